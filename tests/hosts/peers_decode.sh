#!/usr/bin/env bash
# peers_decode.sh PYTHON DIR: bench/peers_decode.py with the peers that PYTHON and $NSA_GGML_LIBRARIES, a folder of
# ggml's libraries, have: they must compute what nsa.h does. Without packages it names those that it leaves out.
set -euo pipefail

python=$1
dir=$2
bench=$(cd "$(dirname "$0")/../.." && pwd)/bench/peers_decode.py
mkdir -p "$dir" && rm -f "$dir/none.json"
# What it compares does not depend on the optimizer, which is most of the time.
printf '#!/bin/sh\nexec %s "$@" -O1\n' "${CC:-cc}" >"$dir/cc"
chmod +x "$dir/cc"
export CC=$dir/cc
small=(--rounds 1 --threads 1,2 --batch 2 --dtype f32,bf16,f16,i8)
"$python" "$bench" "${small[@]}" --shape 4,2,32,4096 ${NSA_GGML_LIBRARIES:+--ggml "$NSA_GGML_LIBRARIES"}
"$python" -I -S "$bench" --rounds 1 --shape 4,1,24/16,300 --json "$dir/none.json" >"$dir/none"
grep "left out: ggml: no llama_cpp is installed" "$dir/none"
grep "left out: PyTorch: No module named 'torch'" "$dir/none"
grep "left out: vLLM: no vllm is installed" "$dir/none"
grep -c '"ggml_ms": null' "$dir/none.json" | grep -qx 20 # 5 methods, 2 dtypes, 1 and 2 threads
if "$python" "$bench" --shape 3,2,16,64 >"$dir/refused" 2>&1; then
    echo "peers_decode.py takes 3 query heads of 2 kv heads" && exit 1
fi
grep "Hk divides H" "$dir/refused"
