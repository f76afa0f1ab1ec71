"""shards: its files as llm.c's format has them, and a run on them to the bit the run on the text.

usage: test_shards.py TRAINER FOLDER SHARDS [wider | DISK_FAULT]. Twins: examples/shards/main.c, disk_fault.c.
"""
import array
import fcntl
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import termios

from runs import PATIENCE, Runs, check, done, wait_for

runs, shards = Runs(sys.argv[1], sys.argv[2], "shards"), sys.argv[3]
corpus, gpt2 = runs.root / "corpus", runs.root / "gpt2"
corpus.mkdir()
lines = [f"line {i} of {i * i % 97} words, it's\n" for i in range(1500)]
(corpus / "a.txt").write_text("".join(lines[:900]))
(corpus / "b.txt").write_text("".join(lines[900:])[:-1])  # no newline at its end: one is put there
(corpus / "empty.txt").write_text("")


def make(folder, *arguments, code=0, given=None):
    ran = subprocess.run([shards, f"{runs.root}/{folder}", *map(str, arguments)], capture_output=True, input=given,
                         timeout=PATIENCE)
    check(ran.returncode == code, ran)
    return runs.root / folder, (ran.stdout + ran.stderr).decode()


def tokens(folder):
    """Of all shards in the order of their names, each with its header checked."""
    found, sizes = [], []
    for path in sorted(folder.glob("*.bin")):
        data = path.read_bytes()
        head = struct.unpack("<256i", data[:1024])
        check(head[:2] == (20240520, 1) and len(data) == 1024 + 2 * head[2], path, head[:3])
        check(data[12:16] == b"nsa\0" and any(head[5:7]) and head[7:] == (0,) * 249, path, head[:7])
        found += struct.unpack(f"<{head[2]}H", data[1024:])
        sizes.append(head[2])
    return found, sizes


def losses(name, *options, steps=4):
    out, _, _ = runs.train(name, *options, "--steps", steps, "--eval-every", 2)
    rows = [row.split(",") for row in (out / "training.csv").read_text().splitlines()]
    return [(row[0], row[1], row[4]) for row in rows], (out / "val.csv").read_text()


def test_bytes():
    folder, said = make("bytes", corpus, "--shard-tokens", 10000)
    text = "".join(lines).encode()
    found, sizes = tokens(folder)
    check(bytes(found) == text, "tokens are the bytes of the text")
    check(sizes == [10000] * (len(text) // 10000) + [len(text) % 10000], sizes)
    check(f"{len(text)} tokens of 2 documents in {len(sizes)} shards, vocabulary of 256" in said, said)
    check(losses("of_bytes", "--dataset", "bin", "--data", folder) == losses("of_text", "--data", corpus), "losses")


def vocabulary():
    """256 bytes as GPT-2 spells them, two merges, the end of text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256)
                                                                                  if b not in plain)}
    symbols = [spelled[b] for b in range(256)] + ["li", "ne", "<|endoftext|>"]
    gpt2.mkdir()
    (gpt2 / "vocab.json").write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}))
    (gpt2 / "merges.txt").write_text("#version: 0.2\nl i\nn e\n")


def test_vocabulary():
    vocabulary()
    folder, said = make("merged", corpus / "a.txt", corpus / "b.txt", "--tokenizer-path", gpt2)
    found, sizes = tokens(folder)
    check("vocabulary of 259" in said and len(sizes) == 1, said)
    check(found.count(258) == 2 and found[-1] == 258 and found[:2] == [256, 257], found[:9])
    spelled = b"".join({256: b"li", 257: b"ne", 258: b""}.get(t) or bytes([t] if t < 256 else []) for t in found)
    check(spelled == "".join(lines).encode()[:-1], "the text")
    words = ("--tokenizer", "gpt2", "--tokenizer-path", gpt2)
    check(losses("of_shards", *words, "--dataset", "bin", "--data", folder) ==
          losses("of_words", *words, "--data", corpus), "losses")


def test_another_vocabulary():
    """Shards say what their tokens spell: a run with other words of the same ids is refused, one that
    has got more is not; others' shards say nothing."""
    merged, turned = runs.root / "merged", runs.root / "turned"
    turned.mkdir()
    vocab = json.loads((gpt2 / "vocab.json").read_text())
    vocab["li"], vocab["ne"] = vocab["ne"], vocab["li"]
    (turned / "vocab.json").write_text(json.dumps(vocab))
    (turned / "merges.txt").write_text((gpt2 / "merges.txt").read_text())
    words = ("--steps", 1, "--tokenizer", "gpt2", "--tokenizer-path", turned)
    for name, options in ((turned, words), ("bytes", ("--vocab-size", 259))):
        _, _, said = runs.train("turned_run", "--data", merged, *options, code=2)
        check(f"merged/shard_000000.bin: its tokens are not those of {name}" in said, said)
        check("must name the vocabulary that `shards` made it with" in said, said)
    grown = runs.root / "grown"
    grown.mkdir()
    vocab = json.loads((gpt2 / "vocab.json").read_text())
    (grown / "vocab.json").write_text(json.dumps(vocab | {"line": 259}))
    (grown / "merges.txt").write_text((gpt2 / "merges.txt").read_text())
    runs.train("grown_run", "--data", merged, "--steps", 1, "--tokenizer", "gpt2", "--tokenizer-path", grown)
    shard = (merged / "shard_000000.bin").read_bytes()
    (runs.root / "unsaid.bin").write_bytes(shard[:12] + bytes(1012) + shard[1024:])
    runs.train("unsaid", "--data", runs.root / "unsaid.bin", *words)
    runs.train("no_files", "--data", merged, "--steps", 1, "--tokenizer", "gpt2")


def test_lines():
    given = "".join(json.dumps({"text": line, "id": i}) + "\n" for i, line in enumerate(["one", "zw\u00f6lf", "", "a\0b"]))
    folder, said = make("lines", "-", given=("\r\n" + given).encode())
    check(bytes(tokens(folder)[0]) == "one\nzw\u00f6lf\na\0b\n".encode() and "of 3 documents" in said, said)
    (runs.root / "set").mkdir()
    (runs.root / "set/x.jsonl").write_text(given)
    (runs.root / "set/y.txt").write_text("plain")
    folder, _ = make("both", runs.root / "set")
    check(bytes(tokens(folder)[0]) == "one\nzw\u00f6lf\na\0b\nplain\n".encode(), tokens(folder))


def test_wide():
    """A vocabulary above 2^16: llm.c's other format, whose tokens the trainers read as those of the text."""
    wide = runs.root / "wide_words"
    wide.mkdir()
    vocab = json.loads((gpt2 / "vocab.json").read_text())
    vocab["line"] = 70000
    (wide / "vocab.json").write_text(json.dumps(vocab))
    (wide / "merges.txt").write_text("#version: 0.2\nl i\nn e\nli ne\n")
    folder, said = make("wide", corpus / "a.txt", corpus / "b.txt", "--tokenizer-path", wide)
    check("vocabulary of 70001" in said, said)
    data = next(folder.glob("*.bin")).read_bytes()
    head = struct.unpack("<256i", data[:1024])
    check(head[:2] == (20240801, 7) and len(data) == 1024 + 4 * head[2], head[:3])
    found = struct.unpack(f"<{head[2]}I", data[1024:])
    check(found.count(70000) == 1500 and found[0] == 70000 and found[-1] == 258, found[:9])
    words = ("--tokenizer", "gpt2", "--tokenizer-path", wide, "--batch-size", 1, "--eval-batches", 1)
    check(losses("of_wide", *words, "--dataset", "bin", "--data", folder, steps=2) ==
          losses("of_wide_text", *words, "--data", corpus, steps=2), "losses")
    outside = runs.root / "outside.bin"
    outside.write_bytes(struct.pack("<256i", 20240801, 7, 400, *[0] * 253) + b"\xff" * 1600)
    _, _, said = runs.train("outside", "--data", outside, code=2)
    check("outside.bin: token 4294967295 at byte " in said and "must be below the vocabulary's 256" in said, said)


def test_wrong_in_the_first_step():
    """Data that cannot be used end a run with 2, whatever micro-batch they lie in: to start again is no help."""
    values = [7] * 3000
    for place in (200, 1500, 2700):
        bad = [*values]
        bad[place] = 999
        path = runs.root / f"bad{place}.bin"
        path.write_bytes(struct.pack("<256i", 20240520, 1, len(bad), *[0] * 253) + struct.pack(f"<{len(bad)}H", *bad))
        common = ("--data", path, "--eval-every", 0, "--val-fraction", 0)
        _, _, said = runs.train(f"first{place}", *common, "--steps", 1, "--accum-batches", 24, code=2)
        check(f"bad{place}.bin: token 999 at byte {1024 + 2 * place}" in said, said)
    out, _, said = runs.train("later", *common, "--steps", 24, "--batch-size", 1, "--seq-len", 128, code=2)
    check("token 999" in said and (out / "training.csv").read_text().count("\n") > 1, said)


def begin(folder):
    """A call that reads its standard input, and so holds its part."""
    call = subprocess.Popen([shards, runs.root / folder, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    call.stdin.write(b'{"text": "one"}\n')
    call.stdin.flush()
    unread = array.array("i", [1])
    wait_for("a reader", lambda: fcntl.ioctl(call.stdin, termios.FIONREAD, unread) == 0 and unread[0] == 0)
    return call


def test_two_at_once():
    """The second call into one folder is refused, and harms nothing."""
    first = begin("twice")
    folder, said = make("twice", corpus, code=1)
    check("twice.part: another run is in this folder (process %d)" % first.pid in said, said)
    said = first.communicate()[0].decode()
    check(first.returncode == 0 and bytes(tokens(folder)[0]) == b"one\n", said)
    check(sorted(p.name for p in folder.iterdir()) == ["shard_000000.bin"], "only shards")


def test_shorter():
    """A file that is cut at a line while the one before it is written: half of a corpus is none."""
    both = runs.root / "cut"
    both.mkdir()
    (both / "a").write_text("some words\n" * 50000)
    for _ in range(100):  # until the cut comes before the call has read that far
        shutil.rmtree(runs.root / "shorter", ignore_errors=True)
        (both / "b.jsonl").write_text('{"text": "one"}\n' * 1000)
        call = subprocess.Popen([shards, runs.root / "shorter", both, "--shard-tokens", "5000"], stderr=subprocess.PIPE)
        wait_for("a shard", lambda: (runs.root / "shorter.part/shard_000000.bin").exists() or call.poll() is not None)
        os.truncate(both / "b.jsonl", 8000)
        said = call.communicate()[1].decode()
        if call.returncode:
            break
    check(call.returncode == 2 and "b.jsonl: ends at byte 8000; it had 16000" in said, said)
    check(not (runs.root / "shorter").exists(), "half of a corpus")


def test_one_after_another():
    """Calls that meet at the end of one of them: that one's shards are whole, and the others fail."""
    want = [file.read_bytes() for file in sorted(make("alone", corpus)[0].iterdir())]
    for i in range(60):
        folder = runs.root / f"meet{i}"
        calls = [subprocess.Popen([shards, folder, corpus], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
                 for _ in range(3)]
        codes = [call.wait() for call in calls]
        check(codes.count(0) == 1, i, codes)
        check([file.read_bytes() for file in sorted(folder.iterdir())] == want, i, codes, os.listdir(folder))


def holds_open(process, path):
    try:
        return any(os.path.samefile(fd, path) for fd in pathlib.Path(f"/proc/{process}/fd").iterdir())
    except OSError:  # one of them was closed meanwhile
        return False


def test_late_lock():
    """A call whose lock is made when another has put the part in place: it lies in the folder that is whole by then."""
    first, part = begin("late"), runs.root / "late.part"
    late = subprocess.Popen([shards, runs.root / "late", corpus], stderr=subprocess.PIPE,
                            env=os.environ | {"LD_PRELOAD": sys.argv[4], "LATE_NAME": ".lock"})
    wait_for("the late call", lambda: holds_open(late.pid, part))
    first.communicate()
    said = late.communicate()[1].decode()
    check(first.returncode == 0 and late.returncode == 1, first.returncode, late.returncode, said)
    check("late.part: another run has just ended there" in said, said)
    check(os.listdir(runs.root / "late") == ["shard_000000.bin"], os.listdir(runs.root / "late"))
    check(not part.exists(), "a part is left")


def test_refusals():
    (runs.root / "a.file").write_text("")
    (runs.root / "torn.part").mkdir()
    (runs.root / "torn.part/shard_000000.bin").write_text("of a call that was killed")
    bad = b'{"text": "fine"}\n{"text": 5}\n'
    for given, words in ((bad, "-: the line that ends at byte 29 has no \"text\" that is a string"),
                         (b'{"text": "fine"}\nplain\n', "is not JSON"), (b"\n", "no text in what was given")):
        folder, said = make("torn", "-", given=given, code=2)
        check(words in said and not folder.exists() and not (runs.root / "torn.part").exists(), said)
    check("must be a new folder" in make("bytes", corpus, code=2)[1], "an old folder")
    check("nowhere: cannot read" in make("new", runs.root / "nowhere", code=2)[1], "no text")
    check("must be an integer in 1" in make("new", corpus, "--shard-tokens", "many", code=2)[1], "no number")
    check("unknown option" in make("new", corpus, "--shards", 3, code=2)[1], "no option")
    check("TEXT: none was given" in make("new", code=2)[1], "nothing named")
    check("cannot make the folder" in make("a.file/new", corpus, code=1)[1], "no room for a folder")
    check(not (runs.root / "new").exists(), "a folder was made")


def test_slash():
    """As a shell completes the name of a folder: the part is beside it, and not in it."""
    want = [file.read_bytes() for file in sorted(make("plain", corpus)[0].iterdir())]
    folder, _ = make("slash//", corpus)
    check([file.read_bytes() for file in sorted(folder.iterdir())] == want, "other shards")
    check(not (runs.root / "slash.part").exists(), "a part is left")
    (runs.root / "slashed").write_text("mine")
    for name in ("slash//", "slashed/"):
        check("must be a new folder" in make(name, corpus, code=2)[1], name)


def test_somebody_elses():
    """A folder FOLDER.part that no killed call has left, the text itself in it, is neither cleared nor filled."""
    mine = runs.root / "mine"
    for name in ("text", "sub/text", ".text"):
        for place in (mine, runs.root / "wiki.part"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("precious")
        folder, said = make("wiki", runs.root / "wiki.part", code=2)
        check(f"wiki.part/{name}: not of a call that was killed" in said, said)
        check((runs.root / "wiki.part" / name).read_text() == "precious" and not folder.exists(), name)
        (runs.root / "wiki.part" / name).unlink()
    (runs.root / "led.part").symlink_to(mine)
    _, said = make("led", corpus, code=2)
    check("led.part: is there, and no folder" in said, said)
    check(sorted(p.name for p in mine.iterdir()) == [".text", "sub", "text"], "what a link leads to")


def test_wider():
    """A vocabulary beyond 2^24, trained on: the first loss is that of a guess among all. It takes 2 GB."""
    vocab, path = (1 << 24) + 100, runs.root / "wider.bin"
    tokens = [(1 << 24) + 5 + i % 60 for i in range(400)]
    path.write_bytes(struct.pack("<256i", 20240801, 7, len(tokens), *[0] * 253) + struct.pack("<400I", *tokens))
    shape = ("--dim 2 --layers 1 --heads 1 --kv-groups 1 --d-k 2 --d-v 2 --tied-embeddings --seq-len 8 --batch-size 1 "
             "--nsa-l 4 --nsa-d 2 --nsa-l-sel 4 --nsa-n-sel 4 --nsa-w 4 --val-fraction 0 --eval-every 0").split()
    out, _, _ = runs.train("wider", "--data", path, "--vocab-size", vocab, *shape, "--steps", 2, "--lr", "1e-2")
    first = float((out / "training.csv").read_text().splitlines()[1].split(",")[1])
    check(abs(first - math.log(vocab)) < 0.1, first)
    _, _, said = runs.train("widest", "--data", path, "--vocab-size", 2**31 - 1, "--steps", 1, code=2)
    check("no memory for" in said, said)
    _, _, said = runs.train("too_wide", "--data", path, "--vocab-size", 2**31, "--steps", 1, code=2)
    check("must be an integer in 0 .. 2147483647" in said, said)


if sys.argv[4:] == ["wider"]:
    test_wider()
    done()
    sys.exit()
test_bytes()
test_vocabulary()
test_another_vocabulary()
test_lines()
test_wide()
test_wrong_in_the_first_step()
test_two_at_once()
test_one_after_another()
if any(sys.argv[4:]):  # a build with a sanitizer has no such library, and CMake gives an empty word
    test_late_lock()
test_shorter()
test_refusals()
test_slash()
test_somebody_elses()
done()
