#!/usr/bin/env python3
"""The whole of NSA as `cc -O2` builds it beside `-O3 -march=native`, which should not matter.

  compare_flags.py FILE    builds bench_attention with each, runs them in turn, a few times, and
                           writes the medians to FILE

Needs a C compiler (CC, default cc) that takes -fopenmp.
"""
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = ("-O2", "-O3 -march=native")
SOURCES = ("bench/bench_attention.c",
           *(f"examples/trainer/base/{name}.c" for name in ("fault", "option", "text")))
ROUNDS, TOKENS = 3, 4096


def build(folder, flags):
    program = folder / flags.replace(" ", "")
    subprocess.run([os.environ.get("CC", "cc"), *flags.split(), "-fopenmp", "-Insa", "-Iexamples/trainer",
                    "-D_XOPEN_SOURCE=700", *SOURCES, "-o", program, "-lm"], cwd=ROOT, check=True)
    return program


def run(folder, program):
    report = folder / "report.json"
    subprocess.run([program, "--shape", f"16,1,64,{TOKENS}", "--seconds", "3", "--json", report],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads(report.read_text())


def main(arguments):
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        programs = {flags: build(folder, flags) for flags in FLAGS}
        reports = [(flags, run(folder, program)) for _ in range(ROUNDS)
                   for flags, program in programs.items()]
    rows = []
    for flags in FLAGS:
        for pass_name in ("fwd", "bwd"):
            times = [row["ms"] for of, report in reports if of == flags for row in report["rows"]
                     if row["branch"] == "nsa" and row["pass"] == pass_name and row["threads"] == 1]
            rows.append({"flags": flags, "branch": "nsa", "pass": pass_name, "tokens": TOKENS,
                         "threads": 1, "ms": statistics.median(times), "runs": len(times)})
            print(f"{flags}: {pass_name} {rows[-1]['ms']} ms")
    report = {name: reports[-1][1][name] for name in ("machine", "date", "commit")}
    pathlib.Path(arguments[0]).write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
