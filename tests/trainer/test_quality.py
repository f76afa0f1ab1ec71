"""scripts/quality with models that train in a second: every run is made once, a call that is broken off goes on,
and the report's figures are those of the runs' own files.

usage: test_quality.py SCRIPT BIN FOLDER. Twin: scripts/quality.
"""
import json
import math
import pathlib
import runpy
import statistics
import subprocess
import sys

from runs import PATIENCE, SMALL, Runs, check, done

script, programs = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
runs = Runs(programs / "train_tiny", sys.argv[3], "quality")
text, out, own = runs.text(), runs.root / "out", runs.root / "bin"
own.mkdir()  # the programs, of which a trainer without a folder says so: in the default's may be anybody's run
for path in programs.iterdir():
    (own / path.name).symlink_to(path)
(own / "train_tiny").unlink()
(own / "train_tiny").write_text(f"""#!/bin/sh
case " $* " in *" --out-dir "*) exec "{programs}/train_tiny" "$@" ;; esac
exit 9
""")
(own / "train_tiny").chmod(0o755)
SEEDS, STEPS, LENGTHS = (1337, 1338), 4, (32, 64)
KINDS, NEEDLE_KINDS = ["full", "window,cmp+slc", "full > nsa", "window 24"], ["full", "full > nsa"]
NEEDLES = ("--dim 32 --layers 1 --heads 4 --kv-groups 2 --d-k 8 --d-v 8 --nsa-l 4 --nsa-d 4 --nsa-l-sel 8 "
           "--nsa-n-sel 3 --nsa-w 8")
PRESET = {"trainer": "train_tiny",
          "text": {"kinds": [KINDS[:3], KINDS[3:]], "steps": STEPS, "options": " ".join(SMALL) + " --eval-batches 2"},
          "needles": {"kinds": [NEEDLE_KINDS], "lengths": LENGTHS, "rows": 2, "options": NEEDLES,
                      "phases": [{"length": 32, "batch": 4, "steps": 3, "lr": 0.01},
                                 {"length": 64, "batch": 2, "steps": 2, "lr": 0.01}]}}
preset = runs.root / "preset.json"
preset.write_text(json.dumps(PRESET))


def call(*arguments, code=0):
    ran = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE)
    check(ran.returncode == code, ran.returncode, ran.stdout, ran.stderr)
    return ran


def train(*options, code=0):
    return call("train", out, "--text", text, "--preset", preset, "--bin", own, "--jobs", 2, *options, code=code)


def lines():
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def test_training():
    train("--seeds", 1)
    first = lines()
    check(len(first) == len(KINDS) + len(NEEDLE_KINDS), first)
    train("--seeds", 2)
    check(lines()[:len(first)] == first and len(lines()) == 2 * len(first), lines())
    # As a call that was broken off leaves it: no line, the run's folder at half of its steps.
    lost = next(x for x in lines() if (x["attention"], x["seed"], x["part"]) == ("full > nsa", 1338, "text"))
    (out / "runs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines() if x != lost))
    log = out / "text-full-nsa-1338.log"
    before = log.read_text()
    train("--seeds", 2)
    check(lines()[-1]["bits_per_byte"] == lost["bits_per_byte"], lines()[-1], lost)
    check(f"resumed after step {STEPS} of {STEPS}" in log.read_text()[len(before):], log.read_text())
    check("attention changes in layers 0 .. 1: full -> nsa" in before and
          f"resumed after step {STEPS // 2} of {STEPS}" in before, before)
    said = train("--seeds", 2, "--gc", code=1).stderr
    check("has runs with another options" in said, said)


def test_report():
    report = json.loads(call("write", out).stdout)
    check(report["runs"] == report["runs_planned"] == 12 and report["seeds"] == list(SEEDS), report["runs"])
    rows = report["rows"]
    bits = {}
    for kind, folder in zip(KINDS, ("full", "window-cmp-slc", "full-nsa", "window-24")):
        for seed in SEEDS:
            loss = float((out / f"text-{folder}-{seed}" / "val.csv").read_text().splitlines()[-1].split(",")[1])
            bits[kind, seed] = loss / math.log(2)
    check({(r["attention"], r["seed"]): r["bits_per_byte"] for r in rows if r["part"] == "text run"} == bits, rows)
    summary = {r["attention"]: r for r in rows if r["part"] == "text"}
    check(list(summary) == KINDS, summary)
    for kind, row in summary.items():
        values, apart = [bits[kind, s] for s in SEEDS], [bits[kind, s] - bits["full", s] for s in SEEDS]
        want = {"mean": statistics.mean(values), "spread": statistics.stdev(values), "lowest": min(values),
                "highest": max(values), "from_full": statistics.mean(apart), "seeds": 2, "tokens": STEPS * 256}
        check(all(abs(row[name] - value) < 1e-12 for name, value in want.items()), row, want)
    check(summary["full"]["keys"] == 32.5 and summary["window 24"]["keys"] < summary["full"]["keys"], summary)
    check(summary["full"]["parameters"] == summary["window 24"]["parameters"] < summary["full > nsa"]["parameters"],
          summary)
    found = [r for r in rows if r["part"] == "needles"]
    check([(r["length"], r["attention"], r["questions"]) for r in found] ==
          [(length, kind, length // 4) for length in LENGTHS for kind in NEEDLE_KINDS], found)
    asked = {(x["attention"], x["seed"]): x["found"] for x in lines() if x["part"] == "needles"}
    for row in found:
        each = [asked[row["attention"], seed][str(row["length"])] for seed in SEEDS]
        check(row["mean"] == statistics.mean(100 * right / all_ for all_, right in each), row, each)


def test_presets():
    """What a trainer would say of each preset's options, GPU or not."""
    sys.path.insert(0, str(script.parent))
    presets = runpy.run_path(str(script))["PRESETS"]
    check(set(presets) == {"small", "large"}, presets)
    for name, its in presets.items():
        trainer = programs / its["trainer"].removesuffix("_cuda")
        for part, more in (("text", ("--steps", its["text"]["steps"])), ("needles", ("--vocab-size", 512))):
            for kind in sum(its[part]["kinds"], []):
                attention, _, window = kind.split(" > ")[-1].partition(" ")
                ran = subprocess.run([str(x) for x in (
                    trainer, *its[part]["options"].split(), "--attention", attention, *more,
                    *(["--nsa-w", window] if window else []), "--dataset", "synthetic", "--device", "cpu", "--out-dir",
                    runs.root / "checked", "--check")],
                                     cwd=script.parent.parent, capture_output=True, text=True, timeout=PATIENCE)
                check(ran.returncode == 0 and "parameters: " in ran.stdout, name, part, kind, ran.stderr)


test_presets()
test_training()
test_report()
done()
