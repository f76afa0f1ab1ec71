#!/usr/bin/env bash
# cuda.sh BUILD DIR: nsa_cuda.cuh as users take it: both implementations in one .cu file with nvcc
# alone (examples/embed/window.cu), and a C99 host beside a .cu file with CMake, from an installed copy.
# That host needs no GPU: a null descriptor is refused before anything is launched. Exit code 77: no nvcc
# on this machine.
set -euo pipefail

build=$1
dir=$2
nsa=$(cd "$(dirname "$0")/../../nsa" && pwd)
nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc) || {
    echo "left out: no nvcc on this machine"
    exit 77
}
rm -rf "$dir"
mkdir -p "$dir"
cd "$dir"

cat >kernels.cu <<'TEXT'
#define NSA_CUDA_IMPLEMENTATION
#include "nsa_cuda.cuh"
TEXT
cat >main.c <<'TEXT'
#define NSA_IMPLEMENTATION
#include "nsa_cuda.cuh"
int main(void) { return nsa_status_kind(nsa_cuda_gate_forward(NULL, NULL, NULL)) != NSA_ERROR_NULL; }
TEXT
cat >CMakeLists.txt <<'TEXT'
cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES C CUDA)
find_package(nsa 0.1 REQUIRED)
add_executable(consumer main.c kernels.cu)
# Less than a fifth of the time; python/tests/cuda.sh has f32, and f16 is bf16 but for conversions.
target_compile_definitions(consumer PRIVATE NSA_CUDA_MAX_DIM=64 NSA_CUDA_NO_F16 NSA_CUDA_NO_F32)
target_link_libraries(consumer PRIVATE nsa::cuda)
TEXT

# Whether the two live in one file is seen without optimisation (-G) and without machine code; the
# other way has both.
"$nvcc" -G -arch=compute_80 -code=compute_80 -I "$nsa" "$nsa/../examples/embed/window.cu" -o window
said=$(./window 2>&1) || true
case $said in
"NSA_OK: "* | "cudaMalloc: "*) ;; # without a GPU the runtime refuses the first call
*) echo "examples/embed/window.cu: $said" && exit 1 ;;
esac

# An older C++ is refused by name, before anything else is said.
"$nvcc" -std=c++14 -arch=compute_80 -code=compute_80 -I "$nsa" -c kernels.cu -o old.o >log 2>&1 &&
    echo "-std=c++14 is taken" && exit 1
grep -m1 "error" log | grep -q "C++17" || { cat log && exit 1; }

cmake --install "$build" --prefix "$dir/prefix" >/dev/null
cmake -S . -B build -DCMAKE_PREFIX_PATH="$dir/prefix" -DCMAKE_CUDA_COMPILER="$nvcc" \
    -DCMAKE_CUDA_ARCHITECTURES=80 >log 2>&1 || { cat log && exit 1; }
cmake --build build >log 2>&1 || { cat log && exit 1; }
build/consumer
