#!/usr/bin/env python3
"""Writes nsa/nsa.h, the one file that people take, from the files of nsa/src, which are what is edited.

  amalgamate.py            writes nsa/nsa.h
  amalgamate.py --check    exit code 1 if nsa/nsa.h is not what this would write

nsa/src/all.h names the files in their order. Each of them includes what it uses, and that must stand above it. An
`.inl` is a text that is read several times: its copies stand where it is included, with comments in the first one
alone. The licence comes last. Not here: a preprocessor; tests/package/rooms.sh compares what a compiler sees of both.
"""
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE, HEADER = ROOT / "nsa/src", ROOT / "nsa/nsa.h"
INCLUDE = re.compile(r'^#include "(.+)"\n', re.M)
COMMENT = re.compile(r"[ \t]*/\*.*?\*/", re.S)


def text_of(name, seen):
    """The text of a file, and in it what it includes and is read there."""
    def included(match):
        other = match[1]
        if other.endswith(".inl") or name == "all.h" and other not in seen:
            return text_of(other, seen) + "\n"
        if other not in seen:
            raise SystemExit(f"amalgamate.py: {name} includes {other}, which nsa/src/all.h does not name above it")
        return ""
    text = INCLUDE.sub(included, (SOURCE / name).read_text().replace("#pragma once\n", ""))
    if name in seen:
        text = COMMENT.sub("", text)
    seen.append(name)
    return text


def amalgamated():
    text = text_of("all.h", [])
    text = text[text.index("*/\n") + 3:]  # what nsa/src/all.h says of itself
    text += "\n/* " + textwrap.indent((ROOT / "LICENSE").read_text(), "   ").strip() + " */\n"
    return "/* Made by scripts/amalgamate.py from nsa/src: edit there. */\n" + re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        raise SystemExit("usage: amalgamate.py [--check]")
    made = amalgamated()
    if not sys.argv[1:]:
        HEADER.write_text(made)
    elif HEADER.read_text() != made:
        raise SystemExit("nsa/nsa.h is not made from nsa/src: run scripts/amalgamate.py")
