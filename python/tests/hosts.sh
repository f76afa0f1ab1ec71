#!/usr/bin/env bash
# hosts.sh DIR HOST...: the package with hosts of other versions than CI's, each in a virtual environment of its own below
# DIR; the newest there is is taken, nothing is pinned. What was found is written to bench/results/hosts.json, from which
# scripts/write_numbers.py makes the table of python/README.md. Not in CI: to be run before a release.
#
#   jax-oldest    the oldest jax that pyproject.toml promises      torch-2.4     the first PyTorch with operators
#   jax-newest    the newest jax                                   torch-newest  the newest PyTorch
#   numpy-1       the last numpy 1                                 torch-debian  the Python of /usr/bin, PyTorch 1.13
#   numpy-2       the newest numpy
#
# PYTHONS: the interpreters to choose from, by default those in PATH; a host takes the newest of them that it supports.
# FUZZ: how many random calls a host's fuzz makes (200).
set -euo pipefail
shopt -s inherit_errexit # a wheel that does not build is no older one

root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -ge 2 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" && exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
tests=$root/python/tests
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2
[ -z "${CUDA_HOME:-}" ] || export LD_LIBRARY_PATH=$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# python_of LEAST MOST: the newest interpreter 3.LEAST .. 3.MOST.
python_of() {
    local minor python
    for ((minor = $2; minor >= $1; minor--)); do
        for python in ${PYTHONS:-} "python3.$minor" python3; do
            python=$(command -v "$python") || continue
            [ "$("$python" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null)" = "3 $minor" ] || continue
            echo "$python" && return
        done
    done
    echo "no Python 3.$1 .. 3.$2 here; PYTHONS may name more" >&2
    return 1
}

# The wheel serves every Python: it is built once for a tree, without the libraries for one thread, which newest.sh has.
wheel() {
    local state
    state=$(cd "$root" && git rev-parse HEAD:python/src HEAD:python/native HEAD:nsa &&
        git diff HEAD -- python/src python/native nsa | sha256sum)
    if [ "$(cat "$dir/wheel.of" 2>/dev/null)" != "$state" ]; then
        local builder
        builder=$(python_of 9 14)
        [ -x "$dir/build/bin/python" ] || "$builder" -m venv "$dir/build"
        rm -rf "$dir/wheel"
        "$dir/build/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$dir/wheel" \
            --config-settings=cmake.define.NSA_PYTHON_SERIAL=OFF "$root/python"
        git -C "$root" describe --always --dirty --exclude='*' >"$dir/wheel.commit"
        echo "$state" >"$dir/wheel.of"
    fi
    echo "$dir"/wheel/*.whl
}

# environment NAME LEAST MOST PACKAGE...: its Python in $python, with the package and these.
environment() {
    local name=$1 of
    python=$dir/$name/bin/python
    if [ ! -x "$python" ]; then
        of=$(python_of "$2" "$3")
        "$of" -m venv "$dir/$name"
    fi
    shift 3
    "$python" -m pip install --quiet --upgrade "$@"
    "$python" -m pip install --quiet --no-deps --force-reinstall "$(wheel)"
}

# The wheels of PyTorch ask for CUDA's libraries, which a CPU does not use; those of a toolkit (CUDA_HOME) serve too.
torch_environment() {
    local name=$1 least=$2 most=$3 torch=$4
    environment "$name" "$least" "$most" numpy filelock typing_extensions sympy networkx jinja2 fsspec setuptools
    "$python" -m pip install --quiet --upgrade --no-deps "$torch"
    "$python" -c 'import torch' 2>/dev/null || "$python" -m pip install --quiet --upgrade "$torch"
}

# held NAME FUZZ_HOST TEST...: the tests, the fuzz, and the host's row.
held() {
    local name=$1 fuzzed=$2
    shift 2
    (cd "$tests" && "$python" -m unittest "$@" && "$python" fuzz.py "$fuzzed" --calls "${FUZZ:-200}") 2>&1 |
        tee "$dir/$name.log"
    "$python" "$tests/hosts.py" "$root/bench/results/hosts.json" "$name" "$dir/$name.log" \
        "$(cat "$dir/wheel.commit")"
}

oldest_jax=$(grep -o 'jax>=[0-9.]*' "$root/python/pyproject.toml")
for host in "$@"; do
    echo "== $host"
    case $host in
    jax-*) # one by one: in a chain of && nothing would stop at what fails inside a function
        if [ "$host" = jax-oldest ]; then environment "$host" 10 13 "jax==${oldest_jax#*>=}.*"; else environment "$host" 12 14 jax; fi
        "$python" -m nsa.build jax
        held "$host" jax test_core test_jax
        ;;
    torch-2.4 | torch-newest)
        if [ "$host" = torch-2.4 ]; then torch_environment "$host" 9 12 'torch==2.4.*'; else torch_environment "$host" 10 14 torch; fi
        held "$host" torch test_core test_torch test_rope
        ;;
    numpy-1 | numpy-2)
        if [ "$host" = numpy-1 ]; then environment "$host" 9 12 'numpy<2'; else environment "$host" 10 14 'numpy>=2'; fi
        held "$host" numpy test_core test_rope
        ;;
    torch-debian)
        python=/usr/bin/python3
        rm -rf "${dir:?}/$host" && "$python" -m zipfile -e "$(wheel)" "$dir/$host"
        export PYTHONPATH=$dir/$host
        held "$host" torch test_core test_torch test_rope
        unset PYTHONPATH
        ;;
    *) echo "hosts.sh: $host is no host" && exit 2 ;;
    esac
done
