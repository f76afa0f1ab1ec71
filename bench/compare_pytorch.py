#!/usr/bin/env python3
"""PyTorch's dense causal attention on the CPU beside ours: a figure for those who know its speed.

  compare_pytorch.py REPORT    REPORT is what `bench_attention --json` wrote on this machine; each of
                               its rows of dense attention, forward, gains a row "pytorch"

Needs PyTorch (`pip install torch`). Keys and values are repeated for the heads of a group, which is
what scaled_dot_product_attention takes; that copy is not timed.
"""
import json
import pathlib
import statistics
import sys
import time

REPEATS, BUDGET = 5, 30.0  # runs of a shape, and seconds after which no further one begins


def milliseconds(torch, row):
    torch.set_num_threads(row["threads"])
    q, k, v = (torch.randn(1, row["heads"], row["tokens"], row["dim"]) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    times, begin = [], time.perf_counter()
    with torch.no_grad():
        attend(q, k, v, is_causal=True)
        while not times or (len(times) < REPEATS and time.perf_counter() - begin < BUDGET):
            at = time.perf_counter()
            attend(q, k, v, is_causal=True)
            times.append((time.perf_counter() - at) * 1e3)
    return statistics.median(times)


def main(arguments):
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    try:
        import torch
    except ImportError:
        raise SystemExit("compare_pytorch.py: PyTorch is not installed here: pip install torch")
    path = pathlib.Path(arguments[0])
    report = json.loads(path.read_text())
    rows = [row for row in report["rows"] if row["branch"] != "pytorch"]
    for dense in [row for row in rows if row["branch"] == "dense" and row["pass"] == "fwd"]:
        ms = milliseconds(torch, dense)
        rate = dense["gflops"] * dense["ms"] / ms
        sgemm = dense["gflops"] / dense["over_sgemm"]
        row = {**dense, "branch": "pytorch", "ms": float(f"{ms:.4g}"), "spread": None,
               "gflops": float(f"{rate:.4g}"), "over_sgemm": float(f"{rate / sgemm:.4g}"),
               "over_dense": float(f"{dense['ms'] / ms:.4g}")}
        rows.append(row)
        print(f"{row['heads']:3} {row['kv_heads']:3} {row['dim']:4} {row['tokens']:7} tokens, "
              f"{row['threads']} threads: {ms:.1f} ms, {row['over_dense']:.2f} x our dense")
    report["rows"], report["pytorch"] = rows, torch.__version__
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
