#!/usr/bin/env bash
# cmake.sh DIR: the tree is configured by the newest CMake there is, fetched into a virtual environment in DIR, without a
# warning: policies that come with a version are set by CMakeLists.txt. Not here: a build. Not in CI.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
[ -x "$dir/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --upgrade cmake
"$dir/venv/bin/cmake" --version | head -n 1
rm -rf "$dir/build"
"$dir/venv/bin/cmake" -S "$root" -B "$dir/build" -DNSA_CUDA=OFF >"$dir/log" 2>&1 || { cat "$dir/log" && exit 1; }
if grep -i -A 5 warning "$dir/log"; then
    echo "the newest CMake warns"
    exit 1
fi
