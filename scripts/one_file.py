#!/usr/bin/env python3
"""Writes nsa.h as a file that includes nothing of its own: the text of the tiles stands where nsa.h
includes itself, once for each instruction set. So it can be pasted into another file, read from stdin
or renamed, with any compiler. It is nsa.h in all else; scripts/release makes it.

  one_file.py FILE     writes FILE; `-` is stdout
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SELF = re.compile(r"^/\* The file that includes itself.*?(?=^#define NSA__ISA )", re.M | re.S)
TEXT = re.compile(r"^#ifdef NSA__ISA\n(.*?)^#endif /\* NSA__ISA \*/\n\n", re.M | re.S)
BY_HAND = re.compile(r"^#ifdef NSA__HAS_BF16_BY_HAND\n#include NSA__BF16_BY_HAND\n.*?^#endif\n\n", re.M | re.S)
INCLUDE = re.compile(r"^#include NSA__THIS_FILE\n", re.M)
CONFIGURATION = re.compile(r"^     NSA_THIS_FILE .*?(?=^\*/|^     NSA_)", re.M | re.S)


def replace(pattern, text, new, least):
    """Every match replaced by the same text, and no fewer than `least`, which nsa.h has."""
    result, count = pattern.subn(lambda match: new, text)
    if count < least:
        raise SystemExit(f"one_file.py: nsa.h has {count} places for {pattern.pattern}, not {least}")
    return result


def one_file(header):
    tiles = TEXT.search(header)[1]
    version = ".".join(re.findall(r"^#define NSA_VERSION_\w+ +(\d+)$", header, re.M))
    note = f"/* Made from nsa.h {version} by scripts/one_file.py: the same in one piece. */\n"
    once, again = tiles.split("*/\n", 1)[0] + "*/\n", tiles.split("*/\n", 1)[1]
    header = replace(TEXT, header, "", 1)
    header = replace(CONFIGURATION, header, "", 1)
    header = replace(SELF, header, once, 1)
    header = replace(BY_HAND, header, "", 1)
    return note + replace(INCLUDE, header, again, 4)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("--"):
        raise SystemExit(__doc__)
    made = one_file((ROOT / "nsa/nsa.h").read_text())
    if sys.argv[1] == "-":
        sys.stdout.write(made)
    elif pathlib.Path(sys.argv[1]).resolve() == ROOT / "nsa/nsa.h":
        raise SystemExit("one_file.py: nsa/nsa.h is what this is made from: give another file")
    else:
        pathlib.Path(sys.argv[1]).write_text(made)
