"""Two processes: a heartbeat file of each, a verdict that wants both, an anomaly that ends both.

usage: test_ranks.py PROGRAM FOLDER VERDICT LAUNCHER... Twin: telemetry.c. How processes train together is
test_mpi.c's.
"""
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time

from poison import KINDS, change
from runs import PATIENCE, SMALL, Runs, check, done, wait_for

runs = Runs(sys.argv[1], sys.argv[2], "ranks", sys.argv[4:])
corpus = runs.text()
out, _, _ = runs.train("both", "--data", corpus, "--steps", 4, "--eval-every", 2, "--save-every", 2,
                       NSA_HEARTBEAT_EVERY="1")
for rank in range(2):
    beats = [json.loads(line) for line in (out / f"heartbeat_rank{rank}.jsonl").read_text().splitlines()]
    check({b["rank"] for b in beats} == {rank} and beats[0]["msg"] == "boot", beats)
    check([b["step"] for b in beats if b["msg"] == "step_end"] == [1, 2, 3, 4], beats)
check(len(list((out / "tb").iterdir())) == 1 and not list(out.glob("stack*")), "one file for all ranks")
check(json.loads((out / "env.json").read_text())["world"] == 2, "two processes")


def verdict():
    return subprocess.run([sys.argv[3], str(out)], text=True, stdout=subprocess.PIPE).stdout


check(verdict().endswith("\nGO\n"), verdict())
(out / "heartbeat_rank1.jsonl").unlink()
check("heartbeat_rank1.jsonl        is missing\nNO-GO\n" in verdict(), verdict())


def end(kind, values):
    out, _, _ = runs.train(kind, "--data", corpus, "--steps", 1)
    change(out / "checkpoints/step_00000001", values)
    ran = subprocess.run([*runs.launcher, runs.program, "--data", corpus, "--steps", "90", "--out-dir", out,
                          "--resume", *SMALL], text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    check(ran.returncode != 0 and f"halted: {kind}" in ran.stdout, kind, ran.returncode, ran.stdout)
    check((out / ".anomaly_type").read_text() == kind + "\n" and (out / ".HALT").exists(), kind)
    metrics = json.loads((out / "metrics.json").read_text())
    check(metrics["exit_code"] != 0 and metrics["steps_done"] < 9, metrics)


with concurrent.futures.ThreadPoolExecutor() as beside:  # most of the time passes in waiting
    for ended in [beside.submit(end, kind, values) for kind, (values, _) in KINDS.items()]:
        ended.result()

# A .HALT ends all of them after the same step, saved.
out, run = runs.start("outside", "--data", corpus, "--steps", 1000000)
wait_for("steps", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 3)
(out / ".HALT").write_text("somebody wants it to end\n")
code = run.wait(PATIENCE)
metrics = json.loads((out / "metrics.json").read_text())
check(code != 0 and metrics["verdict"] == "stopped by SIGTERM", code, metrics)
saved = json.loads((out / "checkpoints/latest/state.json").read_text())["content"]["state"]["step"]
check(saved == metrics["steps_done"], saved, metrics)

# Two folders under one name: what differs there is found before the first step, and told by the process that has it.
spelled = [chr(b) for b in range(33, 127)] + [chr(b) for b in range(161, 256) if b != 173] + [chr(256 + n) for n in range(68)]
for rank in range(2):
    (runs.root / str(rank)).mkdir()
    (runs.root / str(rank) / "text").write_text("".join(f"line {i * (rank + 1) % 7} of words\n" for i in range(3000)))
    for name in ("alone", "other")[rank:]:  # rank 1 has no "alone"
        (runs.root / str(rank) / name).mkdir()
        vocab = {word: i for i, word in enumerate([*spelled, *["th"] * rank, "<|endoftext|>"])}
        (runs.root / str(rank) / name / "vocab.json").write_text(json.dumps(vocab))
        (runs.root / str(rank) / name / "merges.txt").write_text("")
apart = ["sh", "-c", 'cd "$0/${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" && exec "$@"', str(runs.root)]


def differ(name, *options, code=2, words=()):
    """Each in its own folder; exit code 2, for to start again would find the same."""
    ran = subprocess.run([*runs.launcher, *apart, runs.program, *SMALL, "--out-dir", name, *map(str, options)], text=True,
                         stdin=subprocess.DEVNULL, timeout=PATIENCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    check(ran.returncode == code and all(word in ran.stdout for word in words), name, ran)


differ(runs.root / "apart", "--data", "text", "--steps", 3, words=("contents differ", "data.path = text"))
check((runs.root / "apart/training.csv").read_text().count("\n") == 1, "a step was done")
for name, words in (("alone", ("rank 1: alone: must be a folder that has tokenizer.json",)),
                    ("other", ("data.tokenizer_path = other", "vocabularies differ"))):
    differ(runs.root / name, "--data", corpus, "--steps", 3, "--tokenizer", "gpt2", "--tokenizer-path", name, words=words)
differ("own", "--data", corpus, "--steps", 3, code=0)
differ("own", "--data", corpus, "--steps", 6, "--resume", words=("train.out_dir = own", "must be one folder for all"))


def begin(name, *options):
    """A run of steps without end; and the processes of its ranks."""
    out, run = runs.start(name, "--data", corpus, "--steps", 1000000, *options)
    wait_for("steps", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 3)
    return out, run, [json.loads((out / f"heartbeat_rank{rank}.jsonl").read_text().splitlines()[0])["pid"]
                      for rank in range(2)]


LATE = 15  # s that one may keep another waiting; no process of a busy machine, whose disk is slow, stands still for so long


def test_asleep():
    """All of them stand still for longer than that: nobody has waited."""
    out, run, pids = begin("asleep", "--ddp-timeout", LATE)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(LATE + 2)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    rows = (out / "training.csv").read_text().count("\n")
    wait_for("more steps", lambda: (out / "training.csv").read_text().count("\n") > rows + 20)
    for pid in pids:  # told to end it would save, which a slow disk may take longer for than the other one waits
        os.kill(pid, signal.SIGKILL)
    run.wait(PATIENCE)


def test_lost(rank, number):
    """A rank that is gone: metrics.json names it, by a survivor where it is rank 0."""
    out, run, pids = begin(f"lost{rank}_{number}", "--ddp-timeout", LATE)
    os.kill(pids[rank], number)
    wait_for("metrics.json", lambda: (out / "metrics.json").exists())
    metrics = json.loads((out / "metrics.json").read_text())
    check(f"rank {rank}" in metrics["verdict"] and metrics["exit_code"] != 0, rank, number, metrics)
    run.wait(PATIENCE)
    if number == signal.SIGSTOP:
        try:
            os.kill(pids[rank], signal.SIGKILL)
        except ProcessLookupError:
            pass


with concurrent.futures.ThreadPoolExecutor() as beside:
    lost = [beside.submit(test_lost, rank, number)
            for rank, number in ((1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGSTOP))]
    for ended in [beside.submit(test_asleep), *lost]:
        ended.result()
done()
