#!/usr/bin/env python3
"""Predicts what the kernels take on an H200 from counted work, and sets measurements beside it.

The counts are those that tests/simt/test_counters.cpp holds against the executor's: products of
tensor cores, and bytes that tiles bring from L2 into shared memory. Rates are assumptions, named
below; the first run of tests/gpu/run replaces them.

usage: predict.py [--measured gpu.json] [--write bench/results/predictions.md]
"""
import argparse
import json
import pathlib

L, STRIDE, BLOCK, LIST, WINDOW = 32, 16, 64, 16, 512
ROWS, KEYS = 64, 64  # of a tile
PEAK = 989e12  # FLOP/s of dense bf16, as published for the H200
SHARED = PEAK / 2  # a warp of 16 rows reads 256 B of shared memory for a product of 4096 FLOP
SHARE = 0.65  # of that bound: assumed
L2 = 5.5e12  # bytes/s: assumed
MEMORY = 4.8e12 * 0.85  # bytes/s: published, 85 % of it assumed
EXP2 = 132 * 16 * 1.83e9  # exponentials/s: 16 a cycle and multiprocessor
FLASH = 650e12  # FLOP/s of the best dense kernel: what 105 ms at 64k (KERNELS.md) amount to


class Shape:
    """Query-key pairs of each branch, over all query heads, and bytes of tiles."""

    def __init__(self, heads, kv_heads, dim, dim_v, tokens):
        self.heads, self.kv_heads, self.dim, self.dim_v = heads, kv_heads, dim, dim_v
        self.tokens, self.queries = tokens, max(1, ROWS * kv_heads // heads)
        seen = [max(0, (t - L + 1) // STRIDE + 1) if t >= L - 1 else 0 for t in range(tokens)]
        listed = [(min(LIST, t // BLOCK + 1) - 1) * BLOCK + t % BLOCK + 1 for t in range(tokens)]
        self.pairs = {"cmp": heads * sum(seen), "slc": heads * sum(listed),
                      "win": heads * sum(min(WINDOW, t + 1) for t in range(tokens)),
                      "dense": heads * tokens * (tokens + 1) // 2}

    def flop(self, branch, dims):
        return 2 * dims * self.pairs[branch]

    def tile_bytes(self, branch, apart=1.0):
        """K and V of the tiles that all tiles of query rows bring in; `apart`: how many times as many
        blocks the union of a tile's lists holds as one of them."""
        keys = self.pairs[branch] / self.heads / self.queries * apart
        return keys * self.kv_heads * 2 * (self.dim + self.dim_v)

    def rows_bytes(self, width, count=1):
        return 2 * count * self.tokens * self.heads * width


def seconds(flop, l2_bytes):
    return max(flop / (SHARED * SHARE), l2_bytes / L2)


def forward(s, apart):
    """Seconds of each part."""
    both = s.dim + s.dim_v
    parts = {"compress": 4 * 2 * s.tokens * s.kv_heads * both / L2}
    for branch in ("cmp", "slc", "win"):
        spread = apart if branch == "slc" else 1
        parts[branch] = seconds(s.flop(branch, both), s.tile_bytes(branch, spread))
    parts["select"] = s.flop("cmp", s.dim) / (PEAK / 2) + s.pairs["cmp"] / EXP2
    parts["gate"] = s.rows_bytes(s.dim_v, 4) / MEMORY
    return parts


def backward(s, apart):
    """dq takes three products of a pair, dk and dv four; sums of q's gradient go through memory in
    f32 once a branch, and the gate's, the row sums' and the flush's traffic comes on top."""
    parts = {}
    for branch in ("cmp", "slc", "win"):
        spread = apart if branch == "slc" else 1
        parts[branch] = (seconds(s.flop(branch, 2 * s.dim + s.dim_v), s.tile_bytes(branch, spread)) +
                         seconds(s.flop(branch, 2 * s.dim + 2 * s.dim_v), s.tile_bytes(branch)))
    rows = s.rows_bytes(s.dim, 3 * 4 + 2 + 3) + s.rows_bytes(s.dim_v, 3 * 3 + 3 * 2)
    parts["rows, gate, sums"] = rows / MEMORY
    return parts


def crossover(apart):
    """The first length, in steps of 1024, at which NSA's forward is faster than a dense kernel."""
    for tokens in range(1024, 65537, 1024):
        s = Shape(64, 4, 128, 128, tokens)
        if sum(forward(s, apart).values()) < s.flop("dense", s.dim + s.dim_v) / FLASH:
            return tokens
    return None


def worst_apart(s):
    """Neighbours that agree in the forced blocks alone."""
    return (3 + 13 * s.queries) / LIST


def measured_ms(report, branch, which, tokens):
    for row in report.get("rows", []):
        for r in row.get("result", {}).get("rows", []) if row["name"] == "bench" else []:
            if (r["branch"], r["pass"], r["heads"], r["dim"], r["tokens"]) == (branch, which, 64, 128,
                                                                              tokens):
                return f"{r['ms']:.1f}"
    return ""


def table(report):
    s = Shape(64, 4, 128, 128, 65536)
    worst = worst_apart(s)
    near, far = forward(s, 1), forward(s, worst)
    back_near, back_far = backward(s, 1), backward(s, worst)
    total = [sum(x.values()) for x in (near, far, back_near, back_far)]
    rows = [("forward", "nsa", "fwd", total[0], total[1], "<= 34, then 20"),
            ("backward", "nsa", "bwd", total[2], total[3], "<= 74, then 45"),
            ("selection's extra over cmp", "select", "fwd", near["select"], far["select"],
             "<= 8, then 4.5")]
    rows += [(f"forward: {name}", name, "fwd", near[name], far[name], "")
             for name in near if name != "select"]
    rows += [(f"backward: {name}", name, "bwd", back_near[name], back_far[name], "")
             for name in back_near]
    lines = ["| what, ms | goal | predicted | measured |", "|---|---|---|---|"]
    for what, branch, which, low, high, goal in rows:
        span = f"{1e3 * low:.1f}" if f"{low:.4f}" == f"{high:.4f}" else \
            f"{1e3 * low:.1f} .. {1e3 * high:.1f}"
        lines.append(f"| {what} | {goal} | {span} | {measured_ms(report, branch, which, 65536)} |")
    lines.append("| tokens from which NSA's forward beats a dense kernel of "
                 f"{FLASH * 1e-12:.0f} TFLOP/s | <= 11k, then 6k | {crossover(1)} .. "
                 f"{crossover(worst)} | |")
    return s, worst, lines


HEAD = """# What the kernels should take on an H200

Written by `bench/gpu/predict.py --write`; no GPU was at hand, so the last column is empty until
`predict.py --measured gpu.json` fills it from what `tests/gpu/run` wrote. One sequence of 65536
tokens, 64 query heads, 4 kv heads, D 128, bf16, the mma.sync path.

Counted, and held against the executor's counters by `tests/simt/test_counters.cpp`:

"""
TAIL = """
Assumed: a warp works on 16 rows, so that each product of 4096 FLOP reads 256 bytes of shared memory,
which bounds it to half of the published {peak:.0f} TFLOP/s; {share:.0%} of that bound is reached; L2
brings {l2:.1f} TB/s; memory 85 % of 4.8 TB/s. A range is from neighbouring queries that choose the same
blocks to neighbours that agree in the forced blocks alone ({worst:.2f} times as many).

What that says: the first goal of the forward pass holds only if neighbours agree in most blocks, the
second needs wgmma and tiles of more rows; backward takes seven products where five would do, and
misses its first goal on this path; selection keeps its first goal.
"""


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--measured", type=pathlib.Path)
    options.add_argument("--write", type=pathlib.Path)
    given = options.parse_args()
    report = json.loads(given.measured.read_text()) if given.measured else {}
    s, worst, lines = table(report)
    both = s.dim + s.dim_v
    counted = ["| branch | pairs | forward TFLOP | backward TFLOP | GB of key tiles |",
               "|---|---|---|---|---|"]
    for branch in ("cmp", "slc", "win", "dense"):
        high = f" .. {1e-9 * s.tile_bytes(branch, worst):.0f}" if branch == "slc" else ""
        counted.append(f"| {branch} | {s.pairs[branch]:.3g} | {1e-12 * s.flop(branch, both):.2f} | "
                       f"{1e-12 * s.flop(branch, 4 * s.dim + 3 * s.dim_v):.2f} | "
                       f"{1e-9 * s.tile_bytes(branch):.0f}{high} |")
    text = HEAD + "\n".join(counted) + "\n\n" + "\n".join(lines) + "\n" + TAIL.format(
        peak=PEAK * 1e-12, share=SHARE, l2=L2 * 1e-12, worst=worst)
    if given.write:
        given.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
