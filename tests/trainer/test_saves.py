"""Runs that are killed at random moments, run out of disk, or are given damaged checkpoints.

usage: test_saves.py PROGRAM FOLDER [KILLS]. After each kill --resume must go on, and what has been run to
its end must have the same losses, gradient norms and weights, to the bit, as a run that nobody killed.
Twins: saver.c, checkpoint.c, train_save.c.
"""
import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import time

from runs import PATIENCE, SMALL, Runs, check, done, wait_for

kills = int(sys.argv[3]) if len(sys.argv) > 3 else 10
runs = Runs(sys.argv[1], sys.argv[2], f"saves{kills}")
corpus = runs.text()
STEPS = 40
OPTIONS = ("--data", corpus, "--steps", STEPS, "--save-every", 1, "--keep-checkpoints", 2, "--eval-every", 20)


def outcome(out):
    """What must not depend on how often a run was killed."""
    with open(out / "training.csv", newline="") as file:
        table = [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in csv.DictReader(file)]
    last = out / "checkpoints/latest"
    files = [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
    return table, (out / "val.csv").read_text(), (out / "k_stats.csv").read_text(), files


def same(got, want, what):
    for part, (a, b) in enumerate(zip(got, want)):
        check(a == b, what, f"part {part} differs", a if part < 3 else len(a), b if part < 3 else len(b))


# ---- Kills ----

def test_kills():
    out, log, _ = runs.train("whole", *OPTIONS)
    want = outcome(out)
    check(len(want[0]) == STEPS, want[0])
    begin = time.monotonic()
    runs.train("timed", *OPTIONS)
    whole, seed = time.monotonic() - begin, random.randrange(1 << 32)
    chance = random.Random(seed)
    print(f"{kills} kills, seed {seed}; a run takes {whole:.2f} s")
    name, killed, starts, finished = "killed0", 0, 0, 0
    (runs.root / name).mkdir()
    while killed < kills:
        out, run = runs.start(name, *OPTIONS, "--resume")
        starts += 1
        try:
            code = run.wait(chance.random() * whole)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            code = run.wait(PATIENCE)
        if code == -signal.SIGKILL:
            killed += 1
            continue
        check(code == 0, f"seed {seed}, start {starts}: exit code {code}", (runs.root / f"{name}.log").read_text())
        finished += 1
        same(outcome(out), want, f"seed {seed}, run {name}")
        shutil.rmtree(out)
        name = f"killed{finished}"
        (runs.root / name).mkdir()
    out, _, _ = runs.train(name, *OPTIONS, "--resume")
    same(outcome(out), want, f"seed {seed}, run {name}")
    print(f"{killed} kills in {starts} starts, {finished + 1} runs to their end")


# ---- A full disk ----

FULL = r"""
mount -t tmpfs -o size=16m none "$OUT" || exit 77
cp -a "$START" "$OUT/run" || exit 99
head -c "$(($(df -k --output=avail "$OUT" | tail -n 1) - 200))k" /dev/zero >"$OUT/filler" || exit 99
"$@" --out-dir "$OUT/run" --keep-checkpoints 0
echo "code $?"
cp -a "$OUT/run" "$KEPT/full"
rm "$OUT/filler"
"$@" --out-dir "$OUT/run"
echo "code $?"
cp -a "$OUT/run" "$KEPT/whole"
"""


def test_full_disk():
    """A file system of its own fills up while checkpoints are written; then it is emptied. It has room for what a
    killed run left, however many checkpoints that are, and for a part of one more."""
    code = 0
    while code == 0:  # it may end before the kill comes
        shutil.rmtree(runs.root / "start", ignore_errors=True)
        start, run = runs.start("start", *OPTIONS)
        wait_for("a checkpoint", lambda: (start / "checkpoints/latest/state.json").exists())
        run.send_signal(signal.SIGKILL)
        code = run.wait(PATIENCE)
    check(code == -signal.SIGKILL, code)
    if not shutil.which("unshare"):
        print("no unshare here; test_train's limit on the size of a file stands alone")
        return
    place, kept = runs.root / "mount", runs.root / "kept"
    place.mkdir()
    kept.mkdir()
    ran = subprocess.run(["unshare", "--mount", "--map-root-user", "sh", "-c", FULL, "sh", runs.program, *SMALL,
                          *map(str, OPTIONS), "--resume"], text=True, timeout=PATIENCE, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT,
                         env=os.environ | {"OUT": str(place), "KEPT": str(kept), "START": str(start)})
    if "code" not in ran.stdout and ran.returncode in (1, 77):
        print("nothing can be mounted here; test_train's limit on the size of a file stands alone")
        return
    check([line for line in ran.stdout.splitlines() if line.startswith("code ")] == ["code 1", "code 0"], ran.stdout)
    check("No space left on device" in ran.stdout, ran.stdout)
    left = [k.name for k in (kept / "full/checkpoints").glob("step_*")]
    check(left, "no checkpoint is left")
    same(outcome(kept / "whole"), outcome(runs.root / "whole"), "the run on a full disk")


# ---- Damage ----

def damage(name, change, *words, code=2):
    out = runs.root / name
    shutil.copytree(runs.root / "whole", out, symlinks=True)
    change(out / "checkpoints/latest")
    _, _, said = runs.train(name, *OPTIONS, "--steps", STEPS + 1, "--resume", code=code)
    for word in words:
        check(word in said, word, said)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage():
    weights, moments = "model.safetensors", "optimizer.safetensors"
    damage("bit", lambda k: flip(k / moments, -5), moments, "damaged: its checksum is")
    damage("header", lambda k: flip(k / weights, 30), weights, "damaged: its checksum is")
    damage("short", lambda k: os.truncate(k / weights, 1000), weights, "damaged: 1000 bytes")
    damage("gone", lambda k: (k / moments).unlink(), moments, "cannot open")
    damage("state", lambda k: flip(k / "state.json", 100), "state.json")
    damage("empty", lambda k: (k / "state.json").write_text(""), "state.json", "not JSON")
    damage("foreign", lambda k: (k / "state.json").write_text('{"step": 7}'), "state.json",
           "not the state of a checkpoint")
    out, _, _ = runs.train("other", "--data", corpus, "--steps", 1, "--dim", 48)
    _, _, said = runs.train("new", "--data", corpus, "--resume", out, code=2)
    check("model.dim" in said and "48" in said, said)
    _, _, said = runs.train("new", "--data", corpus, "--resume", runs.root / "nowhere", code=2)
    check("nowhere" in said and "no checkpoint" in said, said)
    check(not (runs.root / "new").exists(), "a refused run leaves no folder")


test_kills()
if len(sys.argv) <= 3:
    test_full_disk()
    test_damage()
done()
