"""The tables are on the disk before a checkpoint is: power may fail at any moment, and no row is missing then.

usage: test_sync.py PROGRAM FOLDER SYNC_LOG. Twins: sync_log.c, train_save.c.
"""
import sys

from runs import Runs, check, done

runs = Runs(sys.argv[1], sys.argv[2], "sync")
TABLES = ("training.csv", "val.csv", "k_stats.csv", "fallback_counters.csv")
log = runs.root / "log"
out, _, _ = runs.train("run", "--data", runs.text(), "--steps", 7, "--save-every", 2, "--eval-every", 2,
                       LD_PRELOAD=sys.argv[3], SYNC_LOG=str(log))
flushed, saved = {}, []
for line in log.read_text().splitlines():
    what, size, path = line.split(" ", 2)
    name = path.rsplit("/", 1)[1]
    if what == "flush":
        flushed[name] = int(size)
    elif name.startswith("step_"):
        saved.append(int(name[5:]))
        for table in TABLES:
            rows = (out / table).read_bytes()[:flushed.get(table, 0)].decode().splitlines()[1:]
            last = int(rows[-1].split(",")[0]) if rows else 0
            check(last >= saved[-1] - (saved[-1] % 2 if table == "val.csv" else 0), table, "ends at", last, line)
check(saved == [2, 4, 6, 7], saved)
done()
