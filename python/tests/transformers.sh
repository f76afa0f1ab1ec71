#!/usr/bin/env bash
# transformers.sh DIR BUILD oldest|newest: checkpoints of the trainers in the build folder BUILD, opened by the oldest
# transformers that is promised (4.57) or the newest that there is, with the newest accelerate and PEFT and PyTorch as in
# newest.txt; and models of theirs as `convert import` reads them. In a virtual environment in DIR: a gigabyte is
# fetched. The first line says which versions ran. Not in CI.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
build=$(cd "$2" && pwd)
case ${3:-newest} in
    oldest) wanted="transformers==4.57.*" ;;
    newest) wanted=transformers ;;
    *) echo "transformers.sh: $3: must be oldest or newest" >&2 && exit 2 ;;
esac
python=$dir/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$dir"
# Before torch, without what torch asks for: CUDA libraries that a CPU does not use.
"$python" -m pip install --quiet --upgrade "$wanted"
"$python" -m pip install --quiet --upgrade psutil
"$python" -m pip install --quiet --upgrade --no-deps accelerate peft
"$python" -m pip install --quiet --no-deps --requirement "$root/python/tests/newest.txt"

# As in newest.sh.
[ -z "${CUDA_HOME:-}" ] || export LD_LIBRARY_PATH=$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
"$python" -c 'import torch' 2>/dev/null || "$python" -m pip install --quiet torch==2.15.0

"$python" -m pip install --quiet --no-deps "$root/python"
cd "$root/python/tests"
export OMP_WAIT_POLICY=passive TRANSFORMERS=1 HF_HUB_OFFLINE=1 HF_HOME=$dir/huggingface
"$python" use_transformers.py "$build/bin/train_tiny" "$build/bin/convert"
"$python" import_models.py "$build/bin/convert" "$build/bin/logits" "$build/bin/inspect"
[ "${3:-newest}" = oldest ] || "$python" rope.py
[ "${3:-newest}" = oldest ] || "$python" family.py
"$python" -c 'import convert, sys; sys.exit(convert.main())' "$build/bin/train_tiny" "$build/bin/convert" \
    "$build/bin/logits" "$build/bin/generate" "$build/bin/inspect"
