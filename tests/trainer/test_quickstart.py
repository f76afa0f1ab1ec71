#!/usr/bin/env python3
"""./quickstart where nothing can be installed, and what it leaves: the programs and the next step that it names.

usage: test_quickstart.py SOURCE FOLDER BIN. Twin: quickstart. Configuring and building are a stand-in that takes the
programs from BIN; a user without root or sudo is one, too. What a bare machine gets is `./quickstart` itself.
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

source, folder, programs = (pathlib.Path(word).resolve() for word in sys.argv[1:4])
TOOLS = ("bash sh env dirname mkdir cat sed grep xargs mktemp rm mv find sort ln nproc getconf gzip tr sleep cp "
         "true head").split()
SMALL = ("--steps 2 --dim 32 --layers 1 --heads 2 --kv-groups 1 --seq-len 256 --batch-size 2 --log-every 1 "
         "--dataset text --data text").split()
LINK = f'cd {folder}; case " $* " in *" --build "*) shift 5; mkdir -p build/quickstart/bin; for p; do ' \
       f'ln -sf {programs}/$p build/quickstart/bin/$p; done ;; *) echo "-- nsa 0: stand-in"; cat report ;; esac'
checks = 0


def check(holds, *what):
    global checks
    checks += 1
    if not holds:
        sys.exit(f"FAIL: {what}")


# A build that waits for another in its folder for as long as one that is kept out would be seen: a second.
MET = 'case " $* " in *" --build "*) touch one.$$; for i in 1 2 3 4 5 6 7 8 9 10; do [ "$(ls -d one.* | wc -l)" = 1 ] ' \
      '|| touch met; sleep 0.1; done; rm one.$$ ;; esac'


def place(*tools, report=""):
    """A folder with the script and a PATH of plain tools, and these beside them."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    for name in TOOLS:
        (folder / "bin" / name).symlink_to(shutil.which(name))
    scripts = {"id": "echo 1000", "cmake": LINK, "cc": "true", "make": "true",
               "apt-get": "echo $* >>asked; exit 100", "dpkg-query": "exit 1"}
    for name in tools:
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{scripts[name]}\n")
        (folder / "bin" / name).chmod(0o755)
    for name in ("quickstart", "configs", "README.md", "LICENSE", "docs", "nsa", "examples", "tests"):
        (folder / name).symlink_to(source / name)
    (folder / "quickstart").unlink()
    shutil.copy(source / "quickstart", folder)
    (folder / "report").write_text(report)
    (folder / "text").write_text("".join(f"line {i}, of {i * i % 97} words\n" for i in range(2000)))


def start(*options, at=folder, **more):
    env = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    script = "./quickstart" if at == folder else folder / "quickstart"
    return subprocess.Popen([script, *map(str, options)], cwd=at, env=env, text=True, errors="replace",
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


def run(*options, code=0, **more):
    job = start(*options, **more)
    said, _ = job.communicate(timeout=280)
    check(job.returncode == code, options, job.returncode, said)
    return said


def test_no_root():
    """Neither root nor sudo: it goes on with what is there, and says what could not be installed."""
    place("id", "cmake", "cc", "make", "apt-get", "dpkg-query")
    said = run(*SMALL)
    check("As root: apt-get install gcc" in said and "loss" in said, said)
    libraries = set(re.findall(r"\b[\w-]+-dev\b", (source / "cmake/NsaParts.cmake").read_text()))
    libraries -= {"libomp-dev", "libopenmpi-dev"}  # for clang, for several processes
    asked = said.split("As root: apt-get install ")[1].split("\n")[0].split()
    check(len(libraries) > 8 and libraries <= set(asked), "what a run would be slower or lack without", libraries, asked)
    for name in ("train_tiny", "generate", "inspect", "convert", "shards", "nsa_verdict"):
        check((folder / "build/quickstart/bin" / name).exists(), name, "is not where the pages call it")
    check(not (folder / "asked").exists(), "apt-get was called without a way to be root")
    return said


def test_elsewhere():
    """Paths are those of whoever calls; what is not given is the script's own, and what it says holds there, too."""
    place("id", "cmake", "cc", "make")
    away = folder / "my texts"
    away.mkdir()
    (away / "text").write_text("".join(f"another line {i}\n" for i in range(999)))
    said = run(*SMALL, at=away)
    check("16873 tokens" in said and (folder / "artifacts/quickstart/checkpoints").exists(), said)
    check(not (folder / "data").exists() and [path.name for path in away.iterdir()] == ["text"], "made there")
    test_next_step(said, away)
    said = run(*SMALL, "--out-dir", "mine", at=away)
    check((away / "mine/checkpoints/latest").exists(), said)
    test_next_step(said, away, away / "mine")


def test_next_step(said, at=folder, out=folder / "artifacts/quickstart"):
    """What it says of the next step is true, command by command; its text has no lines of blanks."""
    check("loss.svg" in said and (out / "loss.svg").exists(), said)
    text = said.split("--seed 2\n")[1].split("\n== in ")[0]
    check(text.startswith("A small animal ") and not re.search(r" {9}|\n\n\n", text), text)
    commands = re.findall(r"^  ((?:build|\./|/)\S.*)$", said.split("To go on:")[1], re.M)
    check(len(commands) == 4, commands)
    for command in commands:
        done = subprocess.run(["bash", "-c", command], cwd=at, text=True, errors="replace", capture_output=True, timeout=280,
                              env={"PATH": str(folder / "bin")})
        check(done.returncode == 0 or "nsa_verdict" in command and done.returncode == 1, command, done)
    check("resumed after step 2 of 4" in done.stdout, done.stdout)


def test_lacks():
    """It ends where what is missing is really needed, and names it with its package."""
    place("id", "cc", "make")
    check("not here, and building needs them: cmake\n" in run(code=1), "cmake")
    place("id", "cmake")
    check("building needs them: a C compiler (gcc), make\n" in run(code=1), "cc, make")
    place("id", "cmake", "cc", "make", report="--   without YAML: no libyaml, for configs: no trainers (Debian, Ubuntu: "
          "libyaml-dev)\n--   without MPI: no MPI: one process (Debian, Ubuntu: libopenmpi-dev)\n")
    said = run(code=1)
    check("the trainers' libraries are not all here: libyaml-dev\n" in said and "openmpi" not in said.split("all here")[1],
          said)


def test_two_at_once():
    """They build one after the other, and each has a folder of its own; one that is refused leaves none."""
    place("id", "cmake", "cc", "make")
    for name in ("flock", "ls", "wc", "touch", "rmdir"):
        if not (folder / "bin" / name).exists() and shutil.which(name):
            (folder / "bin" / name).symlink_to(shutil.which(name))
    (folder / "bin/cmake").write_text(f"#!/bin/bash\ncd {folder}; {MET}; {LINK}\n")
    jobs = [start(*SMALL) for _ in range(2)]
    said = [job.communicate(timeout=280)[0] for job in jobs]
    check([job.returncode for job in jobs] == [0, 0], said)
    for name in ("quickstart", "quickstart-2"):
        check((folder / "artifacts" / name / "checkpoints/latest").exists(), name, said)
    check(not (folder / "met").exists() or not shutil.which("flock"), "two build at once", said)
    run(*SMALL, "--steps", "no", code=2)
    check(not (folder / "artifacts/quickstart-3").exists(), "an empty folder")


def test_ends():
    """Exit codes, and signals, are the trainer's."""
    place("id", "cmake", "cc", "make")
    check("must be test, or an option" in run("my.yaml", code=2), "a stray word")
    said = run("--steps", "no", "--data", "text", code=2)
    check("--steps no: must be" in said and "To go on" not in said, said)
    check("train.steps" in run("--check", *SMALL) and "To go on" not in said, said)
    for number, options in ((signal.SIGTERM, {}), (signal.SIGINT, {"start_new_session": True})):
        job = start(*SMALL, "--steps", 1000000, "--out-dir", f"ended_{number}", **options)
        end = time.monotonic() + 200
        rows = folder / f"ended_{number}/training.csv"
        while not rows.exists() or rows.read_text().count("\n") < 3:
            check(time.monotonic() < end, "waited in vain for a step")
            time.sleep(0.05)
        os.killpg(job.pid, number) if options else job.send_signal(number)
        said, _ = job.communicate(timeout=280)
        check(job.returncode == 128 + number and "go on with --resume" in said, number, job.returncode, said)
        check((folder / f"ended_{number}/checkpoints/latest").exists(), "saved")


test_next_step(test_no_root())
test_elsewhere()
test_lacks()
test_two_at_once()
test_ends()
print(f"{checks} passed, 0 failed")
