#!/usr/bin/env python3
"""Instructions that each branch and pass executes, counted by valgrind: figures that a noisy machine
does not change, so that a later version can be held beside this one.

  count_instructions.py PROGRAM [--json FILE]    PROGRAM is the built count_attention
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

SUFFIX = {"fwd": "", "bwd": "_backward"}


def output(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def main(arguments):
    json_wanted = arguments[1:2] == ["--json"] and len(arguments) == 3
    if not (json_wanted or len(arguments) == 1) or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        pairs = output("valgrind", "-q", "--tool=callgrind",
                       f"--callgrind-out-file={folder}/out", arguments[0])
        costs = output("callgrind_annotate", "--inclusive=yes", "--threshold=100", f"{folder}/out")
    rows = []
    for direction, suffix in SUFFIX.items():
        for branch, count in (line.split() for line in pairs.splitlines()):
            found = re.search(rf"^ *([\d,]+) .*:run_{branch}{suffix}\b", costs, re.M)
            if not found:
                continue
            instructions = int(found[1].replace(",", ""))
            per_pair = instructions / int(count) if int(count) else None
            rows.append({"branch": branch, "pass": direction,
                         "million_instructions": round(instructions / 1e6, 2),
                         "per_pair": per_pair and round(per_pair, 2)})
            print(f"{branch:6} {direction} {instructions / 1e6:9.2f} million")
    if json_wanted:
        report = {"machine": "valgrind, AVX2 tiles, " + output("cc", "--version").split("\n")[0],
                  "date": output("date", "-u", "+%Y-%m-%d").strip(),
                  "commit": output("git", "describe", "--always", "--dirty", "--exclude=*").strip(),
                  "rows": rows}
        pathlib.Path(arguments[2]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
