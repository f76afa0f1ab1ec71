"""Attention by layer in whole runs: lists in files and on the command line, resuming, dense to sparse in mid-run.

usage: test_layers.py PROGRAM FOLDER GENERATE VERDICT. Twins: train_carry.c, config_table.c. What a layer computes
is test_model.c's; pictures of such a model are test_inspect.py's.
"""
import json
import struct
import subprocess
import sys

from runs import Runs, check, done

runs = Runs(sys.argv[1], sys.argv[2], "layers")
generate, verdict = sys.argv[3], sys.argv[4]
DATA = ("--data", runs.text(), "--lr-schedule", "constant")


def tensors(folder, part="model"):
    """Of a checkpoint: name to shape and bytes."""
    data = (folder / f"{part}.safetensors").read_bytes()
    size, = struct.unpack_from("<Q", data)
    head = {name: x for name, x in json.loads(data[8:8 + size]).items() if name != "__metadata__"}
    return {name: (x["shape"], data[8 + size + x["data_offsets"][0]:8 + size + x["data_offsets"][1]])
            for name, x in head.items()}


def rows(out):
    return [line.split(",") for line in (out / "training.csv").read_text().splitlines()[1:]]


def numbers(out):
    """Loss and gradient norm of each step, as they were written."""
    return [(row[0], row[1], row[4]) for row in rows(out)]


def test_list():
    """A list of a file is the command line's with commas, and both resume to the bit."""
    config = runs.root / "pattern.yaml"
    config.write_text("model:\n  attention: [window, cmp+slc]\n")
    whole, said, _ = runs.train("whole", *DATA, "--layers", 3, "--attention", "window, cmp+slc", "--steps", 8)
    check("attention window,cmp+slc" in said, said)
    runs.train("file", *DATA, "--layers", 3, "--config", config, "--steps", 4)
    out, _, _ = runs.train("file", "--resume", "--steps", 8, small=False)
    check(numbers(out) == numbers(whole), numbers(out), numbers(whole))
    names = tensors(whole / "checkpoints/latest")
    check(names == tensors(out / "checkpoints/latest"), "weights")
    check("blocks.0.attn.W_K.weight" in names and "blocks.2.attn.W_K.weight" in names, sorted(names))
    check("blocks.1.attn.W_K_slc.weight" in names and "blocks.1.attn.W_K_win.weight" not in names, sorted(names))
    check(names["blocks.1.attn.gate.fc2.weight"][0] == [2, 4], names["blocks.1.attn.gate.fc2.weight"][0])
    lean, _, _ = runs.train("lean", *DATA, "--layers", 3, "--config", config, "--steps", 8, "--gc")
    check(numbers(lean) == numbers(whole), "computed again, other numbers")
    beat = json.loads((whole / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])
    check(beat["gate_branch_shares"][2] == 0 and beat["sel_rows"] == 4 * 64 * 2, beat)
    ran = subprocess.run([generate, whole, "--prompt", "line 1", "--length", "20"], capture_output=True, text=True)
    check(ran.returncode == 0 and "a token read" in ran.stderr, ran)
    judged = subprocess.run([verdict, whole], capture_output=True, text=True).stdout
    check("pct_at_max   ok" in judged, judged)
    _, checked, _ = runs.train("checked", *DATA, "--layers", 3, "--config", config, "--check")
    check("window: keys read by the last token of 64: 0 compressed + 0 selected + 16 window = 16" in checked and
          "cmp+slc: keys read by the last token of 64: 15 compressed + 48 selected + 0 window = 63" in checked, checked)


def test_refusals():
    for value, words in (("", "must be one of, or a list of"), ("nsa,sparse", "nsa, full, window, cmp+slc"),
                         ("nsa;full", "list of"), ("nsa,", "list of"), (",", "list of"),
                         ("nsa,full,window", "model.n_layers = 2")):
        _, _, said = runs.train("refused", *DATA, f"--attention={value}", "--steps", 1, code=2)
        check(words in said and not (runs.root / "refused").exists(), value, said)
    config = runs.root / "wrong.yaml"
    for text in ("[nsa, [full]]", "{nsa: full}", "[]", "~"):
        config.write_text(f"model:\n  attention: {text}\n")
        _, _, said = runs.train("refused", *DATA, "--config", config, "--steps", 1, code=2)
        check("wrong.yaml:2: model.attention" in said and "a list of: nsa, full" in said, text, said)


def test_dense_to_sparse():
    """--attention changed on resume: told, on the disk at once, and each tensor where it belongs."""
    out, _, _ = runs.train("sparse", *DATA, "--attention", "full", "--steps", 20, "--save-every", 10)
    dense = {part: tensors(out / "checkpoints/latest", part) for part in ("model", "optimizer")}
    config = runs.root / "full.yaml"
    config.write_text("model:\n  attention: nsa\n")
    _, _, said = runs.train("sparse", "--resume", "--config", config, "--steps", 30, small=False, code=2)
    check("model.attention is nsa here and full in the checkpoint" in said, said)
    _, said, told = runs.train("sparse", "--resume", "--attention", "nsa,cmp+slc", "--steps", 30, "--save-every", 0,
                               small=False)
    check("WARNING: attention changes in layers 0 .. 0: full -> nsa" in said, said)
    check("WARNING: attention changes in layers 1 .. 1: full -> cmp+slc" in said, said)
    check("8 tensors (gates, phi) begin anew" in said, said)
    check("model.attention = nsa,cmp+slc (command line --attention); in the checkpoint it is full" in told, told)
    check("step_00000020.left" in said, said)
    left, made = out / "checkpoints/step_00000020.left", out / "checkpoints/step_00000020"
    check(tensors(left) == dense["model"], "what it was made of")
    for part, prefixes in (("model", ("",)), ("optimizer", ("m.", "v."))):
        new = tensors(made, part)
        for p in prefixes:
            for b in ("cmp", "slc", "win"):
                for x in "KV":
                    check(new[f"{p}blocks.0.attn.W_{x}_{b}.weight"] ==
                          dense[part][f"{p}blocks.0.attn.W_{x}.weight"], p, b, x)
            check(new[f"{p}blocks.1.mlp.fc1.weight"] == dense[part][f"{p}blocks.1.mlp.fc1.weight"], "mlp")
            check(f"{p}blocks.1.attn.W_K_win.weight" not in new, "cmp+slc has no window")
    fresh = tensors(made, "optimizer")["m.blocks.0.attn.gate.fc1.weight"][1]
    check(fresh == bytes(len(fresh)), "moments of what is new")
    check([int(row[0]) for row in rows(out)] == list(range(1, 31)), rows(out))
    check(float(rows(out)[20][1]) < 0.8 * float(rows(out)[0][1]), "what was learned is lost", rows(out))
    # The same once more from what is on the disk, and from there on nothing is said.
    again, said, _ = runs.train("again", "--resume", made, "--steps", 30, small=False)
    check(numbers(again) == numbers(out)[20:] and "WARNING" not in said, numbers(again), numbers(out))
    back, said, _ = runs.train("back", "--resume", out, "--attention", "full,window", "--steps", 31, small=False)
    new, old = tensors(back / "checkpoints/step_00000030"), tensors(out / "checkpoints/latest")
    check(new["blocks.0.attn.W_K.weight"] == old["blocks.0.attn.W_K_slc.weight"], "full from slc")
    check(new["blocks.1.attn.W_V.weight"] == old["blocks.1.attn.W_V_slc.weight"], "window from what there is")
    tuned, said, _ = runs.train("tuned", *DATA, "--init-from", left, "--attention", "window", "--steps", 1)
    check("weights from" in said, said)


test_list()
test_refusals()
test_dense_to_sparse()
done()
