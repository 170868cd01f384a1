#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat <<'TEXT'
Install another TorchRL and its tensordict beside those of the development environment.

    bash scripts/torchrl/install.sh 0.13.3

They come into .engines/torchrl-VERSION, without what they depend on, which the environment has;
PYTHONPATH=.engines/torchrl-VERSION puts them first. VERSION.txt beside this script pins both. A
second run with the same pins and the same Python does nothing.

    PYTHON    interpreter of the environment    (default: .venv/bin/python)
TEXT
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"

# What is there by these pins, for this Python: the packages have compiled parts.
wanted() { # PINS
    { cat "$1" && "$python" -c 'import sys; print(sys.implementation.cache_tag)'; } | sha256sum
}

install() { # PINS TARGET
    rm -rf "$2"
    mkdir -p "$(dirname "$2")"
    "$python" -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps \
        --target "$2" -r "$1" || return
    wanted "$1" >"$2/.installed"
}

main() {
    local version="${1:-}" pins target
    pins="$here/$version.txt"
    target="$root/.engines/torchrl-$version"
    if [[ $# -ne 1 || "$version" == -* ]]; then
        usage
        [[ "$version" == "-h" || "$version" == "--help" ]]
        return
    fi
    if [[ ! -f "$pins" ]]; then
        echo "no pins for torchrl $version; there are: $(cd "$here" && ls ./*.txt | sed 's|^\./||; s|\.txt$||' | xargs)" >&2
        return 2
    fi
    mkdir -p "$root/.engines"
    exec 9>"$target.lock"
    flock 9
    if [[ -f "$target/.installed" && "$(cat "$target/.installed")" == "$(wanted "$pins")" ]]; then
        echo "torchrl $version is installed already"
        return
    fi
    echo "installing torchrl $version into $target"
    install "$pins" "$target.new" || {
        rm -rf "$target.new"
        echo "torchrl $version could not be installed: the lines above say why. It needs a package index (or wheels: PIP_FIND_LINKS=FOLDER) that has: $(grep == "$pins" | xargs)" >&2
        return 1
    }
    rm -rf "$target"
    mv "$target.new" "$target"
}

main "$@"
