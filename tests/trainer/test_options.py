#!/usr/bin/env python3
"""Every program's command line, option by option: what is listed is taken, and what is wrong is said by its name.

usage: test_options.py FOLDER PROGRAM... Twin: base/option.c. FOLDER is for a file. The options are read from
--help, so that a row of any table is tried without a line here. A program may be two words, "convert export".
What a setting means, and what stands above what, is test_config.c's.
"""
import pathlib
import re
import subprocess
import sys

from runs import PATIENCE

LINE = re.compile(r"  (--\S+)(?: (\S+))?(?:  +| ?$)(.*)")
EMPTY = '""'  # as messages have it
findings = []


def check(holds, *words):
    if not holds:
        findings.append(" ".join(str(w) for w in words))


class Program:
    def __init__(self, command):
        self.command = command.split("|")
        self.name = " ".join([pathlib.Path(self.command[0]).name, *self.command[1:]])
        self.options = {}
        code, text, said = self.run("--help")
        check(code == 0 and not said and text, self.name, "--help:", code, said)
        self.text = text
        usage = re.search(r"^usage: (.*)$", text, re.M)[1].removeprefix(self.name)
        self.words = [w for w in usage.split() if not w.startswith("[")]
        for line in text.splitlines():
            match = LINE.match(line)
            if match:
                name = match[1].replace("--[no-]", "--")
                self.options[name] = {"noun": match[2], "switch": match[2] is None, "lines": [match[3]],
                                      "no": "[no-]" in match[1]}
                last = self.options[name]
            elif line.startswith(" " * 29) and self.options:
                last["lines"].append(line.strip())
            else:
                last = {"lines": []}  # of a name of the environment, or a heading

    def run(self, *arguments, env=None):
        done = subprocess.run([*self.command, *map(str, arguments)], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=PATIENCE, env=env)
        return done.returncode, done.stdout, done.stderr

    def refuses(self, *arguments, says, silent=()):
        """Exit code 2, one line that has `says`; and names no option that was not given."""
        code, text, said = self.run(*arguments)
        check(code == 2 and says in said and said.count("\n") == 1 and not text,
              self.name, *arguments, ":", code, text, said, "must say", says)
        hints = said.split("did you mean")[0].split("(--help")[0].split("is given as")[0]
        given = " ".join(map(str, arguments))
        for name in re.findall(r"--[a-z][a-z-]*", hints):
            check(name in given, self.name, given, ": names", name, "that nobody gave:", said)


def stand_ins(program):
    """Words where a program must have some; where they lead is not looked at before the options are."""
    return ["16"] * len(program.words)


def bad_values(option):
    facts = " ".join(option["lines"])
    number = re.search(r"(?:an integer|a number)(?: in (\S+) \.\. (\S+)|.* at most (\S+))", facts)
    if number:
        most = float((number[2] or number[3]).rstrip(","))
        yield from ("many", "", "0x10", "nan", f"{most * 2 + 2:.0f}", "1 ")
        if "an integer" in facts:
            yield from ("1.5", "99999999999999999999")
    elif "one of" in facts:
        yield from ("nonsense", "")
    elif option["switch"] and "true or false" in facts:
        yield from ("maybe", "2..1")
    elif option["noun"] in ("DIR", "FILE", "PATH", "[TEXT]"):
        yield ""  # trained on, or from, something else in silence


tried = []


def try_option(program, name, option):
    """All of it once; of a row that another program has too, that it is there and checked."""
    words = stand_ins(program)
    if option in tried:
        if not option["switch"]:
            shown = name if option["noun"][0] != "[" else f"{name}z"
            program.refuses(*words, shown, says=f"{shown}: ")
        for value in list(bad_values(option))[:1]:
            program.refuses(*words, f"{name}={value}", says=f"{name} {value or EMPTY}: must be")
        return
    tried.append(option)
    wrong = name[:-1] + name[-1] * 2
    if wrong not in program.options:
        program.refuses(*words, wrong, says=f"{wrong}: unknown option; did you mean {name}?")
    if option["switch"]:
        program.refuses(*words, f"{name}=maybe", says=f"{name} maybe: must be")
        if option["no"]:
            no = "--no-" + name[2:]
            program.refuses(*words, f"{no}=1", says=f"{no}=1: takes no value")
            program.refuses(*words, f"{no}q", says=f"{no}q: unknown option; did you mean {no}?")
        if program.words and not program.words[-1].endswith("..."):
            program.refuses(*words, name, "maybe", says=f"maybe: one too many, after 16; did you mean {name}=maybe?")
        if not program.words:
            program.refuses(name, "maybe", says=f"maybe: belongs to no option; did you mean {name}=maybe?")
    elif not option["noun"].startswith("["):
        program.refuses(*words, name, says=f"{name}: its value is missing; it must be")
        program.refuses(*words, name, "--help-me", says=f"one that begins with -- is given as {name}=--help-me")
    for value in bad_values(option):
        shown = value or EMPTY
        program.refuses(*words, f"{name}={value}", says=f"{name} {shown}: must be")
        if not option["switch"]:
            program.refuses(*words, name, value, says=f"{name} {shown}: must be")


def try_twice(program):
    """The last of two counts, and whoever gave both hears of it; a list takes many."""
    for name in [n for n, o in program.options.items() if o["switch"] and n not in ("--help", "--version")][:1]:
        code, text, said = program.run(*stand_ins(program), f"{name}=yes", f"{name}=no", "--nothing-like-it")
        first = f"warning: {name}: given twice, first as {name}=yes; the last one counts, no\n"
        check(code == 2 and said.startswith(first) and said.count("twice") == 1, program.name, name, "twice:", said)


def try_words(program):
    words = stand_ins(program)
    several = program.words and program.words[-1].endswith("...")
    for n in range(len(program.words)):
        missing = program.words[n].removesuffix("...")
        program.refuses(*words[:n], says=f"{missing}: none was given; usage: {program.name} ")
    if program.words and not several:
        program.refuses(*words, "more", says="more: one too many, after 16")
        program.refuses(*words, "--", "--help", says="--help: one too many, after 16")
    program.refuses(*words, "--nothing-like-it", says="--nothing-like-it: unknown option (--help lists all)")
    program.refuses(*words, "-x", says="-x: unknown option")
    program.refuses(*words, "--version=1", says="--version=1: takes no value")
    program.refuses(*words, "--help=", says="--help=: takes no value")
    program.refuses(*words[:-1], "", says='"": ')
    code, text, said = program.run(*words, "--zzed")
    check(code == 2 and "did you mean --help" not in said, program.name, "--zzed", said)
    program.refuses(*words, "--hlep", says="--hlep: unknown option; did you mean --help?")
    program.refuses(*words, "--verison", says="--verison: unknown option; did you mean --version?")


def try_program(program):
    for flag in ("-h", "--help"):
        code, text, said = program.run("--nonsense", flag)
        check(code == 0 and text == program.text and not said, program.name, flag, "wins:", code, said)
    code, text, said = program.run("--version")
    check(code == 0 and re.fullmatch(rf"{program.name} \d+\.\d+\.\d+\n", text), program.name, "--version:", text, said)
    with open("/dev/full", "w") as full:
        done = subprocess.run([*program.command, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
        check(done.returncode == 2 and "No space left" in done.stderr, program.name, "--help to a full disk")
    check("--help" in program.options and "--version" in program.options, program.name, "lists what it takes")
    try_words(program)
    try_twice(program)
    for name, option in program.options.items():
        if name not in ("--help", "--version"):
            check(option["lines"][0], program.name, name, "has no line of help")
            check("default" in " ".join(option["lines"]) or option["switch"] or option["noun"] in ("FILE", "TEXT"),
                  program.name, name, "tells no default:", option["lines"])
            try_option(program, name, option)


def same(a, b):
    try:
        return float(a) == float(b)
    except ValueError:
        return (a if a != '""' else "none") == b


def try_trainer(trainer, folder):
    """The defaults of --help are those in force, for each key."""
    code, text, said = trainer.run("--dataset=synthetic", "--check")
    check(code == 0, trainer.name, "--check:", said)
    values = dict(re.findall(r"^(\S+\.\S+) +(\S+) +default$", text, re.M))
    stated = dict(re.findall(r"^ +(\w+\.\w+)(?:, .*)?, default (\S+?)(?:, environment \S+)?$", trainer.text, re.M))
    check(len(stated) > 70, trainer.name, "states", len(stated), "defaults")
    for key, value in stated.items():
        check(key not in values or same(values[key], value), key, "is", values.get(key), "and --help says", value)
    path = folder / "options.yaml"
    path.write_text("train:\n  steps: 7\nmodel:\n  dim: 0\n")
    trainer.refuses(path, says=f"belongs to no option; did you mean --config {path}?")
    trainer.refuses("corpus.txt", says="did you mean --data corpus.txt?")
    trainer.refuses("steps=5", says="did you mean --steps=5?")
    trainer.refuses("stray", says="stray: belongs to no option (--help lists all)")
    trainer.refuses("--config", path, says=f"{path}:4: model.dim = 0: must be an integer in 1 ..")
    trainer.refuses("--local-path", "x" * 2000, says="--local-path x")
    code, text, said = trainer.run("--dataset=synthetic", "--steps=5", "--steps=x")
    check(code == 2 and said.splitlines()[-1].startswith("--steps x: must be"), "a bad second one:", said)
    code, text, said = trainer.run("--dataset=text", "--check", "--steps=5", "--steps", "6", "--prompt=--check",
                                   "--local-path", path, "--no-qk-norm", "--sample=1")
    check(re.search(r"train\.steps +6 +command line --steps\n", text), "the last of two counts:", text, said)
    check(said.startswith("warning: --steps: given twice, first as --steps=5; the last one counts, 6\n"), "of two:", said)
    check(re.search(r"sample\.prompt +--check +command line --prompt\n", text), "a value behind =:", text)
    check(re.search(r"data\.path +\S+ +command line --local-path\n", text), "the name that was given:", text)
    check(re.search(r"model\.qk_norm +false +command line --no-qk-norm\n", text), "the name that was given:", text)
    for first, words in (("--steps 5", ("--steps", "5")), ("--resume", ("--resume",))):
        code, text, said = trainer.run(*words, f"{words[0]}=7", "--nothing-like-it")
        again = f"warning: {words[0]}: given twice, first as {first}; the last one counts, 7\n"
        check(said.startswith(again), "of two:", said)
    code, text, said = trainer.run(env={"CONFIG": str(path)})
    check(code == 2 and f"{path}:4: model.dim" in said and "--config" not in said, "by CONFIG:", said)
    code, text, said = trainer.run("--dataset=synthetic", env={"NSA_TB_DISABLE": "maybe"})
    check(code == 2 and "environment NSA_TB_DISABLE=maybe: must be true or false" in said, "by environment:", said)


def try_cut_short(program):
    for name, whole in (("--temp", "--temperature"), ("--vers", "--version"), ("--hel", "--help")):
        program.refuses(*stand_ins(program), name, says=f"{name}: unknown option; did you mean {whole}?")


def try_import(program, folder):
    """What config.json says is not blamed on a flag."""
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 64, "hidden_size": 99999, '
        '"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8, '
        '"hidden_act": "silu", "head_dim": 16}')
    program.refuses(folder, folder / "out", says=f"{folder}/config.json: model.dim = 99999: must be an integer in 1 ..")


folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
programs = [Program(command) for command in sys.argv[2:]]
for each in programs:
    try_program(each)
    if each.name == "train_tiny":
        try_trainer(each, folder)
    if each.name == "generate":
        try_cut_short(each)
    if each.name == "convert import":
        try_import(each, folder)
for finding in findings:
    print(finding)
print(f"{len(programs)} programs, {sum(len(p.options) for p in programs)} options, {len(findings)} findings")
sys.exit(min(len(findings), 99))
