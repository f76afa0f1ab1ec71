#!/usr/bin/env python3
"""Counts what makes nsa/src easy or hard to change, and holds its limits: lines of a file (of nsa/kernels too),
parameters of a function.

  count_house.py            prints the table; exit code: how many limits are passed, at most 99
  count_house.py planted    plants each fault in a text in memory and checks that it is found

A function may have six parameters. Those of LONG have more; none may be added, none may grow, and one that has
become shorter leaves the list. Not here: lines of a function (.clang-tidy), columns (check_docs.py).
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINES = {"tiles.inl": 720}  # of a file; 750 elsewhere
PARAMETERS = 6
LONG = {"NSA__T(round_pairs)": 7, "nsa_decode": 7}
# Where a branch may be told from another: its rule for spans, and its row of traits.
SPANS = {"nsa__span", "nsa__span_begin", "nsa__span_end"}
FUNCTION = re.compile(r"^(?:static|NSA_API|NSA__\w+)\b[^;={}()]*(?:\([^()]*\)[^;={}()]*)??"
                      r"\b(nsa_\w+|NSA__T\(\w+\))\(([^;{}]*)\)\s*\{(.*?)^\}", re.M | re.S)
BRANCH_TEST = re.compile(r"\bbranch [!=]= NSA__")
FORMAT = re.compile(r"(?:->|\.)pairs\b")  # outside operand.h, whose subject they are
PREFETCH = re.compile(r"\bnsa__fetch\w*\(|NSA__PREFETCH")  # not who takes rows from a walker


def bare(text):
    """The text without comments; lines stay."""
    return re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)


def functions(text):
    """(name, number of parameters, body) of every function."""
    for name, parameters, body in FUNCTION.findall(text):
        flat = re.sub(r"\([^()]*\)", "", re.sub(r"\([^()]*\)", "", parameters))
        yield name, 0 if flat.strip() in ("", "void") else flat.count(",") + 1, body


def fields(text, struct):
    """How many fields a struct has."""
    body = re.search(rf"struct {struct} \{{(.*?)^\}}", text, re.M | re.S)
    if not body:
        return 0
    inner = re.sub(r"\(\*(\w+)\)\([^()]*\)", r"\1", body[1])
    return sum(line.count(",") + 1 for line in inner.split(";") if line.strip())


def table(texts):
    """(what is counted, number) of {file name: text}."""
    code = {name: bare(text) for name, text in texts.items()}
    every = [(name, *function) for name, text in code.items() for function in functions(text)]
    attend = [name for name in code if name.startswith(("attend_", "schedule"))]
    joined = "\n".join(code.values())
    lines = {name: text.count("\n") for name, text in texts.items()}
    in_spans = "".join(body for _, function, _, body in every if function in SPANS)
    yield "largest file of nsa/src", max(lines[name] for name in lines if name not in LINES)
    yield "lines of tiles.inl", lines.get("tiles.inl", 0)
    yield "lines of nsa/src", sum(lines.values())
    yield "lines of attention's files", sum(lines[name] for name in attend)
    yield "branch tests outside spans", len(BRANCH_TEST.findall(joined)) - len(BRANCH_TEST.findall(in_spans))
    yield "lines that know a format", sum(bool(FORMAT.search(line))
                                          for name in attend for line in code[name].split("\n"))
    yield "fields of the plan", fields(joined, "nsa__attend_plan")
    yield "functions with more parameters than six", sum(count > PARAMETERS for _, _, count, _ in every)
    yield "functions that prefetch", sum(bool(PREFETCH.search(body)) for *_, body in every)
    yield "functions", len(every)


def findings(texts, known, kernels=None):
    """What passes a limit; `known`: the functions that may have more parameters."""
    for name, text in (texts | (kernels or {})).items():
        lines, most = text.count("\n"), LINES.get(name, 750)
        if lines > most:
            yield f"{name} has {lines} lines, {most} at most"
    counts = {name: count for text in texts.values() for name, count, _ in functions(bare(text))}
    for name, count in counts.items():
        if count > max(PARAMETERS, known.get(name, 0)):
            yield f"{name} has {count} parameters, {max(PARAMETERS, known.get(name, 0))} at most"
    for name, most in known.items():
        if counts.get(name, 0) < most:
            yield f"{name} has {counts.get(name, 0)} parameters now: its {most} in LONG must follow, or go"


def planted(texts):
    seven = f"({', '.join(f'int {name}' for name in 'abcdefg')})"
    for old, new, words in [("\n", "\n" * 751, "lines"), ("nsa__nan(void)", "nsa__nan" + seven, "7 parameters")]:
        name = next(name for name, text in texts.items() if old in text)
        found = list(findings(texts | {name: texts[name].replace(old, new, 1)}, LONG))
        if len(found) != 1 or words not in found[0]:
            yield f"planted for `{words}` in {name}: found {found}"
    if not list(findings(texts, LONG | {"nsa__gone": 7})):
        yield "an entry of LONG that is no function passes"


def main(arguments):
    if arguments not in ([], ["planted"]):
        raise SystemExit("usage: count_house.py [planted]")
    texts, kernels = ({path.name: path.read_text() for path in sorted((ROOT / folder).iterdir())}
                      for folder in ("nsa/src", "nsa/kernels"))
    found = list(planted(texts) if arguments else findings(texts, LONG, kernels))
    for what, number in () if arguments else table(texts):
        print(f"{number:6} {what}")
    print("\n".join(found + [f"count_house: {len(found)} findings"]))
    return min(len(found), 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
