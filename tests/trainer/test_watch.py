"""Runs that are halted, asked where they are, or told to end; and slow ones that are left alone.

usage: test_watch.py PROGRAM FOLDER. Twins: telemetry.c, anomaly.c, dump.c. Each anomaly's rule is
test_anomaly.c's, a stall test_telemetry.c's. Gates, gradient and loss go wrong here because the weights
in a checkpoint are changed, with the checksums that such a checkpoint would have.
"""
import concurrent.futures
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from poison import KINDS, change
from runs import PATIENCE, SMALL, Runs, check, done, wait_for

runs = Runs(sys.argv[1], sys.argv[2], "watch")


# ---- Anomalies ----


def test_anomalies(text):
    for kind, (values, steps) in KINDS.items():
        out, _, _ = runs.train(kind, "--data", text, "--steps", 1)
        change(out / "checkpoints/step_00000001", values)
        options = ("--data", text, "--steps", 9, "--resume")
        _, _, said = runs.train(kind, *options, code=3)
        check(f"halted: {kind}" in said, said)
        check((out / ".anomaly_type").read_text() == kind + "\n", kind)
        check((out / ".HALT").read_text().startswith(f"{kind}: step "), (out / ".HALT").read_text())
        metrics = json.loads((out / "metrics.json").read_text())
        check(metrics["verdict"].startswith(f"halted: {kind}") and metrics["exit_code"] == 3, metrics)
        check(metrics["steps_done"] == steps, metrics)
        if kind == "nan":
            check(os.listdir(out / "checkpoints").count("step_00000002") == 0, "what is no number is not saved")
        _, _, said = runs.train(kind, *options, code=2)
        check(f"{out}/.HALT" in said and "remove the file" in said, said)


def test_gates_by_layer(text):
    """Gates that are all shut halt a run, whatever their shares look like. One layer's are told of, once."""
    for name, values, code in (("shut", lambda name: [-30.0] if name.endswith("gate.fc2.bias") else None, 3),
                               ("layer", lambda name: [60.0, -60.0, -60.0]
                                if name == "blocks.1.attn.gate.fc2.bias" else None, 0)):
        options = ("--data", text, "--layers", 3)
        out, _, _ = runs.train(name, *options, "--steps", 1)
        change(out / "checkpoints/step_00000001", values)
        _, printed, said = runs.train(name, *options, "--steps", 9, "--resume", code=code)
        metrics = json.loads((out / "metrics.json").read_text())
        if code:
            check("halted: gate_collapse" in said and "mean of their sum" in said, said)
            check(metrics["gate_layers_shut"] == 3, metrics)
        else:
            check(printed.count("gates: 1 layers have collapsed (the first: 1), 0 are shut") == 1, printed)
            check(metrics["gate_layers_collapsed"] == 1 and metrics["gate_layers_shut"] == 0, metrics)
            beat = json.loads((out / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])
            check(beat["gate_layers_collapsed"] == 1 and beat["gate_entropy_mean"] > 0.2, beat)


# ---- Signals ----

def test_asked_where_it_is(text):
    """SIGUSR1 until one struck in the middle of a backward pass; the run goes on, and ends when told to."""
    out, run = runs.start("asked", "--data", text, "--steps", 1000000)
    stack = out / "stack_rank0.txt"
    wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 2)

    def struck():
        dumps = stack.read_text().count("----") if stack.exists() else 0
        asked = time.monotonic()
        run.send_signal(signal.SIGUSR1)
        wait_for("a dump", lambda: stack.exists() and stack.read_text().count("----") > dumps)
        latencies.append(time.monotonic() - asked)
        return any(" phase bwd " in d and "layer_backward" in d for d in stack.read_text().split("---- ")[1:])

    latencies = []
    wait_for("a dump of a backward pass", struck)
    print(f"{len(latencies)} dumps, the slowest after {max(latencies):.3f} s")
    wait_for("its heartbeat", lambda: '"watchdog_dump"' in (out / "heartbeat_rank0.jsonl").read_text())
    lines = (out / "training.csv").read_text().count("\n")
    wait_for("steps after it", lambda: (out / "training.csv").read_text().count("\n") > lines + 3)
    run.send_signal(signal.SIGTERM)
    check(run.wait(PATIENCE) == 128 + signal.SIGTERM, run.returncode)
    metrics = json.loads((out / "metrics.json").read_text())
    check(metrics["verdict"] == "stopped by SIGTERM" and metrics["exit_code"] == 143, metrics)
    saved = json.loads((out / "checkpoints/latest/state.json").read_text())["content"]["state"]["step"]
    check(saved == metrics["steps_done"] > lines, saved, metrics)


def test_asked_all_the_time(text):
    """Signals at any moment leave the run as it was. A product's kernel may keep its stack pointer in the heap
    (signals.h): handlers on that stack ended a run by the 120th dump, and no thread but one may get any."""
    out, run = runs.start("often", "--data", text, "--steps", 1000000, "--threads", 2)
    stack = out / "stack_rank0.txt"
    wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 2)
    for _ in range(400):
        size = stack.stat().st_size if stack.exists() else 0
        run.send_signal(signal.SIGUSR1)
        wait_for("a dump", lambda: run.poll() is not None or (stack.exists() and stack.stat().st_size > size))
        check(run.poll() is None, run.returncode, (runs.root / "often.log").read_text())
    if os.path.isdir(f"/proc/{run.pid}/task"):
        masks = [re.search(r"SigBlk:\s*(\w+)", (task / "status").read_text())[1]
                 for task in pathlib.Path(f"/proc/{run.pid}/task").iterdir()]
        said = (runs.root / "often.log").read_text()
        asked = sum(1 << (number - 1) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))
        check("OpenBLAS" in said or [int(mask, 16) & asked for mask in masks].count(0) == 1, masks)
    run.send_signal(signal.SIGTERM)
    check(run.wait(PATIENCE) == 128 + signal.SIGTERM, run.returncode)


def test_terminal_that_ends(text):
    """A hangup ends a run as SIGTERM does, and so do the warnings of batch systems; it passes by one that nohup tells to
    ignore it. A script ignores SIGINT of what it starts in the background: that ends it all the same."""
    for name, number, ignored in (("hung", signal.SIGHUP, signal.SIG_DFL), ("nohup", signal.SIGHUP, signal.SIG_IGN),
                                  ("beside", signal.SIGINT, signal.SIG_IGN), ("warned", signal.SIGUSR2, signal.SIG_DFL),
                                  ("costly", signal.SIGXCPU, signal.SIG_DFL)):
        here = signal.signal(number, ignored)  # a program inherits it
        out, run = runs.start(name, "--data", text, "--steps", 1000000)
        signal.signal(number, here)
        rows = lambda: (out / "training.csv").read_text().count("\n") if (out / "training.csv").exists() else 0
        wait_for("a step", lambda: rows() > 2)
        run.send_signal(number)
        if number == signal.SIGXCPU:  # which comes each second
            run.send_signal(number)
        goes_on = ignored == signal.SIG_IGN and number == signal.SIGHUP
        if goes_on:
            before = rows()
            wait_for("more steps", lambda: run.poll() is not None or rows() > before + 20)
            check(run.poll() is None, run.returncode)
            run.send_signal(signal.SIGTERM)
        check(run.wait(PATIENCE) == 128 + (signal.SIGTERM if goes_on else number), name, run.returncode)
        metrics = json.loads((out / "metrics.json").read_text())
        check(metrics["verdict"].startswith("stopped by SIG"), name, metrics)
        saved = json.loads((out / "checkpoints/latest/state.json").read_text())["content"]["state"]["step"]
        check(saved == metrics["steps_done"], name, saved, metrics)


def test_halt_from_outside(text):
    out, run = runs.start("outside", "--data", text, "--steps", 1000000)
    wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 2)
    (out / ".HALT").write_text("somebody wants it to end\n")
    check(run.wait(PATIENCE) == 143, run.returncode)
    check((out / "checkpoints/latest/state.json").exists() and not (out / ".anomaly_type").exists(), "saved")


# ---- A slow but healthy run ----

def test_slow():
    """Data that take longer to come than a step may stall for: the run waits, and nothing is raised."""
    out, run = runs.start("slow", "--dataset", "fineweb_edu", "--steps", 12, "--batch-size", 1, "--stall-timeout", 5,
                          "--val-fraction", 0,
                          stdin=subprocess.PIPE)
    for i in range(4):
        run.stdin.write((f"word {i}, " * 28)[:239].encode() + b"\n")  # 240 tokens, not quite 4 rows
        run.stdin.flush()
        if i % 2:
            time.sleep(6)
    run.stdin.close()
    code = run.wait(PATIENCE)
    check(code == 0, code, (runs.root / "slow.log").read_text())
    check(not (out / ".HALT").exists() and not (out / ".anomaly_type").exists(), "a slow run was halted")


# ---- Where its lines go ----

def test_closed_output(text):
    """Started without standard input, output and errors: its lines must not land in its files."""
    out = runs.root / "closed"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", runs.program, *SMALL, "--out-dir", str(out), "--data",
               str(text), "--steps", "5"]
    code = subprocess.run(command, timeout=PATIENCE).returncode
    check(code == 0, code)
    rows = (out / "training.csv").read_text().splitlines()
    check([row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4", "5"], rows)


def test_stalled_reader(text):
    """Nobody reads what it prints: it trains on, gives signs of life, and ends."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    command = [runs.program, *SMALL, "--out-dir", str(runs.root / "unread"), "--data", str(text), "--steps", "300"]
    run = subprocess.Popen(command, stdout=writer, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    os.close(writer)
    check(run.wait(PATIENCE) == 0, run.returncode)
    check((runs.root / "unread/training.csv").read_text().count("\n") == 301, "rows")
    printed = os.read(reader, 1 << 16)
    os.close(reader)
    check(printed.startswith(b"model: ") or b"data: " in printed, printed)


def test_late_reader(text):
    """Its output is a pipe that another program made non-blocking, and is full for a while: no line is lost."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    out = runs.root / "late"
    command = [runs.program, *SMALL, "--out-dir", str(out), "--data", str(text), "--steps", "300"]
    run = subprocess.Popen(command, stdout=writer, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    os.close(writer)
    rows = out / "training.csv"
    wait_for("steps", lambda: rows.exists() and rows.read_text().count("\n") > 200)
    with os.fdopen(reader, "rb") as printed:
        steps = [line for line in printed.read().splitlines() if line.startswith(b"step ")]
    check(run.wait(PATIENCE) == 0 and len(steps) >= 300, run.returncode, len(steps))


def test_two_in_one_folder(text):
    out, run = runs.start("shared", "--data", text, "--steps", 1000000)
    wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 2)
    for more in ((), ("--resume",)):
        _, _, said = runs.train("shared", "--data", text, "--steps", 5, *more, code=2)
        check("another run is in this folder" in said or "no checkpoint" in said or "earlier run" in said, said)
    check(f"(process {run.pid})" in runs.train("shared", "--data", text, "--steps", 5, code=2)[2], "its process")
    run.send_signal(signal.SIGTERM)
    check(run.wait(PATIENCE) == 143, run.returncode)


def test_renamed(text):
    """A run whose folder is renamed goes on in two, and says so once."""
    out, run = runs.start("before", "--data", text, "--steps", 1000000, "--save-every", 0)
    wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 2)
    out.rename(runs.root / "after")
    run.send_signal(signal.SIGTERM)
    check(run.wait(PATIENCE) == 143, run.returncode)
    said = (runs.root / "before.log").read_text()
    words = f"warning: {out}/training.csv: renamed or removed while the run goes on"
    check(said.count(words) == 1 and (out / "checkpoints" / "latest").exists(), said[-2000:])


def test_told_to_end_in_a_sample(text):
    """The rest of a long text is not written: it ends after a step, as ever."""
    out, run = runs.start("sampling", "--data", text, "--steps", 1000000, "--sample", 1000000)
    beats, stack = out / "heartbeat_rank0.jsonl", out / "stack_rank0.txt"
    wait_for("the run", lambda: beats.exists() and '"boot"' in beats.read_text())

    def samples():
        run.send_signal(signal.SIGUSR1)
        return stack.exists() and " phase sample " in stack.read_text()

    wait_for("the sample", samples)
    run.send_signal(signal.SIGTERM)
    try:
        check(run.wait(PATIENCE) == 143, run.returncode)
    finally:
        run.kill()
    check("---- sample before training ----" in (runs.root / "sampling.log").read_text(), "the text so far")


# ---- Time that is nobody's fault ----

def test_stopped_while_waiting():
    """Ctrl-Z while it waits for data, for longer than those may take: it waits on."""
    _, run = runs.start("stopped", "--dataset", "fineweb_edu", "--val-fraction", 0, "--loader-timeout", 8, "--steps", 2,
                        stdin=subprocess.PIPE)
    time.sleep(1)  # by then it waits; if it does not yet, the answer is the same
    run.send_signal(signal.SIGSTOP)
    time.sleep(10)
    run.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # if it had waited for ten seconds, it would end
    for i in range(40):
        run.stdin.write(b"words " * 20 + b"\n")
    run.stdin.close()
    check(run.wait(PATIENCE) == 0, run.returncode, (runs.root / "stopped.log").read_text())


corpus = runs.text()
with concurrent.futures.ThreadPoolExecutor() as beside:
    slow, stopped = beside.submit(test_slow), beside.submit(test_stopped_while_waiting)
    test_anomalies(corpus)
    test_gates_by_layer(corpus)
    test_asked_where_it_is(corpus)
    test_asked_all_the_time(corpus)
    test_terminal_that_ends(corpus)
    test_halt_from_outside(corpus)
    test_closed_output(corpus)
    test_stalled_reader(corpus)
    test_late_reader(corpus)
    test_two_in_one_folder(corpus)
    test_renamed(corpus)
    test_told_to_end_in_a_sample(corpus)
    slow.result()
    stopped.result()
done()
