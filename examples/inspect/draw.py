#!/usr/bin/env python3
"""Draws what `inspect` has written: four pictures, and one page that needs nothing else.

  draw.py FILE.json FOLDER [--layer N] [--kv-head N]

Into FOLDER go reads.svg (which keys each query reads in each branch, of one layer and kv head, by
default the last and 0), blocks.svg (the blocks selected in every layer), gates.svg (the share of each
branch), scores.svg (how well block scores foretell dense attention), and index.html, which holds the
pictures, the text and the numbers, and shows for each token what it reads.

Python's own library alone. Not here: what is measured (measure.c), how the page behaves (page.html).
"""
import argparse
import base64
import html
import json
import math
import os
import pathlib
import struct
import sys
import zlib

HERE = pathlib.Path(__file__).resolve().parent
BRANCHES = ("cmp", "slc", "win")
# What a file of inspect's holds beside the lists.
SIZES = ("tokens", "layers", "heads", "kv_heads", "cmp_block", "cmp_stride", "slc_block", "slc_count",
         "slc_init", "slc_local", "window", "step", "numbers")
# Okabe and Ito's colours, which people who see few colours can tell apart.
COLOUR = {"cmp": (0, 158, 115), "slc": (230, 159, 0), "win": (0, 114, 178), "grey": (128, 128, 128)}
STYLE = """<style>
.ground { fill: #ffffff } text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 } .small { font-size: 11px; fill: #59636e }
.axis { stroke: #818b98; fill: none } .grid { stroke: #818b98; stroke-opacity: .25; fill: none }
.line { stroke: #1f2328; stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } text { fill: #e6edf3 }
.small { fill: #9198a1 } .line { stroke: #e6edf3 } }
</style>"""


# ---- What was measured ----------------------------------------------------------------------

def cmp_visible(data, query):
    """N(query + 1): compressed blocks that lie wholly at or before the query."""
    back = query - (data["cmp_block"] - 1)
    return 0 if back < 0 else back // data["cmp_stride"] + 1


def is_forced(data, query, block):
    return block < data["slc_init"] or block > query // data["slc_block"] - data["slc_local"]


def selected_keys(data, query, blocks):
    """Tokens of the listed blocks, up to the query."""
    size = data["slc_block"]
    return sum(min(query + 1, (j + 1) * size) - j * size for j in blocks)


def reads(data, query, record):
    """Keys that one query and kv head reads in each branch."""
    return {"cmp": cmp_visible(data, query), "slc": selected_keys(data, query, record["blocks"]),
            "win": record["win"]}


def check_counts(data):
    """The pictures are right only if they show the reads that the library has counted."""
    total = dict.fromkeys(BRANCHES, 0)
    for layer in data["queries"]:
        for head in layer:
            for query, record in enumerate(head):
                for branch, keys in reads(data, query, record).items():
                    total[branch] += keys
    if total != data["counted"]:
        raise SystemExit(f"the lists say {total} keys were read, the library counted {data['counted']}")


def rank_of(values):
    """Ranks, ties sharing their mean."""
    order, ranks, i = sorted(range(len(values)), key=values.__getitem__), [0.0] * len(values), 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in range(i, j + 1):
            ranks[order[k]] = (i + j) / 2
        i = j + 1
    return ranks


def rank_correlation(a, b):
    """Spearman's, None where one of them is constant."""
    a, b = rank_of(a), rank_of(b)
    mean = (len(a) - 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    size = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return both / size if size else None


def free_blocks(data, query):
    """Candidates that are not forced, where there are more than fit in; else none."""
    free = [j for j in range(query // data["slc_block"] + 1) if not is_forced(data, query, j)]
    return free if len(free) > data["slc_count"] - data["slc_init"] - data["slc_local"] else []


def judge(data, layer):
    """How well a layer chooses, over queries with a choice: the mean dense mass of the forced blocks,
    with as many others as are chosen at random, with those chosen, with the best; the mean rank
    correlation of scores and mass within a query; the pairs of score and mass."""
    forced, luck, chosen, best, correlations, pairs = [], [], [], [], [], []
    room = data["slc_count"] - data["slc_init"] - data["slc_local"]
    for head in layer:
        for query, record in enumerate(head):
            free, mass, score = free_blocks(data, query), record["mass"], record["score"]
            if not free:
                continue
            forced.append(sum(m for j, m in enumerate(mass) if j not in free))
            luck.append(forced[-1] + (1 - forced[-1]) * room / len(free))
            chosen.append(sum(mass[j] for j in record["blocks"]))
            best.append(forced[-1] + sum(sorted((mass[j] for j in free), reverse=True)[:room]))
            correlations.append(rank_correlation([score[j] for j in free], [mass[j] for j in free]))
            pairs += [(score[j], mass[j]) for j in free]
    known = [c for c in correlations if c is not None]
    means = [sum(x) / len(x) if x else 0 for x in (forced, luck, chosen, best)]
    return means, sum(known) / len(known) if known else 0, pairs


# ---- Pieces of pictures -----------------------------------------------------------------------

def rgb(name):
    return "#%02x%02x%02x" % COLOUR[name]


def heat(x, y, width, height, columns, rows, pixel):
    """A picture in the picture, columns x rows of (colour, opacity) or None, as a PNG. Cells are drawn
    some pixels large, for viewers that blur."""
    across, down, lines = math.ceil(320 / columns), math.ceil(320 / rows), bytearray()
    for r in range(rows):
        line = bytearray()
        for c in range(columns):
            of = pixel(r, c)
            line += (bytes((*COLOUR[of[0]], round(255 * of[1]))) if of else b"\0\0\0\0") * across
        lines += (b"\0" + line) * down

    def chunk(kind, body):
        return (struct.pack(">I", len(body)) + kind + body +
                struct.pack(">I", zlib.crc32(kind + body)))

    size = struct.pack(">IIBBBBB", columns * across, rows * down, 8, 6, 0, 0, 0)
    png = (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) +
           chunk(b"IDAT", zlib.compress(bytes(lines), 9)) + chunk(b"IEND", b""))
    return (f'<image x="{x}" y="{y}" width="{width}" height="{height}" preserveAspectRatio="none" '
            f'style="image-rendering: pixelated" '
            f'href="data:image/png;base64,{base64.b64encode(png).decode()}"/>')


def text(x, y, words, kind="", anchor="start", turn=0):
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{turned}>'
            f"{html.escape(words)}</text>")


def frame(x, y, width, height):
    return f'<rect class="axis" x="{x}" y="{y}" width="{width}" height="{height}"/>'


def ticks(span, most=4):
    """Round numbers from 0 to span, at most `most` steps."""
    step = 1
    while span / step > most:
        step *= 2 if str(step)[0] in "15" else 2.5
    return [int(i * step) for i in range(int(span / step) + 1)]


def axis_below(x, y, width, span):
    return [text(x + width * t / span, y + 15, str(t), "small", "middle") for t in ticks(span)]


def axis_left(x, y, height, span, upward=False):
    return [text(x - 5, y + (height - height * t / span if upward else height * t / span) + 4, str(t),
                 "small", "end") for t in ticks(span)]


def legend(x, y, entries):
    """Squares with words, side by side."""
    lines = []
    for name, opacity, words in entries:
        lines += [f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{rgb(name)}" '
                  f'fill-opacity="{opacity}"/>', text(x + 17, y, words)]
        x += 36 + 6.6 * len(words)
    return lines


def document(width, height, title, note, lines):
    """The whole of an SVG file."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(title)}">', STYLE,
        f'<rect class="ground" width="{width}" height="{height}"/>',
        text(14, 24, title, "title"), text(14, 42, note, "small"), *lines, "</svg>", ""])


def area(x, y, width, height, bottoms, tops, most, name):
    """The band between two rows of values, drawn upward."""
    n = max(1, len(tops) - 1)
    up = [f"{x + width * i / n:.1f} {y + height - height * v / most:.1f}" for i, v in enumerate(tops)]
    down = [f"{x + width * i / n:.1f} {y + height - height * v / most:.1f}"
            for i, v in reversed(list(enumerate(bottoms)))]
    return f'<path fill="{rgb(name)}" fill-opacity=".85" d="M{"L".join(up + down)}z"/>'


# ---- The pictures -----------------------------------------------------------------------------

def reads_panels(data, head, side, top):
    """Queries downwards, keys across, one panel for each branch."""
    T, size, lines = data["tokens"], data["slc_block"], []
    sees = [set(record["blocks"]) for record in head]

    def cmp(t, s):
        covered = s < (cmp_visible(data, t) - 1) * data["cmp_stride"] + data["cmp_block"]
        return ("cmp", .85 if s // data["cmp_stride"] % 2 else .45) if covered and cmp_visible(data, t) else None

    def slc(t, s):
        if s > t or s // size not in sees[t]:
            return None
        return ("slc", .4 if is_forced(data, t, s // size) else 1)

    def win(t, s):
        return ("win", .9) if t - head[t]["win"] < s <= t else None

    names = {"cmp": f"cmp: a key for every {data['cmp_stride']} tokens, of {data['cmp_block']} each",
             "slc": f"slc: {data['slc_count']} blocks of {size} tokens",
             "win": f"win: the last {data['window']} tokens"}
    for i, (branch, pixel) in enumerate(zip(BRANCHES, (cmp, slc, win))):
        x = 54 + i * (side + 34)
        lines += [text(x, top - 8, names[branch]), heat(x, top, side, side, T, T, pixel),
                  frame(x, top, side, side), *axis_below(x, top + side, side, T)]
        lines.append(text(x + side / 2, top + side + 30, "key, token", "small", "middle"))
    return lines + [*axis_left(54, top, side, T),
                    text(18, top + side / 2, "query, token", "small", "middle", -90)]


def reads_sum(data, head, left, top, width, height):
    """Keys that each query reads, the branches on top of each other, beside dense attention."""
    T, lines, bottom = data["tokens"], [], [0] * data["tokens"]
    counts = [reads(data, t, record) for t, record in enumerate(head)]
    for branch in BRANCHES:
        level = [b + c[branch] for b, c in zip(bottom, counts)]
        lines.append(area(left, top, width, height, bottom, level, T, branch))
        bottom = level
    lines += [f'<path class="line" stroke-dasharray="5 4" d="M{left} {top + height}L{left + width} {top}"/>',
              frame(left, top, width, height), *axis_below(left, top + height, width, T),
              *axis_left(left, top, height, T, upward=True),
              text(left + width / 2, top + height + 30, "query, token", "small", "middle"),
              text(18, top + height / 2, "keys read", "small", "middle", -90),
              text(left + width * .62, top + height * .3, f"dense attention: {T} at the end", "", "end")]
    words = ", ".join(f"{b} {counts[-1][b]}" for b in BRANCHES)
    return lines + [text(left + 10, top + 18, f"the last query reads {bottom[-1]}: {words}")]


def draw_reads(data, layer, head):
    side, top = 262, 112
    lines = legend(54, 68, [("cmp", .7, "compressed keys"), ("slc", 1, "blocks chosen by score"),
                            ("slc", .4, "forced blocks"), ("win", .9, "window")])
    lines += reads_panels(data, data["queries"][layer][head], side, top)
    lines += reads_sum(data, data["queries"][layer][head], 54, top + side + 56, 3 * side + 68, 150)
    title = "Which keys each query reads"
    return document(940, top + side + 256, title, f"layer {data['numbers'][layer]}, key-value head {head}", lines)


def draw_blocks(data):
    T, J, L = data["tokens"], math.ceil(data["tokens"] / data["slc_block"]), data["layers"]
    side, top = min(262, (864 - 20 * (L - 1)) // L), 108
    lines = legend(54, 68, [("slc", 1, "chosen by score"), ("grey", .45, "forced")])
    for layer, heads in enumerate(data["queries"]):
        x = 54 + layer * (side + 20)
        lines.append(text(x, top - 8, f"layer {data['numbers'][layer]}"))
        for head, records in enumerate(heads):
            y = top + head * (side + 14)
            sees = [set(record["blocks"]) for record in records]

            def pixel(t, j):
                if j not in sees[t]:
                    return None
                return ("grey", .45) if is_forced(data, t, j) else ("slc", 1)

            lines += [heat(x, y, side, side, J, T, pixel), frame(x, y, side, side)]
            if layer == 0:
                lines += [*axis_left(54, y, side, T),
                          text(18, y + side / 2, f"kv head {head}: query", "small", "middle", -90)]
        bottom = top + len(heads) * (side + 14) - 14
        lines += [*axis_below(x, bottom, side, J),
                  text(x + side / 2, bottom + 30, "block of keys", "small", "middle")]
    return document(940, bottom + 44, "The blocks that each query selects, in every layer",
                    f"{data['slc_count']} of at most {J} blocks of {data['slc_block']} tokens; "
                    f"{data['slc_init']} first and {data['slc_local']} latest are forced", lines)


def mean_shares(data, records):
    """Share of each branch in the sum of the gates, over bins of neighbouring tokens."""
    bins = min(64, len(records))
    result = []
    for i in range(bins):
        some = records[len(records) * i // bins:len(records) * (i + 1) // bins]
        shares = [[g / max(sum(r["gates"]), 1e-30) for g in r["gates"]] for r in some]
        result.append([sum(s[b] for s in shares) / len(shares) for b in range(3)])
    return result


def draw_gates(data):
    L, height, top = data["layers"], 120, 108
    width = min(262, (864 - 20 * (L - 1)) // L)
    lines = legend(54, 68, [("cmp", .85, "cmp"), ("slc", .85, "slc"), ("win", .85, "win")])
    for layer, heads in enumerate(data["queries"]):
        x = 54 + layer * (width + 20)
        lines.append(text(x, top - 8, f"layer {data['numbers'][layer]}"))
        for head, records in enumerate(heads):
            y, bottom = top + head * (height + 34), [0] * min(64, len(records))
            shares = mean_shares(data, records)
            for b, branch in enumerate(BRANCHES):
                level = [low + s[b] for low, s in zip(bottom, shares)]
                lines.append(area(x, y, width, height, bottom, level, 1.0001, branch))
                bottom = level
            means = [sum(s[b] for s in shares) / len(shares) for b in range(3)]
            words = ", ".join(f"{b} {100 * m:.0f} %" for b, m in zip(BRANCHES, means))
            lines += [frame(x, y, width, height), text(x, y + height + 15, words, "small")]
            if layer == 0:
                lines += [text(49, y + 9, "100 %", "small", "end"),
                          text(49, y + height, "0", "small", "end"),
                          text(14, y + height / 2, f"kv head {head}", "small", "middle", -90)]
    return document(940, y + height + 32, "What the gate takes from each branch",
                    f"the branch's gate over the sum of the three, tokens 0 to {data['tokens'] - 1} from "
                    "left to right; the mean of all below", lines)


def density(pairs, cells, least):
    """Counts of pairs in cells x cells of both logarithms, from 10^least to 1."""
    grid = [[0] * cells for _ in range(cells)]
    for pair in pairs:
        place = [min(cells - 1, max(0, int(cells * (math.log10(max(v, 1e-30)) - least) / -least))) for v in pair]
        grid[cells - 1 - place[1]][place[0]] += 1
    return grid


def scores_panel(x, y, side, layer, correlation, pairs, least=-5):
    cells = 48
    grid = density(pairs, cells, least)
    most = max(map(max, grid)) or 1

    def pixel(r, c):
        return ("win", .15 + .85 * math.sqrt(grid[r][c] / most)) if grid[r][c] else None

    lines = [text(x, y - 8, f"layer {layer}, rank correlation {correlation:.2f}"),
             heat(x, y, side, side, cells, cells, pixel),
             f'<path class="grid" d="M{x} {y + side}L{x + side} {y}"/>', frame(x, y, side, side)]
    for e in range(least, 1, 2 if side < 240 else 1):
        at = side * (e - least) / -least
        lines.append(text(x + at, y + side + 15, f"1e{e}" if e else "1", "small", "middle"))
    return lines + [text(x + side / 2, y + side + 30, "score of a block", "small", "middle")]


def bars(x, y, width, layer, means):
    kinds = (("grey", "forced"), ("cmp", "random"), ("slc", "selected"), ("win", "best"))
    lines = []
    for i, ((name, words), value) in enumerate(zip(kinds, means)):
        at, wide = y + 22 * i, (width - 92) * value
        lines += [f'<rect x="{x + 52}" y="{at}" width="{wide:.1f}" height="16" fill="{rgb(name)}"/>',
                  text(x + 46, at + 12, words, "small", "end"),
                  text(x + 56 + wide, at + 12, f"{100 * value:.0f} %", "small")]
    return lines


def draw_scores(data):
    L, top = data["layers"], 92
    side = min(262, (864 - 20 * (L - 1)) // L)
    lines = []
    for layer, heads in enumerate(data["queries"]):
        means, correlation, pairs = judge(data, heads)
        x = 54 + layer * (side + 20)
        lines += scores_panel(x, top, side, data["numbers"][layer], correlation, pairs)
        lines += bars(x, top + side + 84, side, layer, means)
    for e in range(-5, 1):
        lines.append(text(49, top + side * -e / 5 + 4, f"1e{e}" if e else "1", "small", "end"))
    lines += [text(12, top + side / 2, "its dense attention", "small", "middle", -90),
              text(54, top + side + 68, "Share of dense attention in the forced blocks alone, with others at "
                   "random, with those selected, with the best as many:")]
    return document(940, top + side + 184, "Block scores against what dense attention would look at",
                    "every block that is not forced, darker where there are more, below 1e-5 at the edge; "
                    "rank correlation within a query, mean", lines)


# ---- The page ---------------------------------------------------------------------------------

def page(data, pictures):
    """page.html with the pictures and the numbers in it. A `</` in the text must not end the script."""
    numbers = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    drawn = "\n".join(f"<figure>{picture}</figure>" for picture in pictures.values())
    return ((HERE / "page.html").read_text(encoding="utf-8").replace("<!-- pictures -->", drawn)
            .replace("/* numbers */ null", numbers))


def write_files(folder, files):
    """Beside their names, and put in place when all are whole: until then older ones stay as they are. What is no
    file, a device behind a link, is written where it is."""
    drafts = {}
    try:
        for name, content in files.items():
            path = (folder / name).resolve()
            draft = path if path.exists() and not path.is_file() else path.with_name(f"{path.name}.{os.getpid()}.tmp")
            drafts[draft] = path
            draft.write_text(content, encoding="utf-8")
            if path.is_file():
                draft.chmod(path.stat().st_mode & 0o777)
        for draft, path in drafts.items():
            if draft != path:
                draft.replace(path)
    finally:
        for draft, path in drafts.items():
            if draft != path:
                draft.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json")
    parser.add_argument("folder")
    parser.add_argument("--layer", type=int)
    parser.add_argument("--kv-head", type=int, default=0)
    options = parser.parse_args()
    try:
        data = json.loads(pathlib.Path(options.json).read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("no object")
        lacks = [key for key in (*SIZES, "text", "queries", "counted") if key not in data]
        if lacks:
            raise ValueError(f"without {', '.join(lacks)}")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{options.json}: not what inspect writes: {error}")
    numbers = data["numbers"]  # of the layers that choose; the others are not in the file
    number = numbers[-1] if options.layer is None else options.layer
    if number not in numbers or not 0 <= options.kv_head < data["kv_heads"]:
        raise SystemExit(f"--layer {number} --kv-head {options.kv_head}: there are layers "
                         f"{', '.join(map(str, numbers))} and kv heads 0 .. {data['kv_heads'] - 1}")
    layer = numbers.index(number)
    check_counts(data)
    pictures = {"reads": draw_reads(data, layer, options.kv_head), "blocks": draw_blocks(data),
                "gates": draw_gates(data), "scores": draw_scores(data)}
    folder = pathlib.Path(options.folder)
    files = {**{f"{name}.svg": picture for name, picture in pictures.items()}, "index.html": page(data, pictures)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, files)
    except OSError as error:
        raise SystemExit(f"{folder}: cannot write there: {error}")
    print(f"wrote {', '.join(f'{name}.svg' for name in pictures)} and index.html to {folder}")


if __name__ == "__main__":
    sys.exit(main())
