#!/usr/bin/env python3
"""Plants faults in nsa.h, in its files in nsa/src, one at a time, and counts how many the tests catch.

Each fault of header_faults.list is a small edit of the implementation. It is compiled once with all
of them, and each run has one (simt/plant.py); what must be a constant is compiled by itself. A fault
is tried on the tests that it names, the smallest table first: a failure, a report of a sanitizer or
a time-out catches it. At least 95 % must be caught; a fault that changes nothing that anybody could
see is marked `equivalent` with its reason, and is not counted.

Results are kept as those of simt/mutate.py are, whose engine this is: what goes on after a stop, when a
fault is tried again, and which faults operators make, is said there.

usage: mutate_header.py --work DIR [--only TEXT] [--run no] [--write FILE] [--made COUNT [--seed TEXT]]
"""
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "simt"))
import mutate  # noqa: E402
import plant  # noqa: E402

ROOMS = sorted((HERE.parent / "nsa" / "src").iterdir())
# A function that is not there is an error of the line that calls it, not of the linker.
COMPILER = mutate.HOST + ["-fopenmp", "-Werror=implicit-function-declaration"]
SANITIZE = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Pairs: products of bf16 by plain code, which would else need units for them.
MODES = {"plain": ["-O2"], "sanitize": ["-O1", "-DNSA__WITHOUT_AVX", *SANITIZE],
         "pairs": ["-O2", "-I", HERE / "harness", '-DNSA__BF16_BY_HAND="bf16_by_hand.h"']}
TESTS = [*mutate.NEEDS, "row_formats", "convert_rows", "idle_threads", "findings"]
# A test's tables, the smallest first; "" is the whole.
TABLES = {test: ["refusals", "little", "quick"] for test in TESTS}
TABLES.update({test: ["little", "quick", ""] for test in TESTS if "att" not in test},
              attention=["little", "quick", ""],
              decode=["1"], pages=["quick"],
              **dict.fromkeys(["block_index", "row_formats", "convert_rows", "idle_threads", "findings"], [""]))


class Fault(mutate.Fault):
    """One entry: `== SECTION | TESTS [MODE] | what it breaks`."""

    known_modes, known_tests, folder = MODES, TESTS, ROOMS[0].parent

    def source(self):
        """The file of nsa/src that has the old text; the first of all if none has."""
        return next((room for room in ROOMS if self.old in room.read_text()), ROOMS[0])

    def places(self):
        return sum(room.read_text().count(self.old) for room in ROOMS)


def blame(refused, lines, texts):
    """The numbers of those of {number: (file, its lines)} that the compiler's errors are about: whose words they
    point to in {file: text}; else in whose lines they are; if in no one's, those right before, as of an else whose
    if is gone; if there are none, all: each is then tried by itself."""
    blamed, errors = set(), mutate.re.findall(r"(\w+\.(?:h|inl)):(\d+):(\d+): error", refused)
    for name, line, column in errors:
        rows = texts[name].split("\n") if name in texts else []
        chosen = mutate.re.findall(r"nsa_fault == (\d+) ", rows[int(line) - 1][:int(column)]) if rows else []
        blamed |= {int(chosen[-1])} if chosen else {
            n for n, (room, span) in lines.items() if room == name and int(line) in span}
    if not blamed & set(lines):
        before = {(n, span.start) for n, (room, span) in lines.items() for name, line, _ in errors
                  if room == name and span.start <= int(line)}
        nearest = max((start for _, start in before), default=0)
        blamed = {n for n, start in before if start == nearest} or set(lines)
        print(f"no fault is to blame: {len(blamed)} are compiled by themselves: " +
              next((line for line in refused.splitlines() if "error" in line), refused[:200]), flush=True)
    return blamed


class Refused(Exception):
    """The linker's words."""


class Bench:
    """The compiler, what is compiled once, and where."""

    def __init__(self, work):
        self.work, self.limits = work, mutate.Limits(work / "limits.json")
        (work / "choice.c").write_text(plant.DEFINITION)
        # Operators write true and false, which are no words of C99.
        (work / "choice.h").write_text("extern const int nsa_fault;\n#define true 1\n#define false 0\n")
        self.folder = work / "planted"
        (self.folder / "src").mkdir(parents=True, exist_ok=True)
        (self.folder / "nsa.h").write_text('#include "src/all.h"\n')

    def run(self, *command):
        return subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)

    def compile(self, mode, source, out, *words):
        done = self.run(*COMPILER, *MODES[mode],
                        "-I", self.folder, "-I", HERE, *words, "-c", source, "-o", out)
        return done.stdout if done.returncode else None

    def implementation(self, texts, mode):
        """nsa.h with {file of nsa/src: text}, compiled; what the compiler says if it refuses."""
        for room in ROOMS:
            (self.folder / "src" / room.name).write_text(texts.get(room, room.read_text()))
        return self.compile(mode, HERE / "harness" / "nsa_impl.c", self.work / f"header_{mode}.o",
                            "-include", self.work / "choice.h")

    def program(self, test, mode):
        """A test program over the implementation that was compiled last."""
        out, objects = self.work / f"{test}_{mode}", [self.work / f"header_{mode}.o"]
        for source in (HERE / f"test_{test}.c", self.work / "choice.c"):
            objects.append(self.work / f"{source.stem}_{mode}.o")
            if refused := self.compile(mode, source, objects[-1]):
                sys.exit(refused)
        done = self.run(*COMPILER, *MODES[mode], *objects, "-lm", "-o", out)
        if done.returncode:
            raise Refused(done.stdout)
        return out

    def together(self, faults, mode):
        """The numbers of those of {number: fault} that can wait for a choice in one program."""
        while True:
            texts, lines = {}, {}
            for room in {fault.source() for fault in faults.values()}:
                mine = {n: fault for n, fault in faults.items() if fault.source() == room}
                texts[room], where = plant.plant_many(room.read_text(), mine)
                lines.update({n: (room.name, span) for n, span in where.items()})
            refused = self.implementation(texts, mode)
            if not refused:
                return set(lines)
            if not lines:
                sys.exit(f"mutate_header.py: nsa.h does not compile in mode {mode}: {refused}")
            blamed = blame(refused, lines, {room.name: text for room, text in texts.items()})
            faults = {n: faults[n] for n in lines if n not in blamed}

    def limit(self, program, table, mode):
        """As mutate.Bench.limit: ten times what a table takes without a fault."""
        name = f"{program.name} {table}"
        if name not in self.limits:
            began = mutate.os.times().children_user
            if how := self.fails(program, mutate.NO_FAULT, table, 3600):
                sys.exit(f"mutate_header.py: {name} fails without a fault: {how}")
            self.limits[name] = 30 + 10 * (mutate.os.times().children_user - began)
        return self.limits[name]

    def know_limits(self, fault, mode):
        """Limits of a fault that is compiled by itself are taken without it."""
        tables = [(self.work / f"{test}_{mode}", table) for test in fault.tests
                  for table in TABLES[test]]
        if all(f"{program.name} {table}" in self.limits for program, table in tables):
            return
        self.forget()
        if refused := self.implementation({}, mode):
            sys.exit(refused)
        for program, table in tables:
            if not program.exists():
                self.program(program.name.removesuffix(f"_{mode}"), mode)
            self.limit(program, table, mode)

    def fails(self, program, number, table, limit):
        """Whether the test fails, and in which words: its first, for it is ended there."""
        run = subprocess.Popen(["prlimit", f"--cpu={limit:.0f}", program, *table.split()], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
                               env={**mutate.os.environ, "NSA_FAULT": str(number),
                                    "OMP_WAIT_POLICY": "passive"})
        for line in run.stdout:
            if "FAIL" in line or "ERROR: AddressSanitizer" in line or "runtime error" in line:
                run.kill()
                run.wait()
                return line.strip()
        status = run.wait()
        return f"status {status} ({limit:.0f} s of processor time allowed)" if status else None

    def caught(self, number, fault, mode):
        """By which test and table, in which words; None if all of them pass."""
        for test in fault.tests:
            program = self.work / f"{test}_{mode}"
            if not program.exists():
                self.program(test, mode)
            for table in TABLES[test]:
                how = self.fails(program, number, table, self.limit(program, table, mode))
                if how:
                    return f"{test} {table}, {mode}: {how}"
        return None

    def forget(self):
        """Programs are linked again after the implementation has changed."""
        for mode in MODES:
            for test in TESTS:
                (self.work / f"{test}_{mode}").unlink(missing_ok=True)


def try_alone(bench, fault):
    """('caught' | 'survived' | 'broken', how) of a fault that is compiled by itself."""
    if fault.places() != 1:
        return "broken", "its old text is not in nsa/src exactly once"
    try:
        return try_modes(bench, fault)
    except Refused as refused:
        return "broken", f"does not link: {refused}"


def try_modes(bench, fault):
    """The same of one whose place is known."""
    text = fault.source().read_text().replace(fault.old, fault.new)
    for mode in fault.modes:
        bench.know_limits(fault, mode)
        bench.forget()
        if refused := bench.implementation({fault.source(): text}, mode):
            lines = refused.strip().splitlines()
            return "broken", "does not compile: " + next((line for line in lines if "error" in line), lines[0])
        if how := bench.caught(mutate.NO_FAULT + 1, fault, mode):
            return "caught", how
    return "survived", ""


def try_all(bench, faults, waiting, tell):
    """tell(fault, verdict, how) of each of `waiting`, {number: fault}: first what is compiled
    together."""
    alone = set()
    for mode in MODES:
        mine = {n: fault for n, fault in faults.items() if mode in fault.modes}
        if not mine.keys() & waiting.keys():
            continue
        bench.forget()
        planted = bench.together(mine, mode)
        alone |= set(mine) - planted
        for n in sorted(planted & waiting.keys() - alone):
            how = bench.caught(n, waiting[n], mode)
            waiting[n].tried.add(mode)
            if how or waiting[n].tried == set(waiting[n].modes):
                tell(waiting.pop(n), "caught" if how else "survived", how or "")
    for fault in waiting.values():
        tell(fault, *try_alone(bench, fault))


def main():
    given = mutate.arguments(__doc__).parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.work)
    faults = mutate.read_faults(HERE / "header_faults.list", Fault)
    if given.made is not None:
        faults = mutate.made_faults(HERE / "header_faults.list", Fault, given)
    return mutate.settle(given, faults,
                         lambda faults, waiting, tell: try_all(bench, faults, waiting, tell),
                         "the tests of nsa.h, gcc")


if __name__ == "__main__":
    sys.exit(main())
