#!/usr/bin/env python3
"""Writes the tables of measured figures into README.md, docs/*.md, python/README.md and
tests/simt/README.md; nothing else may write them.

  write_numbers.py            brings every table up to date with the file that it names
  write_numbers.py --check    changes nothing; exit code 1 where a table differs from its file

A table stands between two comments, the first of which says what is in it:

  <!-- numbers bench/results/cpu.json: branch, tokens, ms where pass=fwd, dim=64 -->
  <!-- end of numbers -->

The file is what bench_attention --json or record_runs.py wrote: one object with machine, date, commit
and rows. `where` may be left out; a row is shown if it has all of the values given, of which each may be
several with | between them, hold *, or be empty where a row has no such figure. `ms: layers by tokens` is a
table of ms with a row for each number of layers and a column for each of tokens:

  <!-- numbers bench/results/tinylm.json: ms: layers by tokens where model=dim 128*, batch=1 -->

Rows of several files may stand in one table: their names with + between them. Without `where`'s rows for one
of its places a crossed table has a dash there. `digits 2` before `where` rounds to as many significant ones.
"""
import fnmatch
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- numbers ([^:\n]+): ([^\n]+?) -->\n)(.*?)(<!-- end of numbers -->)", re.S)


def cell(value, digits=None):
    """A figure as it is printed: at most four significant digits, or just so many; thousands together."""
    if isinstance(value, float) and abs(value) < 10000:
        return f"{value:#.{digits}g}".rstrip(".") if digits else f"{value:.4g}"
    return "" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)


def selected(source, rows, conditions):
    wanted = re.findall(r"(\w+)=(.*?)(?=, \w+=|$)", conditions)
    found = [row for row in rows
             if all(any(fnmatch.fnmatchcase(cell(row.get(name)), value) for value in values.split("|"))
                    for name, values in wanted)]
    if not found or (conditions and not wanted):
        raise SystemExit(f"{source} has no row where {conditions or 'anything'}")
    return found


def lines_of(header, rows):
    printed = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return [printed[0], "|" + "---|" * len(header), *printed[1:]]


def crossed(source, rows, value, down, across, digits):
    """A row for each value of `down`, a column for each of `across`; a dash where nothing was measured."""
    at = {(row[down], row[across]): cell(row[value], digits) or "-" for row in rows}
    if len(at) != len(rows):
        raise SystemExit(f"{source}: several rows have the same {down} and {across}")
    downs, acrosses = (list(dict.fromkeys(row[name] for row in rows)) for name in (down, across))
    return lines_of([f"{down}, {across}:".replace("_", " "), *map(cell, acrosses)],
                    [[cell(d), *(at.get((d, a), "-") for a in acrosses)] for d in downs])


def measured(reports):
    """When, of what and on what the figures were taken."""
    said = [", ".join(dict.fromkeys(str(report[name]) for report in reports))
            for name in ("date", "commit", "machine")]
    return "Measured {} at commit {} on {}.".format(*said)


def table(source, spec):
    """The lines between the comments."""
    reports = [json.loads((ROOT / name).read_text()) for name in source.split(" + ")]
    columns, _, conditions = spec.partition(" where ")
    columns, _, digits = columns.partition(" digits ")
    rows = selected(source, [row for report in reports for row in report["rows"]], conditions)
    cross = re.fullmatch(r"(\w+): (\w+) by (\w+)", columns)
    columns = list(cross.groups()) if cross else [name.strip() for name in columns.split(",")]
    missing = [name for name in columns if name not in rows[0]]
    if missing:
        raise SystemExit(f"{source}: its rows have no {', '.join(missing)}; they have {', '.join(rows[0])}")
    if cross:
        lines = crossed(source, rows, *columns, int(digits or 0))
    else:
        lines = lines_of([name.replace("_", " ") for name in columns],
                         [[cell(row.get(name), int(digits or 0)) for name in columns] for row in rows])
    return "\n".join([*lines, "", measured(reports), ""])


def main(arguments):
    if arguments not in ([], ["--check"]):
        raise SystemExit("usage: write_numbers.py [--check]")
    differing, tables = 0, 0
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
                 ROOT / "python" / "README.md", ROOT / "tests" / "simt" / "README.md"]:
        old = path.read_text()
        tables += len(BLOCK.findall(old))
        new = BLOCK.sub(lambda m: m[1] + table(m[2].strip(), m[3]) + m[5], old)
        if new == old:
            continue
        differing += 1
        if arguments:
            print(f"{path.relative_to(ROOT)}: a table differs from the file that it names; "
                  "run scripts/write_numbers.py")
        else:
            path.write_text(new)
            print(f"wrote {path.relative_to(ROOT)}")
    print(f"{tables} tables")
    return 1 if arguments and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
