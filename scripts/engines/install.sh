#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'TEXT'
Install real inference engines for a CPU machine, each into its own .engines/NAME/.

    bash scripts/engines/install.sh                 # all but the optional, two at a time
    bash scripts/engines/install.sh sglang-0.5.9    # one

An engine is a pair of files beside this script that pin everything it imports: NAME.txt, and
NAME.nodeps.txt for the packages whose own dependency lists ask for GPU builds. An engine that
optional.txt lists is installed when it is named, and no test fails for want of it. A second run
with the same pins and a finished environment does nothing; changed pins build it anew. Every
line of the output names its engine, and the exit status is not 0 unless all are installed.

    PYTHON           interpreter to build with          (default: python3.11)
    TORCH_INDEX_URL  index that serves CPU torch wheels (default: pip's own configuration)

The engines:
TEXT
    known_engines | sed 's/^/    /'
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
script="$here/$(basename "${BASH_SOURCE[0]}")"
home="$(cd "$here/../.." && pwd)/.engines"

# Those of optional.txt, which a run that names none leaves out.
is_optional() { [[ -f "$here/optional.txt" ]] && grep -qxF -- "$1" "$here/optional.txt"; }

usual_engines() {
    local name
    for name in $(known_engines); do is_optional "$name" || echo "$name"; done
}

known_engines() { (cd "$here" && ls ./*.nodeps.txt | sed 's|^\./||; s|\.nodeps\.txt$||'); }

is_installed() { # NAME PINS_HASH
    [[ -f "$home/$1/.installed" && "$(cat "$home/$1/.installed")" == "$2" && -x "$home/$1/bin/python" ]]
}

# A CUDA build of torch is several GB that no CPU engine uses; torchvision and sgl_kernel would
# be imported in place of the launcher's stand-ins.
refuse_gpu_builds() { # PYTHON
    "$1" -W ignore - <<'PY'
import importlib.util
import sys

import torch

if torch.version.cuda is not None:
    sys.exit("this is a CUDA build of torch: set TORCH_INDEX_URL to an index of CPU wheels")
for module in ("torchvision", "sgl_kernel"):
    if importlib.util.find_spec(module) is not None:
        sys.exit(f"{module} must not be installed beside the CPU engine")
PY
}

# Starting an engine is nearly all imports. pip compiles nothing under PYTHONDONTWRITEBYTECODE,
# so compile here; a few vendored files in other dialects do not parse, which is no failure.
compile_all() { # PYTHON
    local site
    site="$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    env -u PYTHONDONTWRITEBYTECODE "$1" -m compileall -q -j 0 "$site" >/dev/null 2>&1 || true
}

build() { # NAME
    local venv="$home/$1" python="$home/$1/bin/python"
    local pip=("$python" -m pip install --quiet --disable-pip-version-check)
    rm -rf "$venv"
    "${PYTHON:-python3.11}" -m venv "$venv"
    # torch first and alone: its index must not be asked for anything else, and what follows
    # then finds the pin satisfied by the CPU build.
    "${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep -E '^torch==' "$here/$1.txt")"
    refuse_gpu_builds "$python"
    "${pip[@]}" -r "$here/$1.txt"
    "${pip[@]}" --no-deps -r "$here/$1.nodeps.txt"
    refuse_gpu_builds "$python"
    compile_all "$python"
}

install_one() { # NAME
    local pins
    pins="$(cat "$here/$1.txt" "$here/$1.nodeps.txt" | sha256sum | cut -d' ' -f1)"
    mkdir -p "$home"
    # One installation at a time: two shells must not fill the same directory.
    exec 9>"$home/$1.lock"
    flock 9
    if is_installed "$1" "$pins"; then
        echo "already installed"
        return
    fi
    echo "installing into $home/$1"
    SECONDS=0
    build "$1"
    echo "$pins" >"$home/$1/.installed"
    echo "installed in $SECONDS s"
}

# In a shell of its own, because `set -e` does not reach into a condition.
install_labelled() { # NAME
    if ! bash "$script" --one "$1" 2>&1 | sed -u "s/^/[$1] /"; then
        echo "[$1] FAILED: the lines above say why; to try again: bash $script $1" >&2
        return 1
    fi
}

main() {
    if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
        usage
        return
    fi
    local name
    for name in "$@"; do
        known_engines | grep -qxF -- "$name" && continue
        echo "no engine is called $name; there are: $(known_engines | xargs)" >&2
        return 2
    done
    [[ $# -gt 0 ]] || set -- $(usual_engines)
    printf '%s\n' "$@" | xargs -P 2 -I{} bash "$script" --labelled {} || return 1
}

case "${1:-}" in
--one) install_one "$2" ;;
--labelled) install_labelled "$2" ;;
*) main "$@" ;;
esac
