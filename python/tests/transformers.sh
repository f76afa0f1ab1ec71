#!/usr/bin/env bash
# transformers.sh DIR BUILD: checkpoints of the trainers in the build folder BUILD, opened by the newest transformers and
# PyTorch, in a virtual environment in DIR (newest.txt, transformers.txt). A gigabyte is fetched. Not in CI.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
build=$(cd "$2" && pwd)
python=$dir/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$dir"
"$python" -m pip install --quiet --no-deps --requirement "$root/python/tests/newest.txt" \
    --requirement "$root/python/tests/transformers.txt"

# As in newest.sh.
[ -z "${CUDA_HOME:-}" ] || export LD_LIBRARY_PATH=$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
"$python" -c 'import torch' 2>/dev/null || "$python" -m pip install --quiet torch==2.15.0

"$python" -m pip install --quiet --no-deps "$root/python"
cd "$root/python/tests"
export OMP_WAIT_POLICY=passive TRANSFORMERS=1 HF_HUB_OFFLINE=1 HF_HOME=$dir/huggingface
"$python" rope.py
"$python" -c 'import convert, sys; sys.exit(convert.main())' "$build/bin/train_tiny" "$build/bin/convert" \
    "$build/bin/logits" "$build/bin/generate" "$build/bin/inspect"
