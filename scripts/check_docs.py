#!/usr/bin/env python3
"""Checks what README.md, docs/*.md and the READMEs of the examples claim about the tree.

  check_docs.py quotes     fenced code that names a file stands in that file, word for word
  check_docs.py names      every nsa_... name, every path and every link in the text leads somewhere
  check_docs.py commands   every command block is run, and prints what the text says
  check_docs.py manual     the program in the manual of nsa.h is examples/embed/window.c and prints
                           what the manual says
  check_docs.py columns    no line of C or CUDA has more than 100 columns, as CONTRIBUTING.md says

A fence whose info string has a second word quotes that file: ```c nsa/src/rope.h. A line of nothing but
`...` in it leaves lines out; the pieces must follow one another in the file. Indentation that a
whole piece has more or less of than the file does not count. A fence ```sh run is run in a scratch
folder that shows the tree; a fence ```text output right after it is what it must print.

Exit code: the number of findings, at most 99. Not here: spelling, style, links to other sites.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(.*)$")
SOURCE_SUFFIXES = {".c", ".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".txt", ".yaml", ".md"}


def documents():
    """The files that are checked, as paths relative to the root."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for folder in ("docs", "examples", "simt", "tests", "bench"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return [path.relative_to(ROOT) for path in found if path.exists()]


def fences(path):
    """The fenced blocks of a document: (line number, words of the info string, lines)."""
    blocks, info, start, body = [], None, 0, []
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        match = FENCE.match(line)
        if match and info is None:
            info, start, body = match.group(1).split(), number, []
        elif match:
            blocks.append((start, info, body))
            info = None
        elif info is not None:
            body.append(line)
    if info is not None:
        raise SystemExit(f"{path}:{start}: this fence is never closed")
    return blocks


def dedent(lines):
    """Lines without the indentation that all of them share, and without trailing space."""
    used = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    shared = min(used, default=0)
    return [line[shared:].rstrip() for line in lines]


def pieces(lines):
    """A quotation split where a line `...` leaves something out."""
    result = [[]]
    for line in lines:
        if line.strip() == "...":
            result.append([])
        else:
            result[-1].append(line)
    return [dedent(piece) for piece in result if any(line.strip() for line in piece)]


def find_piece(piece, text, begin):
    """Where in the file's lines the piece stands at or after `begin`: the line after it, or None."""
    for at in range(begin, len(text) - len(piece) + 1):
        if dedent(text[at:at + len(piece)]) == piece:
            return at + len(piece)
    return None


def check_quotes():
    findings, checked = [], 0
    for path in documents():
        for line, info, body in fences(path):
            if len(info) < 2 or info[1] in ("run", "output"):
                continue
            source = ROOT / info[1]
            if not source.is_file():
                findings.append(f"{path}:{line}: quotes {info[1]}, which does not exist")
                continue
            checked += 1
            text, at = source.read_text().splitlines(), 0
            for piece in pieces(body):
                after = find_piece(piece, text, at)
                if after is None:
                    findings.append(f"{path}:{line}: not in {info[1]} as quoted, from line: {piece[0]}")
                    break
                at = after
    return findings, f"{checked} quotations"


def prose(path):
    """(line number, line) of a document without its fenced blocks."""
    inside = False
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def anchor(heading):
    """The name that GitHub gives a heading, for links into a page."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def leads_somewhere(page, target, place):
    """Whether a link from a page leads to a file or folder, and `place`, if any, to a heading there."""
    path = (ROOT / page).parent / target if target else ROOT / page
    if not place:
        return path.exists()
    return path.is_file() and place in {anchor(line) for _, line in prose(path) if line.startswith("#")}


def known_names():
    """Every nsa_ and NSA_ identifier in the sources and the build."""
    names = set()
    for folder in ("nsa", "examples", "simt", "tests", "bench", "cmake", "configs"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in SOURCE_SUFFIXES - {".md"}:
                names |= set(re.findall(r"\b(?:nsa|NSA)_\w+", path.read_text(errors="replace")))
    return names


def check_names():
    names, findings, checked = known_names(), [], 0
    for path in documents():
        for number, line in prose(path):
            for name in re.findall(r"`[^`]*`", line):
                for word in re.findall(r"\b(?:nsa|NSA)_\w+", name):
                    checked += 1
                    family = word.endswith("_") and any(n.startswith(word) for n in names)
                    if word not in names and not family:
                        findings.append(f"{path}:{number}: no source has the name {word}")
            for target, place in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", line):
                checked += 1
                if not leads_somewhere(path, target, place):
                    findings.append(f"{path}:{number}: the link {target}{place and '#'}{place} leads nowhere")
            for target in re.findall(r"`((?:\w+/)+[\w.-]+\.\w+)`", line):
                checked += 1
                if target.split("/")[0] not in ("build", "data", "artifacts") and not (ROOT / target).exists():
                    findings.append(f"{path}:{number}: there is no file {target}")
    return findings, f"{checked} names and paths"


def quick_compiler(folder):
    """A folder with a `cc` that is this machine's but leaves out the optimizer and the vector tiles, which are
    most of the time: what a program prints does not depend on them, and tests/package compiles them."""
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@" -O0 -U__SSE2__\n')
    compiler.chmod(0o755)
    return folder


def run_commands(script, folder):
    """Runs a block of commands in the folder: what it printed, and its exit code."""
    with tempfile.TemporaryDirectory() as tools:
        path = f"{quick_compiler(pathlib.Path(tools))}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, text=True,
                              env=os.environ | {"PATH": path}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    return done.stdout, done.returncode


def check_commands():
    findings, checked = [], 0
    for path in documents():
        blocks = fences(path)
        for index, (line, info, body) in enumerate(blocks):
            if info[1:2] != ["run"]:
                continue
            checked += 1
            with tempfile.TemporaryDirectory() as scratch:
                for entry in ROOT.iterdir():
                    if entry.name not in ("build", "data", "artifacts", ".git"):
                        (pathlib.Path(scratch) / entry.name).symlink_to(entry)
                printed, code = run_commands("\n".join(body), scratch)
            if code != 0:
                findings.append(f"{path}:{line}: exit code {code}\n{printed}")
            elif index + 1 < len(blocks) and blocks[index + 1][1][1:2] == ["output"]:
                said = "\n".join(blocks[index + 1][2]) + "\n"
                if printed != said:
                    findings.append(f"{path}:{line}: prints something else than the text says:\n{printed}")
    return findings, f"{checked} command blocks"


def check_manual():
    """The manual's program is the example's, and prints what the manual says."""
    manual = (ROOT / "nsa/nsa.h").read_text()
    program = (ROOT / "examples/embed/window.c").read_text()
    program = program[program.index("#define NSA_IMPLEMENTATION"):]
    findings = []
    if "\n".join(" " * 7 + line if line else "" for line in program.splitlines()) not in manual:
        findings.append("nsa/nsa.h: the program in its manual is not examples/embed/window.c")
    said = re.search(r'^   It prints "(.*)"\.$', manual, re.M)
    with tempfile.TemporaryDirectory() as scratch:
        compile_and_run = f"cc {ROOT}/examples/embed/window.c -I{ROOT}/nsa -lm -o window && ./window"
        printed, code = run_commands(compile_and_run, scratch)
    if code != 0 or not said or printed != said[1] + "\n":
        findings.append(f"nsa/nsa.h: the program in its manual prints: {printed}")
    return findings, "1 program"


def check_columns():
    """clang-format breaks code, not comments."""
    findings, checked = [], 0
    for folder in ("nsa", "examples", "simt", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".c", ".h", ".inl", ".cpp", ".cu", ".cuh"}:
                continue
            checked += 1
            findings += [f"{path.relative_to(ROOT)}:{number}: {len(line)} columns, 100 at most"
                         for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
    return findings, f"{checked} files"


CHECKS = {"quotes": check_quotes, "names": check_names, "commands": check_commands,
          "manual": check_manual, "columns": check_columns}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in CHECKS:
        raise SystemExit(f"usage: check_docs.py {'|'.join(CHECKS)}")
    found, what = CHECKS[sys.argv[1]]()
    for finding in found:
        print(finding)
    print(f"{what} checked, {len(found)} findings")
    sys.exit(min(len(found), 99))
