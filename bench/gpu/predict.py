#!/usr/bin/env python3
"""Predicts what the kernels take on an H200 from counted work, and sets measurements beside it.

The counts are those that tests hold: products of tensor cores, launches and bytes that tiles bring
from L2 into shared memory (tests/simt/test_counters.cpp), and the instructions of sm_90a's loops
(tests/cuda/counts.json). Rates are assumptions, named below; the first run of tests/gpu/run
replaces them.

usage: predict.py [--measured gpu.json] [--write bench/results/predictions.md]
"""
import argparse
import json
import math
import pathlib

COUNTS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "cuda" / "counts.json"
L, STRIDE, BLOCK, LIST, WINDOW = 32, 16, 64, 16, 512
ROWS, BACK_ROWS, KEYS = 128, 64, 64  # of a Q tile; of dq's by mma.sync, and what dkv takes; of a key tile
GATHERED = 512 * 2**20  # bytes of what gathered queries find at a time
PEAK = 989e12  # FLOP/s of dense bf16, as published for the H200
SHARED = PEAK / 2  # a warp of 16 rows reads 256 B of shared memory for a product of 4096 FLOP
MMA = 0.65 * SHARED  # FLOP/s; the share is assumed
L2 = 5.5e12  # bytes/s: assumed
MEMORY = 4.8e12 * 0.85  # bytes/s: published, 85 % of it assumed
CLOCK, PROCESSORS = 1.83e9, 132
EXP2 = PROCESSORS * 16 * CLOCK  # exponentials/s: 16 a cycle and multiprocessor
ISSUED = {"at best": 1.0, "likely": 0.6}  # instructions a cycle and scheduler; the second is assumed
PRODUCER, PASSED = 250, 60  # instructions of a producer's warp a key tile, of one that is passed over
COPIER = 80  # the same of selection's, which walks no lists: 75 in sm_90a's SASS
PORT = PROCESSORS * 128 * CLOCK  # bytes/s of shared memory
INSERT = 60  # instructions of a score that goes into a list in shared memory: assumed
FORCED = 3  # blocks of a list that are not ranked
LAUNCH = 2.2e-6  # seconds from a small kernel's begin to the next one's in a graph: assumed
LAUNCHES, RUN = 8, 256  # of a decoding step, one a memset; keys of its runs
FLASH = 650e12  # FLOP/s of the best dense kernel: what 105 ms at 64k amount to


def loop(kernel, dim, dim_v, *more, which=0):
    """Instructions of one warp for 64 of what a loop of sm_90a's kernel goes through, keys or, of dkv,
    rows: of a turn with a mask, and of one without. How many a turn takes follows from its products.
    Narrower heads take a wider one's loop. Forward's sums are taken for rescaled in every turn."""
    dim, dim_v = (64, 64) if max(dim, dim_v) <= 64 else (128, 128) if dim <= 128 else (192, 128)
    arguments = ", ".join(["__nv_bfloat16", str(dim), str(dim_v), *more])
    counted = json.loads(COUNTS.read_text())["kernels"][f"attend_{kernel}_kernel<{arguments}>"][which]
    over = {"forward_sm90": dim, "dq_sm90": dim + dim_v, "dkv_sm90": dim + dim_v}[kernel] // 16
    taken = 16 * (counted["products"] - over) // (2 if kernel == "dkv_sm90" else 1)
    rescaled = dim_v // 2 if kernel == "forward_sm90" else 0
    return [n * 64 / taken for n in (counted["loop"], counted["least"] + rescaled)]


def selection_loop(dim, columns):
    """What counts.json has of selection's loop, with so many rows of a query."""
    dim = 64 if dim <= 64 else 128 if dim <= 128 else 192
    return json.loads(COUNTS.read_text())["kernels"][
        f"select_blocks_sm90_kernel<__nv_bfloat16, {dim}, {columns}>"][0]


def inserted(candidates):
    """Scores in random order that are among a list's best when they come: of a query's blocks, the mean
    over queries with up to so many."""
    return (LIST - FORCED) * math.log(candidates / (LIST - FORCED))


def ranking_turn(dim, columns, candidates, tiles):
    """Instructions of one warp of selection for a key tile, of `tiles` with `candidates` blocks: it ranks every
    tile, those of one query every other."""
    counted, turns = selection_loop(dim, columns), 2 if columns == 16 else 1
    ranked = (counted["ranks"] - counted["least"]) / turns
    offered = 16 / columns * inserted(candidates) / tiles * counted.get("inserts", INSERT)
    return counted["least"] + ranked + offered


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


class Bound:
    """Seconds, and what they are bound by: the slowest of several."""

    def __init__(self, **seconds):
        self.by = max(seconds, key=seconds.get)
        self.seconds = seconds[self.by]


def by_mma(flop, l2_bytes):
    return Bound(tensor=flop / MMA, L2=l2_bytes / L2)


def by_loops(tiles, issued, instructions, flop, l2_bytes):
    """`tiles` on all multiprocessors, each with so many instructions a scheduler."""
    return Bound(issue=tiles * instructions / issued / CLOCK / PROCESSORS, tensor=flop / PEAK,
                 L2=l2_bytes / L2)


def row_tiles(s, branch):
    """Key tiles of a tile of query rows, lists that agree: a last one is begun, win's first too."""
    begun = {"cmp": 0.5, "slc": 0, "win": 1.5, "dense": 0.5}[branch]
    return s.pairs[branch] / s.heads / s.tokens / KEYS + begun


def key_tiles(s, branch, rows):
    return s.tokens * s.heads / rows * row_tiles(s, branch)


def turn(s, branch, turns, read=1):
    """Of a warp's `turns` as loop says: a mask takes the end of what a query sees, win's begin too, and, of
    tiles that other queries of the warpgroup read, `read` times as many, all but its own."""
    masked, whole = turns
    own = max(0, 1 - (2 if branch == "win" else 1) / row_tiles(s, branch)) / read
    return own * whole + (1 - own) * masked


def walks(s, branch, worst):
    """Of a pipeline two warpgroups multiply what any of their four queries reads, while the producer's walk
    the union of all eight: tiles walked, and read by a warpgroup, in those of lists that agree."""
    far = worst and branch == "slc"
    return (s.apart(ROWS), s.apart(ROWS // 2)) if far else (1, 1)


def pipe_instructions(s, branch, worst, turns):
    """Of a scheduler for a tile of rows and a key tile of lists that agree; and how often a warpgroup
    multiplies it."""
    walked, read = walks(s, branch, worst)
    each = turn(s, branch, turns, read)
    return 2 * (read * each + (walked - read) * PASSED) + walked * PRODUCER, read


def by_pipe(s, branch, issued, worst, turns, dims):
    """A pipeline over key tiles."""
    instructions, read = pipe_instructions(s, branch, worst, turns)
    tiles = key_tiles(s, branch, ROWS)
    return by_loops(tiles, issued, instructions, 2 * ROWS * KEYS * dims * read * tiles,
                    s.tile_bytes(branch, ROWS, worst))


def select(s, issued):
    """Selection's second pass over q k. On sm_90a 16 warps share a tile of 256 rows, four and one of the
    producer's a scheduler; operands of 64 rows and 64 keys are read from shared memory."""
    exponentials, rows = s.pairs["cmp"] / EXP2, 256
    if not issued:
        return Bound(tensor=s.flop("cmp", s.dim) / (PEAK / 2) + exponentials)
    columns = max(2, 2 ** math.ceil(math.log2(s.heads // s.kv_heads)))
    tiles = s.tokens * s.kv_heads * columns / rows * row_tiles(s, "cmp")  # rows without a head, too
    each = ranking_turn(s.dim, columns, s.tokens / BLOCK, row_tiles(s, "cmp"))
    operands = rows // 64 * 2 * (64 + KEYS) * s.dim
    return Bound(issue=tiles * (4 * each + COPIER) / issued / CLOCK / PROCESSORS,
                 tensor=2 * rows * KEYS * s.dim * tiles / PEAK, exponentials=exponentials,
                 shared=tiles * (operands + 2 * KEYS * s.dim) / PORT, L2=tiles * 2 * KEYS * s.dim / L2)


def forward(s, issued, worst):
    """Bounds of each part: sm_90a's if `issued` says at which rate, else by mma.sync."""
    both, parts = s.dim + s.dim_v, {}
    parts["compress"] = Bound(L2=4 * 2 * s.tokens * s.kv_heads * both / L2)
    for branch in ("cmp", "slc", "win"):
        far = worst and branch == "slc"
        if not issued:
            parts[branch] = by_mma(s.flop(branch, both) * (s.apart(16) if far else 1),
                                   s.tile_bytes(branch, ROWS, worst))
            continue
        turns = loop("forward_sm90", s.dim, s.dim_v, "true" if branch == "slc" else "false")
        parts[branch] = by_pipe(s, branch, issued, worst, turns, both)
    parts["select"] = select(s, issued)
    parts["gate"] = Bound(memory=s.rows_bytes(s.dim_v, 4) / MEMORY)
    return parts


def backward(s, issued, worst):
    """dq takes three products of a pair, dk and dv four. On sm_90a both are pipelines: a scheduler has a
    warp of each consumer and one of the producer, whose rows serve both consumers but in dk and dv of
    slc."""
    parts = {}
    for branch in ("cmp", "slc", "win"):
        far = worst and branch == "slc"
        dims = {"dq": 2 * s.dim + s.dim_v, "dkv": 2 * s.dim + 2 * s.dim_v}
        if not issued:
            for kernel in dims:
                more = s.apart(16) if far and kernel == "dq" else 1
                parts[f"{branch}: {kernel}"] = by_mma(
                    s.flop(branch, dims[kernel]) * more,
                    s.tile_bytes(branch, BACK_ROWS, worst and kernel == "dq"))
            continue
        turns = loop("dq_sm90", s.dim, s.dim_v, "true", which=int(branch == "slc"))
        parts[f"{branch}: dq"] = by_pipe(s, branch, issued, worst, turns, dims["dq"])
        shared = 2 if branch != "slc" else 1
        tiles = key_tiles(s, branch, BACK_ROWS)
        each = turn(s, branch, loop("dkv_sm90", s.dim, s.dim_v, "true" if branch == "slc" else "false"))
        parts[f"{branch}: dkv"] = by_loops(tiles, issued, each + PRODUCER / shared,
                                           2 * BACK_ROWS * KEYS * dims["dkv"] * tiles,
                                           s.tile_bytes(branch, BACK_ROWS) / shared)
    rows = s.rows_bytes(s.dim_v, 4) + s.rows_bytes(s.dim)
    parts["rows"] = Bound(memory=rows / MEMORY)
    return parts


def total(parts):
    return sum(part.seconds for part in parts.values())


def decode(s):
    """Bytes of one sequence and kv head in a step: keys, scores of the compressed ones (written, and read by
    selection; a run of attention reads its own at once, from cache), sums over heads, and what runs leave in
    16 bits a number and three floats a row, written and read once."""
    group, both = s.heads // s.kv_heads, s.dim + s.dim_v
    blocks = (s.tokens - L) // STRIDE + 1
    keys = 2 * both * (blocks + LIST * BLOCK + WINDOW)
    scores = 2 * 4 * group * blocks
    sums = 2 * 4 * blocks
    runs = sum(-(-n // RUN) for n in (blocks, LIST * BLOCK, WINDOW + 2 * KEYS))
    return {"keys": keys, "scores": scores, "sums": sums, "runs": 2 * group * runs * (2 * s.dim_v + 12)}


def decode_table():
    lines = ["| heads | tokens | keys and scores, MB | all, MB | dense, MB | batch 1: ms, over dense | "
             "32 | 128 |", "|---|---|---|---|---|---|---|---|"]
    for dim, dim_v, tokens in ((128, 128, 65536), (128, 128, 131072), (192, 128, 65536)):
        s = Shape(64, 4, dim, dim_v, tokens)
        parts, dense = decode(s), 2 * (dim + dim_v) * tokens
        read, every = parts["keys"] + parts["scores"], sum(parts.values())
        cells = []
        for batch in (1, 32, 128):
            mine = LAUNCHES * LAUNCH + batch * s.kv_heads * every / MEMORY
            theirs = 2 * LAUNCH + batch * s.kv_heads * dense / MEMORY
            cells.append(f"{1e3 * mine:.3f}, {theirs / mine:.1f}x")
        lines.append(f"| {dim}/{dim_v} | {tokens} | {1e-6 * read:.2f} | {1e-6 * every:.2f} | "
                     f"{1e-6 * dense:.2f} | " + " | ".join(cells) + " |")
    return lines


def gathered(s, issued, dims, rows):
    """Seconds of slc in tiles of up to `rows` rows that read one block, each of which leaves its sum of p v,
    16 bits a number, and three floats in memory, to be read once more. The blocks are full, and chunks of
    queries so long that what they find would fill GATHERED bytes in f32."""
    found = s.pairs["slc"] / BLOCK
    moved = (2 * s.dim_v + 12) * found / MEMORY
    chunk = GATHERED / (4 * (s.dim_v + 3) * LIST * s.heads)
    readers = chunk * LIST / (s.tokens / BLOCK / 2) * s.heads / s.kv_heads
    l2 = 2 * found * (s.dim + BLOCK * (s.dim + s.dim_v) / min(rows, readers))
    flop = 2 * dims * s.pairs["slc"]
    bound = by_mma(flop, l2)
    if issued:
        masked = loop("forward_sm90", s.dim, s.dim_v, "false")[0]
        bound = by_loops(found / rows, issued, 2 * masked + PRODUCER, flop, l2)
    return max(bound.seconds, moved) + moved


def whole_warpgroups(s):
    """Milliseconds of slc's forward, lists that differ: of tensor cores, if warps multiply one query each and
    as it is; of instructions; of L2, which takes as long either way; and where that would no longer bind."""
    both, tiles = s.dim + s.dim_v, key_tiles(s, "slc", ROWS)
    instructions, read = pipe_instructions(s, "slc", True, loop("forward_sm90", s.dim, s.dim_v, "true"))
    least, most = (1e3 * tiles * instructions / rate / CLOCK / PROCESSORS for rate in ISSUED.values())
    moved = s.tile_bytes("slc", ROWS, True)
    bound = 1e3 * moved / L2
    return {"one": 1e3 * s.flop("slc", both) / MMA, "least": least, "most": most, "bound": bound,
            "groups": 1e3 * 2 * ROWS * KEYS * both * read * tiles / PEAK,
            "rate": 1e-9 * moved / most, "slow": least / bound,
            "pair": 100 * FORCED / 2 / (LIST * s.apart(ROWS))}


PATHS = {"by mma.sync": None} | {f"by wgmma, {name}": rate for name, rate in ISSUED.items()}


def few_heads():
    """Forward over listed blocks in ms, 64 query heads, G of them to a kv head: by tiles of
    neighbouring queries, and gathered."""
    lines = ["| G | " + " | ".join(f"{path}: tiles of neighbours | gathered" for path in PATHS) + " |",
             "|---|" + "---|---|" * len(PATHS)]
    for group in (1, 2, 4, 8, 16):
        s = Shape(64, 64 // group, 128, 128, 65536)
        cells = []
        for issued in PATHS.values():
            low, high = (1e3 * forward(s, issued, worst)["slc"].seconds for worst in (False, True))
            whole = 1e3 * gathered(s, issued, s.dim + s.dim_v, ROWS)
            cells.append(f"{low:.1f} .. {high:.1f} | {whole:.1f}")
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return lines


def crossover(issued, worst):
    """The first length, in steps of 1024, at which NSA's forward is faster than a dense kernel."""
    for tokens in range(1024, 65537, 1024):
        s = Shape(64, 4, 128, 128, tokens)
        if total(forward(s, issued, worst)) < s.flop("dense", s.dim + s.dim_v) / FLASH:
            return tokens
    return None


def five_products(s):
    """Picoseconds for a pair of what backward does twice, the scores and dout v, and of ways round it:
    sums of dq from each tile of 64 keys, in f32, or ds in bf16, written and read again."""
    twice = 2 * (s.dim + s.dim_v)
    return [1e12 * t for t in (twice / MMA, twice / PEAK, 2 * 4 * s.dim / 64 / MEMORY,
                               2 * 2 / MEMORY)]


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
    """`low .. high` in ms for each path: neighbours that agree in all blocks, and in none; of one part
    with what bounds it."""
    cells = []
    for issued in PATHS.values():
        both = [parts_of(s, issued, worst) for worst in (False, True)]
        low, high = (f"{1e3 * (p[name].seconds if name else total(p)):.1f}" for p in both)
        by = sorted({p[name].by for p in both}) if name else []
        cells.append((low if low == high else f"{low} .. {high}") + (f" ({', '.join(by)})" if by else ""))
    return " | ".join(cells)


def table(s, report):
    rows = [("forward", "nsa", "fwd", forward, None, "<= 34, then 20"),
            ("backward", "nsa", "bwd", backward, None, "<= 74, then 45"),
            ("selection's extra over cmp", "select", "fwd", forward, "select", "<= 8, then 4.5")]
    rows += [(f"forward: {name}", name, "fwd", forward, name, "")
             for name in forward(s, None, False) if name != "select"]
    rows += [(f"backward: {name}", name, "bwd", backward, name, "")
             for name in backward(s, None, False)]
    lines = [f"| what, ms | goal | {' | '.join(PATHS)} | measured |", "|---|---|" + "---|" * 4]
    for what, branch, which, parts_of, name, goal in rows:
        lines.append(f"| {what} | {goal} | {spans(parts_of, s, name)} | "
                     f"{measured_ms(report, branch, which, 65536)} |")
    cells = " | ".join(f"{crossover(rate, False)} .. {crossover(rate, True)}"
                       for rate in PATHS.values())
    lines.append("| tokens from which NSA's forward beats a dense kernel of "
                 f"{FLASH * 1e-12:.0f} TFLOP/s | <= 11k, then 6k | {cells} | |")
    return lines


def other_shapes():
    lines = [f"| heads | tokens | pass | {' | '.join(PATHS)} |", "|---|---|---|" + "---|" * len(PATHS)]
    for dim, dim_v, tokens in ((128, 128, 131072), (192, 128, 65536), (64, 64, 65536)):
        s = Shape(64, 4, dim, dim_v, tokens)
        for name, parts_of in (("forward", forward), ("backward", backward)):
            lines.append(f"| {dim}/{dim_v} | {tokens} | {name} | {spans(parts_of, s)} |")
    return lines


HEAD = """# What the kernels should take on an H200

Written by `bench/gpu/predict.py --write`; {measured}. One sequence of 65536
tokens, 64 query heads, 4 kv heads, D 128, bf16. What is measured of forward and backward as a whole is of
random rows, and stands against the upper end of a range. A build for sm_90a multiplies by wgmma, one for any
other architecture by mma.sync; below an H200 runs either.

Counted, and held against the executor's counters by `tests/simt/test_counters.cpp`, for both paths:

"""
UNMEASURED = """no GPU was at hand, so the last column is empty until
`predict.py --measured gpu.json` fills it from what `tests/gpu/run` wrote"""
MEASURED = """the last column is what `tests/gpu/run` measured on
{machine[name]}, driver {machine[driver]} ({commit}, {date})"""
TAIL = """
Assumed. By mma.sync a warp works on 16 rows, so that each product of 4096 FLOP reads 256 bytes of
shared memory, which bounds it to half of the published {peak:.0f} TFLOP/s; 65 % of that bound is reached.
By wgmma a part takes as long as the slowest of three: its tensor cores at the published rate, its key tiles
from L2, its instructions; of selection also its exponentials and what products read of shared memory. Instructions of
a warp's loop are counted in sm_90a's SASS (`tests/cuda/counts.json`), with a mask and without: a warp's queries
see most of their key tiles whole, lists that differ but their own. At best a scheduler issues one a cycle,
{likely} is what is likely. A producer's warp takes {producer} a key tile, and a warpgroup {passed} for one that it
passes over: both assumed. L2 brings {l2:.1f} TB/s; memory 85 % of 4.8 TB/s. A
range is from neighbouring queries that choose the same blocks to neighbours that agree in the forced blocks
alone; in brackets is what bounds a part.

Other shapes, 64 query heads and 4 kv heads, ms:

{shapes}

A step of decoding, bf16, 64 query heads and 4 kv heads. Bytes are of one sequence and kv head, times from
memory's rate and {launches} launches of {launch:.1f} us, of which one is a memset; dense attention is one pass over
all keys and values in two launches. What runs of keys leave, in 16 bits, is in `all`:

{decode}

Why backward takes seven products and not five. dq's kernel and that of dk and dv both make the
scores and dout v. Making them once saves {mma:.2f} ps of a pair by mma.sync and, at the published rate,
{wgmma:.2f} by wgmma, and costs, without float atomics, traffic: sums of dq from every tile of 64 keys {sums:.2f} ps,
ds itself {ds:.2f} (and a buffer of as many bytes as there are pairs, times two, or many small launches to keep it
small).

With few heads to a kv head a tile has many neighbouring queries, whose lists have many blocks in all:

{few}

Up to G = 4 slc's forward and dq gather the queries that read a block, and add up what they found: it
costs the same however far neighbours are apart. From G = 8 on, tiles of neighbours are left to it.

Selection by wgmma takes attention's own product, 64 rows by 64 keys, so that forward and decoding rank by the
same bits; by four groups of 64 rows, so that a key tile is brought in once for 256. A warp adds up its
exponentials over heads in registers and scores 32 blocks at a time. {room} blocks of a list are ranked; of scores
in random order {inserted:.0f} go into a list on their way, at {inserts} instructions each.

Why slc with lists that differ keeps whole warpgroups. Of 64 rows that are multiplied with a block, those of
one query in four read it. If each warp multiplied the 16 rows of one query by mma.sync, nothing would be in
vain: tensor cores would take {one:.1f} ms in place of {groups:.1f}, and fewer instructions would be issued
than now, which take {least:.1f} ms at best and {most:.1f} likely. But L2 takes {bound:.1f} ms either way, for the
tile brings in each block that one of its queries reads. It would gain if L2 brought more than {rate:.1f} TB/s,
or a scheduler issued less than {slow:.2f} a cycle. Clusters of two thread blocks that bring in the forced blocks
together would save {pair:.1f} % of the bytes. Gathered queries take the time of the table above whatever their lists
are, but add up in another order: a choice by the lists would make a query's bits depend on its neighbours.
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
    head = HEAD.format(measured=MEASURED.format(**report) if report else UNMEASURED)
    text = head + "\n".join(counted) + "\n\n" + "\n".join(table(s, report)) + "\n" + TAIL.format(
        peak=PEAK * 1e-12, l2=L2 * 1e-12, mma=mma, wgmma=wgmma, sums=sums, ds=ds,
        few="\n".join(few_heads()), likely=ISSUED["likely"], producer=PRODUCER, passed=PASSED,
        shapes="\n".join(other_shapes()), decode="\n".join(decode_table()), launches=LAUNCHES,
        launch=1e6 * LAUNCH, room=LIST - FORCED, inserted=inserted(s.tokens / BLOCK),
        inserts=selection_loop(s.dim, s.heads // s.kv_heads)["inserts"], **whole_warpgroups(s))
    if given.write:
        given.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
