"""Ten thousand tiny steps with evaluations and checkpoints: the memory of the process does not grow.

usage: test_soak.py PROGRAM FOLDER [STEPS]. Twin: none. Memory is what the system says (VmRSS), read while
the run goes on; its slope is taken over the last four fifths of the steps.
"""
import json
import sys
import time

from runs import Runs, check, done

STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 10000
PER_STEP = 8  # bytes: 80 KiB, twenty pages, over the whole run

runs = Runs(sys.argv[1], sys.argv[2], "soak")
out, run = runs.start("run", "--data", runs.text(), "--steps", STEPS, "--eval-every", STEPS // 20, "--save-every",
                      STEPS // 20, "--log-every", STEPS // 10)
samples = []
while run.poll() is None:
    time.sleep(0.05)
    try:
        with open(f"/proc/{run.pid}/status") as status:
            resident = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS")]
        with open(out / "training.csv", "rb") as rows:
            rows.seek(-200, 2)
            step = int(rows.read().splitlines()[-2].split(b",")[0])
    except (OSError, ValueError, IndexError):
        continue
    if resident and step > STEPS // 5:
        samples.append((step, resident[0]))
check(run.returncode == 0, run.returncode, (runs.root / "run.log").read_text()[-2000:])
check(len(samples) > 50 and samples[-1][0] > STEPS * 0.9, len(samples))
steps, bytes_ = zip(*samples)
mean_step, mean_bytes = sum(steps) / len(steps), sum(bytes_) / len(bytes_)
slope = (sum((s - mean_step) * (b - mean_bytes) for s, b in samples) /
         sum((s - mean_step) ** 2 for s in steps))
print(f"{STEPS} steps: {min(bytes_)} to {max(bytes_)} bytes resident in {len(samples)} samples, "
      f"slope {slope:.3f} bytes a step")
check(abs(slope) <= PER_STEP, f"memory grows by {slope:.1f} bytes a step")
check(json.loads((out / "metrics.json").read_text())["steps_done"] == STEPS, "all steps")
done()
