"""train_125m_cuda as its users run it, its kernels under the executor: the losses of the CPU; recorded steps,
a resumed run and one that was told to stop, to the same bits; two processes over a double of NCCL; fp16 that
overflows; a loss that is no number.

usage: test_train_cuda.py PROGRAM CPU_PROGRAM FOLDER. Twins: train.c, ops_cuda.cu. Each operation is
test_trainer.c's.
"""
import json
import pathlib
import signal
import socket
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "trainer"))
from poison import KINDS, change
from runs import PATIENCE, Runs, check, done, wait_for

runs = Runs(sys.argv[1], sys.argv[3], "train_cuda")
corpus = runs.text()
LITTLE = ("--data", corpus, "--seq-len", 32, "--batch-size", 1, "--device", "cuda", "--precision", "fp32",
          "--lr-schedule", "constant", "--eval-every", 5)


def rows(out):
    """Loss and gradient norm of each step."""
    lines = [line.split(",") for line in (out / "training.csv").read_text().splitlines()[1:]]
    check([int(line[0]) for line in lines] == list(range(1, len(lines) + 1)), "a step is missing", lines)
    return [(float(line[1]), float(line[4])) for line in lines]


def near(a, b):
    check(len(a) == len(b), a, b)
    for x, y in zip(a, b):
        check(abs(x[0] - y[0]) <= 1e-5 * y[0] and abs(x[1] - y[1]) <= 1e-3 * y[1], a, b)


# ---- The same steps ----

whole, said, _ = runs.train("whole", *LITTLE, "--steps", 7, "--accum-batches", 2, "--save-every", 3,
                            "--keep-checkpoints", 0, NSA_HEARTBEAT_EVERY="1")
check("| cuda, f32," in said and "val_loss" in said, said)
runs.program, program = sys.argv[2], runs.program
cpu, _, _ = runs.train("cpu", *LITTLE, "--device", "cpu", "--steps", 7, "--accum-batches", 2, NSA_HEARTBEAT_EVERY="1")
runs.program = program
near(rows(whole), rows(cpu))
k_stats = [(out / "k_stats.csv").read_text() for out in (whole, cpu)]
check(k_stats[0] == k_stats[1] and k_stats[0].count("\n") == 8, k_stats)
beats = [[json.loads(line) for line in (out / "heartbeat_rank0.jsonl").read_text().splitlines()]
         for out in (whole, cpu)]
for a, b in zip(*([x for x in each if x["msg"] == "step_end"] for each in beats)):
    check(a["step"] == b["step"] and abs(a["gate_entropy_mean"] - b["gate_entropy_mean"]) < 1e-5, a, b)

memory = json.loads((whole / "mem_step1.json").read_text())
check(0 < memory["allocated_bytes.all.current"] <= memory["reserved_bytes.all.current"], memory)
check(all(0 < beat["gpu_mem_alloc"] <= beat["gpu_mem_reserved"] for beat in beats[0]), beats[0])
peak = json.loads((whole / "metrics.json").read_text())["peak_memory_mib"]
check(abs(peak - beats[0][-1]["gpu_mem_reserved"]) < 1e-5 * peak, peak, beats[0][-1])

recorded, said, _ = runs.train("recorded", *LITTLE, "--steps", 7, "--accum-batches", 2, "--cuda-graph")
check(rows(recorded) == rows(whole) and "no effect" not in said, rows(recorded), rows(whole))
resumed, _, _ = runs.train("resumed", *LITTLE, "--steps", 7, "--accum-batches", 2, "--cuda-graph",
                           "--resume", whole / "checkpoints/step_00000003")
check((resumed / "training.csv").read_text().splitlines()[1].startswith("4,"), "resumed after step 3")
tail = [line.split(",") for line in (resumed / "training.csv").read_text().splitlines()[1:]]
check([(float(x[1]), float(x[4])) for x in tail] == rows(whole)[3:], tail, rows(whole))
_, said, _ = runs.train("isolated", *LITTLE, "--steps", 2, "--cuda-graph", "--isolate-documents")
check("runtime.cuda_graph: no effect" in said, said)

# ---- Told to stop: what was computed is reported and saved ----

out, run = runs.start("stopped", *LITTLE, "--steps", 100000, "--accum-batches", 2)
wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 3)
run.send_signal(signal.SIGTERM)
check(run.wait(PATIENCE) == 128 + signal.SIGTERM, run.returncode)
last = len(rows(out))
state = json.loads((out / "checkpoints/latest/state.json").read_text())["content"]["state"]
check(state["step"] == last == json.loads((out / "metrics.json").read_text())["steps_done"], state, last)
runs.train("stopped", *LITTLE, "--steps", last + 2, "--accum-batches", 2, "--resume")
common = min(last + 2, 7)
check(common > 3 and rows(out)[:common] == rows(whole)[:common], rows(out), rows(whole))

# ---- Two processes, whose sums lie on the device's streams ----

ports = []
TWO = (*LITTLE, "--batch-size", 2, "--ddp-check-every", 3)


def start_two(name, *options):
    """As torchrun starts them; but both on the one device that the executor has."""
    port = socket.socket()  # stays bound, so that nobody else is given it; a listener with SO_REUSEADDR may bind it
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("", 0))
    ports.append(port)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    pairs = [runs.start(name, *options, log=f"{name}{rank}", environment=where | {
        "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": "0"}) for rank in (0, 1)]
    return pairs[0][0], [run for _, run in pairs]


def train_two(name, *options):
    out, both = start_two(name, *options)
    for run in both:
        check(run.wait(PATIENCE) == 0, run.returncode, *((runs.root / f"{name}{r}.log").read_text() for r in (0, 1)))
    return out, (runs.root / f"{name}0.log").read_text()


two, said = train_two("two", *TWO, "--steps", 4, "--accum-batches", 2)
check("processes: 2 over nccl" in said, said)
runs.program = sys.argv[2]
cpu, _, _ = runs.train("cpu_two", *TWO, "--device", "cpu", "--steps", 4, "--accum-batches", 2)
runs.program = program
near(rows(two), rows(cpu))
recorded, said = train_two("recorded_two", *TWO, "--steps", 4, "--accum-batches", 2, "--cuda-graph")
check(rows(recorded) == rows(two) and "no effect" not in said, rows(recorded), rows(two))

# One sequence divided between two, recorded.
divided, said = train_two("divided", *LITTLE, "--steps", 4, "--accum-batches", 2, "--cuda-graph",
                          "--context-parallel", 2)
check("over nccl, 1 rows for each 2, and of a row 16 tokens each" in said and "no effect" not in said, said)
near(rows(divided), rows(whole)[:4])

out, both = start_two("stopped_two", *TWO, "--steps", 100000, "--cuda-graph")
wait_for("a step", lambda: (out / "training.csv").exists() and (out / "training.csv").read_text().count("\n") > 3)
both[1].send_signal(signal.SIGTERM)
for run in both:
    check(run.wait(PATIENCE) == 128 + signal.SIGTERM, run.returncode)
state = json.loads((out / "checkpoints/latest/state.json").read_text())["content"]["state"]
check(state["step"] == len(rows(out)), state, rows(out))

# ---- Overflow, decided on the device; and what no scale helps ----

FP16 = ("--data", corpus, "--seq-len", 2, "--batch-size", 1, "--device", "cuda", "--precision", "fp16")
out, said, _ = runs.train("overflow", *FP16, "--steps", 10, "--save-every", 4, "--keep-checkpoints", 0)
state = json.loads((out / "checkpoints/latest/state.json").read_text())["content"]["state"]
check("overflow: step skipped" in said and 1 <= state["skipped_steps"] < 10, said, state)
check(state["loss_scale"] == 65536 / 2 ** state["skipped_steps"], state)
more, _, _ = runs.train("more", *FP16, "--steps", 10, "--resume", out / "checkpoints/step_00000004")
check((more / "training.csv").read_text().splitlines()[1:] != [], "resumed")
ends = [(x / "training.csv").read_text().splitlines()[-1].split(",") for x in (out, more)]
check(ends[0][1] == ends[1][1] and ends[0][4] == ends[1][4], ends)

out, _, _ = runs.train("nan", *LITTLE, "--steps", 1)
change(out / "checkpoints/step_00000001", KINDS["nan"][0])
_, _, said = runs.train("nan", *LITTLE, "--steps", 9, "--resume", code=3)
check("halted: nan" in said and (out / ".anomaly_type").read_text() == "nan\n", said)
check(not (out / "checkpoints/step_00000002").exists(), "what is no number is not saved")
done()
