"""hosts.py RESULTS HOST LOG COMMIT: writes the row of a host into RESULTS, with the versions that this Python has, after its
tests.

Twin: hosts.sh, which calls it. Not here: running anything.
"""
import datetime
import importlib.metadata
import json
import pathlib
import platform
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
from record_runs import commit, machine  # noqa: E402,F401


def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:  # a distribution's own package
        return str(__import__(name).__version__)
    except ImportError:
        return None


def write_row(results, row, commit, key="host"):
    """A row takes the place of the last of its key; all rows are of one commit, so those of another go."""
    path = pathlib.Path(results)
    report = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = [other for other in report["rows"] if other[key] != row[key] and report["commit"] == commit] + [row]
    report = dict(machine=machine(), date=datetime.date.today().isoformat(), commit=commit,
                  rows=sorted(rows, key=lambda x: x[key]))
    path.write_text(json.dumps(report, indent=1) + "\n")


def main(results, host, log, commit):
    said = pathlib.Path(log).read_text()
    tests, skipped = re.search(r"Ran (\d+) tests", said), re.search(r"OK \(skipped=(\d+)\)", said)
    fuzz = re.search(r"(\d+) calls computed, (\d+) refused, (\d+) arrays", said)
    row = dict(host=host, python=platform.python_version(), **{name: version(name) for name in ("numpy", "torch", "jax")},
               tests=int(tests[1]), skipped=int(skipped[1]) if skipped else 0, fuzzed_calls=int(fuzz[1]) + int(fuzz[2]))
    write_row(results, row, commit)


if __name__ == "__main__":
    main(*sys.argv[1:])
