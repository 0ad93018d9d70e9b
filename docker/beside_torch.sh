#!/usr/bin/env bash
# Installs a wheel of gpuload beside the torch that is there, and fails rather than let that be replaced.
#
#   beside_torch.sh WHEEL EXTRA [UNPIN]
#
# UNPIN: packages, as a|b, that the image pins to versions gpuload cannot work with; their pins are left out.
#
# NVIDIA's images pin what they were built with in /etc/pip/constraint.txt. Those pins hold here too, and one for torch
# is added: by the version that pip knows it by, which is not always torch.__version__. They stay in KEPT, for pip to
# obey in whatever is installed later.
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
# Their libraries load beside torch's; this needs no GPU.
python3 -P -c 'import torch, cupy, pylibcudf, rmm, gpuload.load; print("gpuload", gpuload.__version__, "beside torch", torch.__version__)'
