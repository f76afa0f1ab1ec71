#!/usr/bin/env python3
"""Plants faults in the kernels, one at a time, and counts how many the tests catch.

Each fault of faults.list is a small edit of one file under nsa/kernels. The kernels that a test needs
are compiled anew with it, for the executor, and the CPU's test of that primitive runs on them, its
smallest table first: a failure, a report of the executor or a time-out catches the fault. At least
95 % must be caught; a fault that changes nothing that anybody could see is marked `equivalent` with
its reason, and is not counted.

Results are appended to WORK/results.jsonl as they come. A fault that was caught is not tried again
while its text and its function stay as they are, so that a run that was stopped goes on where it was.

usage: mutate.py --executor LIST --headers DIR --work DIR [--only TEXT] [--run no] [--write FILE]
"""
import argparse
import datetime
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHARE = 0.95
LANGUAGE = ("-DNSA_SIMT -DCHECK_CUDA -DNSA_CUDA_MAX_DIM=64 -fno-strict-aliasing "
            "-DNSA__SLC_PART_ROWS=64 -DNSA__CMP_PART_ROWS=64 -DNSA__DECODE_RUN_KEYS=16 "
            "-DNSA__READERS_CHUNKS=8 -DNSA__GATHER_BYTES=1 -w").split()
LANGUAGE.append(f"-fmacro-prefix-map={ROOT}/=")
# One mode's compiler flags and schedule; each has what only it can see: the checker, the path of
# sm_90a.
PLAIN = (["-O1"], {"NSA_SIMT_ASYNC": "late"})
CHECK = (["-O1", "-g1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"],
         {"NSA_SIMT_SCHEDULE": "random", "NSA_SIMT_SEED": "7", "NSA_SIMT_PREEMPT": "500"})
WGMMA = ["-DNSA__SIMT_WGMMA"]
MODES = {"plain": PLAIN, "check": CHECK, "wgmma": (PLAIN[0] + WGMMA, PLAIN[1]),
         "wgmma_check": (CHECK[0] + WGMMA, CHECK[1])}
# What a test needs of nsa/kernels.
NEEDS = {"block_index": ["block_index"], "rope": ["rope"], "compress": ["compress"],
         "gate": ["gate"], "select_blocks": ["select_blocks", "select_lists"],
         "attend_cmp": ["attend_cmp"], "attend_slc": ["attend_slc"], "attend_win": ["attend_win"],
         "attend_dense": ["attend_dense"], "attention": ["attention"], "decode": ["decode"]}
# A test's tables, the smallest first; the checker runs the first alone.
TABLES = {test: ["little", "broad"] for test in NEEDS}
TABLES.update(block_index=["quick"], decode=["short", "1"])
COMPILER = (["ccache"] if shutil.which("ccache") else []) + ["g++", "-std=c++17"]
HOST = COMPILER[:-2] + ["gcc", "-std=gnu99"]


def language(test):
    """f16 is bf16's code; of decoding's caches one is f16."""
    return LANGUAGE + ([] if test == "decode" else ["-DNSA_CUDA_NO_F16"])


class Fault:
    """One entry: `== FILE | TESTS [MODE] | what it breaks`, then lines of - old and + new text."""

    def __init__(self, head, body):
        self.file, tests, self.what = (part.strip() for part in head.split("|", 2))
        words = tests.split()
        self.modes = [w for w in words if w in MODES] or ["plain"]
        self.tests = [w for w in words if w in NEEDS]
        self.equivalent = "equivalent" in words
        self.old = "\n".join(line[2:] for line in body if line.startswith("- "))
        self.new = "\n".join(line[2:] for line in body if line.startswith("+ "))
        unknown = set(words) - set(MODES) - set(NEEDS) - {"equivalent"}
        if unknown or not self.tests or not self.old:
            sys.exit(f"faults.list: {head}: {unknown or 'names no test, or has no text'}")

    def key(self, kernels=ROOT / "nsa" / "kernels"):
        """Changes with the fault and with the function that it is planted in."""
        text = (kernels / self.file).read_text()
        at = max(text.find(self.old), 0)
        begin, end = text.rfind("\n}\n", 0, at), text.find("\n}\n", at + len(self.old))
        words = [self.file, *self.modes, *self.tests, self.old, self.new,
                 text[max(begin, 0):end if end >= 0 else None]]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def read_faults(path):
    faults, head, body = [], None, []
    for line in path.read_text().splitlines() + ["== "]:
        if line.startswith("== "):
            if head:
                faults.append(Fault(head, body))
            head, body = line[3:], []
        elif line[:2] in ("- ", "+ ") or line in ("-", "+"):
            body.append(line)
    return faults


class Bench:
    """The compiler, what is compiled once, and where."""

    def __init__(self, given):
        self.work, self.headers = given.work, given.headers
        self.executor = given.executor.split("|")
        self.hosts, self.limits = set(), {}
        self.work.mkdir(parents=True, exist_ok=True)

    def includes(self, nsa):
        return ["-I", HERE / "include", "-I", nsa, "-I", nsa / "kernels", "-I", HERE.parent,
                "-isystem", self.headers]

    def run(self, command):
        return subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)

    def host(self, test, mode):
        """The test and nsa.h's implementation, which no fault touches."""
        objects = []
        for name in (f"test_{test}", "nsa_impl"):
            objects.append(self.work / f"{name}_{mode}.o")
            if objects[-1] in self.hosts:
                continue
            races = ["-DCHECK_RACES"] if "check" in mode else []
            done = self.run([*HOST, "-O1", *language(test), *races, *self.includes(ROOT / "nsa"),
                             "-c", ROOT / "tests" / f"{name}.c", "-o", objects[-1]])
            if done.returncode:
                sys.exit(done.stdout)
            self.hosts.add(objects[-1])
        return objects

    def program(self, nsa, test, mode, out):
        """Compiles the kernels of one test in one mode; what the compiler says if it refuses."""
        source = out.with_suffix(".cpp")
        source.write_text("#define NSA_CUDA_IMPLEMENTATION\n#define NSA__CUDA_IMPLEMENTED\n"
                          '#include "nsa_cuda.cuh"\n' + "".join(
            f'#include "kernels/{name}.cuh"\n' for name in NEEDS[test]))
        kernels = out.with_suffix(".o")
        done = self.run([*COMPILER, *MODES[mode][0], *language(test), *self.includes(nsa), "-c", source,
                         "-o", kernels])
        if done.returncode:
            return done.stdout
        done = self.run(["g++", *self.executor, kernels, *self.host(test, mode), "-lm", "-o", out])
        return done.stdout if done.returncode else None

    def fails(self, program, table, mode, limit):
        """Whether the test fails, and in which words: its first, for it is ended there. Time is the
        program's own, so that a loaded machine does not matter."""
        run = subprocess.Popen(["prlimit", f"--cpu={limit:.0f}", program, table], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               errors="replace", env={**os.environ, **MODES[mode][1]})
        for line in run.stdout:
            if "FAIL" in line or "simt:" in line:
                run.kill()
                run.wait()
                return line.strip()
        status = run.wait()
        return f"status {status} ({limit:.0f} s of processor time allowed)" if status else None

    def sound(self, test, mode):
        """Without a fault every table passes; a while more than ten times as long is the limit
        with one."""
        if (test, mode) in self.limits:
            return self.limits[test, mode]
        program, limits = self.work / f"sound_{test}_{mode}", []
        refused = self.program(ROOT / "nsa", test, mode, program)
        for table in TABLES[test][:1] if "check" in mode else TABLES[test]:
            began = os.times().children_user
            how = refused or self.fails(program, table, mode, 1800)
            if how:
                sys.exit(f"mutate.py: {test} {table} fails in mode {mode} without a fault: {how}")
            limits.append((table, 30 + 10 * (os.times().children_user - began)))
        self.limits[test, mode] = limits
        return limits


def plant(fault, work):
    """A copy of nsa/ with the fault in it; None where the text is not there exactly once."""
    nsa = work / "nsa"
    shutil.copytree(ROOT / "nsa", nsa, dirs_exist_ok=True)
    file = nsa / "kernels" / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        return None
    file.write_text(text.replace(fault.old, fault.new))
    return nsa


def try_fault(bench, fault):
    """('caught' | 'survived' | 'broken', how)."""
    nsa = plant(fault, bench.work)
    if not nsa:
        return "broken", "its old text is not in the file exactly once"
    for mode in fault.modes:
        for test in fault.tests:
            tables, program = bench.sound(test, mode), bench.work / "faulty"
            refused = bench.program(nsa, test, mode, program)
            if refused:
                return "broken", "does not compile: " + refused.strip().splitlines()[0]
            for table, limit in tables:
                how = bench.fails(program, table, mode, limit)
                if how:
                    return "caught", f"{test} {table}, {mode}: {how}"
    return "survived", ""


def known_results(file):
    """{key: row} of what earlier runs found; the last word counts."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["key"]: row for row in rows}


def verdict_of(fault, results):
    verdict = results.get(fault.key(), {}).get("verdict", "not tried")
    return "equivalent" if fault.equivalent and verdict == "survived" else verdict


def report(faults, results):
    """What bench/results/faults.json holds: a row a file, and one of all. `tried` are those of
    which there is a result for the sources as they are; the share is of them."""
    rows = []
    for file in ["all", *sorted({fault.file for fault in faults})]:
        mine = [f for f in faults if file in ("all", f.file)]
        tried = [(f.what, verdict_of(f, results)) for f in mine if f.key() in results]
        verdicts = [verdict for _, verdict in tried]
        counted = verdicts.count("caught") + verdicts.count("survived")
        rows.append({"file": file, "faults": len(mine), "tried": len(tried),
                     "caught": verdicts.count("caught"),
                     "equivalent": verdicts.count("equivalent"),
                     "share": round(verdicts.count("caught") / counted, 4) if counted else None,
                     "survived": [what for what, verdict in tried if verdict == "survived"]})
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], text=True,
                            stdout=subprocess.PIPE).stdout.strip()
    return {"machine": "the executor of tests/simt", "date": datetime.date.today().isoformat(),
            "commit": commit or "unknown", "rows": rows}


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--executor", required=True, help="its object files, joined by |")
    options.add_argument("--headers", type=pathlib.Path, required=True)
    options.add_argument("--work", type=pathlib.Path, required=True)
    options.add_argument("--only", default="", help="faults whose file, tests or text hold this")
    options.add_argument("--write", type=pathlib.Path, help="JSON of all faults' results")
    options.add_argument("--run", choices=["yes", "no"], default="yes",
                         help="no: only what earlier runs found is counted")
    given = options.parse_args()
    faults = [f for f in read_faults(HERE / "faults.list")
              if re.search(given.only, f"{f.file} {' '.join(f.tests)} {f.what}")]
    bench = Bench(given)
    results = known_results(given.work / "results.jsonl")
    for fault in faults:
        key, began = fault.key(), time.monotonic()
        if given.run == "no" or results.get(key, {}).get("verdict") == "caught":
            continue
        verdict, how = try_fault(bench, fault)
        row = {"key": key, "file": fault.file, "what": fault.what, "verdict": verdict,
               "how": how[:200], "seconds": round(time.monotonic() - began, 1)}
        results[key] = row
        with (given.work / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{verdict:10} {fault.file}: {fault.what}" + (f" ({row['how']})" if how else ""),
              flush=True)
    verdicts = [verdict_of(fault, results) for fault in faults]
    caught, survived = verdicts.count("caught"), verdicts.count("survived")
    print(f"{caught} of {caught + survived} faults caught, {verdicts.count('equivalent')} "
          f"equivalent, {verdicts.count('broken')} broken, {verdicts.count('not tried')} not tried")
    if given.write:
        faults = read_faults(HERE / "faults.list")
        given.write.write_text(json.dumps(report(faults, results), indent=1) + "\n")
    return 1 if set(verdicts) & {"broken", "not tried"} or caught < SHARE * (caught + survived) else 0


if __name__ == "__main__":
    sys.exit(main())
