"""Muon and wsd in whole runs: resumed to the bit, moments in checkpoints, refusals by name.

usage: test_optimizers.py PROGRAM FOLDER. Twins: optimizer.c, config_lr. What a step computes is test_muon.c's.
"""
import json
import struct
import sys

from runs import Runs, check, done

runs = Runs(sys.argv[1], sys.argv[2], "optimizers")
DATA = ("--data", runs.text())
MUON = (*DATA, "--optimizer", "muon", "--lr-schedule", "wsd", "--warmup-steps", 2, "--decay-fraction", 0.25,
        "--weight-decay", 0.1)


def rows(out):
    return [line.split(",") for line in (out / "training.csv").read_text().splitlines()[1:]]


def names(path):
    data = path.read_bytes()
    size, = struct.unpack_from("<Q", data)
    return set(json.loads(data[8:8 + size])) - {"__metadata__"}


def test_resume():
    whole, said, _ = runs.train("whole", *MUON, "--steps", 16, "--save-every", 8)
    last = whole / "checkpoints/latest"
    part, _, _ = runs.train("part", "--resume", whole / "checkpoints/step_00000008", "--steps", 16, small=False)
    check([row[1:3] + row[4:] for row in rows(whole)[8:]] == [row[1:3] + row[4:] for row in rows(part)], rows(part))
    for file in ("model.safetensors", "optimizer.safetensors"):
        check((last / file).read_bytes() == (part / "checkpoints/latest" / file).read_bytes(), file)
    moments = names(last / "optimizer.safetensors")
    check({"m.blocks.0.mlp.fc1.weight", "m.embed.weight", "v.embed.weight", "v.lm_head.weight",
           "v.blocks.1.norm1.weight", "v.blocks.0.attn.gate.fc1.bias"} <= moments, sorted(moments))
    check("v.blocks.0.mlp.fc1.weight" not in moments and "v.blocks.0.attn.gate.fc2.weight" not in moments,
          sorted(moments))
    check(float(rows(whole)[-1][1]) < 0.8 * float(rows(whole)[0][1]), rows(whole))
    # Up over 2 steps, even for 10, then down over 4 in fifths.
    rates = [float(row[2]) / 3e-3 for row in rows(whole)]
    want = [0.5] + 11 * [1] + [0.8, 0.6, 0.4, 0.2]
    check(all(abs(rate - there) < 1e-5 for rate, there in zip(rates, want)), rates)
    _, said, _ = runs.train("sparse", "--resume", whole, "--attention", "full,nsa", "--steps", 18, small=False)
    check("WARNING: attention changes in layers 0 .. 0: nsa -> full" in said, said)


def test_refusals():
    out, _, _ = runs.train("adamw", *DATA, "--steps", 2)
    _, _, said = runs.train("adamw", "--resume", "--optimizer", "muon", "--steps", 3, small=False, code=2)
    check("train.optimizer is muon here and adamw in the checkpoint" in said and "--init-from" in said, said)
    runs.train("tuned", *DATA, "--init-from", out, "--optimizer", "muon", "--steps", 1)
    for options, words in ((("--optimizer", "sgd"), "--optimizer sgd: must be one of: adamw, muon"),
                           (("--lr-schedule", "linear"), "must be one of: cosine, constant, wsd"),
                           (("--decay-fraction", "1.5"), "--decay-fraction 1.5: must be a number in 0 .. 1"),
                           ((*MUON[2:], "--warmup-steps", 8, "--steps", 10), "train.decay_fraction = 0.25")):
        _, _, said = runs.train("refused", *DATA, *options, code=2)
        check(words in said and not (runs.root / "refused").exists(), options, said)


test_resume()
test_refusals()
done()
