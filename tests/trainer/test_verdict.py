"""GO and NO-GO: a sound run is let through, and each criterion alone stops it, at its limit.

usage: test_verdict.py PROGRAM FOLDER VERDICT. Twin: examples/nsa_verdict.
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree

from runs import PATIENCE, Runs, check, done, wait_for

runs = Runs(sys.argv[1], sys.argv[2], "verdict")
program = sys.argv[3]
GB = 1e9 / 2**20  # in MiB


def verdict(out, code):
    """What nsa_verdict says: {criterion: (holds, figure)}, and the artefacts."""
    ran = subprocess.run([program, str(out)], text=True, capture_output=True, timeout=PATIENCE)
    check(ran.returncode == code, out, ran.returncode, ran.stdout, ran.stderr)
    *lines, last = ran.stdout.splitlines()
    check(last == ("GO" if code == 0 else "NO-GO"), ran.stdout)
    said, artefacts = {}, {}
    for line in lines:
        criterion, holds, figure = line.split(None, 2)
        check(holds in ("ok", "NO"), line)
        if criterion == "artefact":
            artefacts[figure.split()[0]] = (holds == "ok", figure.split(None, 1)[1])
        else:
            said[criterion] = (holds == "ok", figure)
    check(list(said) == ["exit", "steps", "rows", "loss", "validation", "data", "memory", "throughput", "pct_at_max",
                         "gates", "fallbacks", "checkpoint"], said)
    check((code == 0) == all(holds for holds, _ in [*said.values(), *artefacts.values()]), ran.stdout)
    return said, artefacts


def changed(name, change):
    out = runs.root / name
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(sound, out, symlinks=True)
    change(out)
    return out


def with_metrics(**fields):
    def change(out):
        metrics = json.loads((out / "metrics.json").read_text())
        (out / "metrics.json").write_text(json.dumps(metrics | fields))
    return change


def only(out, criterion, *words):
    """NO-GO for this reason and no other."""
    said, artefacts = verdict(out, 1)
    reasons = {c: f for c, (holds, f) in [*said.items(), *artefacts.items()] if not holds}
    check(list(reasons) == ([criterion] if isinstance(criterion, str) else list(criterion)), reasons)
    criterion = list(reasons)[0]
    for word in words:
        check(word in reasons[criterion], reasons)


corpus = runs.text()
sound, _, _ = runs.train("sound", "--data", corpus, "--steps", 8, "--eval-every", 4)

said, artefacts = verdict(sound, 0)
check(said["fallbacks"][1] == "0 (below 10)", said)
check(len(artefacts) == 17, artefacts)
for name, (_, size) in artefacts.items():
    path = sound / name
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    check(size == f"{sum(f.stat().st_size for f in files)} bytes", name, size)
    print(f"{name:45} {size}")

# Each figure on both sides of its limit.
for criterion, key, good, bad in (
        ("memory", "peak_memory_mib", 39.999 * GB, 40.001 * GB), ("throughput", "toks_per_s_p50", 50.1, 50.0),
        ("pct_at_max", "sel_pct_at_max", 0.2999, 0.3), ("fallbacks", "total_fallbacks", 9, 10)):
    verdict(changed("good", with_metrics(**{key: good})), 0)
    only(changed("bad", with_metrics(**{key: bad})), criterion)
    only(changed("none", with_metrics(**{key: None})), criterion)

# How it ended.
only(changed("collapsed", with_metrics(gate_layers_collapsed=1)), "gates", "of 1 layers collapsed, of 0 shut")
only(changed("shut", with_metrics(gate_layers_shut=2)), "gates", "of 2 shut")
only(changed("code", with_metrics(exit_code=1)), "exit", "exit code 1")
only(changed("failed", with_metrics(verdict="failed: why")), "exit", "failed: why")
only(changed("halted", lambda out: (out / ".HALT").write_text("nan\n")), "exit", ".HALT")
only(changed("fewer", with_metrics(steps_done=7)), ("steps", "rows", "checkpoint"), "7 of 8")
only(changed("more", with_metrics(steps=9)), "steps", "8 of 9")


# Slower paths, as real runs meet them: a product of 16 bits without units, a reader without its library.
out, _, _ = runs.train("as_f32", "--data", corpus, "--steps", 8, "--precision", "bf16", "--eval-every", 4,
                       ONEDNN_MAX_CPU_ISA="AVX2")
rows = (out / "fallback_counters.csv").read_text().splitlines()
count = int(rows[-1].split(",")[-1])
each = count - int(rows[-2].split(",")[-1])
check(each >= 10 and rows[0].split(",")[7] == "half_product_fails" and rows[-1].split(",")[7] == str(count), rows)
only(out, "fallbacks", f"{count} (below 10), half_product_fails {count}")
unread = runs.root / "unread.txt.gz"
unread.write_bytes(b"\x1f\x8b\x08 whatever")
for steps in (8, 12):
    out, _, _ = runs.train(f"unread{steps}", "--data", unread, "--steps", steps, "--synthetic-on-fail",
                           "--eval-every", 4)
    said, _ = verdict(out, 1)  # for its data, too
    check(said["fallbacks"] == (steps < 10, f"{steps} (below 10), data_source_fails {steps}"), said)


# What it learnt, and from what.
def rows_changed(change):
    def write(out):
        head, *rows = (out / "training.csv").read_text().splitlines()
        (out / "training.csv").write_text("\n".join([head, *change(rows)]) + "\n")
    return write


def with_losses(losses):
    return rows_changed(lambda rows: [f"{i + 1},{loss},1e-3,5000,1" for i, loss in enumerate(losses)])


def in_history(*lines):
    def write(out):
        first = json.loads((out / "history.jsonl").read_text())
        (out / "history.jsonl").write_text("".join(json.dumps(first | line) + "\n" for line in lines))
    return write


only(changed("hole", rows_changed(lambda rows: rows[:3] + rows[5:])), "rows", "has step 6 where 4 is due")
only(changed("cut", rows_changed(lambda rows: rows[:5])), "rows", "steps 1 to 5")
only(changed("twice", rows_changed(lambda rows: rows[:3] + rows[2:])), "rows", "has step 3 where 4 is due")
only(changed("rises", with_losses([5.58, 6, 7, 8, 9, 10, 100, 132.9])), "loss", "5.5800 at first, 132.9000 at last")
only(changed("idle", with_losses([5.55] * 8)), "loss")
verdict(changed("learns", with_losses([5.5, 5.5, 5.4, 5.3, 5.2, 5.2, 5.1, 5.0])), 0)
only(changed("wrong", lambda out: (out / "val.csv").write_text("step,val_loss,ppl\n8,7.5,1800\n")), "validation",
     "7.5000 at last")
only(changed("unseen", lambda out: (out / "val.csv").write_text("step,val_loss,ppl\n")), "validation", "no evaluation")
only(changed("madeup", with_metrics(synthetic_from=64)), "data", "made up from sample 64 on")
only(changed("short", in_history({"config": {"train.steps": 100000}}, {"config": {"train.steps": 8}})), "steps",
     "started for 100000")
verdict(changed("longer", in_history({"config": {"train.steps": 4}}, {"config": {"train.steps": 8}})), 0)
only(changed("weights", lambda out: os.truncate(out / "checkpoints/latest/model.safetensors", 10)), "checkpoint",
     "model.safetensors: damaged: 10 bytes")


def without_links(out):
    """As on a file system that has none."""
    for link in ("latest", "best"):
        name = os.readlink(out / "checkpoints" / link)
        (out / "checkpoints" / link).unlink()
        (out / "checkpoints" / link).write_text(name)


check(verdict(changed("without_links", without_links), 0)[1] == artefacts, "latest as a file")


def with_line(name, line, text):
    """That line of the file replaced; behind the last, added."""
    def write(out):
        lines = (out / name).read_text().splitlines()
        (out / name).write_text("\n".join([*lines[:line - 1], text, *lines[line:]]) + "\n")
    return write


# What cannot be read is not passed over: the last evaluation may be in it.
for name, criterion, line, text in (("training.csv", "rows", 3, "xx"), ("training.csv", "rows", 10, "9,3.0"),
                                    ("val.csv", "validation", 3, "8,low,2"), ("val.csv", "validation", 4, "9" * 3000),
                                    ("fallback_counters.csv", "fallbacks", 9, "8")):
    only(changed("unread", with_line(name, line, text)), criterion, f"{name}: line {line} is no row of numbers")
for name in ("env.json", "mem_boot.json"):
    for text in ("{", "[]"):
        said, artefacts = verdict(changed("unread", lambda out: (out / name).write_text(text)), 1)
        check(artefacts[name] == (False, "is no JSON object"), artefacts)
endless = changed("endless", with_line("fallback_counters.csv", 9, ",".join(["8", *["inf"] * 10])))
runs.train("endless", "--data", corpus, "--steps", 9, "--resume")  # an infinity is many, and no negative number
check(json.loads((endless / "metrics.json").read_text())["total_fallbacks"] >= 1e15, "an infinity of fallbacks")
only(changed("unread", with_line("val.csv", 3, "1e999,4.8,120")), "validation", "line 3 is no row")
only(changed("unread", with_line("history.jsonl", 1, "{")), "steps", "history.jsonl that cannot be read: 1 of 1")
said, _ = verdict(changed("half", with_line("history.jsonl", 2, '{"iso": "2026-')), 0)  # a start on a full disk
check("history.jsonl that cannot be read: 1 of 2" in said["steps"][1], said)
out, _, _ = runs.train("noeval", "--data", corpus, "--steps", 8, "--eval-every", 0)
check("evaluation was switched off" in verdict(out, 0)[0]["validation"][1], "no evaluation is said")
out, _, _ = runs.train("lazy", "--data", corpus, "--steps", 8, "--lr", "1e-30", "--eval-every", 4)
check(not verdict(out, 1)[0]["loss"][0], "a rate of next to nothing")
out, _, _ = runs.train("random", "--dataset", "synthetic", "--steps", 8, "--eval-every", 4)
said, _ = verdict(out, 0)
check("uniformly random" in said["data"][1] and "not judged: random tokens" in said["loss"][1], said)
noise = runs.root / "noise"
noise.write_bytes(random.Random(1).randbytes(60000))
out, _, _ = runs.train("noise_run", "--dataset", "text", "--data", noise, "--steps", 60, "--lr", "3e-4",
                       "--eval-every", 30)
check(not verdict(out, 1)[0]["loss"][0], "random bytes")
first, _, _ = runs.train("earlier", "--data", corpus, "--steps", 6)
out, _, _ = runs.train("goes_on", "--steps", 14, "--resume", first / "checkpoints/step_00000006")
check("steps 7 to 14, each once" in verdict(out, 0)[0]["rows"][1], "a run that goes on from another folder")
for name, text in (("killed", None), ("garbage", "{"), ("list", "[]")):
    out = changed(name, lambda out: (out / "metrics.json").unlink() if text is None else
                  (out / "metrics.json").write_text(text))
    check(not verdict(out, 1)[0]["exit"][0], name)
out, run = runs.start("stopped", "--data", corpus, "--steps", 500000)
wait_for("20 steps", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 20)
run.send_signal(signal.SIGTERM)
run.wait(PATIENCE)
said, _ = verdict(out, 1)
check(not said["exit"][0] and not said["steps"][0] and "of 500000" in said["steps"][1], said)
check(said["rows"][0] and said["checkpoint"][0], said)

# What must be there.
for name in artefacts:
    if name == "metrics.json":
        continue
    def remove(out):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    said, rest = verdict(changed("missing", remove), 1)
    check(rest[name] == (False, "is missing"), name, rest)
only(changed("empty", lambda out: (out / "mem_boot.json").write_text("")), "mem_boot.json", "0 bytes")


def with_world(out):
    env = json.loads((out / "env.json").read_text())
    (out / "env.json").write_text(json.dumps(env | {"world": 2**63 - 1}))


only(changed("worlds", with_world), "env.json", "must be at most 65536")  # and no line for each
off = {"NSA_TB_DISABLE": "1", "NSA_DISABLE_CSV_LOGS": "1", "NSA_HEARTBEAT_EVERY": "0"}
out, _, _ = runs.train("off", "--data", corpus, "--steps", 8, **off)
_, artefacts = verdict(out, 0)
check(sum(f == "switched off" for _, f in artefacts.values()) == 7, artefacts)
out, _, _ = runs.train("blind", "--data", corpus, "--steps", 8, NSA_DISABLE_AUX_STATS="1")
only(out, "pct_at_max", "not known", "switched off")
for attention in ("full", "window"):
    out, _, _ = runs.train(attention, "--data", corpus, "--steps", 8, "--attention", attention)
    check("selects nothing" in verdict(out, 0)[0]["pct_at_max"][1], attention)

# What is no run at all.
(runs.root / "nothing").mkdir()
verdict(runs.root / "nothing", 1)
for words in ([str(runs.root / "nowhere")], [], ["--frobnicate"], ["a", "b"], [str(corpus)]):
    check(subprocess.run([program, *words], stderr=subprocess.DEVNULL).returncode == 2, words)

with open("/dev/full", "w") as full:  # a verdict that nobody has read is none
    ran = subprocess.run([program, str(sound)], stdout=full, stderr=subprocess.PIPE, text=True)
    check(ran.returncode == 2 and "No space left" in ran.stderr, ran)
    ran = subprocess.run([runs.program, "--check", "--data", str(corpus), "--out-dir", str(runs.root / "new")],
                         stdout=full, stderr=subprocess.PIPE, text=True)
    check(ran.returncode == 1 and "No space left" in ran.stderr, ran)

# The picture: a line through every step, a dot for every evaluation, all of it inside.
SVG = "{http://www.w3.org/2000/svg}"
tree = xml.etree.ElementTree.parse(sound / "loss.svg").getroot()
lines = {line.get("class"): [tuple(map(float, p.split(","))) for p in line.get("points").split()]
         for line in tree.iter(SVG + "polyline")}
check(len(lines["training"]) == 8 and len(lines["validation"]) == 2, lines)
check(len([c for c in tree.iter(SVG + "circle")]) == 2, "dots")
width, height = map(float, tree.get("viewBox").split()[2:])
check(all(0 < x < width and 0 < y < height for line in lines.values() for x, y in line), lines)
check(lines["training"][0][1] < lines["training"][-1][1], "the loss falls, so the line does")
done()
