"""Python packages that a test reads our files with: those of this Python, or fetched into FOLDER.

need(FOLDER, NAME...) makes them importable, or ends the test: with 77, skipped, where they cannot be had;
with 1 on CI, where a check must not be left out in silence. Twin: python-packages.txt. Tests import it.
"""
import fcntl
import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys


def is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of what stands before a dot
        return False


def missing(names):
    importlib.invalidate_caches()
    return [name for name in names if not is_there(name)]


def fetch(place, names):
    if missing(names):
        wanted = pathlib.Path(__file__).with_name("python-packages.txt")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target",
                        place, "--requirement", wanted], stderr=subprocess.DEVNULL)


def need(folder, *names):
    place = pathlib.Path(folder) / "python-packages"
    if missing(names):
        sys.path.insert(0, str(place))
        with open(f"{place}.lock", "w") as lock:  # until it has ended, pip leaves packages there that are not whole
            fcntl.flock(lock, fcntl.LOCK_EX)
            fetch(place, names)
    if missing(names):
        print(f"skipped: {sys.executable} has no {', '.join(missing(names))}, and pip could not fetch it")
        sys.exit(1 if os.environ.get("CI") else 77)
