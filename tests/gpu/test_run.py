#!/usr/bin/env python3
"""tests/gpu/run without a GPU: its commands are stand-ins that pass, fail, hang or are cut short, and
what the report must still tell is looked for.

usage: test_run.py WORK_FOLDER
"""
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import types

RUN = pathlib.Path(__file__).resolve().parent / "run"
BENCHES = RUN.parents[2] / "bench" / "gpu"
sys.path.insert(0, str(BENCHES))
STANDINS = {
    "nvidia-smi": "echo 'A GPU, 9.0, 1.0'",
    "compute-sanitizer": 'while [ "${1#/}" = "$1" ]; do shift; done; exec "$@"',
    # makes the programs: each says what it was asked; some misbehave
    "cmake": """[ "$1" = --build ] || exit 0
mkdir -p "$2/bin" && cd "$2/bin"
for name in attention decode attend_slc attend_cmp attend_win attend_dense select_blocks score_blocks score_lists \\
    rank_queries compress merge gate rope block_index; do
    echo "#!/bin/sh
echo $name \\$* \\$NSA_TEST_GRAPH" >gpu_$name
done
cp "$HERE/fails" gpu_rope
cp "$HERE/hangs" gpu_gate
cp "$HERE/is_cut_short" bench_gpu
chmod +x *""",
    "fails": 'echo FIRST; i=0; while [ $i -lt 4000 ]; do echo "a line of many"; i=$((i + 1)); done\n'
             "echo LAST; exit 3",
    "trains": 'while [ "$1" != --out-dir ]; do shift; done; mkdir "$2"',  # it wants a folder of its own
    "hangs": 'trap "echo at case 7; exit 1" TERM; sleep 1000',
    "is_cut_short": """printf '{"copy_gbs": 1, "rows": [\\n {"ms": 2}' >"$2"; exit 1""",
}
failures = []


def check(ok, what):
    if not ok:
        failures.append(what)
        print(f"FAIL: {what}")


def run(work, *words, path="bin"):
    """The exit status, and the rows of the report by name."""
    environment = {**os.environ, "PATH": f"{work / path}:{os.environ['PATH']}", "HERE": str(work / "bin")}
    done = subprocess.run([sys.executable, RUN, "--build", work / "build", "--jobs", "4", *words],
                          env=environment, text=True, stdout=subprocess.PIPE, timeout=120)
    file = work / "build" / "gpu.json"
    report = json.loads(file.read_text()) if file.exists() else {"rows": [], "failed": []}
    return done.returncode, {row["name"]: row for row in report["rows"]}, report["failed"]


def test_ended(work):
    """Who ends the script, while a program hangs that does not hear, has ended that too."""
    told = work / "told"
    os.mkfifo(told)
    (work / "bin" / "hangs").write_text('#!/bin/sh\ntrap "" TERM; exec >"$HERE/../told"; echo there; sleep 60\n')
    environment = {**os.environ, "PATH": f"{work / 'bin'}:{os.environ['PATH']}", "HERE": str(work / "bin")}
    script = subprocess.Popen([sys.executable, RUN, "--build", work / "build", "--only", "test"], env=environment,
                              stdout=subprocess.DEVNULL)
    with open(told) as pipe:
        check(pipe.readline() == "there\n", "a program that hangs")
        script.terminate()
        check(script.wait() == 128 + signal.SIGTERM, f"how the script ended: {script.returncode}")
        check(select.select([pipe], [], [], 30)[0], "what hung holds the pipe, and a GPU would be held, too")


def test_shares(work):
    """A step of the last part may take all the time that is left: of the last that has steps."""
    loader = importlib.machinery.SourceFileLoader("run", str(RUN))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader("run", loader))
    loader.exec_module(script)
    given = types.SimpleNamespace(quick=True, build=work / "build", dry_run=True, jobs=2)
    shares = [(steps[0]["name"], share) for steps, _, share in script.asked(given, ["whole", "bench", "test"])]
    check(shares == [("test attention", 1 / 3), ("bench", 1)], f"{shares}")


def test_peers():
    """bench/gpu/peers.py where there is no GPU to time: a pass of a peer fails, and it says so alone."""
    import peers

    def fails():
        raise RuntimeError("not this shape")

    timer = types.SimpleNamespace(record=int, synchronize=int, elapsed_time=lambda end: 200.0)
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(Event=lambda enable_timing: timer,
                                                             empty_cache=int))
    for calls, said in ((lambda *of: {"fwd": int, "bwd": fails, "step": int}, [200, None, 200]),
                        (lambda *of: fails(), [None])):
        rows = peers.measure(torch, "a peer", calls, peers.SHAPES[0], 8192)
        check([row["ms"] for row in rows] == said, f"times of a peer: {rows}")
        check(all((row["ms"] is None) == (row["reason"] == "RuntimeError: not this shape") for row in rows),
              f"reasons of a peer: {rows}")


def test_no_torch(work):
    """The same where PyTorch is none to measure: every row says why."""
    package = work / "torch" / "nn" / "attention"
    package.mkdir(parents=True)
    (work / "torch" / "nn" / "__init__.py").touch()
    (package / "__init__.py").touch()
    for text, reason in (("raise OSError('no libthat.so')", "no libthat.so"), (
            "class cuda:\n    is_available = bool\n__version__ = '9+cpu'", "torch 9+cpu finds no GPU")):
        (work / "torch" / "__init__.py").write_text(text + "\n")
        done = subprocess.run([sys.executable, "-B", BENCHES / "peers.py", "--quick", "--json", work / "peers.json"],
                              env={**os.environ, "PYTHONPATH": str(work)}, stdout=subprocess.DEVNULL)
        rows = json.loads((work / "peers.json").read_text())["rows"] if done.returncode == 0 else []
        check(len(rows) == 6 and all(row["reason"] == reason for row in rows), f"{reason}: {rows[:1]}")
        (work / "peers.json").unlink(missing_ok=True)


def test_predict(work):
    """bench/gpu/predict.py with a report: what was measured, of which machine; without one: that it was
    not."""
    report = {"machine": {"name": "A GPU", "driver": "1.0"}, "commit": "abc", "date": "2026-01-02",
              "rows": [{"name": "bench", "result": {"rows": [
                  {"branch": "nsa", "pass": "fwd", "heads": 64, "dim": 128, "dim_v": 128, "tokens": 65536,
                   "ms": ms} for ms in (None, 98.76)]}}]}
    (work / "gpu.json").write_text(json.dumps(report))
    for words, there, not_there in (((), "no GPU was at hand", "98.8"), (
            ("--measured", work / "gpu.json"), "measured on\nA GPU, driver 1.0 (abc, 2026-01-02)", "at hand")):
        done = subprocess.run([sys.executable, BENCHES / "predict.py", *words], text=True,
                              stdout=subprocess.PIPE)
        check(done.returncode == 0 and there in done.stdout and not_there not in done.stdout, f"{words}: {there}")
        check(("| 98.8 |" in done.stdout) == bool(words), f"{words}: the time that was measured")


def main():
    work = pathlib.Path(sys.argv[1]).resolve()
    shutil.rmtree(work, ignore_errors=True)
    (work / "bin").mkdir(parents=True)
    (work / "none").mkdir()
    for name, text in STANDINS.items():
        (work / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (work / "bin" / name).chmod(0o755)
    (work / "none" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (work / "none" / "nvidia-smi").chmod(0o755)

    status, rows, failed = run(work, path="none")
    check(status == 77 and not rows, "without a GPU it is skipped")

    status, rows, failed = run(work, "--only", "test,bench", "--minutes", "0.4")
    check(status == 1 and sorted(failed) == ["bench", "test gate", "test rope"], f"failed: {failed}")
    check(rows["test decode"]["tail"] == "decode 3\n", f"of decode: {rows['test decode']}")
    tail = rows["test rope"]["tail"]
    check(rows["test rope"]["status"] == 3 and len(tail) < 33000, "how the failing one ended")
    check(tail.startswith("FIRST") and "characters left out" in tail and tail.endswith("LAST\n"),
          "begin and end of what the failing one said")
    tail = rows["test gate"]["tail"]
    check(rows["test gate"]["status"] == 124 and "at case 7" in tail and "no end after" in tail,
          f"where the one that hangs was: {tail}")
    given = re.search("no end after ([0-9]+) s", tail)
    check(given and int(given[1]) <= 8, "one that hangs leaves time to the next part: a third of what is left")
    check(rows["bench"]["result"] == {"copy_gbs": 1, "rows": [{"ms": 2}]},
          f"what a bench had measured when it was ended: {rows['bench']}")

    status, rows, failed = run(work, "--only", "test,bench", "--minutes", "0.04")
    check("not begun" in rows.get("test gate", rows["configure"])["tail"], "what there was no time for")

    # one program does not build: the others run, and what an earlier build left of it does not
    for name in ("gpu_merge", "train_125m_cuda"):
        (work / "build" / "bin" / name).write_text("#!/bin/sh\necho OLD\n")
        (work / "build" / "bin" / name).chmod(0o755)
    (work / "bin" / "cmake").write_text((work / "bin" / "cmake").read_text() + "\nrm gpu_merge; exit 2\n")
    for name in ("fails", "hangs"):
        (work / "bin" / name).write_text("#!/bin/sh\necho $*\n")
    status, rows, failed = run(work, "--only", "test,trainer")
    check(status == 1 and failed == ["build", "test merge", "trainer build"], f"failed: {failed}")
    check("left out" in rows["trainer 100 steps"]["tail"], f"an older trainer: {rows['trainer 100 steps']}")
    check("-k" in rows["build"]["command"], f"a build that goes on: {rows['build']['command']}")
    check(rows["test attention"]["status"] == 0, f"{rows['test attention']}")
    (work / "bin" / "cmake").write_text(f"#!/bin/sh\n{STANDINS['cmake']}\n")

    status, rows, failed = run(work, "--only", "trainer")
    check(status == 0 and "left out" in rows["trainer operations"]["tail"], "a trainer that is not built")
    (work / "bin" / "cmake").write_text(f"#!/bin/sh\n{STANDINS['cmake']}\ncp \"$HERE/trains\" train_125m_cuda\n")
    for times in ("once", "again"):
        status, rows, failed = run(work, "--only", "trainer")
        check(status == 0 and not failed, f"a trainer {times}: {failed}")
        run(work, "--only", "trainer", "--dry-run")
        check((work / "build" / "trainer_100_steps").is_dir(), "what a dry run leaves of the one before")
    status, rows, failed = run(work, "--only", "graph,sanitizer")
    check(status == 0 and not failed, f"all pass: {failed}")
    check(len(rows) == 2 + 16 + 60, f"{len(rows)} steps")
    check(rows["graph attention"]["tail"] == "attention quick 1\n", "a graph is asked for")
    check(rows["racecheck decode"]["tail"] == "decode short\n", f"{rows['racecheck decode']}")
    test_ended(work)
    test_shares(work)
    test_peers()
    test_no_torch(work)
    test_predict(work)
    print(f"test_run: {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
