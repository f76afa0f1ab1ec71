#!/usr/bin/env bash
# dlpack.sh WAY DIR: examples/embed/dlpack.py. With WAY numpy by the machine's own Python, and through
# TVM-FFI if that is installed; with WAY tvm_ffi in an environment of its own, which pip fills with pinned
# packages. Exit code 77: Python, numpy or the network is missing.
set -euo pipefail

way=$1
dir=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
skip() { echo "left out: $1" && exit 77; }
command -v python3 >/dev/null || skip "no python3 on this machine"
mkdir -p "$dir"
cc -O1 -U__SSE2__ -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -shared -fPIC \
    "$root/examples/embed/dlpack.c" -I"$root/nsa" -o "$dir/libnsa_dlpack.so" -lm
case $way in
numpy)
    python3 -c 'import numpy' 2>/dev/null || skip "no numpy for python3 (Debian, Ubuntu: python3-numpy)"
    python3 "$root/examples/embed/dlpack.py" "$dir/libnsa_dlpack.so"
    ;;
tvm_ffi)
    python3 -m venv "$dir/venv" >/dev/null || skip "no venv for python3 (Debian, Ubuntu: python3-venv)"
    "$dir/venv/bin/pip" install -q apache-tvm-ffi==0.1.15.post2 numpy==2.4.6 >"$dir/log" 2>&1 ||
        skip "pip could not install apache-tvm-ffi and numpy: $(tail -1 "$dir/log")"
    "$dir/venv/bin/python" "$root/examples/embed/dlpack.py" "$dir/libnsa_dlpack.so" tvm_ffi
    ;;
*) echo "dlpack.sh: WAY is numpy or tvm_ffi" && exit 2 ;;
esac
