"""What a file of data is: every form that the trainers and `shards` read, and what they refuse, by name.

usage: test_formats.py TRAINER FOLDER SHARDS WITH. Twins: examples/trainer/data/format.c, format_files.c, unpack.c,
documents.c. WITH has the names of the libraries that the build has (zlib, zstd). zstd's frames are written here,
from RFC 8878: raw blocks. What shards writes with bytes for tokens is the text that was read, so most is asked of it;
the trainer must take the same files, or refuse them in the same words.
"""
import gzip
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys

from runs import PATIENCE, SMALL, Runs, check, done

runs, shards, libraries = Runs(sys.argv[1], sys.argv[2], "formats"), sys.argv[3], sys.argv[4].split(",")
numbers = itertools.count()
MARK = b"\xef\xbb\xbf"
DOCUMENTS = [f"document {i}, of {i * i % 89} words" for i in range(40)]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(DOCUMENTS)).encode()
READ = "".join(text + "\n" for text in DOCUMENTS).encode()


def zstd(data, checksum=b""):
    """Frames of one raw block each, at most 64 KiB."""
    out = b""
    for at in range(0, max(len(data), 1), 65536):
        part = data[at:at + 65536]
        out += struct.pack("<IBI", 0xFD2FB528, 0xA0, len(part)) + struct.pack("<I", 1 | len(part) << 3)[:3] + part
    return out


def place(files):
    """A folder of these files, or one file where there is one that does not say its folder."""
    root = runs.root / f"data{next(numbers)}"
    root.mkdir()
    for name, data in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    return root


def convert(path, *options, given=None):
    """What shards makes of it: the text, or None, and what it says."""
    out = runs.root / f"shards{next(numbers)}"
    ran = subprocess.run([shards, out, path, *options], capture_output=True, input=given, timeout=PATIENCE)
    said = (ran.stdout + ran.stderr).decode(errors="replace")
    if ran.returncode:
        check(ran.returncode == 2 and not out.exists(), ran)
        return None, said
    return b"".join(file.read_bytes()[1024:][::2] for file in sorted(out.iterdir())), said


def train(path, *options, code=0, given=None):
    _, out, errors = runs.train(f"run{next(numbers)}", "--data", path, "--steps", 1, "--eval-every", 0, "--seq-len", 32,
                                *options, code=code, given=given)
    return out + errors


def reads(name, data, want, trains=True):
    path = place({name: data}) / name
    found, said = convert(path)
    check(found == want, name, found and found[:99], said)
    if trains:
        train(path)


def refuses(name, data, *words, trains=False):
    """By both, in the same words; never taken for text."""
    path = place({name: data}) / name
    found, said = convert(path)
    check(found is None and name in said and all(word in said for word in words), name, words, said)
    if trains:
        error = train(path, code=2)
        check(name in error and all(word in error for word in words), error)


def test_json():
    array = json.dumps([{"text": text, "id": [i]} for i, text in enumerate(DOCUMENTS)]).encode()
    pretty = json.dumps([{"story": "], ", "text": text} for text in DOCUMENTS], indent=2).encode()
    reads("plain.jsonl", LINES, READ)
    reads("windows.jsonl", MARK + LINES.replace(b"\n", b"\r\n"), READ)
    reads("space.jsonl", b"\r\n \t\n" + LINES, READ, trains=False)
    reads("mark_and_space.ndjson", MARK + b"\n\n  " + LINES, READ)
    reads("array.json", array, READ)
    reads("array_windows.json", MARK + b"\r\n" + pretty.replace(b"\n", b"\r\n") + b"\r\n", READ)
    reads("array.jsonl", pretty, READ, trains=False)
    reads("strings.json", json.dumps(DOCUMENTS, indent=1).encode(), READ)
    reads("lines_of_strings.jsonl", "".join(json.dumps(t) + "\n" for t in DOCUMENTS).encode(), READ, trains=False)
    reads("named_as_text.txt", LINES, READ, trains=False)
    reads("array_named_as_text.txt", array, READ, trains=False)
    reads("strings.txt", MARK + json.dumps(DOCUMENTS).encode(), READ, trains=False)
    reads("long_string", json.dumps(["x" * 70000]).encode(), b"x" * 70000 + b"\n", trains=False)
    for said in ('["Stop", he said', '["Stop\n", "go"]', '["Stop" and go]', '["Stop"] he said', 'He said\n{"stop" and', '[1] {"stop"}\n'):
        text = (said + " and no more of it\n" * 40).encode()
        reads("said", text, text, trains=False)
    half = b"".join(line if i % 2 else b'{"story": "other"}\n' for i, line in enumerate(LINES.splitlines(keepends=True)))
    check(re.search(r"data: \d+ documents read, \d+ lines or values that are none passed over",
                    train(place({"half.jsonl": half}) / "half.jsonl")), "how many have no text")
    reads("marks", MARK * 2 + LINES, READ)
    for first in (b"# a corpus\n", b"// a corpus\r\n\r\n", b"40 documents\n\n", b"'{'\n"):
        refuses("headed.txt", first + LINES, "JSON lines behind a first line that is none: cut that off", trains=True)
    some = LINES.splitlines(keepends=True)[:5]
    for before, lines in ((b"# a\n# b\n\n", some), (b"", [b"data: %s\n" % x for x in some]),
                          (b"", [b"%d\t%s" % x for x in enumerate(some)]),
                          (b"", [repr(json.loads(x)).encode() + b"\n" for x in some])):
        refuses("before.txt", before + b"".join(lines), "lines that hold objects, of JSON or Python", trains=True)
        path = b"lines\n" * 7 + before + b"".join(lines * 20)
        found, said = convert("-", given=path)  # of a pipe the first lines are judged, too
        check(found is None and "lines that hold objects" in said, found and found[:99], said)
    code = b"int a[] = {1, 2};\nint b = f({\"a\", 3}, {'a'});\ndoc {\"a\": 1} more\nx = {a: 1}\n"
    reads("code.c", code, code, trains=False)
    text = b"A reply\nis\n{\"stop\": true}\nor nothing.\n"
    found, said = convert("-", given=text)
    check(found == text, found, said)
    for data in (b'[["a", "b"]]', b'[1, "a text"]\n[2, "another"]\n', b'[[{"text": "a"}]]'):
        refuses("rows.txt", data, "rows.txt")
    refuses("sequence.txt", b"\x1e" + LINES.replace(b"\n", b"\n\x1e"), "a sequence of JSON texts (RFC 7464)")
    reads("nasty.json", json.dumps([{"a": "\\\"]}", "text": 'quote " and \\ and ]'}, {"text": ""}]).encode(),
          b'quote " and \\ and ]\n', trains=False)
    numbers_json = b"".join(b'{"n": %s, "text": "document %d"}\n' % (n, i) for i, n in enumerate(
        (b"18446744073709551615", b"-9223372036854775809", b"123456789012345678901234567890", b"1e300")))
    reads("long_numbers.jsonl", numbers_json, b"".join(b"document %d\n" % i for i in range(4)), trains=False)
    reads("put_together.jsonl", MARK + LINES + MARK + LINES, READ * 2)
    refuses("infinite.jsonl", b'{"n": 1e999, "text": "a"}\n', "is not JSON: real number overflow near '1e999'")
    refuses("nan.jsonl", b'{"n": NaN, "text": "a"}\n', "is not JSON: invalid token near 'NaN'")
    refuses("half.jsonl", b'{"text": "\\ud800"}\n', "is not JSON: invalid Unicode '\\uD800'")
    refuses("nested.jsonl", b'{"a": %s%s, "text": "b"}\n' % (b"[" * 70, b"]" * 70), "nested more than 64 deep")
    kinds = ((None, "null"), (5, "a number"), (["a"], "an array"), ({}, "an object"), (True, "true or false"))
    for value, kind in kinds:
        refuses("kind.jsonl", json.dumps({"text": value}).encode(), f'has no "text" that is a string, but {kind}')
    for order in ("le", "be"):
        refuses("wide.jsonl", LINES.decode().encode(f"utf-16-{order}"))
    refuses("story.json", b'[{"story": "once", "id": 1},\n {"story": "twice"}]', 'has no "text" that is a string',
            'but "story", "id"', trains=True)
    refuses("whole.json", b'{"data": [{"text": "a"}]}', 'has no "text"', '"data"')
    refuses("numbers.jsonl", b"[1, 2, 3]\n[4]\n", 'has no "text" that is a string')
    refuses("cut.json", b'[{"text": "whole"}, {"text": "cut', "at byte 20: a value that does not end", trains=True)
    refuses("open.json", b'[{"text": "whole"}', "it ends in the middle: cut short")
    refuses("comma.json", b'[{"text": "a"} {"text": "b"}]', "at byte 15: a comma or ] is missing")
    refuses("trailing.json", b'[{"text": "a"},]', "a comma and no value")
    refuses("twice.json", b'[{"text": "a"}]\n[{"text": "b"}]', "at byte 16: bytes behind its end")
    refuses("zero.json", b'[{"text": "a"}]\0[{"text": "b"}]', "at byte 15: bytes behind its end")
    refuses("zeros.json", b'[{"text": "a"},\0{"text": "b"}]', "is not JSON")
    over_lines = "\n".join(json.dumps({"text": text, "tags": ["a", "of its own line"]}, indent=1) for text in DOCUMENTS)
    for name in ("over_lines.json", "over_lines.txt"):
        refuses(name, MARK + over_lines.replace("\n", "\r\n").encode(), "a JSON object over several lines", trains=True)
    check("over several lines" in convert("-", given=over_lines.encode())[1], "of a pipe")
    refuses("words.jsonl", b"Once upon a time\n", "named as JSON, but byte 0 begins none", trains=True)
    check("no text in what was given" in convert(place({"none.json": b"[ ]\n"}) / "none.json")[1], "an empty array")


def test_text():
    reads("mark.txt", MARK + b"plain text\n" * 30, b"plain text\n" * 30)
    reads("no_newline", b"plain text", b"plain text\n", trains=False)
    strays = b"caf\xc3\xa9 au lait\n" * 9 + b"a caf\xe9\n" + b"plain\n" * 400 + b"and na\xefve\n" * 2
    reads("strays.txt", strays, strays, trains=False)
    for name, data in (("latin.txt", "Das M\u00e4dchen ging \u00fcber die Stra\u00dfe\n".encode("latin-1") * 99),
                       ("kanji", "\u65e5\u672c\u8a9e\u306e\u6587\u3067\u3059\n".encode("shift-jis") * 99),
                       ("packed.msgpack", b"\x82\xa4text\xa5hello\xa2id\x01" * 99), ("a.br", b"\x8b\x02\x80" * 400)):
        refuses(name, data, "not in UTF-8", "iconv", "--dataset text takes its bytes", trains=True)
        train(place({name: data}) / name, "--dataset", "text")
    reads("code.c", b"{ int x; }\n", b"{ int x; }\n", trains=False)
    reads("note.md", b"[1] a note\n", b"[1] a note\n", trains=False)
    path = place({"only_a_mark.txt": MARK}) / "only_a_mark.txt"
    check("an empty file" in train(path, code=2), "a mark alone")
    check(convert(path)[0] is None, "a mark alone")
    for name, data, what in (
            ("page.html", b"<!DOCTYPE html>\n<html lang=en>", "a page of the web"),
            ("saved.txt", b"<!-- saved -->\n<!--by me -->\n<html>", "a page of the web"),
            ("corpus.txt", b"\r\n  <HTML><body>404</body>", "a page of the web"),
            ("wiki", b'<mediawiki xmlns="x">\n<page>', "a dump of a wiki"),
            ("feed.txt", b'<?xml version="1.0"?>', "XML"),
            ("crawl.txt", b"WARC/1.0\r\nWARC-Type: conversion", "a crawl's pages (WARC)"),
            ("a.csv", b"id,text\n1,once", "a table by its name"),
            ("b.TSV", b"id\ttext\n1\tonce", "a table by its name")):
        refuses(name, data + b" upon a time\n" * 40, what, "--dataset text takes it as it is", trains=True)
        train(place({name: data + b" upon a time\n" * 40}) / name, "--dataset", "text")
    refuses("corpus.jsonl", MARK + b"<html>\n<h1>Please log in</h1>",
            "a page of the web (HTML): take its text out first")
    for word, at in (("ORCHARDS", 0), ("ID3 for trees", 0), ("RIFF raff", 0), ("GGUF", 0), ("PAR15", 0), ("GIF89a", 0),
                     ("custard", 255), ("OggS", 3)):  # what binary files begin with, but for what follows there
        words = (b"." * at + word.encode() + b" \x1b[1mand\f more words\n") * 20
        reads("word.txt", words, words, trains=at > 0)
    reads("angle.txt", b"<htmx> is no page\n" * 40, b"<htmx> is no page\n" * 40)
    bare = place({"zeros.dat": b"a\0b\n" * 99}) / "zeros.dat"
    refuses("zeros.dat", b"a\0b\n" * 99, "holds zero bytes", "--dataset text", trains=True)
    train(bare, "--dataset", "text")
    turns = b"plain text\n" * 6000 + b"\0" * 999 + b"plain text\n" * 6000  # behind the head that is judged
    words = ("text that is none at byte ", "--dataset text")
    refuses("turns.txt", turns, words[0] + "66000", words[1])
    found, said = convert("-", given=turns)
    check(found is None and words[0] + "66000" in said, said)
    bare = place({"turns.txt": b"plain text\n" * 60000 + bytes(9999) + b"plain text\n" * 60000}) / "turns.txt"
    said = train(bare, "--steps", 500, "--val-fraction", 0, code=2)  # which no other start would better
    check(all(word in said for word in words) and "| saved" in said, said)
    train(bare, "--steps", 500, "--dataset", "text")
    if "zlib" in libraries:
        refuses("turns.txt.gz", gzip.compress(turns), words[0] + "66000", trains=True)


def test_packed():
    """By gzip and by zstd, of one member or several, whatever is inside."""
    forms = {"zlib": (gzip.compress, ".gz", b"unpack it at byte"), "zstd": (zstd, ".zst", b"")}
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    array = json.dumps(DOCUMENTS).encode()
    for library, (pack, end, _) in forms.items():
        if library not in libraries:
            refuses(f"c4.json{end}", pack(LINES), "this build has no", "unpack it first", trains=True)
            continue
        reads(f"c4.json{end}", pack(LINES), READ)
        reads(f"members.jsonl{end}", pack(LINES[:half]) + pack(b"") + pack(LINES[half:]), READ)
        reads(f"array.json{end}", pack(MARK + array), READ, trains=False)
        reads(f"text{end}", pack(MARK + b"plain text\n" * 20000), b"plain text\n" * 20000)
        reads("named_otherwise.txt", pack(b"plain text\n"), b"plain text\n", trains=False)
        whole = pack(LINES)
        for left in (len(whole) - 1, len(whole) // 2, 12):
            refuses(f"cut{left}.jsonl{end}", whole[:left], f"end at byte {left} in the middle: cut short",
                    trains=left == 12)
        refuses(f"twice.jsonl{end}", pack(whole), "packed twice")
        refuses(f"tar.tar{end}", pack(b"name" + bytes(253) + b"ustar\0" + bytes(200)), "in it a tar archive")
        refuses(f"set.parquet{end}", pack(b"PAR1" + bytes(90)), "in it a Parquet file")
        refuses(f"page.txt{end}", pack(b"<html>" + bytes(90)), "in it a page of the web (HTML)")
        refuses(f"shard.bin{end}", pack(struct.pack("<256i", 20240520, 1, 1, *[0] * 253) + b"ab"), "plain files")
        refuses(f"behind.jsonl{end}", whole + b"garbage behind", "damaged: cannot unpack it at byte")
    if "zlib" in libraries:
        reads("padded.jsonl.gz", gzip.compress(LINES) + bytes(1000), READ, trains=False)
        wrong = bytearray(gzip.compress(LINES))
        wrong[-6] ^= 1  # of the sum
        refuses("sum.jsonl.gz", bytes(wrong), "damaged: cannot unpack it at byte", "incorrect data check")
        wrong = gzip.compress(LINES)
        refuses("middle.jsonl.gz", wrong[:40] + b"\xff" * 30 + wrong[70:], "damaged: cannot unpack it at byte",
                trains=True)
    if "zstd" in libraries:
        skipped = struct.pack("<II", 0x184D2A53, 5) + b"notes"
        reads("skipped.jsonl.zst", skipped + zstd(LINES) + skipped, READ, trains=False)
        # A window of 2 GiB, of zstd --ultra --long=31: no single segment, one raw block.
        wide = struct.pack("<IBB", 0xFD2FB528, 0, (31 - 10) << 3) + struct.pack("<I", 1 | len(LINES) << 3)[:3] + LINES
        reads("long.jsonl.zst", wide, READ)
        wrong = bytearray(zstd(LINES))
        wrong[9] |= 6  # a reserved kind of block
        refuses("block.jsonl.zst", bytes(wrong), "damaged: cannot unpack it at byte")


def test_strangers():
    """By their first bytes, whatever their names."""
    strangers = {
        "Parquet": b"PAR1\x15\x04", "Arrow file": b"ARROW1\0\0", "Arrow stream": b"\xff\xff\xff\xff\x58\1\0\0",
        "ORC": b"ORC\x11", "Avro": b"Obj\x01\x04", "SQLite": b"SQLite format 3\0", "HDF5": b"\x89HDF\r\n\x1a\n",
        "NumPy": b"\x93NUMPY\x01\0", "zip": b"PK\x03\x04\x14", "xz": b"\xfd7zXZ\0\0\4", "bzip2": b"BZh91AY&SY",
        "lz4": b"\x04\x22\x4d\x18", "7z": b"7z\xbc\xaf\x27\x1c\0\4", "RAR": b"Rar!\x1a\x07\1\0", "PDF": b"%PDF-1.7\n",
        "a PDF": MARK + b"%PDF-1.4\n", "PostScript": b"%!PS-Adobe-3.0\n",
        "tar": b"a" + bytes(256) + b"ustar\x0000", "ELF": b"\x7fELF\2\1\1", "PNG": b"\x89PNG\r\n\x1a\n",
        "JPEG": b"\xff\xd8\xff\xe0\0", "GIF": b"GIF89a\x10\0", "RIFF": b"RIFF\0\0\0\0WAVE", "GGUF": b"GGUF\3\0\0\0",
        "safetensors": struct.pack("<Q", 40) + b'{"a": {}}', "(safetensors)":
        struct.pack("<Q", 40) + b'{ \n"a": {}}', "pickle": b"\x80\x04\x95\0\0", "Office":
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "RTF": b"{\\rtf1\\ansi", "Git LFS":
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "UTF-16": b"\xff\xfe" + "text".encode("utf-16-le"), "iconv -f UTF-16": b"\xfe\xff" + "text".encode("utf-16-be"),
        "UTF-32": b"\xff\xfe\0\0" + "text".encode("utf-32-le"), "WebAssembly": b"\0asm\1\0\0\0"}
    for i, (what, head) in enumerate(strangers.items()):
        for name in ("data.txt", "data.jsonl")[:1 + (i % 8 == 0)]:
            refuses(name, head + b"some more bytes\n" * 20, what, trains=i % 8 == 0)
    folder = place({"a.txt": b"text\n" * 99, "b.parquet": b"PAR1" + bytes(99)})
    check("b.parquet: a Parquet file: write it as JSON lines" in train(folder, code=2), "in a folder too")


def test_folder():
    """A hub's folder: the page beside the data is neither trained on nor validated on; what is passed over is said."""
    files = {"README.md": b"# The set\n" * 9, "LICENSE": b"do as you like\n", "data.jsonl": LINES,
             "sub/more.json": json.dumps(DOCUMENTS).encode(), "dataset_infos.json": b"{}", ".gitattributes": b"*",
             "book.txt": b"a book\nof two\n", "empty.txt": b""}
    if "zlib" in libraries:
        files["c4.json.gz"] = gzip.compress(LINES)
    folder = place(files)
    (folder / "up").symlink_to("..")
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    words = (": passed over: LICENSE, README.md, dataset_infos.json, empty.txt (empty), .gitattributes, "
             "gone (a link to nothing), pipe (no plain file), up (a link to a folder)")
    found, said = convert(folder)
    check(said.count("passed over") == 1 and words in said, said)
    want = b"a book\nof two\n" + READ * (3 if "zlib" in libraries else 2)
    check(found == want, found)
    said = train(folder)
    check(words in said and "a stream of documents, 4 files" in said, said)
    beside = place({"data.jsonl": LINES, "plot.png": b"\x89PNG\r\n\x1a\n" + bytes(99), "data.jsonl~": LINES,
                    "tool": b"\x7fELF\2", "data.jsonl.md5": b"0 data.jsonl\n", "more.jsonl.part": b"{",
                    "sub/Thumbs.db": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"})
    words = (": passed over: data.jsonl.md5, data.jsonl~, more.jsonl.part, plot.png (a picture (PNG)), sub/Thumbs.db, "
             "tool (a program (ELF))")
    found, said = convert(beside)
    check(found == READ and words in said, found, said)
    check(words in train(beside), "what lies beside data")
    check("a folder without text" in train(place({"a.png": b"\x89PNG\r\n\x1a\n"}), code=2), "pictures alone")
    check("a folder without text" in train(place({"README.md": b"words\n" * 99}), code=2), "a page alone is none")
    train(place({"README.md": b"words\n" * 99}) / "README.md")  # which is meant where it is named
    around = place({"a.txt": b"text of mine\n" * 99})
    for options in (("--steps", 1), ("--steps", 2, "--resume")):  # a run below its own data, and beside an older one
        said = train(around, "--out-dir", around / "runs/mine", *options)
    words = ("passed over: runs/mine (the folder of a run)", ": 1 text file, ")
    check(all(word in said for word in words) and "differ" not in said, said)
    check(convert(around)[0] == b"text of mine\n" * 99, "runs are no text")
    shard = struct.pack("<256i", 20240520, 1, 500, *[0] * 253) + b"ab" * 500
    mixed = place({"a.bin": shard.replace(b"ab", b"a\0"), "b.txt": b"text\n" * 99})
    check("token shards (a.bin) and text (b.txt) in one folder" in train(mixed, code=2), "both")
    check("b.txt" in train(mixed, "--dataset", "bin") and "a.bin" in train(mixed, "--dataset", "text"), "one of them")


def test_names_for_validation():
    """llm.c's val shards, and the files of other sets' parts: never trained on, and validated on."""
    def shard(byte):
        return struct.pack("<256i", 20240520, 1, 900, *[0] * 253) + bytes((byte, 0)) * 900
    for files in ({"fineweb_val_000000.bin": shard(7), "fineweb_train_000001.bin": shard(5)},
                  {"tiny_val.bin": shard(7), "tiny.bin": shard(5)},
                  {"validation.jsonl": LINES.replace(b"document", b"%"), "train.jsonl": LINES},
                  {"set-valid.txt": b"%" * 2000, "set-train.txt": b"a" * 2000, "set-test.txt": b"?" * 2000}):
        names = list(files)
        out, said, _ = runs.train(f"run{next(numbers)}", "--data", place(files), "--steps", 30, "--eval-every", 30,
                                  "--seq-len", 32, "--lr", "1e-2", "--warmup-steps", 0)
        check(f"for validation by their names, not trained on: {names[0]}" in said, said)
        check(("for tests by their names" in said) == ("set-test.txt" in names), said)
        if names[0].endswith(".bin"):  # one token that was never seen
            loss = float((out / "val.csv").read_text().splitlines()[-1].split(",")[1])
            last = float((out / "training.csv").read_text().splitlines()[-1].split(",")[1])
            check(loss > 4 > 2 > last, loss, last)
    parts = place({"train/0001.jsonl": LINES, "validation/0007.jsonl": LINES, "test/0.jsonl": LINES})
    found, said = convert(parts)
    check("not trained on: validation/0007.jsonl" in said and "passed over: test/0.jsonl" in said, said)
    check(found == READ, found)
    code = place({"train.py": b"print(1)\n" * 99, "test_all.py": b"assert 1\n", "eval_it.py": b"pass\n"})
    check(convert(code)[0].count(b"\n") == 101, "programs are no parts")
    folder = place({"test.txt": b"a book called test\n" * 99, "valid.txt": b"another\n" * 99})
    check("by their names" not in train(folder), "names of books")


def test_input():
    """Standard input, judged by its first bytes alone."""
    for given, want in ((LINES, READ), (MARK + LINES, READ), (json.dumps(DOCUMENTS).encode(), READ),
                        (b"one line\nand another\n", b"one line\nand another\n")):
        check(convert("-", given=given)[0] == want, given[:40])
    packed = {"zlib": gzip.compress(LINES), "zstd": zstd(LINES)}
    for library in set(libraries) & set(packed):
        check(convert("-", given=packed[library])[0] == READ, library)
    found, said = convert("-", given=b"PAR1" + bytes(99))
    check(found is None and "-: a Parquet file" in said, said)


def test_large():
    """Packed bytes are held once, and what memory has no room for is refused before the kernel kills."""
    if "zlib" not in libraries:
        return
    size = 96 << 20
    packed = 6 * gzip.compress(b"0123456789abcde\n" * (size // 16 // 6), 1)
    path = place({"large.txt.gz": packed}) / "large.txt.gz"
    options = ("--data", path, "--steps", 1, "--eval-every", 0)
    _, process = runs.start("large", *options)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status
    check(status == 0, (runs.root / "large.log").read_text())
    check(used.ru_maxrss * 1024 < 3 * size, used.ru_maxrss, "KiB for a text of", size)
    group = runs.root / "group"
    group.mkdir()
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c",
              'mount --bind "$0" /sys/fs/cgroup || exit 77; exec "$@"', group]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], stderr=subprocess.DEVNULL).returncode:
        print("nothing can be mounted here; test_quota's groups stand alone")
        return
    trainer = [runs.program, *SMALL, *map(str, options), "--out-dir", runs.root / "refused"]
    writer = [shards, runs.root / "unwritten", path]
    text = f"{path}: no memory for "
    for room, command, words in ((size, trainer, text), (size, writer, text), (4 * size, writer, "memory for tokens")):
        (group / "memory.max").write_text(str(room))
        ran = subprocess.run([*inside, *command], capture_output=True, text=True, timeout=PATIENCE)
        check(ran.returncode == 2 and words in ran.stdout + ran.stderr, ran)


for test in (test_json, test_text, test_packed, test_strangers, test_folder, test_names_for_validation, test_input,
             test_large):
    test()
done()
