#!/usr/bin/env bash
# newest.sh DIR [TEST...]: a virtual environment in DIR with the newest hosts, pinned in newest.txt; the
# package, installed by pip; and the tests test_core, test_torch and test_jax, or those named. A gigabyte
# is fetched, and two more of CUDA libraries where the machine has none of them. Not in CI.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
python=$dir/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$dir"
"$python" -m pip install --quiet --no-deps --requirement "$root/python/tests/newest.txt"

# Torch is linked against CUDA's libraries on a CPU too: those of a toolkit, or the wheels it asks for.
[ -z "${CUDA_HOME:-}" ] || export LD_LIBRARY_PATH=$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
"$python" -c 'import torch' 2>/dev/null || "$python" -m pip install --quiet torch==2.15.0

"$python" -m pip install --quiet --no-deps "$root/python"
"$python" -m nsa.build jax
cd "$root/python/tests"
[ $# -gt 0 ] || set -- test_core test_torch test_jax
for name in "$@"; do
    OMP_WAIT_POLICY=passive "$python" -m unittest "$name"
done
