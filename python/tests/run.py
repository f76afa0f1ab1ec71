"""Runs the tests of one file with the package that was built into a folder.

    run.py FOLDER PACKAGES test_core        PACKAGES: where packages are fetched to that this Python lacks
    run.py FOLDER PACKAGES train ARG...     examples/train.py
    run.py FOLDER PACKAGES convert ARG...   convert.py
    run.py FOLDER PACKAGES fuzz ARG...      fuzz.py

Exit code 77, skipped, where the host that the test needs is not on this machine; on CI that is a failure.
"""
import importlib
import os
import pathlib
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "trainer"))
import packages  # noqa: E402

NEEDS = {"test_core": ["numpy"], "test_torch": ["numpy", "torch"], "test_jax": ["numpy", "jax"],
         "test_rope": ["numpy"], "train": ["torch"], "convert": ["torch"], "fuzz": ["numpy"]}
PROGRAMS = ("train", "convert", "fuzz")  # with arguments of their own


def main(arguments):
    if len(arguments) < 3 or arguments[2] not in NEEDS or (len(arguments) > 3 and arguments[2] not in PROGRAMS):
        sys.exit(__doc__)
    folder, fetched, name = arguments[:3]
    needs = NEEDS[name] + ["torch"] * (arguments[2:4] == ["fuzz", "torch"])
    # A distribution's packages belong to its own Python, which need not be the first in PATH.
    system = "/usr/bin/python3"
    if packages.missing(needs) and os.path.realpath(sys.executable) != os.path.realpath(system):
        test = "import " + ", ".join(needs)
        if subprocess.run([system, "-c", test], stderr=subprocess.DEVNULL).returncode == 0:
            os.execv(system, [system, __file__, *arguments])
    packages.need(fetched, *needs)
    sys.path[:0] = [folder, str(HERE)]
    if name in PROGRAMS:
        sys.path.insert(0, str(HERE.parent / "examples"))
        sys.argv[1:] = arguments[3:]
        return importlib.import_module(name).main()
    result = unittest.TextTestRunner(verbosity=1).run(unittest.defaultTestLoader.loadTestsFromName(name))
    return not result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
