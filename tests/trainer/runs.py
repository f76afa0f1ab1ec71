"""What the tests of whole runs share: a folder of their own, the small model, running and starting it.

Twin: none. Tests import it; it is no test.
"""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

# A model that takes a millisecond or two a step; rows are longer than its window.
SMALL = ("--dim 32 --layers 2 --heads 4 --kv-groups 2 --d-k 8 --d-v 8 --nsa-l 8 --nsa-d 4 --nsa-l-sel 16 "
         "--nsa-n-sel 3 --nsa-w 16 --seq-len 64 --batch-size 4 --lr 3e-3 --log-every 1 --threads 1").split()
PATIENCE = 300  # s, for what must come sooner or later
checks = 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background


def check(holds, *what):
    global checks
    checks += 1
    if not holds:
        sys.exit(f"FAIL: {what}")


def done():
    print(f"{checks} passed, 0 failed")


def wait_for(what, happened):
    end = time.monotonic() + PATIENCE
    while not happened():
        check(time.monotonic() < end, "waited in vain for", what)
        time.sleep(0.01)


class Runs:
    def __init__(self, program, folder, name, launcher=()):
        self.program, self.root, self.launcher = program, pathlib.Path(folder) / name, launcher
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)

    def text(self):
        path = self.root / "text"
        path.write_text("".join(f"line {i} of {i * i % 97} words\n" for i in range(3000)))
        return path

    def start(self, name, *options, environment=None, log=None, **popen):
        """The small model in root/name: its folder, and the process, with its output in root/name.log, or log.log."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("NSA_") and k != "CONFIG"}
        log = open(self.root / f"{log or name}.log", "w")
        command = [*self.launcher, self.program, *SMALL, "--out-dir", str(self.root / name), *map(str, options)]
        return self.root / name, subprocess.Popen(command, env=env | (environment or {}), stdout=log,
                                                  stderr=subprocess.STDOUT,
                                                  **{"stdin": subprocess.DEVNULL} | popen)

    def train(self, name, *options, code=0, given=None, small=True, **environment):
        """Runs it to its end: its folder, what it printed, what it complained of. Without `small` its settings are
        those of the program, or of the checkpoint that it goes on from."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("NSA_") and k != "CONFIG"}
        command = [*self.launcher, self.program, *(SMALL if small else ()), "--out-dir", str(self.root / name),
                   *map(str, options)]
        ran = subprocess.run(command, text=True, errors="replace", env=env | environment, input=given,
                             stdin=None if given else subprocess.DEVNULL, capture_output=True, timeout=PATIENCE)
        check(ran.returncode == code, ran.returncode, ran.stdout, ran.stderr)
        return self.root / name, ran.stdout, ran.stderr
