#!/usr/bin/env python3
"""Checks that every planted fault still fits: its old text stands once in the file that it changes, and its
new text is another, which no operator makes (tests/simt/operators.py): those are made when they are run, and
one that a reason calls equivalent is the exception. The mutation runs (tests/mutate_header.py, tests/simt/mutate.py) call a fault that
does not fit `broken`, but they are slow tests; this one runs for every commit. Whether a fault is caught
is not asked here.

  check_faults.py            checks both lists
  check_faults.py planted    checks that it finds one: for each list, an entry whose text is not there, one
                             whose text is there more than once, one that changes nothing, and one that an
                             operator makes; and what each operator makes of a few lines
  check_faults.py made       names what makes each entry, `-` if nothing does

Exit code: the number of findings, at most 99.
"""
import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "simt")]
import mutate  # noqa: E402
import mutate_header  # noqa: E402
import operators  # noqa: E402

LISTS = {ROOT / "tests" / "header_faults.list": mutate_header.Fault,
         ROOT / "tests" / "simt" / "faults.list": mutate.Fault}


FILES = {}
DRAWN = argparse.Namespace(made=20, seed="planted", only="")


def maker(fault):
    """The edit that makes what a listed fault is; None if no operator does."""
    path = fault.source()
    if path not in FILES:
        FILES[path] = operators.File(path.name, path.read_text())
    return FILES[path].maker(fault.old, fault.new)


def is_made(fault, rules):
    """Its maker, if what makes it is tried on the same tests in the same modes."""
    tried = set(rules.get(fault.source().name, "").split())
    return maker(fault) if {*fault.tests, *fault.modes} <= tried | {"plain"} else None


def finding(fault, rules):
    """What is wrong with one entry; None if it fits."""
    if fault.places() != 1:
        return f"its old text is {fault.places()} times in {fault.source().relative_to(ROOT)}, not once"
    if fault.new == fault.old:
        return "it changes nothing"
    made = None if fault.equivalent else is_made(fault, rules)
    return made and f"an operator makes it: {made.name}"


def check():
    for path, kind in LISTS.items():
        rules = mutate.rules_of(path)
        for name in sorted(rules):
            if not (kind.folder / name).exists():
                yield f"{path.relative_to(ROOT)}: @@ {name}: no such file"
        for fault in mutate.read_faults(path, kind):
            if wrong := finding(fault, rules):
                yield f"{path.relative_to(ROOT)}: {fault.file}: {fault.what}: {wrong}"


LINES = """static int nsa__seen(const int *x, int n) {
    if (n > 1 && x[0]) return min(n - 1, 4);
    x[2] = n;
    n += 1;
    nsa__cuda_tiles_wait<int, 4>();
    return x ? n & 0x7fffu : 0;
}
"""
# Of LINES: an edit of each operator, as what a list would say.
MADE = {"constant": ("min(n - 1, 4)", "min(n - 1, 5)"), "other": ("n > 1 &&", "n >= 1 &&"),
        "operand": ("min(n - 1, 4)", "min(n, 4)"), "truth": ("if (n > 1 && x[0])", "if (false)"),
        "choice": ("return x ? n & 0x7fffu : 0;", "return n & 0x7fffu;"), "call": ("min(n - 1, 4)", "n - 1"),
        "value": ("x[2] = n;", "x[0] = n;"), "drop": ("    x[2] = n;\n", ""),
        "swap": ("x[2] = n;\n    n += 1;", "n += 1;\n    x[2] = n;"),
        "weaker": ("nsa__cuda_tiles_wait<int, 4>()", "nsa__cp_async_wait<0>()")}
BITS = "0x7fffu", "0x7f00u"  # the constant operator's, of bits


def planted():
    for path, kind in LISTS.items():
        rules, first = mutate.rules_of(path), mutate.read_faults(path, kind)[0]
        for old, new in ("this text is nowhere", ""), ("}", "{"), (first.old, first.old):
            first.old, first.new = old, new
            if not finding(first, rules):
                yield f"{path.relative_to(ROOT)}: an entry of `{old}` and `{new}` passes"
        for fault in mutate.made_faults(path, kind, DRAWN):
            if f"{fault.what.rsplit(':', 2)[0]}:" not in (finding(fault, rules) or ""):
                yield f"{path.relative_to(ROOT)}: {fault.what}, which an operator makes, passes: {finding(fault, rules)}"
    for operator, (old, new) in MADE.items():
        made = operators.File("lines.h", LINES).maker(old, new)
        if not made or not made.name.startswith(f"lines.h:nsa__seen:{operator}:"):
            yield f"operator {operator} does not make `{new}` of `{old}`, but {made}"
    if not operators.File("lines.h", LINES).maker(*BITS):
        yield "no operator takes half of a constant's bits"
    if operators.File("lines.h", LINES).maker("x[2] = n;", "x[2] = n * n;"):
        yield "an operator is said to make what none makes"


def name_makers():
    for path, kind in LISTS.items():
        for fault in mutate.read_faults(path, kind):
            made = maker(fault)
            print(f"{path.name}: {fault.file}: {fault.what}: {made.name if made else '-'}")


def main(arguments):
    if arguments not in ([], ["planted"], ["made"]):
        raise SystemExit("usage: check_faults.py [planted|made]")
    if arguments == ["made"]:
        return name_makers() or 0
    findings = list(planted() if arguments else check())
    print("\n".join(findings + [f"check_faults: {len(findings)} findings"]))
    return min(len(findings), 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
