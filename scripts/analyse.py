#!/usr/bin/env python3
"""Static analysis of nsa.h and of the examples: clang-tidy with the checks of .clang-tidy, cppcheck,
and gcc's -fanalyzer. Prints what they find; exit code 1 where they find anything.

  analyse.py BUILD [TOOL...]      BUILD: a configured tree, such as build/release, whose
                                  compile_commands.json says how each file is compiled

TOOL is tidy, cppcheck or analyzer; all of them without one. One that is not there is named and left out.
What each finding is worth was decided once: docs/hardening.md says what is switched off, and why.
"""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPPCHECK = ["cppcheck", "--quiet", "--std=c99", "--enable=warning,performance,portability", "--error-exitcode=1",
            "--suppress=*:/usr/*"]
# Following every call through nsa.h did not end in minutes. So each function is looked at by itself, a call
# being a summary, with at most two states a place; and not at what is uninitialised, of which summaries know
# nothing.
ANALYZER = ["-O0", "-Wno-error", "-fanalyzer", "-fanalyzer-call-summaries",
            "--param", "analyzer-min-snodes-for-call-summary=0", "--param", "analyzer-max-enodes-per-program-point=2",
            "-Wno-analyzer-use-of-uninitialized-value", "-Wno-analyzer-too-complex", "-fanalyzer-verbosity=0",
            "-fdiagnostics-plain-output", "-S", "-o", "/dev/null"]
# What it says and is not so, docs/hardening.md says why.
ARGUED = "|".join((r"nsa\.h:.*: shift by count \('23'\) >= precision of type ",
                   r"source_corpus\.c:.*: dereference of NULL '\*c\.folder' ",
                   r"restore\.c:.*: leak of 'values' "))


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


def findings_of(build, command):
    """What a tool prints if it ends with an error."""
    done = subprocess.run(command, cwd=build, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout if done.returncode else ""


def tidy(build, file, options):
    return findings_of(build, ["clang-tidy", "--quiet", "-p", str(build), "--warnings-as-errors=*", str(ROOT / file)])


def cppcheck(build, file, options):
    """cppcheck's own preprocessor does not know that an argument of ## may be empty: the compiler's does."""
    text = build / "analyse" / file.replace("/", "_").replace(".c", ".i")
    text.parent.mkdir(exist_ok=True)
    subprocess.run(["gcc", *options, "-E", "-o", text, str(ROOT / file)], check=True)
    return findings_of(build, [*CPPCHECK, str(text)])


def analyzer(build, file, options):
    done = subprocess.run(["gcc", *options, *ANALYZER, str(ROOT / file)], cwd=build, text=True,
                          env={**os.environ, "LC_ALL": "C"}, stderr=subprocess.PIPE)
    return "".join(line for line in done.stderr.splitlines(True)
                   if done.returncode or ("warning: " in line and not re.search(ARGUED, line)))


TOOLS = {"tidy": ("clang-tidy", tidy), "cppcheck": ("cppcheck", cppcheck), "analyzer": ("gcc", analyzer)}


def main(words):
    if words[:1] in (["-h"], ["--help"]):
        return print(__doc__)
    if not words or not set(words[1:]) <= set(TOOLS):
        raise SystemExit(__doc__)
    build, findings, looked = pathlib.Path(words[0]).resolve(), 0, 0
    if not (build / "compile_commands.json").is_file():
        raise SystemExit(f"analyse.py: {build} has no compile_commands.json: configure it with cmake first")
    for name in words[1:] or TOOLS:
        program, look = TOOLS[name]
        if not shutil.which(program):
            print(f"left out: no {program} on this machine")
            continue
        for file, options in commands(build).items():
            text = look(build, file, options)
            looked += 1
            if text:
                findings += 1
                print(f"{name}: {file}", text, sep="\n", flush=True)
    print(f"{looked} times a tool looked at a file; {findings} with findings")
    return findings > 0 or not looked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
