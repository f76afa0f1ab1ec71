"""Runs that are halted, asked where they are, or told to end; and slow ones that are left alone.

usage: test_watch.py PROGRAM FOLDER. Twins: telemetry.c, anomaly.c, dump.c. Each anomaly's rule is
test_anomaly.c's, a stall test_telemetry.c's. Gates, gradient and loss go wrong here because the weights
in a checkpoint are changed, with the checksums that such a checkpoint would have.
"""
import concurrent.futures
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time

from runs import Runs, check, done, wait_for

runs = Runs(sys.argv[1], sys.argv[2], "watch")
MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                      0x27D4EB2F165667C5)


def rotate(x, n):
    return (x << n | x >> (64 - n)) & MASK


def add_lane(lane, x):
    return rotate((lane + x * P2) & MASK, 31) * P1 & MASK


def xxh64(data):
    """XXH64 with seed 0, from its specification."""
    lanes, at = [(P1 + P2) & MASK, P2, 0, -P1 & MASK], 0
    while len(data) - at >= 32:
        lanes = [add_lane(lane, x) for lane, x in zip(lanes, struct.unpack_from("<4Q", data, at))]
        at += 32
    h = P5
    if at:
        h = sum(rotate(lane, n) for lane, n in zip(lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            h = ((h ^ add_lane(0, lane)) * P1 + P4) & MASK
    h = (h + len(data)) & MASK
    while len(data) - at >= 8:
        h = (rotate(h ^ add_lane(0, struct.unpack_from("<Q", data, at)[0]), 27) * P1 + P4) & MASK
        at += 8
    if len(data) - at >= 4:
        h = (rotate(h ^ struct.unpack_from("<I", data, at)[0] * P1 & MASK, 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        h = rotate(h ^ byte * P5 & MASK, 11) * P1 & MASK
    for shift, prime in ((33, P2), (29, P3)):
        h = (h ^ h >> shift) * prime & MASK
    return h ^ h >> 32


def change(checkpoint, values):
    """Sets every element of the tensors whose name `values` answers for; seals the checkpoint again."""
    path = checkpoint / "model.safetensors"
    data, state = bytearray(path.read_bytes()), json.loads((checkpoint / "state.json").read_text())
    entry = state["content"]["files"]["model.safetensors"]
    check(f"{xxh64(data):016x}" == entry["xxh64"] and len(data) == entry["bytes"], "the file's checksum", entry)
    first = 8 + struct.unpack_from("<Q", data)[0]
    changed = 0
    for name, tensor in json.loads(data[8:first]).items():
        new = None if name == "__metadata__" else values(name)
        if new is None:
            continue
        begin, end = (first + x for x in tensor["data_offsets"])
        count = (end - begin) // 4
        struct.pack_into(f"<{count}f", data, begin, *(new[i % len(new)] for i in range(count)))
        changed += 1
    check(changed, "no tensor was changed")
    path.write_bytes(data)
    # state.json's own checksum is of its text as Jansson writes it; the entry is all that changes.
    old_entry, new_sum = entry["xxh64"], f"{xxh64(data):016x}"
    compact = state_text(state["content"])
    check(f"{xxh64(compact.encode()):016x}" == state["xxh64"], "the state's checksum", compact)
    state["xxh64"] = f"{xxh64(compact.replace(old_entry, new_sum).encode()):016x}"
    entry["xxh64"] = new_sum
    (checkpoint / "state.json").write_text(json.dumps(state))


def state_text(value):
    """JSON without spaces, keys sorted, numbers with 17 digits as C prints them."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{state_text(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, float):
        text = f"{value:.17g}"
        return text if re.search(r"[.e]", text) else text + ".0"
    return json.dumps(value, ensure_ascii=False)


# ---- Anomalies ----

KINDS = {
    "gate_collapse": (lambda name: [60.0, -60.0, -60.0] if name.endswith("gate.fc2.bias") else None, 4),
    "zero_gradient": (lambda name: [0.0] if name in ("embed.weight", "lm_head.weight") else None, 2),
    "nan": (lambda name: [float("nan")] if name == "norm.weight" else None, 1),
}


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
    check(run.wait(120) == 128 + signal.SIGTERM, run.returncode)
    metrics = json.loads((out / "metrics.json").read_text())
    check(metrics["verdict"] == "stopped by SIGTERM" and metrics["exit_code"] == 143, metrics)
    saved = json.loads((out / "checkpoints/latest/state.json").read_text())["content"]["state"]["step"]
    check(saved == metrics["steps_done"] > lines, saved, metrics)


def test_halt_from_outside(text):
    out, run = runs.start("outside", "--data", text, "--steps", 1000000)
    wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 2)
    (out / ".HALT").write_text("somebody wants it to end\n")
    check(run.wait(120) == 143, run.returncode)
    check((out / "checkpoints/latest/state.json").exists() and not (out / ".anomaly_type").exists(), "saved")


# ---- A slow but healthy run ----

def test_slow():
    """Data that take longer to come than a step may stall for: the run waits, and nothing is raised."""
    out, run = runs.start("slow", "--dataset", "fineweb_edu", "--steps", 12, "--batch-size", 1, "--stall-timeout", 1,
                          stdin=subprocess.PIPE)
    for i in range(4):
        run.stdin.write((f"word {i}, " * 28)[:239].encode() + b"\n")  # 240 tokens, not quite 4 rows
        run.stdin.flush()
        time.sleep(1.6)
    run.stdin.close()
    code = run.wait(120)
    check(code == 0, code, (runs.root / "slow.log").read_text())
    check(not (out / ".HALT").exists() and not (out / ".anomaly_type").exists(), "a slow run was halted")


corpus = runs.text()
with concurrent.futures.ThreadPoolExecutor() as beside:
    slow = beside.submit(test_slow)
    test_anomalies(corpus)
    test_asked_where_it_is(corpus)
    test_halt_from_outside(corpus)
    slow.result()
done()
