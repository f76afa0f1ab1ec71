"""Builds what the wheel does not hold, for it needs what not everybody has.

    python -m nsa.build jax            the handlers for XLA: a C compiler, and jaxlib for its header
    python -m nsa.build cuda [ARCH...] the operators on CUDA: nvcc; by default for this machine's GPU, or
                                       sm_80 and sm_90a, about two minutes each
    ... --to FOLDER                    instead of into the package

Twins: native/xla.c, native/cuda.cu. Not here: anything that an import does by itself.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import distributions

from ._library import FOLDER

NATIVE = FOLDER / "native"


def words_of(variable: str, otherwise: str) -> list[str]:
    """A compiler, and what is put in front of it or behind: "ccache gcc", "gcc -m64". A path may have spaces."""
    given = os.environ.get(variable, "")
    return [given] if shutil.which(given) else shlex.split(given) or [otherwise]


def run(command: list[str]) -> None:
    print(" ".join(command), flush=True)
    try:
        code = subprocess.run(command).returncode
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}; must be a compiler, as CC or NVCC names it")
    if code:
        sys.exit(1)


def record(library: pathlib.Path) -> None:
    """In pip's list of the package's files, so that it goes with them: a newer package's structs may be others."""
    line = f"nsa/{library.name},,\n"
    for file in [file for found in distributions(name="nsa-attention") for file in found.files or ()]:
        path = pathlib.Path(str(file.locate()))
        if file.name == "RECORD" and (path.parents[1] / "nsa" / library.name).resolve() == library.resolve():
            with path.open("r+", encoding="utf-8") as listed:
                if line not in listed.readlines():
                    listed.write(line)


def build_jax(to: pathlib.Path) -> None:
    try:
        import jax
    except ImportError:
        sys.exit("jax is not installed here, whose jaxlib has the header that is needed: pip install jax")
    run([*words_of("CC", "cc"), "-std=c99", "-D_POSIX_C_SOURCE=200809L", "-O2", "-shared", "-fPIC", "-isystem",
         jax.ffi.include_dir(), str(NATIVE / "xla.c"), "-o", str(to / "libnsa_xla.so"), "-ldl"])


def architectures() -> list[str]:
    """Of the GPUs here; 9.0 by the name that has its wgmma."""
    try:
        asked = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True,
                               text=True).stdout.split()
    except FileNotFoundError:
        asked = []
    found = {"90a" if cap == "9.0" else cap.replace(".", "") for cap in asked}
    return [f"sm_{cap}" for cap in sorted(found)] or ["sm_80", "sm_90a"]


def build_cuda(to: pathlib.Path, wanted: list[str]) -> None:
    compiler = words_of("NVCC", shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    flags = []
    for name in wanted or architectures():
        flags += ["-gencode", f"arch=compute_{name.removeprefix('sm_')},code={name}"]
    run([*compiler, "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *flags, "-I", str(NATIVE), str(NATIVE / "cuda.cu"),
         "-o", str(to / "libnsa_cuda.so")])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nsa.build", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["jax", "cuda"])
    parser.add_argument("arch", nargs="*", help="sm_80, sm_90a, ...: of cuda alone")
    parser.add_argument("--to", type=pathlib.Path, default=FOLDER)
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    if arguments.what == "jax":
        build_jax(arguments.to)
    else:
        build_cuda(arguments.to, arguments.arch)
    record(arguments.to / f"libnsa_{'xla' if arguments.what == 'jax' else 'cuda'}.so")


if __name__ == "__main__":
    main()
