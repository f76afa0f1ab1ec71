#!/usr/bin/env python3
"""Trains models to find needles in long rows, examines them far beyond the lengths that they were
trained at, and draws what they found.

  retrieval.py run FOLDER [--bin build/release/bin] [--threads N] [--jobs N] [--rows N]
      trains nsa, full and window on the same rows in the same order, into FOLDER, N of them at
      once, examines each, and writes bench/results/retrieval.json; goes on where a run in FOLDER
      that was interrupted has ended
  retrieval.py draw [--check]
      makes docs/retrieval.svg of that file, or with --check says whether it is what would be made

Every model has the same sizes, steps and rows, and sees them in the phases below: short rows first,
for the question is learnt there, then longer ones. window reads the last 128 tokens alone.
"""
import argparse
import collections
import concurrent.futures
import csv
import datetime
import io
import json
import os
import pathlib
import subprocess
import sys
import time

from record_runs import commit, machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "retrieval.json"
PICTURE = ROOT / "docs" / "retrieval.svg"
ATTENTIONS = ("nsa", "full", "window")
LENGTHS = (1024, 2048, 4096, 8192, 16384)

# RoPE's base keeps half of the channels almost still over 16k tokens.
MODEL = """--dataset retrieval --vocab-size 512 --dim 64 --layers 1 --heads 2 --kv-groups 1 --d-k 32
--d-v 32 --nsa-l 4 --nsa-d 4 --nsa-l-sel 8 --rope-base 1000000 --seed 1337
--lr-schedule constant --warmup-steps 50 --grad-clip 1 --log-every 25""".split()
WINDOWS = {"nsa": 8, "full": 8, "window": 128}  # full does not use its own

# `blocks` are nsa's selected blocks: how many is no weight, and may change between phases. With few
# the selection is learnt; with more, of long rows, little is lost by it.
Phase = collections.namedtuple("Phase", "length batch steps lr blocks", defaults=(5,))
PHASES = (Phase(64, 64, 250, 5e-3), Phase(256, 16, 700, 4e-3), Phase(1024, 4, 400, 2e-3),
          Phase(2048, 2, 200, 1e-3), Phase(1024, 4, 500, 2e-3), Phase(4096, 2, 100, 5e-4),
          Phase(1024, 4, 250, 5e-4), Phase(4096, 2, 100, 2e-4),
          Phase(256, 16, 500, 1e-3), Phase(4096, 2, 80, 3e-4),
          Phase(4096, 2, 150, 2e-4, blocks=16))


COUNTS = ("asked", "right", "reached", "reached_right")


def state(out):
    """The state of a model's newest checkpoint, or None."""
    path = out / "checkpoints" / "latest" / "state.json"
    return json.loads(path.read_text())["content"]["state"] if path.exists() else None


def train(binaries, folder, attention, threads):
    """All phases of one model, each going on from the one before; seconds of training. What an earlier
    call has done is not done again."""
    out, steps = folder / attention, 0
    # In this task a branch may rightly take all of the gate, which the trainers' watchdog ends a run for.
    environment = {**os.environ, "NSA_DISABLE_AUX_STATS": "1"}
    for phase in PHASES:
        steps += phase.steps
        before = state(out)
        if before and before["step"] >= steps:
            continue
        command = [str(binaries / "train_tiny"), *MODEL, "--attention", attention,
                   "--nsa-w", str(WINDOWS[attention]), "--nsa-n-sel", str(phase.blocks),
                   "--seq-len", str(phase.length), "--batch-size", str(phase.batch),
                   "--steps", str(steps), "--lr", str(phase.lr), "--threads", str(threads),
                   "--out-dir", str(out)] + (["--resume"] if before else [])
        print(f"{attention}: rows of {phase.length}, to step {steps}", flush=True)
        with open(folder / f"{attention}.log", "a") as log:
            if subprocess.run(command, stdout=log, stderr=log, env=environment).returncode:
                raise SystemExit(f"training failed; the end of {log.name} says why")
    return state(out)["seconds"]


def examine(binaries, folder, attention, rows, lengths=LENGTHS):
    """{length: [counts of each tenth of the depth]}: asked, right, the needle was among the keys of the
    question's token, right of these"""
    done = subprocess.run([str(binaries / "retrieval"), str(folder / attention), str(rows), *map(str, lengths)],
                          stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"retrieval {folder / attention}: exit code {done.returncode}")
    found = collections.defaultdict(list)
    for row in csv.DictReader(io.StringIO(done.stdout)):
        found[int(row["length"])].append([int(row[name]) for name in COUNTS])
    return found


def row_of(attention, length, tenths):
    """One row of the table: percentages, the oldest tenth first."""
    asked, right, reached, both = (sum(column) for column in zip(*tenths))
    row = {"attention": attention, "length": length, "questions": asked,
           "found_%": round(100 * right / asked, 1), "read": reached, "read_and_found": both}
    for i, (some, hits, _, _) in enumerate(tenths):
        row[f"{10 * i}-{10 * i + 10}"] = round(100 * hits / some, 1) if some else None
    return row


def one(binaries, folder, attention, options):
    """A model trained and examined: its rows of the table, and the seconds that it took."""
    trained = train(binaries, folder, attention, options.threads)
    begin = time.monotonic()
    found = examine(binaries, folder, attention, options.rows)
    rows = [row_of(attention, length, tenths) for length, tenths in sorted(found.items())]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows, {"training": round(trained),
                  "examination": round(time.monotonic() - begin)}


def run(options):
    folder, binaries = pathlib.Path(options.folder), pathlib.Path(options.bin)
    for name in ("train_tiny", "retrieval"):
        if not (binaries / name).exists():
            raise SystemExit(f"{binaries / name} is not there; build it, or name its folder with --bin")
    folder.mkdir(parents=True, exist_ok=True)
    built_of = commit()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda attention: one(binaries, folder, attention, options), ATTENTIONS))
    rows = [row for found, _ in done for row in found]
    seconds = {attention: spent for attention, (_, spent) in zip(ATTENTIONS, done)}
    report = {"machine": machine(), "date": datetime.date.today().isoformat(), "commit": built_of,
              "seconds": seconds, "phases": [phase._asdict() for phase in PHASES],
              "options": MODEL, "rows_each": options.rows, "rows": rows}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {RESULTS.relative_to(ROOT)}")


# ---- The picture ----

CELL, HIGH, LEFT, TOP, GAP = 44, 26, 60, 80, 40


def colour(percent):
    """White at 0 to a dark blue at 100."""
    share = percent / 100
    return "#%02x%02x%02x" % tuple(round(255 + share * (end - 255)) for end in (20, 70, 150))


def panel(rows, title, top):
    """One attention's lengths downwards, tenths of the depth across."""
    tenths = [f"{10 * i}-{10 * i + 10}" for i in range(10)]
    lines = [f'<text x="{LEFT}" y="{top - 22}" font-weight="bold">{title}</text>']
    for i, name in enumerate(tenths):
        lines.append(f'<text x="{LEFT + CELL * i + CELL / 2}" y="{top - 6}" '
                     f'text-anchor="middle">{name}</text>')
    for j, row in enumerate(rows):
        y = top + HIGH * j
        lines.append(f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{row["length"]}</text>')
        for i, name in enumerate(tenths):
            value = row[name]
            shown = "" if value is None else f"{value:.0f}"
            lines.append(f'<rect x="{LEFT + CELL * i}" y="{y}" width="{CELL - 1}" height="{HIGH - 1}" '
                         f'fill="{colour(value or 0)}"/>'
                         f'<text x="{LEFT + CELL * i + CELL / 2}" y="{y + 17}" text-anchor="middle" '
                         f'class="{"on_dark" if (value or 0) > 55 else "on_light"}">{shown}</text>')
    return lines


STYLE = """<style>
.ground { fill: #ffffff } text { fill: #1f2328 } text.on_dark { fill: #ffffff } text.on_light { fill: #000000 }
@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } text { fill: #e6edf3 } }
</style>"""


def picture():
    """The text of the picture."""
    report = json.loads(RESULTS.read_text())
    titles = {"nsa": "NSA", "full": "dense attention", "window": "the last 128 tokens alone"}
    lines, top = [], TOP
    for attention in ATTENTIONS:
        rows = [row for row in report["rows"] if row["attention"] == attention]
        if rows:
            lines += panel(rows, titles[attention], top)
            top += HIGH * len(rows) + GAP + 22
    width, height = LEFT + 10 * CELL + 20, top - 22
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        STYLE, f'<rect class="ground" width="{width}" height="{height}"/>',
        '<text x="8" y="18" font-size="13">Needles found, % of the questions</text>',
        '<text x="8" y="36">downwards: tokens of a row; across: depth of the needle, 0 the oldest</text>',
        *lines, "</svg>", ""])


def draw(check):
    if not check:
        PICTURE.write_text(picture())
        print(f"wrote {PICTURE.relative_to(ROOT)}")
    elif PICTURE.read_text() != picture():
        raise SystemExit(f"{PICTURE.relative_to(ROOT)} differs from {RESULTS.relative_to(ROOT)}; "
                         "run scripts/retrieval.py draw")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("folder")
    runner.add_argument("--bin", default="build/release/bin")
    runner.add_argument("--threads", type=int, default=0)
    runner.add_argument("--jobs", type=int, default=1)
    runner.add_argument("--rows", type=int, default=20)
    commands.add_parser("draw").add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        draw(options.check)


if __name__ == "__main__":
    sys.exit(main())
