#!/usr/bin/env python3
"""Checks that the folders of examples/trainer include only what they stand on.

  check_includes.py            checks the tree
  check_includes.py planted    checks that each kind of wrong include is found: plants one at a time in the
                               text of a file, in memory

A header is named from examples/trainer ("data/tokenizer.h"); nsa/ and what is beside the file in
a program's folder go without. Exit code: the number of findings, at most 99. Not here: system headers,
and the tests, which may include anything.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# A folder, and the folders that it may include beside itself.
STANDS_ON = {
    "base": [],
    "config": ["base"],
    "ops": ["base"],
    "data": ["base", "config"],
    "telemetry": ["base", "config"],
    "dist": ["base", "config", "ops"],
    "model": ["base", "ops", "dist"],
    "checkpoint": ["base", "config", "data"],
    "train": ["base", "config", "ops", "data", "telemetry", "dist", "model", "checkpoint"],
}
# Programs: every folder. A header that only its own folder may include:
INSIDE = {"config/config_table.h", "data/bpe.h", "data/bpe_vocab.h", "dist/dist_link.h", "train/train_inside.h"}
LIBRARY = {"nsa.h", "nsa_cuda.cuh", "kernels/rows.cuh"}
LENT = {"inspect/measure.h"}  # of one program to another, named from examples
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)


def sources():
    """Every C and CUDA file under examples, with its path from there."""
    found = [path for path in EXAMPLES.rglob("*") if path.suffix in {".c", ".h", ".cu", ".cuh"}]
    return {path.relative_to(EXAMPLES).as_posix(): path.read_text() for path in sorted(found)}


def check_one(name, target, files):
    """What is wrong with one include line of the file `name`, or None."""
    parts = name.split("/")
    folder = parts[1] if parts[0] == "trainer" else None
    if target in LIBRARY or target in LENT and not folder or not folder and f"{parts[0]}/{target}" in files:
        return None
    if f"trainer/{target}" not in files or "/" not in target:
        return "is no header of examples/trainer, named from there"
    other = target.split("/")[0]
    if target in INSIDE and other != folder:
        return f"is for {other}/ alone"
    if folder and other != folder and other not in STANDS_ON[folder]:
        return f"is above: {folder}/ stands on {', '.join(STANDS_ON[folder]) or 'nothing'}"
    return None


def check(files):
    for name, text in files.items():
        parts = name.split("/")
        if parts[0] in ("embed", "ggml"):
            continue  # they stand on nsa.h and on other people's headers, not on the trainer
        if parts[0] == "trainer" and parts[1] not in STANDS_ON:
            yield f"examples/{name}: {parts[1]}/ is not in the table of check_includes.py"
            continue
        for match in INCLUDE.finditer(text):
            wrong = check_one(name, match[1], files)
            if wrong:
                line = text.count("\n", 0, match.start()) + 1
                yield f'examples/{name}:{line}: "{match[1]}" {wrong}'


# A file, the include that is added to it, and what must be said.
PLANTED = [
    ("trainer/base/fault.h", "config/config.h", "stands on nothing"),
    ("trainer/data/source.c", "telemetry/csv.h", "data/ stands on base, config"),
    ("trainer/model/model.c", "train/train.h", "model/ stands on base, ops, dist"),
    ("trainer/train/train.c", "config/config_table.h", "is for config/ alone"),
    ("generate/main.c", "train/train_inside.h", "is for train/ alone"),
    ("generate/main.c", "model.h", "named from there"),
    ("trainer/data/data.c", "source.h", "named from there"),
    ("trainer/data/data.c", "../config/config.h", "named from there"),
    ("trainer/ops/cuda/ops_cuda.cu", "data/data.h", "ops/ stands on base"),
]


def planted(files):
    for name, target, words in PLANTED:
        changed = dict(files)
        changed[name] += f'\n#include "{target}"\n'
        findings = list(check(changed))
        if len(findings) != 1 or words not in findings[0]:
            yield f'"{target}" planted in {name}: found {findings}, not one with "{words}"'


def main(arguments):
    if arguments not in ([], ["planted"]):
        raise SystemExit("usage: check_includes.py [planted]")
    files = sources()
    findings = list(planted(files) if arguments else check(files))
    for finding in findings:
        print(finding)
    print(f"{len(PLANTED) if arguments else len(files)} checked, {len(findings)} findings")
    return min(len(findings), 99) if files else 99


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
