#!/usr/bin/env python3
"""Writes the tables of measured figures into README.md and docs/*.md; nothing else may write them.

  write_numbers.py            brings every table up to date with the file that it names
  write_numbers.py --check    changes nothing; exit code 1 where a table differs from its file

A table stands between two comments, the first of which says what is in it:

  <!-- numbers bench/results/cpu.json: branch, tokens, ms where pass=fwd, dim=64 -->
  <!-- end of numbers -->

The file is what bench_attention --json or record_runs.py wrote: one object with machine, date, commit
and rows. `where` may be left out; a row is shown if it has all of the values given.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- numbers ([^:\n]+): ([^\n]+?) -->\n)(.*?)(<!-- end of numbers -->)", re.S)


def cell(value):
    """A figure as it is printed: four significant digits, thousands kept together."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10000 else f"{value:.0f}"
    return "" if value is None else str(value)


def table(source, spec):
    """The lines between the comments."""
    report = json.loads((ROOT / source).read_text())
    columns, _, conditions = spec.partition(" where ")
    columns = [name.strip() for name in columns.split(",")]
    wanted = dict(pair.strip().split("=") for pair in conditions.split(",")) if conditions else {}
    rows = [row for row in report["rows"]
            if all(cell(row.get(name)) == value for name, value in wanted.items())]
    if not rows:
        raise SystemExit(f"{source} has no row where {conditions or 'anything'}")
    missing = [name for name in columns if name not in rows[0]]
    if missing:
        raise SystemExit(f"{source}: its rows have no {', '.join(missing)}; they have {', '.join(rows[0])}")
    lines = ["| " + " | ".join(name.replace("_", " ") for name in columns) + " |",
             "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in columns) + " |" for row in rows]
    lines += ["", f"Measured {report['date']} at commit {report['commit']} on {report['machine']}.", ""]
    return "\n".join(lines)


def main(arguments):
    if arguments not in ([], ["--check"]):
        raise SystemExit("usage: write_numbers.py [--check]")
    differing, tables = 0, 0
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
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
