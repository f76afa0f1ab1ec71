#!/usr/bin/env python3
"""Shapes that cost far more than others: the time of each pass for a query, key and head.

  cliffs.py BIN FILE [SECONDS]    BIN is the folder of the built programs. Measures shapes that FILE has not yet,
                                  and begins no further one after SECONDS (200): run it until it says that all are
                                  there. Then FILE's rows are the shapes with a pass of more than LIMIT times the
                                  cost of the best, worst first.

The best of a pass is the least cost of any shape; one of narrower heads counts as that many times dearer as it is
narrower, because products grow with the width.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import time

LIMIT = 3
PRODUCTS = {"fwd": 2, "bwd": 5}  # of a query and a key, each as wide as a head
SHAPE = ("heads", "kv_heads", "dim", "tokens")
# the tables' first shape, and what differs from it in one thing
SHAPES = [(16, 1, 64, 2048),
          *((16, 1, dim, 2048) for dim in (1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 32, 33, 80, 128, 129, 192, 256)),
          *((heads, kv_heads, 64, 2048) for heads, kv_heads in ((1, 1), (3, 1), (12, 12), (64, 64), (64, 1))),
          *((16, 1, 64, tokens) for tokens in (1, 16, 31, 64, 100, 256, 513, 1024, 4096))]


def measure(program, shape):
    with tempfile.TemporaryDirectory() as folder:
        to = pathlib.Path(folder) / "report.json"
        subprocess.run([program, "--shape", ",".join(map(str, shape)), "--seconds", "1", "--json", to],
                       check=True, stdout=subprocess.DEVNULL)
        report = json.loads(to.read_text())
    origin = {name: report[name] for name in ("machine", "date", "commit")}
    return origin, [{**{name: row[name] for name in (*SHAPE, "threads", "branch", "pass", "ms")},
                     "ps": float(f"{2e3 * PRODUCTS[row['pass']] * row['dim'] / row['gflops']:.4g}")}
                    for row in report["rows"] if row["gflops"]]


def cliffs(costs):
    """A row for each shape and number of threads that has a pass above the limit; `ps` are picoseconds."""
    def best(row):
        return min(other["ps"] * max(1, row["dim"] / other["dim"]) for other in costs
                   if all(other[name] == row[name] for name in ("threads", "branch", "pass")))

    found = {}
    for row in costs:
        times = row["ps"] / best(row)
        if times > LIMIT:
            found.setdefault(tuple(row[name] for name in (*SHAPE, "threads")), []).append(
                (times, f"{row['branch']} {row['pass']} {times:.1f}"))
    rows = [{**dict(zip((*SHAPE, "threads"), shape)), "times": float(f"{max(passes)[0]:.3g}"),
             "passes": ", ".join(text for _, text in sorted(passes, reverse=True))}
            for shape, passes in found.items()]
    return sorted(rows, key=lambda row: -row["times"])


def main(arguments):
    if len(arguments) not in (2, 3) or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    program, path = pathlib.Path(arguments[0]).resolve() / "bench_attention", pathlib.Path(arguments[1])
    seconds = float((arguments[2:] or [200])[0])
    report = json.loads(path.read_text()) if path.exists() else {"costs": []}
    begin = time.monotonic()
    for shape in SHAPES:
        if any(tuple(row[name] for name in SHAPE) == shape for row in report["costs"]):
            continue
        if time.monotonic() - begin > seconds:
            raise SystemExit(f"not all yet: go on from {shape}")
        origin, costs = measure(program, shape)
        if report.get("commit", origin["commit"]) != origin["commit"]:
            raise SystemExit(f"{path} is of {report['commit']}: remove it, and measure all of {origin['commit']}")
        report = {**origin, "rows": cliffs(report["costs"] + costs), "costs": report["costs"] + costs}
        path.write_text(json.dumps(report).replace("}, {", "},\n {") + "\n")
    for row in report["rows"]:
        print(f"{row['heads']} heads over {row['kv_heads']}, {row['dim']} wide, {row['tokens']} tokens, "
              f"{row['threads']} threads: {row['passes']}")


if __name__ == "__main__":
    main(sys.argv[1:])
