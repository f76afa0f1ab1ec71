#!/usr/bin/env python3
"""Builds the page: the model's forward pass for WebAssembly, then one HTML file that holds all.

  build.py [--model FILE] [--out FOLDER] [--only wasm|page|native]

Into FOLDER (build/web) go web.wasm and nsa.html, which opens from the disk and loads nothing;
`native` builds the program `numbers` instead, the same sources for this machine, which the tests
compare with web.wasm. FILE is what pack.py makes of a checkpoint (model.bin, unless another is given).

Needs Debian's packages clang, lld, wasi-libc and libclang-rt-14-dev-wasm32 (the number is clang's), and
Python's own library. ccache is used where it is there.
"""
import argparse
import base64
import concurrent.futures
import gzip
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRAINER = HERE.parent / "trainer"
INCLUDE = [ROOT / "nsa", TRAINER, HERE.parent]
# The trainers' model and its operations for the CPU, as they are.
SHARED = [TRAINER / f"{name}.c" for name in (
    "base/arena", "base/fallback", "base/fault", "base/phase", "base/rng", "base/stats", "base/text", "model/context",
    "model/model", "model/model_layer", "model/model_layout", "model/params", "ops/gemm", "ops/gemm_bf16",
    "ops/ops_cpu", "ops/ops_half")]
SHARED += [HERE.parent / "nsa.c", HERE.parent / "inspect" / "measure.c"]
OWN = [HERE / name for name in ("alone.c", "race.c", "web.c")]
FLAGS = ["-O3", "-Wall", "-Werror=incompatible-pointer-types", "-D_XOPEN_SOURCE=700",
         *(f"-I{folder}" for folder in INCLUDE)]
WASM = ["--target=wasm32-wasi", "-msimd128"]
NATIVE = ["-DNSA__WITHOUT_AVX"]  # AVX's tiles have no twin in WebAssembly, and take longest to compile
LINK = ["-mexec-model=reactor", "-Wl,--gc-sections,--strip-all", "-Wl,-z,stack-size=1048576"]
LARGEST = 2 << 20  # bytes of the page


def run(command):
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]}: not here; README.md names the packages")
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    sys.stderr.write(done.stderr)


def compile_all(sources, flags, folder):
    """Objects of all sources, several at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    ccache = [shutil.which("ccache")] if shutil.which("ccache") else []
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [[*ccache, "clang", *flags, *FLAGS, "-c", source, "-o", to]
                for source, to in zip(sources, objects)]
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(run, commands))
    return objects


def build_wasm(out):
    objects = compile_all(SHARED + OWN, WASM, out / "wasm")
    run(["clang", WASM[0], *LINK, *objects, "-o", out / "web.wasm"])


def build_native(out):
    run(["clang", *compile_all(SHARED + OWN + [HERE / "numbers.c"], NATIVE, out / "native"), "-lm",
         "-o", out / "numbers"])


def carried(data):
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def build_page(out, model):
    page = (HERE / "page.html").read_text()
    parts = {"/* page.css */": (HERE / "page.css").read_text(),
             "/* nsa.js */": (HERE / "nsa.js").read_text(),
             "/* page.js */": (HERE / "page.js").read_text(),
             "web.wasm, packed": carried((out / "web.wasm").read_bytes()),
             "model.bin, packed": carried(model.read_bytes())}
    for place, text in parts.items():
        if page.count(place) != 1:
            raise SystemExit(f"page.html must hold `{place}` once")
        page = page.replace(place, text)
    data = page.encode()
    if len(data) > LARGEST:
        raise SystemExit(f"nsa.html would be {len(data)} bytes; allowed: {LARGEST}")
    (out / "nsa.html").write_bytes(data)
    print(f"wrote {out / 'nsa.html'}: {len(data)} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=HERE / "model.bin")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "web")
    parser.add_argument("--only", choices=("wasm", "page", "native"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only == "native":
        build_native(options.out)
        return
    if options.only != "page":
        build_wasm(options.out)
    if options.only != "wasm":
        build_page(options.out, options.model)


if __name__ == "__main__":
    main()
