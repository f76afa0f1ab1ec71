#!/usr/bin/env python3
"""Plants faults in the kernels, one at a time, and counts how many the tests catch.

Each fault of faults.list is a small edit of one file under nsa/kernels. The kernels that a test needs
are compiled anew with it, for the executor, and the CPU's test of that primitive runs on them: a
failure, a report of the executor or a time-out catches the fault. At least 95 % must be caught; a
fault that changes nothing that anybody could see is marked `equivalent` with its reason, and is not
counted.

usage: mutate.py --executor LIST --headers DIR --work DIR [--only TEXT] [--report FILE]
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHARE = 0.95
LANGUAGE = ("-DNSA_SIMT -DCHECK_CUDA -DNSA_CUDA_NO_F16 -DNSA_CUDA_MAX_DIM=64 -fno-strict-aliasing "
            "-DNSA__SLC_PART_ROWS=64 -DNSA__CMP_PART_ROWS=64 -DNSA__GATHER_BYTES=1 -w -g1").split()
LANGUAGE.append(f"-fmacro-prefix-map={ROOT}/=")
# One mode's compiler flags and schedule; each has what only it can see.
MODES = {"plain": (["-O1"], {"NSA_SIMT_ASYNC": "late"}),
         "check": (["-O1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"],
                   {"NSA_SIMT_SCHEDULE": "random", "NSA_SIMT_SEED": "7", "NSA_SIMT_PREEMPT": "500"})}
# What a test needs of nsa/kernels.
NEEDS = {"block_index": ["block_index"], "rope": ["rope"], "compress": ["compress"],
         "gate": ["gate"], "select_blocks": ["select_blocks", "select_lists"],
         "attend_cmp": ["attend_cmp"], "attend_slc": ["attend_slc"], "attend_win": ["attend_win"],
         "attend_dense": ["attend_dense"], "attention": ["attention"]}
# How much of a test's table runs: that of attention costs most.
LENGTHS = {test: "little" for test in NEEDS if test.startswith("att")}


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
        self.hosts = {}
        self.work.mkdir(parents=True, exist_ok=True)

    def includes(self, nsa):
        return ["-I", HERE / "include", "-I", nsa, "-I", nsa / "kernels", "-I", HERE.parent,
                "-isystem", self.headers]

    def run(self, command, **more):
        return subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, **more)

    def host(self, test):
        """The test and nsa.h's implementation, which no fault touches."""
        for name in (f"test_{test}", "nsa_impl"):
            if name not in self.hosts:
                self.hosts[name] = self.work / f"{name}.o"
                done = self.run(["gcc", "-std=gnu99", "-O1", *LANGUAGE, *self.includes(ROOT / "nsa"),
                                 "-c", ROOT / "tests" / f"{name}.c", "-o", self.hosts[name]])
                if done.returncode:
                    sys.exit(done.stdout)
        return [self.hosts[f"test_{test}"], self.hosts["nsa_impl"]]

    def program(self, nsa, test, mode, out):
        """Compiles the kernels of one test in one mode; what the compiler says if it refuses."""
        source = out.with_suffix(".cpp")
        source.write_text("#define NSA_CUDA_IMPLEMENTATION\n#define NSA__CUDA_IMPLEMENTED\n"
                          '#include "nsa_cuda.cuh"\n' + "".join(
            f'#include "kernels/{name}.cuh"\n' for name in NEEDS[test]))
        kernels = out.with_suffix(".o")
        done = self.run(["g++", "-std=c++17", *MODES[mode][0], *LANGUAGE, *self.includes(nsa), "-c",
                         source, "-o", kernels])
        if done.returncode:
            return done.stdout
        done = self.run(["g++", *self.executor, kernels, *self.host(test), "-lm", "-o", out])
        return done.stdout if done.returncode else None

    def fails(self, program, test, mode, limit):
        """Whether the test fails, and in which words."""
        try:
            done = self.run([program, LENGTHS.get(test, "quick")], timeout=limit,
                            env=dict(MODES[mode][1]))
        except subprocess.TimeoutExpired:
            return f"no end in {limit:.0f} s"
        said = [line for line in done.stdout.splitlines() if "FAIL" in line or "simt:" in line]
        return (said or [f"status {done.returncode}"])[0] if done.returncode else None


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


def try_fault(bench, fault, limits):
    """('caught' | 'survived' | 'broken', how)."""
    nsa = plant(fault, bench.work)
    if not nsa:
        return "broken", "its old text is not in the file exactly once"
    for mode in fault.modes:
        for test in fault.tests:
            program = bench.work / "faulty"
            refused = bench.program(nsa, test, mode, program)
            if refused:
                return "broken", "does not compile: " + refused.strip().splitlines()[0]
            how = bench.fails(program, test, mode, limits[test, mode])
            if how:
                return "caught", f"{test}, {mode}: {how}"
    return "survived", ""


def sound_kernels(bench, faults):
    """Without a fault every test passes; ten times what it takes is the limit with one."""
    limits = {}
    for test, mode in sorted({(t, m) for f in faults for t in f.tests for m in f.modes}):
        program = bench.work / f"sound_{test}_{mode}"
        refused = bench.program(ROOT / "nsa", test, mode, program)
        began = time.monotonic()
        how = refused or bench.fails(program, test, mode, 900)
        if how:
            sys.exit(f"mutate.py: {test} fails in mode {mode} without a fault: {how}")
        limits[test, mode] = 60 + 10 * (time.monotonic() - began)
    return limits


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--executor", required=True, help="its object files, joined by |")
    options.add_argument("--headers", type=pathlib.Path, required=True)
    options.add_argument("--work", type=pathlib.Path, required=True)
    options.add_argument("--only", default="", help="faults whose file, tests or text hold this")
    options.add_argument("--report", type=pathlib.Path)
    given = options.parse_args()
    faults = [f for f in read_faults(HERE / "faults.list")
              if re.search(given.only, f"{f.file} {' '.join(f.tests)} {f.what}")]
    bench = Bench(given)
    limits = sound_kernels(bench, faults)
    counts, lines = {"caught": 0, "survived": 0, "broken": 0, "equivalent": 0}, []
    for fault in faults:
        verdict, how = try_fault(bench, fault, limits)
        if fault.equivalent and verdict == "survived":
            verdict = "equivalent"
        counts[verdict] += 1
        lines.append(f"{verdict:10} {fault.file}: {fault.what}" + (f" ({how[:160]})" if how else ""))
        print(lines[-1], flush=True)
    counted = counts["caught"] + counts["survived"]
    lines.append(f"{counts['caught']} of {counted} faults caught, "
                 f"{counts['equivalent']} equivalent, {counts['broken']} broken")
    print(lines[-1])
    if given.report:
        given.report.write_text("\n".join(lines) + "\n")
    return 1 if counts["broken"] or counts["caught"] < SHARE * counted else 0


if __name__ == "__main__":
    sys.exit(main())
