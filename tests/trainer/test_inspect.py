"""inspect and draw.py on a small model: lists, scores and counts agree with one another and with the
pictures; the page holds all of it; what cannot be inspected is refused by name.

usage: test_inspect.py TRAINER FOLDER INSPECT DRAW RETRIEVAL. Twins: examples/inspect.
"""
import base64
import json
import re
import resource
import struct
import subprocess
import sys
import xml.etree.ElementTree
import zlib

from poison import change
from runs import PATIENCE, Runs, check, done

runs = Runs(sys.argv[1], sys.argv[2], "inspect")
inspect, draw, retrieval = sys.argv[3:6]
TEXT = "".join(f"line {i} of {i * i % 97} words\n" for i in range(9))[:110] + "\u00e9</script>"
LENGTH = len(TEXT.encode())
L, D, BLOCK, COUNT, WINDOW = 8, 4, 16, 4, 16  # of the model below


def run(*command, code=0, words="", **options):
    ran = subprocess.run([str(word) for word in command], text=True, capture_output=True, timeout=PATIENCE, **options)
    check(ran.returncode == code, command, ran.returncode, ran.stdout, ran.stderr)
    check(words in ran.stdout + ran.stderr, words, ran.stdout, ran.stderr)


def check_query(t, record, reads):
    """One query's record by itself; adds the keys that it reads."""
    blocks, score, mass = record["blocks"], record["score"], record["mass"]
    candidates = t // BLOCK + 1
    check(all(0 < g < 1 for g in record["gates"]) and len(record["gates"]) == 3, t, record)
    check(blocks == sorted(set(blocks)) and len(blocks) == min(COUNT, candidates), t, blocks)
    check({0, max(0, candidates - 2), candidates - 1} <= set(blocks), "forced blocks", t, blocks)
    check(len(score) == len(mass) == candidates and abs(sum(mass) - 1) < 1e-3, t, mass)
    visible = (t + 1 - L) // D + 1 if t + 1 >= L else 0
    check(abs(sum(score) - (visible > 0)) < 1e-3, "scores of all blocks are all of p_cmp", t, score)
    free = [j for j in range(1, candidates - 2)]
    chosen = [score[j] for j in free if j in blocks]
    others = [score[j] for j in free if j not in blocks]
    check(not others or min(chosen) >= max(others) * 0.999, "the best scores were chosen", t, record)
    for branch, keys in (("cmp", visible), ("win", min(WINDOW, t + 1)),
                         ("slc", sum(len(range(j * BLOCK, min(t + 1, (j + 1) * BLOCK))) for j in blocks))):
        reads[branch] += keys


def opaque(image):
    """Cells of a PNG of draw.py's that are drawn, its width and height in cells being LENGTH."""
    png = base64.b64decode(image.split(",", 1)[1])
    width, height = struct.unpack(">II", png[16:24])
    at, body = 8, b""
    while at < len(png):
        size = struct.unpack(">I", png[at:at + 4])[0]
        body += png[at + 8:at + 8 + size] if png[at + 4:at + 8] == b"IDAT" else b""
        at += size + 12
    rows = zlib.decompress(body)
    drawn = sum(1 for r in range(height) for c in range(width) if rows[r * (4 * width + 1) + 4 * c + 4])
    return drawn * LENGTH * LENGTH / (width * height)


def check_pictures(folder, data):
    """Well-formed, loading nothing, and the drawn cells of a head are the keys that it reads."""
    for name in ("reads", "blocks", "gates", "scores"):
        xml.etree.ElementTree.parse(folder / f"{name}.svg")
    images = re.findall(r'href="(data:[^"]*)"', (folder / "reads.svg").read_text())
    head = {"cmp": 0, "slc": 0, "win": 0}
    for t, record in enumerate(data["queries"][1][0]):
        check_query(t, record, head)
    check(opaque(images[1]) == head["slc"] and opaque(images[2]) == head["win"], head)
    covered = sum(D * ((t + 1 - L) // D) + L for t in range(L - 1, LENGTH))
    check(opaque(images[0]) == covered, "tokens under compressed keys", covered)
    page = (folder / "index.html").read_text()
    loads = [link for link in re.findall(r'(?:src|href)="([^"]*)"', page) if not link.startswith("data:")]
    check(not loads and "@import" not in page, "the page loads", loads)
    numbers = re.search(r"const data = (.*);\n", page)[1]
    check(json.loads(numbers) == data, "the page's numbers")
    check("</" not in numbers, "the script would end in the text")


def check_refusals(model, full, text, result):
    long, empty, wide, out = runs.root / "long", runs.root / "empty", runs.root / "wide", ("--out", result)
    long.write_text("\ufeff" + "x" * 129)
    empty.write_text("\ufeff")
    wide.write_text("text", encoding="utf-16")
    for words, *options in (
            ("CHECKPOINT: none was given", "--text", text, *out),
            ("--text FILE or --prompt", model, *out),
            ("--text FILE or --prompt", model, "--text", text, "--prompt", "x", *out),
            ("--out FILE.json", model, "--text", text),
            ("unknown option", model, "--bogus", "1"),
            ("value is missing", model, "--text"),
            ("must be an integer", model, "--text", text, "--tokens", "0", *out),
            ("one too many, after", model, model, "--text", text, *out),
            ("nowhere", runs.root / "nowhere", "--text", text, *out),
            ("cannot open", model, "--text", runs.root / "no-such-text", *out),
            ("the text is empty", model, "--text", empty, *out),
            ("the text is empty", model, "--prompt", "", *out),
            ("text in UTF-16: convert it", model, "--text", wide, *out),
            ("129 tokens; the model was trained with a context of 128", model, "--text", long, *out),
            ("other attention than nsa", full, "--text", text, *out),
            ("--tokenizer-path: has no effect: the tokens of", model, "--text", text, "--tokenizer-path", "x", *out),
            ("cannot create", model, "--text", text, "--out", runs.root / "no-folder" / "x.json")):
        run(inspect, *options, code=2, words=words)
    run(inspect, model, "--text", long, "--tokens", "128", *out)
    link = runs.root / "sink"
    link.symlink_to("/dev/full")
    run(inspect, model, "--text", text, "--out", link, code=1, words="cannot write: No space left")
    check(link.is_symlink(), "what was no file of its own is gone")
    older = result.read_bytes()
    run(inspect, model, "--text", text, *out, code=1, words="cannot write: File too large", restore_signals=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))
    check(result.read_bytes() == older, "an older file is lost")
    check(sorted(runs.root.glob("*.tmp")) == [], "half a file is left")
    run(inspect, "--help", words="--tokenizer-path")
    run(sys.executable, draw, text, runs.root / "drawn", code=1, words="not what inspect writes")
    for other, words in (("5", "no object"), ("[]", "no object"), ('{"tokens": 1}', "without layers, heads")):
        empty.write_text(other)
        run(sys.executable, draw, empty, runs.root / "drawn", code=1, words=words)
    run(sys.executable, draw, result, runs.root / "drawn", "--layer", "2", code=1, words="layers 0, 1")
    run(sys.executable, draw, result, text, code=1, words="cannot write there")
    drawn = {path.name: path.read_bytes() for path in (runs.root / "drawn").iterdir()}
    run(sys.executable, draw, result, runs.root / "drawn", "--layer", "0", code=1, words="File too large",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))
    check({path.name: path.read_bytes() for path in (runs.root / "drawn").iterdir()} == drawn, "older pictures are lost")
    data = json.loads(result.read_text())
    data["counted"]["slc"] += 1
    result.write_text(json.dumps(data))
    run(sys.executable, draw, result, runs.root / "drawn", code=1, words="the library counted")


options = ("--dataset", "text", "--data", runs.text(), "--seq-len", 128, "--nsa-n-sel", COUNT, "--steps", 20)
model, _, _ = runs.train("model", *options)
full, _, _ = runs.train("full", *options, "--attention", "full", "--steps", 1)
text, result = runs.root / "sample", runs.root / "result.json"
text.write_text(TEXT)
run(inspect, model, "--text", text, "--out", result)
data = json.loads(result.read_text())
check(bytes.fromhex("".join(data["text"])) == TEXT.encode(), data["text"])
check(len(data["queries"]) == 2 and all(len(layer) == 2 for layer in data["queries"]), "layers, kv heads")
reads = {"cmp": 0, "slc": 0, "win": 0}
for layer in data["queries"]:
    for head in layer:
        check(len(head) == LENGTH, len(head))
        for t, record in enumerate(head):
            check_query(t, record, reads)
check(reads == data["counted"], "counted by the library", data["counted"], reads)
check(data["queries"][0] != data["queries"][1], "two layers with the same numbers")
run(sys.executable, draw, result, runs.root / "drawn", words="wrote reads.svg")
check_pictures(runs.root / "drawn", data)
check_refusals(model, full, text, result)
# Of attention by layer what chooses is shown, under its layer's number; cmp+slc has no window.
mixed, _, _ = runs.train("mixed", *options, "--layers", 3, "--attention", "nsa,full,cmp+slc")
run(inspect, mixed, "--text", text, "--out", result, words="2 layers")
data = json.loads(result.read_text())
check(data["numbers"] == [0, 2] and len(data["queries"]) == 2, data["numbers"])
check(all(record["win"] == 0 and record["gates"][2] == 0 for head in data["queries"][1] for record in head), "a window")
check(all(record["win"] == min(WINDOW, t + 1) for t, record in enumerate(data["queries"][0][0])), "no window")
run(sys.executable, draw, result, runs.root / "drawn", words="wrote reads.svg")
check("layer 2, key-value head 0" in (runs.root / "drawn" / "reads.svg").read_text(), "the layer's number")
run(sys.executable, draw, result, runs.root / "drawn", "--layer", "1", code=1, words="layers 0, 2")
# Finite weights whose products are not: JSON has no numbers for what comes of them, and what was there stays.
older = result.read_bytes()
needles, _, _ = runs.train("needles", "--dataset", "retrieval", "--vocab-size", 512, "--steps", 1)
for huge in (model, needles):
    change(huge / "checkpoints/latest", lambda name: [3e38] if name.endswith("W_Q.weight") else None)
run(retrieval, needles, 1, 64, code=1, words="step_00000001: the model gives")
run(inspect, model, "--text", text, "--out", result, code=1, words="step_00000020: the model's gates or scores")
check(result.read_bytes() == older, "an older file is lost")
done()
