"""Runs that go on from somewhere else than where they stopped, with other settings, or on other weights.

usage: test_resume.py PROGRAM FOLDER VERDICT. Twins: train_open.c, checkpoint.c, config.c. That a resumed run has
the same bits is test_saves.py's.
"""
import fcntl
import json
import os
import shutil
import signal
import sys

from runs import PATIENCE, Runs, check, done, wait_for

runs = Runs(sys.argv[1], sys.argv[2], "resume")
corpus = runs.text()
DATA = ("--data", corpus)


def steps_of(out):
    return [int(row.split(",")[0]) for row in (out / "training.csv").read_text().splitlines()[1:]]


def state(path):
    return json.loads((path / "state.json").read_text())["content"]


def history(out):
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def kill_after_a_step(name, *options):
    """Starts the run, and kills it once it has done a step that no checkpoint holds."""
    out = runs.root / name
    old = (out / "training.csv").stat().st_ino if (out / "training.csv").exists() else None
    out, run = runs.start(name, *options)
    wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").stat().st_ino != old
             and len(steps_of(out)) > 0 and steps_of(out)[-1] > state(out / "checkpoints/latest")["state"]["step"])
    run.send_signal(signal.SIGKILL)
    run.wait(PATIENCE)
    return out


def test_going_back():
    """An earlier checkpoint, then a kill before the first save of its own: the future given up stays given up."""
    out, _, _ = runs.train("back", *DATA, "--steps", 60, "--save-every", 20, "--keep-checkpoints", 0)
    early = out / "checkpoints/step_00000020"
    kill_after_a_step("back", "--steps", 1000000, "--save-every", 900000, "--lr", "1e-4", "--resume", early)
    check(os.readlink(out / "checkpoints/latest") == "step_00000020", os.listdir(out / "checkpoints"))
    check((out / "checkpoints/step_00000060.left").is_dir(), os.listdir(out / "checkpoints"))
    _, said, _ = runs.train("back", "--steps", 70, "--resume", small=False)
    check("resumed after step 20 of 70" in said, said)
    check(steps_of(out) == list(range(1, 71)), steps_of(out))
    check(float(state(out / "checkpoints/latest")["config"]["train.lr"]) == 1e-4, "the rate of the second start")
    # What was given up can be taken up again.
    _, said, _ = runs.train("back", "--steps", 62, "--resume", out / "checkpoints/step_00000060.left")
    check("resumed after step 60 of 62" in said, said)
    check(os.readlink(out / "checkpoints/latest") == "step_00000062", "latest")
    check((out / "checkpoints/step_00000070.left").is_dir(), os.listdir(out / "checkpoints"))


def test_best():
    """`best` has the lowest loss of those that were saved where there was an evaluation, and stays; a rate that ruins
    the model does not move it."""
    def losses(out):
        return {int(line.split(",")[0]): float(line.split(",")[1])
                for line in (out / "val.csv").read_text().splitlines()[1:]}

    out, _, _ = runs.train("best", *DATA, "--steps", 12, "--lr", "0.03", "--save-every", 4, "--eval-every", 2,
                          "--keep-checkpoints", 1)
    best = out / "checkpoints/best"
    runs.train("best", "--steps", 20, "--lr", "1", "--resume", small=False)
    of = losses(out)
    lowest = min((4, 8, 12, 16, 20), key=of.get)
    check(lowest <= 12 and os.readlink(best) == f"step_{lowest:08d}", of, os.listdir(out / "checkpoints"))
    check(abs(state(best)["state"]["val_loss"] - of[lowest]) < 1e-6, state(best)["state"], of)
    check({p.name for p in (out / "checkpoints").glob("step_*")} == {os.readlink(best), "step_00000020"},
          os.listdir(out / "checkpoints"))
    _, said, _ = runs.train("best", "--steps", 14, "--resume", best, small=False)
    check(f"resumed after step {lowest} of 14" in said, said)
    check(os.readlink(out / "checkpoints/latest") == "step_00000014", os.listdir(out / "checkpoints"))


def test_while_another_runs():
    """What another run may still save is not looked for: neither what it is now, nor that it is damaged."""
    out, _, _ = runs.train("held", *DATA, "--steps", 3)
    weights = out / "checkpoints/latest/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with open(out / ".lock", "r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        _, _, said = runs.train("held", "--resume", "--steps", 4, small=False, code=2)
        check(f"another run is in this folder (process {os.getpid()})" in said and "damaged" not in said, said)
        weights.write_bytes(whole)
        _, _, said = runs.train("held", "--resume", "--steps", 4, small=False, code=2)
        check(steps_of(out) == [1, 2, 3], steps_of(out))
    runs.train("held", "--resume", "--steps", 4, small=False)
    check(steps_of(out) == [1, 2, 3, 4], steps_of(out))


def test_from_another_folder():
    """--resume ELSEWHERE --out-dir NEW, killed before its first checkpoint: NEW goes on from there all the same."""
    other, _, _ = runs.train("other", *DATA, "--steps", 10)
    before = (other / "checkpoints/step_00000010/state.json").read_bytes()
    out = kill_after_a_step("new", "--steps", 1000000, "--save-every", 900000, "--resume",
                            other / "checkpoints/step_00000010")
    _, said, _ = runs.train("new", "--steps", 12, "--resume")
    check("resumed after step 10 of 12" in said, said)
    check(steps_of(out) == [11, 12], steps_of(out))
    check((other / "checkpoints/step_00000010/state.json").read_bytes() == before, "the other folder is as it was")
    whole, _, _ = runs.train("whole", *DATA, "--steps", 12)
    check((out / "checkpoints/latest/model.safetensors").stat().st_size ==
          (whole / "checkpoints/latest/model.safetensors").stat().st_size, "weights")


def test_settings():
    """What is not said again stays; what is said changes it, and is told; every start leaves a line."""
    first = ("--lr", "7e-4", "--weight-decay", "0.1", "--batch-size", 6, "--eval-every", 3, "--eval-batches", 2)
    out, _, _ = runs.train("settings", *DATA, *first, "--steps", 4)
    alone = {"small": False}
    _, said, told = runs.train("settings", "--steps", 6, "--resume", **alone)
    settings = state(out / "checkpoints/latest")["config"]
    for key, value in (("train.lr", 7e-4), ("train.weight_decay", 0.1), ("train.batch_size", 6),
                       ("train.eval_every", 3), ("model.dim", 32), ("data.path", str(corpus))):
        check(settings[key] == value, key, settings[key])
    check("step 0006 | val_loss" in said, said)
    check("train.steps = 6 (command line --steps); in the checkpoint it is 4" in told, told)
    check("train.lr" not in told, told)
    _, _, told = runs.train("settings", "--steps", 8, "--resume", "--lr", "5e-4", **alone)
    check("train.lr = 0.0005 (command line --lr); in the checkpoint it is 0.0007" in told, told)
    lines = history(out)
    check([line["step"] for line in lines] == [0, 4, 6], lines)
    check(lines[1]["changed"] == {"train.steps": [4, 6]}, lines[1]["changed"])
    check(lines[2]["changed"] == {"train.steps": [6, 8], "train.lr": [7e-4, 5e-4]}, lines[2]["changed"])
    check(lines[2]["from"].endswith("step_00000006") and lines[2]["config"]["train.lr"] == 5e-4, lines[2])


def test_weights_alone():
    out, _, _ = runs.train("trained", *DATA, "--steps", 40)
    _, said, _ = runs.train("tuned", *DATA, "--steps", 3, "--init-from", out)
    check("weights from" in said, said)
    lines = (runs.root / "tuned/training.csv").read_text().splitlines()
    check(float(lines[1].split(",")[1]) < 4 and lines[1].startswith("1,"), lines)
    _, _, said = runs.train("tuned2", *DATA, "--steps", 3, "--init-from", out, "--dim", 48, code=2)
    check("train.init_from" in said and "model.dim" in said, said)
    check(not (runs.root / "tuned2").exists(), "a refused run leaves no folder")
    _, said, _ = runs.train("tuned", *DATA, "--steps", 5, "--init-from", out, "--resume")
    check("no effect" in said and steps_of(runs.root / "tuned") == [1, 2, 3, 4, 5], said)


def test_data():
    """Random tokens only where they are asked for; a resumed run knows its data."""
    _, _, said = runs.train("none", "--steps", 2, code=2)
    check("data.path" in said and "--dataset synthetic" in said and not (runs.root / "none").exists(), said)
    _, said, _ = runs.train("asked", "--steps", 2, "--dataset", "synthetic")
    check("uniformly random" in said, said)
    moved = runs.root / "moved"
    shutil.copy(corpus, moved)
    runs.train("gone", "--data", moved, "--steps", 2)
    for share, none in (("0.05", True), ("0.3", False)):
        _, said, _ = runs.train("gone", "--steps", 2, "--resume", "--val-fraction", share)
        check((f"data.val_fraction = {share}: has no effect" not in said) == none, said)
    moved.unlink()
    _, _, said = runs.train("gone", "--steps", 4, "--resume", code=2)
    check("moved" in said and "No such file" in said, said)
    odd = os.fsencode(runs.root) + b"/caf\xe9"
    shutil.copy(corpus, odd)
    runs.train("odd", "--data", os.fsdecode(odd), "--steps", 2)
    _, said, _ = runs.train("odd", "--steps", 4, "--resume")
    check("resumed after step 2" in said, said)
    check("caf\\xe9" in " ".join(history(runs.root / "odd")[0]["command"]), history(runs.root / "odd")[0]["command"])


def test_finished():
    """A run that has nothing left to do says so; and a text that is used hundreds of times is not said each time."""
    tiny = runs.root / "tiny"
    tiny.write_text("a tiny text, used again and again. " * 20)
    _, said, noted = runs.train("finished", "--data", tiny, "--steps", 300, "--log-every", 100)
    epochs = [int(line.split("epoch ")[1].split()[0]) for line in (said + noted).splitlines() if "epoch " in line
              and " begins" in line]
    check(epochs[:3] == [1, 2, 4] and len(epochs) < 10 and epochs[-1] > 64, epochs)
    _, said, _ = runs.train("finished", "--resume", small=False)
    check("all steps are done: none is left to train (--steps N for more)" in said and "| loss" not in said, said)
    _, said, _ = runs.train("finished", "--resume", "--steps", 301, small=False)
    check("resumed after step 300 of 301" in said and "none is left" not in said, said)


test_going_back()
test_finished()
test_best()
test_while_another_runs()
test_from_another_folder()
test_settings()
test_weights_alone()
test_data()
done()
