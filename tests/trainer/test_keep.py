"""The script that starts a trainer again until it is done: what it repeats, and what it must not.

usage: test_keep.py SCRIPT PROGRAM FOLDER. Twin: scripts/keep_training.
"""
import os
import signal
import subprocess
import sys

from runs import PATIENCE, SMALL, Runs, check, done, wait_for

script = sys.argv[1]
runs = Runs(sys.argv[2], sys.argv[3], "keep")
count = runs.root / "count"


def fake(*codes):
    """A trainer that ends with these exit codes, one after the other; how often it was started, and the last code."""
    count.write_text("")
    fake_trainer = runs.root / "fake"
    fake_trainer.write_text(f"""#!/bin/sh
[ "$2" = --resume ] || exit 99
echo x >> {count}
set -- {' '.join(map(str, codes))}
shift $(($(wc -l < {count}) - 1))
[ "$1" -lt 200 ] || kill -$(($1 - 200)) $$
exit $1
""")
    fake_trainer.chmod(0o755)
    ran = subprocess.run([script, "--wait=0", str(fake_trainer), "--option"], timeout=PATIENCE, stderr=subprocess.DEVNULL)
    return count.read_text().count("x"), ran.returncode


for code in (0, 2, 3, 129, 130, 143):
    check(fake(code, 77) == (1, code), code, fake(code, 77))
check(fake(1, 1, 0) == (3, 0), "a failure is repeated")
check(fake(209, 211, 0) == (3, 0), "so is a kill, and a crash")
for name, code in (("nowhere", 127), ("count", 126)):
    run = subprocess.run([script, "--wait=60", str(runs.root / name)], timeout=PATIENCE, stderr=subprocess.PIPE, text=True)
    check(run.returncode == code and name in run.stderr, "no program is not waited for", run)
check(subprocess.run([script], stderr=subprocess.DEVNULL).returncode == 2, "no trainer")

# Told to end: the trainer saves, and both end.
for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 143)):
    out = runs.root / f"told{number}"
    out.mkdir()
    command = [script, runs.program, *SMALL, "--out-dir", str(out), "--data", str(runs.text()), "--steps", "1000000"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 2)
    run.send_signal(number)
    check(run.wait(PATIENCE) == code, number, run.returncode)
    check((out / "checkpoints/latest/state.json").exists(), "saved")

# While it waits for the next start.
(runs.root / "fails").write_text("#!/bin/sh\nexit 1\n")
os.chmod(runs.root / "fails", 0o755)
run = subprocess.Popen([script, "--wait", "86400", str(runs.root / "fails")], stderr=subprocess.PIPE, text=True)
said = run.stderr.readline()
check("exit code 1; again in 86400 s" in said, said)
run.send_signal(signal.SIGTERM)
check(run.wait(PATIENCE) == 143, run.returncode)
done()
