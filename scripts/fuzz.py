#!/usr/bin/env python3
"""Runs the fuzzers of tests/fuzz for a given processor time each, in slices, so that a run that was
ended goes on where it was; counts what they did.

  fuzz.py BUILD FOLDER MINUTES NAME...            BUILD: the preset fuzz's folder, such as build/fuzz
  fuzz.py --merge BUILD FOLDER NAME...            adds to the kept inputs what reaches more than they do
  fuzz.py --unpack FOLDER NAME                    the kept inputs as files, which is what libFuzzer reads
  fuzz.py --record FOLDER > bench/results/fuzz.json

Kept inputs are lines of hex digits in tests/fuzz/corpus/NAME.hex. FOLDER/NAME holds the inputs that were found, FOLDER/NAME.json the sums. Time is the processor's, as the
kernel counts it for the process, not the clock's. Exit code 1: an input broke something; it is left in
FOLDER, its name begins with NAME.
"""
import datetime
import hashlib
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

from record_runs import commit, machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
SLICE = 300  # seconds by the clock
SHORTEST = 30  # a process reads all inputs first: on a busy machine ever shorter ones would do nothing else
# Longest inputs that are worth while: what a harness reads at most, or some lines of a file.
LONGEST = {"api": 600, "cache": 600}


def limits():
    """An input that never ends meets the processor's limit, wherever the process has to wait."""
    resource.setrlimit(resource.RLIMIT_CPU, (2 * SLICE, 2 * SLICE))


def kept_file(name):
    return ROOT / "tests/fuzz/corpus" / f"{name}.hex"


def unpack(name, folder):
    """Writes the kept inputs to files of `folder`, named as libFuzzer names its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for line in kept_file(name).read_text().splitlines():
        data = bytes.fromhex(line)
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)
    return folder


def run_slice(build, folder, name, seconds):
    """One process of the fuzzer: what it printed, its exit code, its processor time."""
    found = folder / name
    found.mkdir(parents=True, exist_ok=True)
    kept = unpack(name, folder / f"{name}-kept")
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", f"-artifact_prefix={folder}/{name}-",
               f"-max_len={LONGEST.get(name, 2048)}", "-timeout=1200", "-report_slow_units=1200", "-verbosity=1"]
    log = folder / f"{name}.log"
    with open(log, "wb") as out:
        child = subprocess.Popen([build / "bin" / f"fuzz_{name}", *options, found, kept],
                                 stdout=out, stderr=out, preexec_fn=limits)
        _, status, used = os.wait4(child.pid, 0)
    return log.read_text(errors="replace"), os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def fuzz(build, folder, minutes, name):
    """Slices until the sum reaches `minutes`. False: an input broke something."""
    file = folder / f"{name}.json"
    row = json.loads(file.read_text()) if file.exists() else {"harness": name, "cpu_minutes": 0.0, "inputs_run": 0}
    while row["cpu_minutes"] < minutes:
        left = 60 * (minutes - row["cpu_minutes"])
        text, code, seconds = run_slice(build, folder, name, min(SLICE, max(SHORTEST, int(left) + 1)))
        units = re.findall(r"stat::number_of_executed_units: (\d+)", text)
        status = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text)
        if code or not units or not status:
            print(f"{name}: exit code {code}; the end of what it printed:", *text.splitlines()[-30:], sep="\n")
            return False
        row["cpu_minutes"] = round(row["cpu_minutes"] + seconds / 60, 2)
        row["inputs_run"] += int(units[-1])
        row["edges_reached"], row["kept_inputs"] = int(status[-1][0]), int(status[-1][2])
        file.write_text(json.dumps(row) + "\n")
        print(f"{datetime.datetime.now():%H:%M} {row}", flush=True)
    return True


def merge(build, folder, name):
    """Adds the few inputs that reach edges which the kept ones do not; how often an edge is passed does
    not count here."""
    with tempfile.TemporaryDirectory() as scratch:
        kept = unpack(name, pathlib.Path(scratch) / name)
        subprocess.run([build / "bin" / f"fuzz_{name}", "-merge=1", "-use_counters=0", "-timeout=1200",
                        f"-max_len={LONGEST.get(name, 2048)}", kept, folder / name], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = sorted(file.read_bytes().hex() for file in kept.iterdir())
    kept_file(name).write_text("\n".join(lines) + "\n")


def record(folder):
    rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    for row in rows:
        row["inputs_per_second"] = round(row["inputs_run"] / row["cpu_minutes"] / 60)
    json.dump({"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit(), "rows": rows},
              sys.stdout, indent=1)
    print()


def main(words):
    if words[:1] == ["--record"] and len(words) == 2:
        return record(pathlib.Path(words[1]))
    if words[:1] == ["--merge"] and len(words) >= 4:
        for name in words[3:]:
            merge(pathlib.Path(words[1]), pathlib.Path(words[2]), name)
        return 0
    if words[:1] == ["--unpack"] and len(words) == 3:
        return unpack(words[2], pathlib.Path(words[1])) and 0
    if len(words) < 4 or not words[2].replace(".", "", 1).isdigit():
        raise SystemExit(__doc__)
    build, folder = (pathlib.Path(word).resolve() for word in words[:2])
    return 1 - all([fuzz(build, folder, float(words[2]), name) for name in words[3:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
