#!/usr/bin/env python3
"""Checks that every planted fault still fits: its old text stands once in the file that it changes, and its
new text is another. The mutation runs (tests/mutate_header.py, tests/simt/mutate.py) call a fault that
does not fit `broken`, but they are slow tests; this one runs for every commit. Whether a fault is caught
is not asked here.

  check_faults.py            checks both lists
  check_faults.py planted    checks that it finds one: for each list, an entry whose text is not there, one
                             whose text is there more than once, and one that changes nothing

Exit code: the number of findings, at most 99.
"""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "simt")]
import mutate  # noqa: E402
import mutate_header  # noqa: E402

LISTS = {ROOT / "tests" / "header_faults.list": mutate_header.Fault,
         ROOT / "tests" / "simt" / "faults.list": mutate.Fault}


def finding(fault):
    """What is wrong with one entry; None if it fits."""
    if fault.places() != 1:
        return f"its old text is {fault.places()} times in {fault.source().relative_to(ROOT)}, not once"
    return None if fault.new != fault.old else "it changes nothing"


def check():
    for path, kind in LISTS.items():
        for fault in mutate.read_faults(path, kind):
            if wrong := finding(fault):
                yield f"{path.relative_to(ROOT)}: {fault.file}: {fault.what}: {wrong}"


def planted():
    for path, kind in LISTS.items():
        first = mutate.read_faults(path, kind)[0]
        for old, new in ("this text is nowhere", ""), ("}", "{"), (first.old, first.old):
            first.old, first.new = old, new
            if not finding(first):
                yield f"{path.relative_to(ROOT)}: an entry of `{old}` and `{new}` passes"


def main(arguments):
    if arguments not in ([], ["planted"]):
        raise SystemExit("usage: check_faults.py [planted]")
    findings = list(planted() if arguments else check())
    print("\n".join(findings + [f"check_faults: {len(findings)} findings"]))
    return min(len(findings), 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
