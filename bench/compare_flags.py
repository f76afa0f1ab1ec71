#!/usr/bin/env python3
"""The whole of NSA as gcc and clang build it with -O2 beside -O3 -march=native, which should not matter.

  compare_flags.py FILE    builds bench_attention with each, runs them in turn, a few times, and
                           writes the medians to FILE

Needs both compilers, and that they take -fopenmp.
"""
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILDS = tuple(itertools.product(("gcc", "clang"), ("-O2", "-O3 -march=native")))
SOURCES = ("bench/bench_attention.c",
           *(f"examples/trainer/base/{name}.c" for name in ("fault", "option", "text")))
ROUNDS, TOKENS = 3, 4096


def build(folder, compiler, flags):
    program = folder / (compiler + flags.replace(" ", ""))
    subprocess.run([compiler, *flags.split(), "-fopenmp", "-Insa", "-Iexamples/trainer",
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
        programs = {of: build(folder, *of) for of in BUILDS}
        reports = [(of, run(folder, program)) for _ in range(ROUNDS) for of, program in programs.items()]
    rows = []
    for (compiler, flags), pass_name in itertools.product(BUILDS, ("fwd", "bwd")):
        times = [row["ms"] for of, report in reports if of == (compiler, flags) for row in report["rows"]
                 if row["branch"] == "nsa" and row["pass"] == pass_name and row["threads"] == 1]
        rows.append({"compiler": compiler, "flags": flags, "branch": "nsa", "pass": pass_name, "tokens": TOKENS,
                     "threads": 1, "ms": statistics.median(times), "runs": len(times)})
        print(f"{compiler} {flags}: {pass_name} {rows[-1]['ms']} ms")
    report = {name: reports[-1][1][name] for name in ("machine", "date", "commit")}
    pathlib.Path(arguments[0]).write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
