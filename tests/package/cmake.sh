#!/usr/bin/env bash
# cmake.sh DIR: the tree is configured without a warning by the oldest CMake that it takes, the last of 3 and the newest
# there is, each fetched into a virtual environment in DIR: policies that come with a version are set by CMakeLists.txt.
# Not here: a build. Not in CI.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
[ -x "$dir/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir/venv"
oldest=$(sed -n 's/^cmake_minimum_required(VERSION \([0-9]*\.[0-9]*\).*/\1/p' "$root/CMakeLists.txt")
failures=0
for version in "cmake==$oldest.*" "cmake<4" cmake; do
    "$dir/venv/bin/python" -m pip install --quiet --upgrade "$version"
    "$dir/venv/bin/cmake" --version | head -n 1
    rm -rf "$dir/build"
    "$dir/venv/bin/cmake" -S "$root" -B "$dir/build" -DNSA_CUDA=OFF >"$dir/log" 2>&1 || { cat "$dir/log" && exit 1; }
    if grep -i -A 5 warning "$dir/log"; then
        echo "CMake of '$version' warns"
        failures=$((failures + 1))
    fi
done
exit "$failures"
