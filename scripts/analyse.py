#!/usr/bin/env python3
"""Static analysis of nsa.h and of the examples: clang-tidy with the checks of .clang-tidy, and
cppcheck. Prints what they find; exit code 1 where they find anything.

  analyse.py BUILD [TOOL...]      BUILD: a configured tree, such as build/release, whose
                                  compile_commands.json says how each file is compiled

TOOL is tidy or cppcheck; both without one. A tool that is not there is named and left out.
What each finding is worth was decided once: docs/hardening.md says what is switched off, and why.
"""
import json
import pathlib
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPPCHECK = ["cppcheck", "--quiet", "--std=c99", "--enable=warning,performance,portability", "--error-exitcode=1",
            "--suppress=*:/usr/*"]


def commands(build):
    """What is looked at: each C file of the examples but the programs that hold an implementation of their
    own, and nsa.h by itself, with the options that it is compiled with; of a file that is compiled several
    times the first."""
    files = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = pathlib.Path(entry["file"]).resolve().relative_to(ROOT)
        ours = file.parts[0] == "examples" and file.parts[1] != "embed"
        if file.suffix == ".c" and (ours or file.name == "nsa_impl.c"):
            words = shlex.split(entry["command"])
            first = next(i for i, word in enumerate(words) if word.startswith("-"))
            files.setdefault(str(file), words[first:words.index("-o")])
    return files


def tidy(build, file, options):
    return ["clang-tidy", "--quiet", "-p", str(build), "--warnings-as-errors=*", str(ROOT / file)]


def cppcheck(build, file, options):
    """cppcheck's own preprocessor does not know that an argument of ## may be empty: the compiler's does."""
    text = build / "analyse" / file.replace("/", "_").replace(".c", ".i")
    text.parent.mkdir(exist_ok=True)
    subprocess.run(["gcc", *options, "-E", "-o", text, str(ROOT / file)], check=True)
    return [*CPPCHECK, str(text)]


TOOLS = {"tidy": ("clang-tidy", tidy), "cppcheck": ("cppcheck", cppcheck)}


def main(words):
    if not words or not set(words[1:]) <= set(TOOLS):
        raise SystemExit(__doc__)
    build, findings, looked = pathlib.Path(words[0]).resolve(), 0, 0
    for name in words[1:] or TOOLS:
        program, command = TOOLS[name]
        if not shutil.which(program):
            print(f"left out: no {program} on this machine")
            continue
        for file, options in commands(build).items():
            done = subprocess.run(command(build, file, options), cwd=build, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT)
            looked += 1
            if done.returncode:
                findings += 1
                print(f"{name}: {file}", done.stdout, sep="\n", flush=True)
    print(f"{looked} times a tool looked at a file; {findings} with findings")
    return findings > 0 or not looked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
