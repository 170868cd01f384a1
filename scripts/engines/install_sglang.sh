#!/usr/bin/env bash
# Install SGLang 0.5.23 for a CPU machine into .engines/sglang-0.5.23/.
#
# The pins lie beside this script. A second run with the same pins and a sound environment
# does nothing; changed pins rebuild the environment from nothing.
#
#   PYTHON           interpreter to build with          (default: python3.11)
#   TORCH_INDEX_URL  index that serves CPU torch wheels (default: pip's own configuration)
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
name="sglang-0.5.23"
venv="$(cd "$here/../.." && pwd)/.engines/$name"
pins="$here/$name.txt"
pins_nodeps="$here/$name.nodeps.txt"
stamp="$venv/.installed"
torch_pin="$(grep -E '^torch==' "$pins")"
wanted="$(cat "$pins" "$pins_nodeps" | sha256sum | cut -d' ' -f1)"

exit_if_installed() {
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" && -x "$venv/bin/python" ]]; then
        echo "$name is already installed in $venv"
        exit 0
    fi
}

exit_if_installed
# One installation at a time: two shells must not fill the same directory.
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
exit_if_installed

rm -rf "$venv"
"${PYTHON:-python3.11}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

# torch first and alone: its index must not be asked for anything else, and what follows
# then finds the pin satisfied by the CPU build.
"${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch_pin"
"$venv/bin/python" -W ignore - <<'PY'
import sys

import torch

if torch.version.cuda is not None:
    sys.exit("this is a CUDA build of torch: set TORCH_INDEX_URL to an index of CPU wheels")
PY
"${pip[@]}" -r "$pins"
"${pip[@]}" --no-deps -r "$pins_nodeps"

# A GPU build of either package would be imported in place of the launcher's stand-ins.
"$venv/bin/python" -W ignore - <<'PY'
import importlib.util
import sys

for module in ("torchvision", "sgl_kernel"):
    if importlib.util.find_spec(module) is not None:
        sys.exit(f"{module} must not be installed beside the CPU engine")
PY

# Start-up is nearly all imports. pip compiles nothing under PYTHONDONTWRITEBYTECODE, so
# compile here; a few vendored files in other dialects do not parse, which is no failure.
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 0 "$site" >/dev/null 2>&1 || true

echo "$wanted" >"$stamp"
echo "installed $name in $venv"
