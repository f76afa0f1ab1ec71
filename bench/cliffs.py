#!/usr/bin/env python3
"""Shapes that cost far more than others: the rate of every pass over the best rate of that pass.

  cliffs.py BIN [LIMIT]    BIN is the folder of the built programs; prints the passes that are more
                           than LIMIT times (3) as slow per multiply-add as the best shape's, worst
                           first. Some ten minutes, one thread.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

# heads, kv_heads, dim, tokens: the tables' first shape, and what differs from it in one thing
SHAPES = [(16, 1, 64, 2048),
          *((16, 1, dim, 2048) for dim in (1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 32, 33, 80, 128, 129, 192, 256)),
          *((heads, kv_heads, 64, 2048) for heads, kv_heads in ((1, 1), (3, 1), (12, 12), (64, 64), (64, 1))),
          *((16, 1, 64, tokens) for tokens in (1, 16, 31, 64, 100, 256, 513, 1024, 4096))]


def measure(program, shape, folder):
    report = folder / "report.json"
    subprocess.run([program, "--shape", ",".join(map(str, shape)), "--seconds", "1", "--json", report],
                   check=True, stdout=subprocess.DEVNULL)
    rows = json.loads(report.read_text())["rows"]
    return {(row["branch"], row["pass"]): row["gflops"] for row in rows
            if row["threads"] == 1 and row.get("gflops") and not row.get("beside")}


def main(arguments):
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    program, limit = pathlib.Path(arguments[0]) / "bench_attention", float((arguments[1:] or [3])[0])
    with tempfile.TemporaryDirectory() as name:
        rates = {shape: measure(program, shape, pathlib.Path(name)) for shape in SHAPES}
    best = {}
    for of_shape in rates.values():
        for which, rate in of_shape.items():
            best[which] = max(rate, best.get(which, 0))
    found = [(best[which] / rate, which, shape) for shape, of_shape in rates.items()
             for which, rate in of_shape.items()]
    for times, (branch, pass_name), (heads, kv_heads, dim, tokens) in sorted(found, reverse=True):
        if times > limit:
            print(f"{times:6.1f} times: {branch:5} {pass_name}, {heads} heads over {kv_heads}, {dim} wide, "
                  f"{tokens} tokens")


if __name__ == "__main__":
    main(sys.argv[1:])
