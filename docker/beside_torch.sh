#!/usr/bin/env bash
# Installs a wheel of gpuload next to an installed torch. Fails if torch would be replaced.
#
#   beside_torch.sh WHEEL EXTRA [UNPIN]
#
# UNPIN: packages, as a|b, that the image pins to versions that gpuload does not support. Their pins are ignored.
#
# NVIDIA's images pin the versions of their packages in /etc/pip/constraint.txt (PINS). These pins apply here too. A pin
# for torch is added, with the version in its package metadata, which can differ from torch.__version__. All pins are
# written to KEPT, so that they can also apply to later installations.
set -euo pipefail

wheel=$1
extra=$2
unpin=${3:-}
pins=${PINS:-/etc/pip/constraint.txt}
kept=${KEPT:-/etc/pip/gpuload.txt}

torch_now() {
    python3 -P -c 'import importlib.metadata as m, torch; print(m.version("torch"), torch.version.cuda, torch.__file__)'
}

before=$(torch_now)
echo "torch==${before%% *}" > "$kept"
if [[ -f $pins ]]; then
    sed -E "/^(torch${unpin:+|$unpin})[[:space:]]*([=@<>~;]|$)/Id" "$pins" >> "$kept"
fi
PIP_CONSTRAINT=$kept python3 -m pip install --no-cache-dir "${wheel}[${extra}]"

after=$(torch_now)
if [[ $after != "$before" ]]; then
    echo "torch was replaced: $before before, $after after" >&2
    exit 1
fi
# Check that CuPy and pylibcudf can be imported together with torch. This needs no GPU.
python3 -P -c 'import torch, cupy, pylibcudf, rmm, gpuload.pipeline.run; print("gpuload", gpuload.__version__, "next to torch", torch.__version__)'
