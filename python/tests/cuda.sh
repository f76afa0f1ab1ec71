#!/usr/bin/env bash
# cuda.sh PYTHON PACKAGE: `python -m nsa.build cuda` compiles, for one architecture, one dtype and few
# widths, and what it makes loads and has each function that nsa.torch calls. No GPU is needed.
set -euo pipefail

to=$2/cuda
export NVCC_APPEND_FLAGS="-DNSA_CUDA_NO_BF16 -DNSA_CUDA_NO_F16 -DNSA_CUDA_MAX_DIM=64" PYTHONPATH=$2
"$1" -m nsa.build cuda sm_80 --to "$to"
"$1" - "$to/libnsa_cuda.so" <<'PYTHON'
import ctypes
import sys
import pathlib
from nsa import _abi, _library

_library.Library(pathlib.Path(sys.argv[1]), ctypes.c_float)  # its layout is that of the package
handle = ctypes.CDLL(sys.argv[1])
called = [f"{name}{way}" for name in ("attend_cmp", "attend_slc", "attend_win", "attend_dense", "compress", "gate",
                                      "rope", "merge", "attention") for way in ("_forward", "_backward")]
called += ["select_blocks", "score_blocks", "rank_queries"]
missing = [name for name in called if not hasattr(handle, "nsa_cuda_" + name)]
print(f"{len(called) - len(missing)} functions are there; missing: {missing}")
sys.exit(bool(missing))
PYTHON
