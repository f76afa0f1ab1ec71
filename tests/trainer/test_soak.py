"""Ten thousand tiny steps with evaluations and checkpoints: the memory of the process does not grow.

usage: test_soak.py PROGRAM FOLDER COUNTER [STEPS]. Twin: heap_count.c, which is COUNTER. Of two kinds of memory:
what the program holds of the heap is, at its least, the same to the byte in each fifth of the run but the first;
what the system counts for it (RssAnon), whole pages that were ever touched, free ones between blocks too, may
grow by twenty pages in all.
"""
import json
import mmap
import os
import struct
import sys
import time

from runs import Runs, check, done

COUNTER, STEPS = sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else 10000
FIFTHS = 5
PER_STEP = 8  # bytes resident: 80 KiB, twenty pages, over the whole run

runs = Runs(sys.argv[1], sys.argv[2], "soak")
counts = runs.root / "counts"
counts.write_bytes(bytes(mmap.PAGESIZE))
out, run = runs.start("run", "--data", runs.text(), "--steps", STEPS, "--eval-every", STEPS // 20, "--save-every",
                      STEPS // 20, "--log-every", STEPS // 10,
                      environment={"LD_PRELOAD": COUNTER, "HEAP_COUNT": str(counts)})
with open(counts, "rb") as file:
    held = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)
samples = []
while run.poll() is None:
    time.sleep(0.05)
    try:
        with open(f"/proc/{run.pid}/status") as status:
            resident = [int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")]
        with open(out / "training.csv", "rb") as rows:
            rows.seek(-200, os.SEEK_END)
            step = int(rows.read().splitlines()[-2].split(b",")[0])
    except (OSError, ValueError, IndexError):
        continue
    if resident and STEPS // FIFTHS < step < STEPS * 0.98:  # at the end all is given back
        samples.append((step, resident[0], struct.unpack_from("q", held)[0]))
check(run.returncode == 0, run.returncode, (runs.root / "run.log").read_text()[-2000:])
check(len(samples) > 50 and samples[-1][0] > STEPS * 0.9, len(samples))

steps, resident, heap = zip(*samples)
mean_step, mean_bytes = sum(steps) / len(steps), sum(resident) / len(resident)
slope = (sum((s - mean_step) * (b - mean_bytes) for s, b in zip(steps, resident)) /
         sum((s - mean_step) ** 2 for s in steps))
least = [min(h for s, h in zip(steps, heap) if s * FIFTHS // STEPS == fifth) for fifth in range(1, FIFTHS)]
print(f"{STEPS} steps, {len(samples)} samples: {least} bytes of the heap at the least in each fifth; "
      f"{min(resident)} to {max(resident)} bytes resident, slope {slope:.3f} bytes a step")
check(least[0] > 1000000 and len(set(least)) == 1, "what the program holds grows", least)
check(abs(slope) <= PER_STEP, f"resident memory grows by {slope:.1f} bytes a step")
check(json.loads((out / "metrics.json").read_text())["steps_done"] == STEPS, "all steps")
done()
