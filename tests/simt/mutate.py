#!/usr/bin/env python3
"""Plants faults in the kernels, one at a time, and counts how many the tests catch.

Each fault of faults.list is a small edit of one file under nsa/kernels. The kernels that a test
needs are compiled for the executor with all faults that name the test, and each run has one of them
(plant.py); what must be a constant is compiled by itself. The CPU's test of that primitive runs on
them, its smallest table first: a failure, a report of the executor or a time-out catches the fault.
At least 95 % must be caught; a fault that changes nothing that anybody could see is marked
`equivalent` with its reason, and is not counted.

Results are appended to WORK/results.jsonl as they come. A fault that has not survived is not tried
again while its text and its function stay as they are: a run that was stopped goes on where it was.

With --made the faults are those that operators make (operators.py), or so many of them, drawn by --seed,
on the tests that the list's lines of `@@` name. What the compiler refuses is none. One that survives is shown:
a case that the tests lack, or an entry of the list that says why it is `equivalent`.

usage: mutate.py --executor LIST --definitions LIST --headers DIR --work DIR
                 [--only TEXT] [--run no] [--write FILE] [--made COUNT [--seed TEXT]]
"""
import argparse
import datetime
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import operators
import plant

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHARE = 0.95
LANGUAGE = ["-DNSA_SIMT", "-DCHECK_CUDA", "-fno-strict-aliasing", "-w",
            f"-fmacro-prefix-map={ROOT}/="]
# One mode's compiler flags and schedule, and definitions of its own; each has what only it can see: the
# checker, the path of sm_90a, heads of several panels, heads that its pipelines do not take.
PLAIN = (["-O1"], {"NSA_SIMT_ASYNC": "late"})
CHECK = (["-O1", "-g1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"],
         {"NSA_SIMT_SCHEDULE": "random", "NSA_SIMT_SEED": "7", "NSA_SIMT_PREEMPT": "500"})
WGMMA = ["-DNSA__SIMT_WGMMA"]
PARTS = "NSA__SLC_PART_ROWS=1024"  # so that a block's readers take several steps of both consumers
MODES = {"plain": PLAIN, "check": CHECK, "wgmma": (PLAIN[0] + WGMMA, PLAIN[1], PARTS),
         "wgmma_check": (CHECK[0] + WGMMA, CHECK[1], PARTS),
         "wgmma_wide": (PLAIN[0] + WGMMA, PLAIN[1], "NSA_CUDA_MAX_DIM=128"),
         "wgmma_widest": (PLAIN[0] + WGMMA, PLAIN[1], "NSA_CUDA_MAX_DIM=256")}
# The launches of test_launches.cpp by the limits of a device; those of 99 KB are near them with wider heads.
MODES.update({f"sm_{number}": (PLAIN[0], {"NSA_SIMT_ARCH": number}, f"NSA_CUDA_MAX_DIM={most}")
              for number, most in [("80", 64), ("86", 128), ("89", 128), ("90", 64), ("100", 64), ("120", 128)]},
             sm_90a=(PLAIN[0] + WGMMA, {"NSA_SIMT_ARCH": "90"}, "NSA_CUDA_MAX_DIM=64"))
# What a test needs of nsa/kernels.
NEEDS = {"block_index": ["block_index"], "rope": ["rope"], "compress": ["compress"],
         "gate": ["gate"], "merge": ["merge", "attend_branches"],
         "select_blocks": ["select_blocks", "select_lists"], "rank_queries": ["select_lists"],
         "score_blocks": ["score_blocks"], "score_lists": ["score_lists"],
         "attend_cmp": ["attend_branches"], "attend_slc": ["attend_branches"], "attend_win": ["attend_branches"],
         "attend_dense": ["attend_branches"], "attention": ["load"], "decode": ["load"],
         "pages": ["rope", "merge", "score_lists", "load"],
         "launches": ["rope", "merge", "score_lists", "load"]}
# A test's tables, the smallest first; the checker runs one alone, as in CI.
TABLES = {test: ["little", "broad"] for test in NEEDS}
TABLES.update(block_index=["quick"], decode=["short", "1"], launches=["little"])
CHECKED = {test: tables[0] for test, tables in TABLES.items()}
CHECKED.update(dict.fromkeys(["attend_slc", "select_blocks", "rank_queries", "score_lists"], "least"))
NO_FAULT = 0
COMPILER = (["ccache"] if shutil.which("ccache") else []) + ["g++", "-std=c++17"]
HOST = COMPILER[:-2] + ["gcc", "-std=gnu99"]


class Fault:
    """One entry: `== FILE | TESTS [MODE] | what it breaks`, then lines of - old and + new text."""

    known_modes, known_tests, made = MODES, NEEDS, False
    folder = ROOT / "nsa" / "kernels"

    def __init__(self, head, body):
        self.file, tests, self.what = (part.strip() for part in head.split("|", 2))
        words = tests.split()
        self.modes = [w for w in words if w in self.known_modes] or ["plain"]
        self.tests = [w for w in words if w in self.known_tests]
        self.equivalent, self.tried = "equivalent" in words, set()
        self.old = "\n".join(line[2:] for line in body if line.startswith("- "))
        self.new = "\n".join(line[2:] for line in body if line.startswith("+ "))
        unknown = set(words) - set(self.known_modes) - set(self.known_tests) - {"equivalent"}
        if unknown or not self.tests or not self.old:
            sys.exit(f"{head}: {unknown or 'names no test, or has no text'}")

    def pairs(self):
        return [(mode, test) for mode in self.modes for test in self.tests]

    def source(self):
        return self.folder / self.file

    def places(self):
        """How often the old text stands where it may."""
        return self.source().read_text().count(self.old)

    def key(self):
        """Changes with the fault and with the function that it is planted in."""
        text = self.source().read_text()
        at = max(text.find(self.old), 0)
        begin, end = text.rfind("\n}\n", 0, at), text.find("\n}\n", at + len(self.old))
        words = [self.file, *self.modes, *self.tests, self.old, self.new,
                 text[max(begin, 0):end if end >= 0 else None]]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def rules_of(path):
    """{file: its tests and modes} for the faults that operators make."""
    return {line[3:].split("|")[0].strip(): line.split("|")[1].strip()
            for line in path.read_text().splitlines() if line.startswith("@@ ")}


def made_faults(path, kind, given):
    """Faults that operators make in the files that the list names, as many as are asked for."""
    rules, edits = rules_of(path), {}
    files = {name: operators.File(name, (kind.folder / name).read_text()) for name in rules}
    everywhere = "\n".join(file.text for file in files.values())
    for name, file in files.items():
        edits.update({edit.name: (file, edit) for edit in file.edits()
                      if re.search(given.only, f"{name} {rules[name]} {edit.name}")})
    for fault in read_faults(path, kind):
        if fault.equivalent and (maker := files[fault.source().name].maker(fault.old, fault.new)):
            edits.pop(maker.name, None)
    for name in operators.draw(list(edits), given.made or len(edits), given.seed):
        file, edit = edits[name]
        old, new = operators.quotation(file.text, edit, everywhere)
        fault = kind(f"{file.name} | {rules[file.name]} | {name}",
                     [f"- {line}" for line in old.split("\n")] + [f"+ {line}" for line in new.split("\n")])
        fault.made = True
        yield fault


def read_faults(path, kind=Fault):
    faults, head, body = [], None, []
    for line in path.read_text().splitlines() + ["== "]:
        if line.startswith("== "):
            if head:
                faults.append(kind(head, body))
            head, body = line[3:], []
        elif line[:2] in ("- ", "+ ") or line in ("-", "+"):
            body.append(line)
    return faults


class Limits(dict):
    """Seconds of processor time that a table may take, kept while no source changes."""

    def __init__(self, path):
        sources = [*(ROOT / "nsa").rglob("*.*"), *(ROOT / "tests").glob("*.c"),
                   *(ROOT / "tests/harness").glob("*.[ch]")]
        text = b"".join(source.read_bytes() for source in sorted(sources))
        self.path, self.digest = path, hashlib.sha256(text).hexdigest()
        kept = json.loads(path.read_text()) if path.exists() else {}
        super().__init__(kept["limits"] if kept.get("digest") == self.digest else {})

    def __setitem__(self, name, seconds):
        super().__setitem__(name, seconds)
        self.path.write_text(json.dumps({"digest": self.digest, "limits": self}))


class Bench:
    """The compiler, what is compiled once, and where."""

    def __init__(self, given):
        self.work, self.headers = given.work, given.headers
        self.executor = given.executor.split("|")
        self.definitions = [f"-D{word}" for word in given.definitions.split("|")]
        self.hosts = set()
        self.work.mkdir(parents=True, exist_ok=True)
        self.limits = Limits(given.work / "limits.json")
        (self.work / "choice.c").write_text(plant.DEFINITION)

    def includes(self, nsa):
        return ["-I", ROOT / "simt" / "include", "-I", nsa, "-I", nsa / "kernels", "-I", HERE.parent,
                "-isystem", self.headers]

    def language(self, mode):
        own = [word for each in MODES[mode][2:] for word in (f"-U{each.split('=')[0]}", f"-D{each}")]
        return [*LANGUAGE, *self.definitions, *own]

    def run(self, command):
        return subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)

    def host(self, test, mode):
        """The test and nsa.h's implementation, which no fault touches; the choice of a fault."""
        objects = []
        own = ROOT / "tests" / f"test_{test}.c"
        for source in (own if own.exists() else HERE / f"test_{test}.cpp",
                       ROOT / "tests" / "harness" / "nsa_impl.c", self.work / "choice.c"):
            objects.append(self.work / f"{source.stem}_{mode}.o")
            if objects[-1] in self.hosts:
                continue
            races = ["-DCHECK_RACES"] if "check" in mode else []
            compiler = COMPILER if source.suffix == ".cpp" else HOST
            done = self.run([*compiler, "-O1", *self.language(mode), *races,
                             *self.includes(ROOT / "nsa"), "-c", source, "-o", objects[-1]])
            if done.returncode:
                sys.exit(done.stdout)
            self.hosts.add(objects[-1])
        return objects

    def program(self, nsa, test, mode, out):
        """Compiles the kernels of one test in one mode; what the compiler says if it refuses."""
        source = out.with_suffix(".cpp")
        source.write_text(plant.DECLARATION +
                          "#define NSA_CUDA_IMPLEMENTATION\n#define NSA__CUDA_IMPLEMENTED\n"
                          '#include "nsa_cuda.cuh"\n' + "".join(
            f'#include "kernels/{name}.cuh"\n' for name in NEEDS[test]))
        kernels = out.with_suffix(".o")
        done = self.run([*COMPILER, *MODES[mode][0], *self.language(mode), *self.includes(nsa),
                         "-c", source, "-o", kernels])
        if done.returncode:
            return done.stdout
        done = self.run(["g++", *self.executor, kernels, *self.host(test, mode), "-lm", "-o", out])
        return done.stdout if done.returncode else None

    def together_in(self, test, mode):
        return self.work / f"all_{test}_{mode}"

    def together(self, faults, test, mode):
        """The numbers of those of {number: fault} that can wait for a choice in one program."""
        nsa, program = self.work / "nsa_all", self.together_in(test, mode)
        while True:
            lines = {}
            shutil.copytree(ROOT / "nsa", nsa, dirs_exist_ok=True)
            for file in {fault.file for fault in faults.values()}:
                path = nsa / "kernels" / file
                mine = {n: fault for n, fault in faults.items() if fault.file == file}
                text, lines_of = plant.plant_many(path.read_text(), mine)
                path.write_text(text)
                lines.update({n: (file, span) for n, span in lines_of.items()})
            refused = self.program(nsa, test, mode, program)
            if not refused:
                return set(lines)
            errors = re.findall(r"(\w+\.cuh):(\d+):\d+: error", refused)
            blamed = {n for n, (file, span) in lines.items()
                      if any(at == file and int(line) in span for at, line in errors)}
            if not faults:
                sys.exit(f"mutate.py: {test} does not compile in mode {mode}: {refused}")
            faults = {n: faults[n] for n in lines if n not in blamed} if blamed else {}

    def fails(self, program, number, table, mode, limit):
        """Whether the test fails, and in which words: its first, for it is ended there. Time is the
        program's own, so that a loaded machine does not matter."""
        run = subprocess.Popen(["prlimit", f"--cpu={limit:.0f}", program, table], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
                               env={**os.environ, **MODES[mode][1], "NSA_FAULT": str(number)})
        for line in run.stdout:
            if "FAIL" in line or "simt:" in line:
                run.kill()
                run.wait()
                return line.strip()
        status = run.wait()
        return f"status {status} ({limit:.0f} s of processor time allowed)" if status else None

    def limit(self, test, table, mode):
        """Without a fault every table passes; a while more than ten times as long is the limit
        with one."""
        name = f"{test} {table} {mode}"
        if name not in self.limits:
            began = os.times().children_user
            how = self.fails(self.together_in(test, mode), NO_FAULT, table, mode, 1800)
            if how:
                sys.exit(f"mutate.py: {test} {table} fails in mode {mode} without a fault: {how}")
            self.limits[name] = 30 + 10 * (os.times().children_user - began)
        return self.limits[name]

    def caught(self, program, number, test, mode):
        """By which table and in which words; None if all of them pass."""
        for table in [CHECKED[test]] if "check" in mode else TABLES[test]:
            how = self.fails(program, number, table, mode, self.limit(test, table, mode))
            if how:
                return f"{test} {table}, {mode}: {how}"
        return None


def try_alone(bench, fault):
    """('caught' | 'survived' | 'broken', how) of a fault that is compiled by itself."""
    nsa, program = bench.work / "nsa_one", bench.work / "alone"
    shutil.copytree(ROOT / "nsa", nsa, dirs_exist_ok=True)
    file = nsa / "kernels" / fault.file
    if file.read_text().count(fault.old) != 1:
        return "broken", "its old text is not in the file exactly once"
    file.write_text(file.read_text().replace(fault.old, fault.new))
    for mode, test in fault.pairs():
        if refused := bench.program(nsa, test, mode, program):
            return "broken", "does not compile: " + refused.strip().splitlines()[0]
        if how := bench.caught(program, 1, test, mode):
            return "caught", how
    return "survived", ""


def try_all(bench, faults, waiting, tell):
    """tell(fault, verdict, how) of each of `waiting`, {number: fault}: first what is compiled
    together, test by test, with the faults that are known already, so that ccache knows it too."""
    alone = set()
    for mode, test in itertools.product(MODES, NEEDS):
        mine = {n: fault for n, fault in faults.items() if (mode, test) in fault.pairs()}
        if not mine.keys() & waiting.keys():
            continue
        planted = bench.together(mine, test, mode)
        alone |= set(mine) - planted
        for n in sorted(planted & waiting.keys() - alone):
            how = bench.caught(bench.together_in(test, mode), n, test, mode)
            waiting[n].tried.add((mode, test))
            if how or waiting[n].tried == set(waiting[n].pairs()):
                tell(waiting.pop(n), "caught" if how else "survived", how or "")
    for fault in waiting.values():
        tell(fault, *try_alone(bench, fault))


def known_results(file):
    """{key: row} of what earlier runs found; the last word counts."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["key"]: row for row in rows}


def verdict_of(fault, results):
    verdict = results.get(fault.key(), {}).get("verdict", "not tried")
    if fault.made and verdict == "broken":
        return "refused"
    return "equivalent" if fault.equivalent and verdict == "survived" else verdict


def report(faults, results, machine):
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
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"],
                            text=True, stdout=subprocess.PIPE).stdout.strip()
    return {"machine": machine, "date": datetime.date.today().isoformat(),
            "commit": commit or "unknown", "rows": rows}


def arguments(text):
    options = argparse.ArgumentParser(description=text.split("\n\n")[0])
    options.add_argument("--work", type=pathlib.Path, required=True)
    options.add_argument("--only", default="", help="faults whose file, tests or text hold this")
    options.add_argument("--write", type=pathlib.Path, help="JSON of all faults' results")
    options.add_argument("--made", type=int, help="so many faults that operators make; 0: all")
    options.add_argument("--seed", default="1", help="of the drawing")
    options.add_argument("--run", choices=["yes", "no"], default="yes",
                         help="no: only what earlier runs found is counted")
    return options


def settle(given, every, attempt, machine):
    """Tries the faults that are asked for by attempt(all, waiting, tell), counts and writes; the exit
    status."""
    all_faults = dict(enumerate(every, NO_FAULT + 1))
    faults = {n: f for n, f in all_faults.items()
              if re.search(given.only, f"{f.file} {' '.join(f.tests)} {f.what}")}
    results, began = known_results(given.work / "results.jsonl"), time.monotonic()

    def tell(fault, verdict, how):
        nonlocal began
        now = time.monotonic()
        row = {"key": fault.key(), "file": fault.file, "what": fault.what, "verdict": verdict,
               "how": how[:200], "seconds": round(now - began, 1)}
        results[row["key"]], began = row, now
        with (given.work / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{verdict:10} {fault.file}: {fault.what}" + (f" ({row['how']})" if how else ""),
              flush=True)
        if fault.made and verdict == "survived":
            print(f"- {fault.old}\n+ {fault.new}", flush=True)

    if given.run == "yes":
        attempt(all_faults, {n: fault for n, fault in faults.items()
                             if verdict_of(fault, results) not in ("caught", "equivalent", "refused")}, tell)
    verdicts = [verdict_of(fault, results) for fault in faults.values()]
    caught, survived = verdicts.count("caught"), verdicts.count("survived")
    print(f"{caught} of {caught + survived} faults caught, {verdicts.count('equivalent')} "
          f"equivalent, {verdicts.count('broken')} broken, {verdicts.count('refused')} refused by the compiler, "
          f"{verdicts.count('not tried')} not tried")
    if given.made is not None:
        return 1 if survived or verdicts.count("not tried") else 0
    if given.write:
        rows = report(list(all_faults.values()), results, machine)
        given.write.write_text(json.dumps(rows, indent=1) + "\n")
    unknown = set(verdicts) & {"broken", "not tried"}
    return 1 if unknown or caught < SHARE * (caught + survived) else 0


def main():
    options = arguments(__doc__)
    options.add_argument("--executor", required=True, help="its object files, joined by |")
    options.add_argument("--definitions", required=True, help="of narrow kernels, joined by |")
    options.add_argument("--headers", type=pathlib.Path, required=True)
    given = options.parse_args()
    bench = Bench(given)
    faults = read_faults(HERE / "faults.list")
    if given.made is not None:
        faults = made_faults(HERE / "faults.list", Fault, given)
    return settle(given, faults,
                  lambda faults, waiting, tell: try_all(bench, faults, waiting, tell),
                  "the executor of tests/simt")


if __name__ == "__main__":
    sys.exit(main())
