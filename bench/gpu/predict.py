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
ROWS, BACK_ROWS = 128, 64  # of a tile, forward and backward
GATHERED = 512 * 2**20  # bytes of what gathered queries find at a time
PEAK = 989e12  # FLOP/s of dense bf16, as published for the H200
SHARED = PEAK / 2  # a warp of 16 rows reads 256 B of shared memory for a product of 4096 FLOP
RATE = {"mma": 0.65 * SHARED, "wgmma": 0.5 * PEAK}  # FLOP/s; both shares are assumed
L2 = 5.5e12  # bytes/s: assumed
MEMORY = 4.8e12 * 0.85  # bytes/s: published, 85 % of it assumed
COPY = 12  # instructions of the loop around one cp.async of a key tile: counted in sm_90a's PTX
CLOCK, PROCESSORS = 1.83e9, 132
EXP2 = PROCESSORS * 16 * CLOCK  # exponentials/s: 16 a cycle and multiprocessor
FLASH = 650e12  # FLOP/s of the best dense kernel: what 105 ms at 64k (KERNELS.md) amount to


class Shape:
    """Query-key pairs of each branch, over all query heads, and bytes of tiles."""

    def __init__(self, heads, kv_heads, dim, dim_v, tokens):
        self.heads, self.kv_heads, self.dim, self.dim_v = heads, kv_heads, dim, dim_v
        self.tokens = tokens
        seen = [max(0, (t - L + 1) // STRIDE + 1) if t >= L - 1 else 0 for t in range(tokens)]
        listed = [(min(LIST, t // BLOCK + 1) - 1) * BLOCK + t % BLOCK + 1 for t in range(tokens)]
        self.pairs = {"cmp": heads * sum(seen), "slc": heads * sum(listed),
                      "win": heads * sum(min(WINDOW, t + 1) for t in range(tokens)),
                      "dense": heads * tokens * (tokens + 1) // 2}

    def flop(self, branch, dims):
        return 2 * dims * self.pairs[branch]

    def queries(self, rows):
        return max(1, rows * self.kv_heads // self.heads)

    def apart(self, rows):
        """How many times as many blocks as one list the union of a tile's lists holds, at worst:
        neighbours agree in the forced blocks alone; no more than there are on average."""
        return min(3 + 13 * self.queries(rows), self.tokens / BLOCK / 2) / LIST

    def tile_bytes(self, branch, rows, worst=False):
        """K and V of the tiles that all tiles of query rows bring in."""
        keys = self.pairs[branch] / self.heads / self.queries(rows)
        if worst and branch == "slc":
            keys *= self.apart(rows)
        return keys * self.kv_heads * 2 * (self.dim + self.dim_v)

    def rows_bytes(self, width, count=1):
        return 2 * count * self.tokens * self.heads * width


def seconds(rate, flop, l2_bytes):
    return max(flop / rate, l2_bytes / L2)


def forward(s, path, worst):
    """Seconds of each part."""
    both = s.dim + s.dim_v
    parts = {"compress": 4 * 2 * s.tokens * s.kv_heads * both / L2}
    for branch in ("cmp", "slc", "win"):
        parts[branch] = seconds(RATE[path], s.flop(branch, both) * more(s, branch, path, worst),
                                s.tile_bytes(branch, ROWS, worst))
    parts["select"] = s.flop("cmp", s.dim) / (PEAK / 2) + s.pairs["cmp"] / EXP2
    parts["gate"] = s.rows_bytes(s.dim_v, 4) / MEMORY
    return parts


def more(s, branch, path, worst):
    """How many times as much is multiplied as is seen: wgmma multiplies 64 rows with the union of
    what they see; mma.sync 16."""
    return s.apart(64 if path == "wgmma" else 16) if worst and branch == "slc" else 1


def backward(s, path, worst):
    """dq takes three products of a pair, dk and dv four; sums of q's gradient go through memory in
    f32 once a branch, and the gate's, the row sums' and the flush's traffic comes on top."""
    parts, rate = {}, RATE[path]
    for branch in ("cmp", "slc", "win"):
        dq = s.flop(branch, 2 * s.dim + s.dim_v) * more(s, branch, path, worst)
        dkv = s.flop(branch, 2 * s.dim + 2 * s.dim_v)
        parts[branch] = (seconds(rate, dq, s.tile_bytes(branch, BACK_ROWS, worst)) +
                         seconds(rate, dkv, s.tile_bytes(branch, BACK_ROWS)))
    rows = s.rows_bytes(s.dim, 3 * 4 + 2 + 3) + s.rows_bytes(s.dim_v, 3 * 3 + 3 * 2)
    parts["rows, gate, sums"] = rows / MEMORY
    return parts


def gathered(s, path, products, width, rows):
    """Seconds of slc in tiles of up to `rows` rows that read one block, each of which leaves `width`
    floats in memory, to be read once more. The blocks are full, and chunks of queries so long that what
    they find fills GATHERED bytes."""
    found = s.pairs["slc"] / BLOCK
    moved = 4 * width * found / MEMORY
    chunk = GATHERED / (4 * width * LIST * s.heads)
    readers = chunk * LIST / (s.tokens / BLOCK / 2) * s.heads / s.kv_heads
    l2 = 2 * found * (s.dim + BLOCK * (s.dim + s.dim_v) / min(rows, readers))
    return max(seconds(RATE[path], products * s.pairs["slc"], l2), moved) + moved


def few_heads():
    """Forward over listed blocks in ms, 64 query heads, G of them to a kv head: by tiles of
    neighbouring queries, and gathered."""
    lines = ["| G | " + " | ".join(f"{path}: tiles of neighbours | {path}: gathered"
                                    for path in ("mma.sync", "wgmma")) + " |",
             "|---|---|---|---|---|"]
    for group in (1, 2, 4, 8, 16):
        s = Shape(64, 64 // group, 128, 128, 65536)
        cells = []
        for path in RATE:
            low, high = (1e3 * forward(s, path, worst)["slc"] for worst in (False, True))
            whole = 1e3 * gathered(s, path, 2 * (s.dim + s.dim_v), s.dim_v + 2, ROWS)
            cells.append(f"{low:.1f} .. {high:.1f} | {whole:.1f}")
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return lines


def crossover(path, worst):
    """The first length, in steps of 1024, at which NSA's forward is faster than a dense kernel."""
    for tokens in range(1024, 65537, 1024):
        s = Shape(64, 4, 128, 128, tokens)
        if sum(forward(s, path, worst).values()) < s.flop("dense", s.dim + s.dim_v) / FLASH:
            return tokens
    return None


def five_products(s):
    """Picoseconds for a pair of what backward does twice, the scores and dout v, and of ways round it:
    sums of dq from each tile of 64 keys, in f32, or ds in bf16, written and read again."""
    twice = 2 * (s.dim + s.dim_v)
    return [1e12 * t for t in (twice / RATE["mma"], twice / RATE["wgmma"],
                               2 * 4 * s.dim / 64 / MEMORY, 2 * 2 / MEMORY)]


def key_tile(s):
    """Of one tile of 64 keys and 128 rows by wgmma: pieces of 16 bytes, instructions of all warps that
    copy them, and how many could be issued while it is multiplied."""
    pieces = 64 * 2 * (s.dim + s.dim_v) // 16
    multiplied = 2 * 64 * ROWS * (s.dim + s.dim_v) / (RATE["wgmma"] / PROCESSORS)
    return pieces, pieces // 32 * COPY, 4 * CLOCK * multiplied


def measured_ms(report, branch, which, tokens):
    """What the bench measured; of slc from lists that neighbours share to random ones."""
    found = {}
    for row in report.get("rows", []):
        for r in (row.get("result") or {}).get("rows", []) if row["name"] == "bench" else []:
            case = (which, 64, 128, 128, tokens)
            if r["ms"] and (r["pass"], r["heads"], r["dim"], r["dim_v"], r["tokens"]) == case:
                found[r["branch"]] = f"{r['ms']:.1f}"
    return " .. ".join(found[name] for name in (f"{branch}_near", branch) if name in found)


def spans(parts_of, s, name=None):
    """`low .. high` in ms for each path: neighbours that agree in all blocks, and in none."""
    cells = []
    for path in RATE:
        low, high = (1e3 * (parts[name] if name else sum(parts.values()))
                     for parts in (parts_of(s, path, worst) for worst in (False, True)))
        cells.append(f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} .. {high:.1f}")
    return " | ".join(cells)


def table(s, report):
    rows = [("forward", "nsa", "fwd", forward, None, "<= 34, then 20"),
            ("backward", "nsa", "bwd", backward, None, "<= 74, then 45"),
            ("selection's extra over cmp", "select", "fwd", forward, "select", "<= 8, then 4.5")]
    rows += [(f"forward: {name}", name, "fwd", forward, name, "")
             for name in forward(s, "mma", False) if name != "select"]
    rows += [(f"backward: {name}", name, "bwd", backward, name, "")
             for name in backward(s, "mma", False)]
    lines = ["| what, ms | goal | by mma.sync | by wgmma | measured |", "|---|---|---|---|---|"]
    for what, branch, which, parts_of, name, goal in rows:
        lines.append(f"| {what} | {goal} | {spans(parts_of, s, name)} | "
                     f"{measured_ms(report, branch, which, 65536)} |")
    cells = " | ".join(f"{crossover(path, False)} .. {crossover(path, True)}" for path in RATE)
    lines.append("| tokens from which NSA's forward beats a dense kernel of "
                 f"{FLASH * 1e-12:.0f} TFLOP/s | <= 11k, then 6k | {cells} | |")
    return lines


HEAD = """# What the kernels should take on an H200

Written by `bench/gpu/predict.py --write`; no GPU was at hand, so the last column is empty until
`predict.py --measured gpu.json` fills it from what `tests/gpu/run` wrote. One sequence of 65536
tokens, 64 query heads, 4 kv heads, D 128, bf16. What is measured of forward and backward as a whole is of
random rows, and stands against the upper end of a range. A build for sm_90a multiplies by wgmma, one for any
other architecture by mma.sync.

Counted, and held against the executor's counters by `tests/simt/test_counters.cpp`, for both paths:

"""
TAIL = """
Assumed. By mma.sync a warp works on 16 rows, so that each product of 4096 FLOP reads 256 bytes of
shared memory, which bounds it to half of the published {peak:.0f} TFLOP/s; 65 % of that bound is reached.
By wgmma four warps read an operand once for 64 rows; half of the published rate is reached (the
authors of FlashAttention-3 report 0.58 to 0.59 of it with one of their two overlaps left out). L2
brings {l2:.1f} TB/s; memory 85 % of 4.8 TB/s. A range is from neighbouring queries that choose the same
blocks to neighbours that agree in the forced blocks alone.

Why backward takes seven products and not five. dq's kernel and that of dk and dv both make the
scores and dout v. Making them once saves {mma:.2f} ps of a pair by mma.sync and {wgmma:.2f} by wgmma, and
costs, without float atomics, traffic: sums of dq from every tile of 64 keys {sums:.2f} ps, ds itself {ds:.2f}
(and a buffer of as many bytes as there are pairs, times two, or many small launches to keep it
small). By wgmma only the second could gain, and only as far as its traffic hides behind products.

Why key tiles come by cp.async and not by TMA. A tile of 64 keys, K and V, is {pieces} pieces of 16 bytes,
eight to a thread; the loop around a piece has {loop} instructions (sm_90a's PTX), so {copying:.0f} are issued
by the eight warps where {slots:.0f} could be while the tile is multiplied: {share:.1f} %. That is all that TMA's
four boxes would take away: no byte less, and no register that is short (forward has 186 of 255). Its cost:
maps of each view that the driver encodes, looked up at run time; rows behind a sequence's end would be the
next sequence's instead of zeros, so they had to be zeroed after all; and dk's and dv's streamed rows, heads
of gathered queries, are no box. TMA with mbarriers pays as part of another structure, where one warp group
multiplies while the other one exponentiates: the authors of FlashAttention-3 report 661 TFLOP/s with both of
its overlaps and 570 to 582 with one of them left out (dense, no mask). Going from 570 to 661 would save
{gain:.1f} ms of the {wide:.1f} that forward's products by wgmma take above. No goal hangs on it: forward keeps its
first goal without, and misses the second with it. It was not built, because nothing here can show that it
pays; the wrappers (mbarrier, bulk and tensor copies) are there, and run under the executor in
`tests/simt/test_hopper.cpp`.

With few heads to a kv head a tile has many neighbouring queries, whose lists have many blocks in all:

{few}

Up to G = 4 slc's forward and dq gather the queries that read a block, and add up what they found: it
costs the same however far neighbours are apart. From G = 8 on, tiles of neighbours are left to it.

What that says: the forward pass keeps its first goal where neighbours agree in most blocks, with
wgmma by far; its second is a matter of slc's tiles from L2 and of selection. Backward keeps its
first goal by wgmma alone. Selection multiplies by mma.sync everywhere: decoding has to rank by the very
same bits.
"""


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--measured", type=pathlib.Path)
    options.add_argument("--write", type=pathlib.Path)
    given = options.parse_args()
    report = json.loads(given.measured.read_text()) if given.measured else {}
    s = Shape(64, 4, 128, 128, 65536)
    counted = ["| branch | pairs | forward TFLOP | backward TFLOP | GB of key tiles, forward |",
               "|---|---|---|---|---|"]
    for branch in ("cmp", "slc", "win", "dense"):
        high = f" .. {1e-9 * s.tile_bytes(branch, ROWS, True):.0f}" if branch == "slc" else ""
        counted.append(f"| {branch} | {s.pairs[branch]:.3g} | "
                       f"{1e-12 * s.flop(branch, s.dim + s.dim_v):.2f} | "
                       f"{1e-12 * s.flop(branch, 4 * s.dim + 3 * s.dim_v):.2f} | "
                       f"{1e-9 * s.tile_bytes(branch, ROWS):.0f}{high} |")
    mma, wgmma, sums, ds = five_products(s)
    few = "\n".join(few_heads())
    pieces, copying, slots = key_tile(s)
    wide = 1e3 * sum(forward(s, "wgmma", False)[branch] for branch in ("cmp", "slc", "win"))
    text = HEAD + "\n".join(counted) + "\n\n" + "\n".join(table(s, report)) + "\n" + TAIL.format(
        peak=PEAK * 1e-12, l2=L2 * 1e-12, mma=mma, wgmma=wgmma, sums=sums, ds=ds, few=few, pieces=pieces,
        loop=COPY, copying=copying, slots=slots, share=100 * copying / slots, wide=wide,
        gain=wide * (1 - 570 / 661))
    if given.write:
        given.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
