#!/usr/bin/env python3
"""Checks what README.md, docs/*.md and the other READMEs claim about the tree.

  check_docs.py quotes     fenced code that names a file stands in that file, word for word; all code says who keeps it
  check_docs.py names      every nsa_... name, option, path and link in the text leads somewhere
  check_docs.py commands [BIN]
                           every command block is run, and prints what the text says; those that call programs of
                           the build, with those in BIN. Of blocks that are not run, programs know their options
  check_docs.py slow [PAGE...]
                           the blocks that take minutes are run, page by page, in a copy of the tree
  check_docs.py manual     the program in the manual of nsa.h is examples/embed/window.c and prints
                           what the manual says
  check_docs.py pictures   every drawing in docs follows a dark page
  check_docs.py columns    no line of C or CUDA has more than 100 columns, as CONTRIBUTING.md says

A fence whose info string has a second word quotes that file: ```c nsa/src/rope.h. A line of nothing but
`...` in it leaves lines out; the pieces must follow one another in the file. Indentation that a
whole piece has more or less of than the file does not count. A fence ```sh run is run in a scratch
folder that shows the tree, the programs, and what a reader has: a model where quickstart leaves it, my.yaml,
my_text.txt and corpus/. A fence ```text output right after it is what it must print. Other fences ```sh say why not:
```sh slow: REASON or ```sh needs: WHAT. Code that quotes no file is ```LANGUAGE run: TEST, which takes it from the page
(fences_run_by), or ```LANGUAGE needs: WHAT.

Exit code: the number of findings, at most 99. Not here: spelling, style, links to other sites.
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(.*)$")
SOURCE_SUFFIXES = {".c", ".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".txt", ".yaml", ".md"}


def documents():
    """The files that are checked, as paths relative to the root."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for folder in ("docs", "examples", "python", "simt", "tests", "bench"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return [path.relative_to(ROOT) for path in found if path.exists()]


def fences(path):
    """The fenced blocks of a document: (line number, words of the info string, lines)."""
    blocks, info, start, body = [], None, 0, []
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        match = FENCE.match(line)
        if match and info is None:
            info, start, body = match.group(1).split(), number, []
        elif match:
            blocks.append((start, info, body))
            info = None
        elif info is not None:
            body.append(line)
    if info is not None:
        raise SystemExit(f"{path}:{start}: this fence is never closed")
    return blocks


def dedent(lines):
    """Lines without the indentation that all of them share, and without trailing space."""
    used = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    shared = min(used, default=0)
    return [line[shared:].rstrip() for line in lines]


def pieces(lines):
    """A quotation split where a line `...` leaves something out."""
    result = [[]]
    for line in lines:
        if line.strip() == "...":
            result.append([])
        else:
            result[-1].append(line)
    return [dedent(piece) for piece in result if any(line.strip() for line in piece)]


def find_piece(piece, text, begin):
    """Where in the file's lines the piece stands at or after `begin`: the line after it, or None."""
    for at in range(begin, len(text) - len(piece) + 1):
        if dedent(text[at:at + len(piece)]) == piece:
            return at + len(piece)
    return None


def fences_run_by(test):
    """(document, line, text) of every fence that says that this test runs it."""
    return [(path, line, "\n".join(body) + "\n") for path in documents() for line, info, body in fences(path)
            if info[1:3] == ["run:", test]]


CODE = {"c", "cpp", "cuda", "python", "cmake", "meson", "yaml"}


def keeper_missing(info):
    """What a fence of code lacks that quotes no file, or None."""
    if info[1:2] == ["needs:"] and len(info) > 2:
        return None
    if info[1:2] != ["run:"] or len(info) < 3:
        return f"must be one of: {info[0]} FILE, {info[0]} run: TEST, {info[0]} needs: WHAT"
    test = ROOT / info[2]
    if not test.is_file() or not re.search(r"fences_run_by\(|run_pages\(|run: tests/package", test.read_text()):
        return f"{info[2]} runs no fences"
    return None


def check_quotes():
    findings, checked = [], 0
    for path in documents():
        for line, info, body in fences(path):
            if info[:1] and info[0] in CODE and (len(info) < 2 or info[1].endswith(":")):
                checked += 1
                lacks = keeper_missing(info)
                findings += [f"{path}:{line}: {lacks}"] if lacks else []
                continue
            if len(info) < 2 or info[0] == "sh" or info[1] == "output":
                continue
            source = ROOT / info[1]
            if not source.is_file():
                findings.append(f"{path}:{line}: quotes {info[1]}, which does not exist")
                continue
            checked += 1
            text, at = source.read_text().splitlines(), 0
            for piece in pieces(body):
                after = find_piece(piece, text, at)
                if after is None:
                    findings.append(f"{path}:{line}: not in {info[1]} as quoted, from line: {piece[0]}")
                    break
                at = after
    return findings, f"{checked} quotations"


def prose(path):
    """(line number, line) of a document without its fenced blocks."""
    inside = False
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def anchor(heading):
    """The name that GitHub gives a heading, for links into a page."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def leads_somewhere(page, target, place):
    """Whether a link from a page leads to a file or folder, and `place`, if any, to a heading there."""
    path = (ROOT / page).parent / target if target else ROOT / page
    if not place:
        return path.exists()
    return path.is_file() and place in {anchor(line) for _, line in prose(path) if line.startswith("#")}


def known_names():
    """Every nsa_ and NSA_ identifier in the sources and the build."""
    names = set()
    for folder in ("nsa", "examples", "python", "simt", "tests", "bench", "cmake", "configs"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in SOURCE_SUFFIXES - {".md"}:
                names |= set(re.findall(r"\b(?:nsa|NSA)_\w+", path.read_text(errors="replace")))
    return names


def known_flags():
    """Every --option that a table, a parser or a script of the tree names."""
    flags = set()
    for folder in ("examples", "python", "simt", "tests", "bench", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in {".c", ".h", ".py", ".sh", ""}:
                flags |= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text(errors="replace")))
    return flags | {"--no-" + flag[2:] for flag in flags}


OTHERS = {"ctest", "cmake", "zstd", "tensorboard", "debootstrap", "python", "sbatch"}  # have their own


def unknown_flags(line, flags):
    """Options in a line's quoted words that nothing of this tree has."""
    for words in re.findall(r"`([^`]*)`", line):
        if words.split(" ")[0] not in OTHERS:
            yield from (flag for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", words) if flag not in flags)


def check_names():
    names, flags, findings, checked = known_names(), known_flags(), [], 0
    for path in documents():
        for number, line in prose(path):
            findings += [f"{path}:{number}: nothing has the option {flag}" for flag in unknown_flags(line, flags)]
            for name in re.findall(r"`[^`]*`", line):
                for word in re.findall(r"\b(?:nsa|NSA)_\w+", name):
                    checked += 1
                    family = word.endswith("_") and any(n.startswith(word) for n in names)
                    if word not in names and not family:
                        findings.append(f"{path}:{number}: no source has the name {word}")
            for target, place in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", line):
                checked += 1
                if not leads_somewhere(path, target, place):
                    findings.append(f"{path}:{number}: the link {target}{place and '#'}{place} leads nowhere")
            for target in re.findall(r"`((?:\w+/)+[\w.-]+\.\w+)`", line):
                checked += 1
                here = (ROOT / path).parent / target
                if target.split("/")[0] not in ("build", "data", "artifacts") and not ((ROOT / target).exists() or
                                                                                       here.exists()):
                    findings.append(f"{path}:{number}: there is no file {target}")
    return findings, f"{checked} names and paths"


def quick_compiler(folder):
    """A folder with a `cc` that is this machine's but leaves out the optimizer and the vector tiles, which are
    most of the time: what a program prints does not depend on them, and tests/package compiles them."""
    compiler = folder / "cc"
    path = shlex.quote(os.environ["PATH"])  # without this folder, where a `cc` that is ccache would find itself
    compiler.write_text(f'#!/bin/sh\nPATH={path}\nexec cc "$@" -O0 -U__SSE2__\n')
    compiler.chmod(0o755)
    return folder


def run_commands(script, folder):
    """Runs a block of commands in the folder: what it printed, and its exit code."""
    with tempfile.TemporaryDirectory() as tools:
        path = f"{quick_compiler(pathlib.Path(tools))}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, text=True,
                              env=os.environ | {"PATH": path}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    return done.stdout, done.returncode


TINY = """model: {dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1}
train: {steps: 4, seq_len: 128, batch_size: 2, log_every: 1}
"""


def stage_own(scratch):
    """What a reader brings."""
    (scratch / "my.yaml").write_text(TINY)
    (scratch / "corpus").mkdir()
    text = "".join(f"line {i}, of {i * i % 97} words\n" for i in range(1000))
    for name in ("my_text.txt", "corpus/a.txt", "corpus/b.txt"):
        (scratch / name).write_text(text)


def stage(scratch, programs=None, model=None):
    """What a reader of a page has: the tree, the programs, files of their own, and quickstart's model."""
    for entry in ROOT.iterdir():
        if entry.name not in ("build", "data", "artifacts", ".git"):
            (scratch / entry.name).symlink_to(entry)
    stage_own(scratch)
    for preset in ("release", "quickstart") if programs else ():
        (scratch / "build" / preset).mkdir(parents=True)
        (scratch / "build" / preset / "bin").symlink_to(programs)
    if model:
        shutil.copytree(model, scratch / "artifacts/quickstart", symlinks=True)


def make_model(programs, folder):
    """The run that ./quickstart makes, cut short."""
    subprocess.run([programs / "train_tiny", "--config", ROOT / "configs/quickstart.yaml", "--data", ROOT / "LICENSE",
                    "--dataset", "text", "--steps", "2", "--batch-size", "1", "--eval-every", "0", "--warmup-steps",
                    "0", "--out-dir", folder], check=True, capture_output=True)
    return folder


def options_of(program, known={}):
    """Every option that --help lists, of the commands of a program that has some, too."""
    if program not in known:
        words = [[], ["export"], ["import"]] if program.name == "convert" else [[]]
        text = "".join(subprocess.run([program, *w, "--help"], capture_output=True, text=True).stdout for w in words)
        names = set(re.findall(r"^  (--\S+)", text, re.M))
        known[program] = {"--help"} | {n.replace("[no-]", "") for n in names} | {n.replace("[no-]", "no-") for n in names}
    return known[program]


def unknown_options(script, programs):
    """Options in a block that the program before them does not list."""
    for command in re.split(r"[;&|\n]+", script.replace("\\\n", " ")):
        called = re.search(r"\bbuild/\w+/bin/(\w+)(.*)", command)
        program = called and programs / called[1].removesuffix("_cuda")
        if not called or not program.exists() or called[1] in NO_TABLE:
            continue
        for option in re.findall(r"(?<=\s)--[a-z][\w-]*", called[2].split("#")[0]):
            if option not in options_of(program):
                yield f"{called[1]} has no option {option}"


NO_TABLE = {"ladder", "simt_ladder_check", "fuzz_api"}  # programs with arguments of their own


def command_blocks():
    """(document, line, kind, lines, what it must print or None) of every fence of commands."""
    for path in documents():
        blocks = fences(path)
        for index, (line, info, body) in enumerate(blocks):
            if info[:1] == ["sh"]:
                after = blocks[index + 1] if index + 1 < len(blocks) else (0, [], [])
                said = "\n".join(after[2]) + "\n" if after[1][1:2] == ["output"] else None
                yield path, line, info[1:], "\n".join(body), said


def check_commands(programs=None):
    programs = programs and pathlib.Path(programs).resolve()
    findings, checked, left = [], 0, 0
    for path, line, settings in fences_run_by("scripts/check_docs.py") if programs else ():
        checked += 1
        with tempfile.TemporaryDirectory() as scratch:
            (pathlib.Path(scratch) / "page.yaml").write_text(settings)
            check = f"{programs}/train_tiny --config page.yaml --dataset synthetic --check"
            printed, code = run_commands(check, scratch)
        findings += [f"{path}:{line}: exit code {code}\n{printed}"] if code else []
    with tempfile.TemporaryDirectory() as folder:
        model = programs and make_model(programs, pathlib.Path(folder) / "model")
        for path, line, kind, script, said in command_blocks():
            if programs:
                findings += [f"{path}:{line}: {what}" for what in unknown_options(script, programs)]
            if "artifacts/quickstart" in script and "build/release/bin" in script:
                findings.append(f"{path}:{line}: who has artifacts/quickstart has its programs in build/quickstart/bin")
            if kind != ["run"] and (kind[:1] not in (["slow:"], ["needs:"]) or len(kind) < 2):
                findings.append(f"{path}:{line}: must be one of: sh run, sh slow: REASON, sh needs: WHAT")
            if kind != ["run"] or not programs and "build/" in script:
                left += 1
                continue
            checked += 1
            with tempfile.TemporaryDirectory() as scratch:
                stage(pathlib.Path(scratch), programs, model)
                printed, code = run_commands(script, scratch)
            if code != 0:
                findings.append(f"{path}:{line}: exit code {code}\n{printed}")
            elif said is not None and printed != said:
                findings.append(f"{path}:{line}: prints something else than the text says:\n{printed}")
    return findings, f"{checked} command blocks ({left} left out)"


def check_slow(*pages):
    """Page after page, a page's blocks one after another: what one makes is there for the next."""
    findings, checked = [], 0
    asked = [block for block in command_blocks() if not pages or str(block[0]) in pages]
    for page in sorted({block[0] for block in asked if block[2][0] == "slow:"}):
        with tempfile.TemporaryDirectory() as scratch:
            tree = pathlib.Path(scratch) / "nsa"
            left_out = {"build", "artifacts", ".git", "data"}
            shutil.copytree(ROOT, tree, symlinks=True,
                            ignore=lambda folder, names: left_out & set(names) if folder == str(ROOT) else ())
            stage_own(tree)
            if (ROOT / "data").is_dir():
                (tree / "data").symlink_to(ROOT / "data")
            environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            def run(script):
                return subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tree, env=environment, text=True,
                                      errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT)
            blocks = [block for block in asked if block[0] == page and block[2][0] != "needs:"]
            called = sorted(set(re.findall(r"build/release/bin/(\w+)", " ".join(block[3] for block in blocks))))
            if called:  # README's first page tells how these are built
                done = run(f"cmake --preset release && cmake --build --preset release --target {' '.join(called)}")
                if done.returncode:
                    findings.append(f"{page}: {' '.join(called)} do not build\n{done.stdout[-4000:]}")
            for path, line, kind, script, _ in blocks:
                checked += 1
                done = run(script)
                print(f"{path}:{line}: exit code {done.returncode}", flush=True)
                if done.returncode:
                    findings.append(f"{path}:{line}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    return findings, f"{checked} command blocks"


def check_manual():
    """The manual's program is the example's, and prints what the manual says."""
    manual = (ROOT / "nsa/nsa.h").read_text()
    program = (ROOT / "examples/embed/window.c").read_text()
    program = program[program.index("#define NSA_IMPLEMENTATION"):]
    findings = []
    if "\n".join(" " * 7 + line if line else "" for line in program.splitlines()) not in manual:
        findings.append("nsa/nsa.h: the program in its manual is not examples/embed/window.c")
    said = re.search(r'^   It prints "(.*)"\.$', manual, re.M)
    with tempfile.TemporaryDirectory() as scratch:
        compile_and_run = f"cc {ROOT}/examples/embed/window.c -I{ROOT}/nsa -lm -o window && ./window"
        printed, code = run_commands(compile_and_run, scratch)
    if code != 0 or not said or printed != said[1] + "\n":
        findings.append(f"nsa/nsa.h: the program in its manual prints: {printed}")
    return findings, "1 program"


def check_pictures():
    """Every drawing follows a dark page, and the curves of losses are what the trainers draw today."""
    findings, checked = [], 0
    drawn = (ROOT / "examples/trainer/telemetry/curve.c").read_text()
    drawn = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', drawn[drawn.index("<svg") - 1:])).replace("\\n", "\n")
    style = drawn[drawn.index("<style>"):drawn.index("</style>")]
    for path in sorted((ROOT / "docs").glob("*.svg")):
        checked += 1
        text = path.read_text()
        ground = re.search(r"<rect[^>]*>", text)
        if "prefers-color-scheme: dark" not in text or not ground or "fill=" in ground[0]:
            findings.append(f"docs/{path.name}: its ground stays as it is on a dark page")
        if path.name.endswith("_loss.svg") and style not in text:
            findings.append(f"docs/{path.name}: not as curve.c draws it")
    return findings, f"{checked} pictures"


def check_columns():
    """clang-format breaks code, not comments."""
    findings, checked = [], 0
    for folder in ("nsa", "examples", "simt", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".c", ".h", ".inl", ".cpp", ".cu", ".cuh"}:
                continue
            checked += 1
            findings += [f"{path.relative_to(ROOT)}:{number}: {len(line)} columns, 100 at most"
                         for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
    return findings, f"{checked} files"


CHECKS = {"quotes": check_quotes, "names": check_names, "commands": check_commands, "slow": check_slow,
          "manual": check_manual, "columns": check_columns, "pictures": check_pictures}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in CHECKS:
        raise SystemExit(f"usage: check_docs.py {'|'.join(CHECKS)}")
    found, what = CHECKS[sys.argv[1]](*sys.argv[2:])
    for finding in found:
        print(finding)
    print(f"{what} checked, {len(found)} findings")
    sys.exit(min(len(found), 99))
