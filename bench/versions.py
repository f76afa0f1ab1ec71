#!/usr/bin/env python3
"""nsa.h of several commits side by side: each pass by one after the other, in one process, on one problem, or on two if
a struct has changed between them.

  versions.py [--shape H,Hk,D,T] [--dtype f32|bf16|f16] [--threads N] [--rounds R] [--only PASS]... VERSION...

A VERSION is a commit, or a folder that has an nsa.h: nsa/ is the tree's. PASS is one of problem.h's rows and a
direction, as slc-bwd. The first version is the one that the others are held against: a ratio of 1.05 is 5 % faster than
it. Printed are the medians of the ratios of the rounds, and the first and third quartile. Which version is first
is worth some per cent on some machines: give them in both orders. Needs a C compiler (CC) that takes -fopenmp.
"""
import argparse
import ctypes
import os
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ("cmp", "select", "slc", "win", "gate", "nsa", "dense")  # problem.h's, in its order
DTYPES = ("f32", "bf16", "f16")
PASSES = [f"{row}-fwd" for row in ROWS] + [f"{row}-bwd" for row in ROWS if row != "select"]


def build(folder, number, version):
    """The shared library of a version."""
    include, library = pathlib.Path(version).resolve(), folder / f"version{number}.so"
    if not (include / "nsa.h").is_file():
        include = folder / str(number)
        include.mkdir()
        text = subprocess.run(["git", "show", f"{version}:nsa/nsa.h"], cwd=ROOT, check=True, capture_output=True)
        (include / "nsa.h").write_bytes(text.stdout)
    subprocess.run([os.environ.get("CC", "cc"), "-O3", "-std=c99", "-fopenmp", "-fPIC", "-shared", f"-I{include}",
                    ROOT / "bench/version.c", "-o", library, "-lm"], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.version_problem_bytes.restype = ctypes.c_size_t
    loaded.version_make.restype = ctypes.c_void_p
    loaded.version_time.restype = ctypes.c_double
    loaded.version_time.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return loaded


def time_pass(library, problem, name):
    row, direction = name.split("-")
    seconds = library.version_time(problem, ROWS.index(row), direction == "bwd")
    if seconds < 0:
        raise SystemExit(f"versions.py: {name} failed")
    return seconds


def make_problems(libraries, options):
    """The problem of each version: one for all whose structs are as large, as two of 64k tokens may not fit."""
    heads, kv_heads, dim, tokens = map(int, options.shape.split(","))
    made = {}
    for library in libraries:
        size = library.version_problem_bytes()
        if size not in made:
            made[size] = library.version_make(DTYPES.index(options.dtype), heads, kv_heads, dim, tokens,
                                              options.threads)
    return [made[library.version_problem_bytes()] for library in libraries]


def measure(libraries, problems, passes, rounds):
    """Seconds by pass and version, of every round."""
    times = {name: [[] for _ in libraries] for name in passes}
    dense = any(name.startswith("dense") for name in passes)  # of a long sequence it takes minutes
    for library, problem in zip(libraries, problems):
        for row in ROWS if dense else ROWS[:-1]:  # forward fills what backward reads, and caches
            time_pass(library, problem, f"{row}-fwd")
    for turn in range(rounds):
        for name in passes:
            for i in range(len(libraries)):
                at = (i + turn) % len(libraries)
                times[name][at].append(time_pass(libraries[at], problems[at], name))
    return times


def report(versions, times):
    for name, of_versions in times.items():
        least = ", ".join(f"{1e3 * min(t):.4g}" for t in of_versions)
        print(f"{name:11} least ms: {least}", end="")
        for version, t in list(zip(versions, of_versions))[1:]:
            ratios = [first / other for first, other in zip(of_versions[0], t)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
            print(f"   {version} {middle:.3f} ({low:.3f} .. {high:.3f})", end="")
        print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="16,1,64,8192")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", action="append", choices=PASSES)
    parser.add_argument("versions", nargs="+")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        libraries = [build(pathlib.Path(folder), *of) for of in enumerate(options.versions)]
    problems = make_problems(libraries, options)
    report(options.versions, measure(libraries, problems, options.only or PASSES, options.rounds))


if __name__ == "__main__":
    main()
