#!/usr/bin/env bash
# ggml.sh DIR: examples/ggml against ggml's sources in the folder $NSA_GGML_SOURCE, or against an
# installed ggml: its checks must pass, and it must measure. Exit code 77: there is neither.
set -euo pipefail

dir=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
source=${NSA_GGML_SOURCE:-}
mkdir -p "$dir"
if [ -z "$source" ]; then
    printf '%s\n' 'cmake_minimum_required(VERSION 3.22)' 'project(has LANGUAGES C CXX)' \
        'find_package(ggml REQUIRED)' >"$dir/CMakeLists.txt"
    if ! cmake -S "$dir" -B "$dir/has" >"$dir/has.log" 2>&1; then
        echo "left out: no ggml on this machine, and NSA_GGML_SOURCE names no folder of its sources"
        exit 77
    fi
fi
"$root/examples/ggml/build.sh" "$dir/build" ${source:+"$source"} >"$dir/log" 2>&1 ||
    { tail -40 "$dir/log" && exit 1; }
"$dir/build/nsa_ggml"
"$dir/build/nsa_ggml" 1024 2
