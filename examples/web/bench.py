#!/usr/bin/env python3
"""What SIMD128 gains: one layer's attention in node, through the module as the page has it and through
one that was built without vector instructions.

  bench.py [--out FOLDER] [--json FILE]

On a machine that does nothing else. FILE (bench/results/web.json) is what scripts/write_numbers.py
makes the table of. Twins: bench.js, build.py.
"""
import argparse
import datetime
import json
import pathlib
import subprocess

import build

HERE = pathlib.Path(__file__).resolve().parent


def build_scalar(out):
    """web.wasm without -msimd128."""
    out.mkdir(parents=True, exist_ok=True)
    objects = build.compile_all(build.SHARED + build.OWN, build.WASM[:1], out / "wasm")
    build.run(["clang", build.WASM[0], *build.LINK, *objects, "-o", out / "web.wasm"])


def machine():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=build.ROOT / "build" / "web")
    parser.add_argument("--json", type=pathlib.Path, default=build.ROOT / "bench" / "results" / "web.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    build.build_wasm(options.out)
    build_scalar(options.out / "scalar")
    measured = json.loads(subprocess.run(
        ["node", HERE / "bench.js", options.out / "web.wasm", options.out / "scalar" / "web.wasm", HERE / "model.bin"],
        check=True, capture_output=True, text=True).stdout)
    commit = subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    found = {"machine": f"{machine()}, node {measured['node']}", "date": datetime.date.today().isoformat(),
             "commit": commit.stdout.strip()}
    rows = ",\n".join(f"    {json.dumps(row)}" for row in measured["rows"])
    options.json.write_text(json.dumps(found, indent=2)[:-2] + f',\n  "rows": [\n{rows}\n  ]\n}}\n')
    print(options.json.read_text())


if __name__ == "__main__":
    main()
