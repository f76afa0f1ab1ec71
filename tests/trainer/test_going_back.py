"""No row of a run's tables is lost: not where a run that goes back to an earlier checkpoint is killed at any call
that changes a file, nor where a disk was full once, nor where it has no links (FAT, drives of a cloud).

usage: test_going_back.py PROGRAM FOLDER DISK_FAULT EVERY: of the calls at which it could be killed, every so many-th
is tried. Twins: disk_fault.c, train_open.c, telemetry/csv.c. Kills of an ordinary resume are test_saves.py's.
"""
import json
import shutil
import sys

from runs import Runs, check, done

fault, every = sys.argv[3], int(sys.argv[4])
runs = Runs(sys.argv[1], sys.argv[2], f"going_back_{every}")
STEPS = 9
SAVES = ["--data", runs.text(), "--save-every", 3, "--keep-checkpoints", 0, "--eval-every", 3]
TABLES = {"training.csv": list(range(1, STEPS + 1)), "k_stats.csv": list(range(1, STEPS + 1)),
          "fallback_counters.csv": list(range(1, STEPS + 1)), "val.csv": list(range(3, STEPS + 1, 3))}


def steps_of(out, table):
    return [int(line.split(",")[0]) for line in (out / table).read_text().splitlines()[1:]]


def check_tables(out, *what):
    for table, steps in TABLES.items():
        check(steps_of(out, table) == steps, *what, table, steps_of(out, table))


def copy(name):
    shutil.rmtree(runs.root / name, ignore_errors=True)
    shutil.copytree(whole, runs.root / name, symlinks=True)
    return runs.root / name


whole, _, _ = runs.train("whole", *SAVES, "--steps", STEPS)
check_tables(whole, "a run that nothing happens to")

# Going back, killed at one place after another; then the run is started once more, as whoever runs it would.
killed, at = 0, 1
while True:
    out = copy("back")
    _, process = runs.start("back", "--resume", out / "checkpoints" / "step_00000003", "--steps", STEPS,
                            environment={"LD_PRELOAD": fault, "KILL_AT": str(at)})
    if process.wait() == 0:
        break
    check(process.returncode == -9, at, process.returncode)
    runs.train("back", "--resume", "--steps", STEPS)
    check_tables(out, "killed at call", at)
    killed += 1
    at += every
check_tables(out, "not killed")
check(killed * every >= 60, killed, "places are fewer than a run has")

# A disk that is full for one write, of each table: the run fails, and its row is there, at once or after the resume,
# and so is the evaluation that was due after the step (the third).
for table, steps in TABLES.items():
    for at in (1, 2, 3):
        out = runs.root / "full"
        shutil.rmtree(out, ignore_errors=True)
        _, said, complaint = runs.train("full", *SAVES, "--steps", STEPS, code=1, LD_PRELOAD=fault, FULL_NAME=table,
                                        FULL_AT=str(at))
        check(table in complaint and "No space left" in complaint, complaint)
        runs.train("full", "--resume", "--steps", STEPS)
        check_tables(out, "full at write", at, "of", table)

# Of heartbeats as well: the step's rows are there, and no part of a line stands before another.
for at in (1, 2, 4):
    shutil.rmtree(out, ignore_errors=True)
    runs.train("full", *SAVES, "--steps", STEPS, code=2 if at == 1 else 1, LD_PRELOAD=fault, FULL_NAME="rank0.jsonl",
               FULL_AT=str(at), NSA_HEARTBEAT_EVERY="1")
    runs.train("full", *SAVES, "--steps", STEPS, *(["--resume"] if at > 1 else []))
    check_tables(out, "full at heartbeat", at)
    for line in (out / "heartbeat_rank0.jsonl").read_text().splitlines():
        json.loads(line)

# Without links `latest` and `best` are files that say the name, and count as links do.
no_links = {"LD_PRELOAD": fault, "NO_LINKS": "1"}
out, _, _ = runs.train("no_links", *SAVES, "--steps", 6, "--keep-checkpoints", 1, **no_links)
folder = out / "checkpoints"
check((folder / "latest").read_text() == "step_00000006" and not (folder / "latest").is_symlink(), "latest")
(folder / "latest").write_text("step_00000003")
(folder / "best").write_text("step_00000003")
shutil.copytree(folder / "step_00000006", folder / "step_00000003")
_, said, _ = runs.train("no_links", "--resume", "--steps", STEPS, **no_links)
check("resumed after step 6 of 9, from " in said and "step_00000003" in said, said)
_, said, _ = runs.train("no_links", "--resume", folder / "latest", "--steps", STEPS, **no_links)
check("step_00000009" in said, said)
check_tables(out, "without links")
done()
