#!/usr/bin/env bash
# build.sh DIR [GGML]: builds nsa_ggml in DIR against ggml's sources in GGML, or, without them, against
# an installed ggml. It needs cmake and a compiler for C and C++. The program is DIR/nsa_ggml.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,3s/^# //p' "$0" && exit 2; }
cmake -S "$(dirname "$0")" -B "$1" ${2:+-DNSA_GGML_SOURCE="$(realpath "$2")"}
cmake --build "$1" --target nsa_ggml --parallel "$(nproc)"
