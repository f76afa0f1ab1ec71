"""What a run leaves in its folder, read by csv and json: every file, every field, every switch; and that what
its steps did to the weights is what it says.

usage: test_artefacts.py PROGRAM FOLDER. Twins: telemetry.c, train_report.c. What TensorBoard reads is
test_events.py's; what statistics mean is test_observer.c's.
"""
import array
import csv
import json
import math
import struct
import sys

from runs import Runs, check, done

runs = Runs(sys.argv[1], sys.argv[2], "artefacts")
program, root = runs.program, runs.root
TOKENS, BATCH, LAYERS, GROUPS, BLOCK, BLOCKS = 64, 4, 2, 2, 16, 3
FIELDS = """ts iso pid rank step msg phase layer gpu_mem_alloc gpu_mem_reserved loss toks_per_s grad_norm
gate_entropy_mean gate_max_gate gate_collapse_frac gate_sum_mean gate_layers_collapsed gate_layers_shut
gate_branch_shares sel_k_mean sel_k_max sel_rows
sel_pct_at_max fb_selection_triton_fails fb_selection_cuda_fails fb_selection_pack_fails
fb_selection_mask_fails fb_compressed_fa2_fails fb_sliding_fa2_fails fb_half_product_fails
fb_cuda_mainloop_fails fb_data_source_fails fb_total_fallbacks""".split()


def train(*arguments, **environment):
    return runs.train(*arguments, **{"NSA_HEARTBEAT_EVERY": "1"} | environment)


def rows(path, header):
    with open(path, newline="") as file:
        read = list(csv.reader(file))
    check(",".join(read[0]) == header, path, read[0])
    return [[float(x) for x in row] for row in read[1:]]


def heartbeats(out):
    lines = (out / "heartbeat_rank0.jsonl").read_text().splitlines()
    beats = [json.loads(line) for line in lines]
    for beat in beats:
        check(sorted(beat) == sorted(FIELDS), sorted(set(beat) ^ set(FIELDS)))
    return beats


def of(beats, msg):
    return [b for b in beats if b["msg"] == msg]


def test_run(text):
    out, log, _ = train("run", "--data", text, "--steps", 6, "--eval-every", 3)
    training = rows(out / "training.csv", "step,loss,lr,toks_per_s,grad_norm")
    check([r[0] for r in training] == [1, 2, 3, 4, 5, 6], training)
    check([r[0] for r in rows(out / "val.csv", "step,val_loss,ppl")] == [3, 6])
    # n_sel blocks of the tokens at or before each: the lists here are all that is visible, up to three.
    k = [sum(sorted([BLOCK] * (t // BLOCK) + [t % BLOCK + 1])[-BLOCKS:]) if t < BLOCK * BLOCKS
         else BLOCK * (BLOCKS - 1) + t % BLOCK + 1 for t in range(TOKENS)]
    for row in rows(out / "k_stats.csv", "step,k_mean,k_max,rows,pct_at_max"):
        check(row[1:4] == [sum(k) / TOKENS, max(k), TOKENS * BATCH * LAYERS * GROUPS], row)
        check(row[4] == k.count(max(k)) / TOKENS, row)
    names = ",".join(f[3:] for f in FIELDS if f.startswith("fb_"))
    counters = rows(out / "fallback_counters.csv", "step," + names)
    check(len(counters) == 6 and not any(sum(r[1:]) for r in counters), counters)
    beats = heartbeats(out)
    check(beats[0]["msg"] == "boot" and beats[0]["loss"] is None and beats[0]["step"] == 0, beats[0])
    check(len(of(beats, "progress")) == 3, "two evaluations and a checkpoint")
    ends = of(beats, "step_end")
    check([b["step"] for b in ends] == [1, 2, 3, 4, 5, 6], ends)
    for beat, row in zip(ends, training):
        check(math.isclose(beat["loss"], row[1], rel_tol=1e-8), beat, row)
        check(math.isclose(beat["grad_norm"], row[4], rel_tol=1e-8), beat, row)
        check(0 < beat["gate_entropy_mean"] <= math.log(3) + 1e-6, beat)
        check(1 / 3 - 1e-6 <= beat["gate_max_gate"] <= 1 and beat["gate_collapse_frac"] == 0, beat)
        check(math.isclose(sum(beat["gate_branch_shares"]), 1, rel_tol=1e-6), beat)
        check(beat["sel_k_max"] == max(k) and beat["sel_k_mean"] == sum(k) / TOKENS, beat)
        check(beat["gpu_mem_alloc"] == 0 and beat["fb_total_fallbacks"] == 0, beat)
    check(all(a["ts"] <= b["ts"] for a, b in zip(beats, beats[1:])), "time goes on")
    return out, training


def tensors(path):
    """{name: (shape, values)} of a safetensors file."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: (t["shape"], array.array("f", data[start + t["data_offsets"][0]:start + t["data_offsets"][1]]))
            for name, t in header.items()}


def check_update(step, rate, decay, before, after):
    """AdamW's formula on the weights and moments of two checkpoints; the norm of the gradient that it took."""
    squares, off_v, off_w = 0, 0, 0
    for name, (shape, weights) in after["model"].items():
        keep = 1 - rate * decay * (len(shape) > 1 and "embed" not in name)
        columns = [after["optimizer"][k + name][1] for k in ("m.", "v.")]
        columns += [before["optimizer"][k + name][1] for k in ("m.", "v.")]
        for new, m, v, m0, v0, old in zip(weights, *columns, before["model"][name][1]):
            gradient = (m - 0.9 * m0) / 0.1
            squares += gradient * gradient
            off_v = max(off_v, abs(v - 0.95 * v0 - 0.05 * gradient ** 2) / (v + v0 + 1e-30))
            change = rate * m / (1 - 0.9 ** step) / (math.sqrt(v / (1 - 0.95 ** step)) + 1e-8)
            off_w = max(off_w, abs(new - (old * keep - change)) / (abs(old) + rate))
    check(off_v < 1e-5 and off_w < 1e-6, step, off_v, off_w)
    return math.sqrt(squares)


def test_updates(text):
    """Rates, bias corrections, decay and clipping of whole steps, from what three checkpoints hold."""
    out, _, _ = train("updates", "--data", text, "--steps", 3, "--save-every", 1, "--keep-checkpoints", 0, "--lr", 0.01,
                      "--warmup-steps", 2, "--weight-decay", 0.1, "--grad-clip", 0.5, "--accum-batches", 2)
    training = rows(out / "training.csv", "step,loss,lr,toks_per_s,grad_norm")
    check(json.loads((out / "metrics.json").read_text())["batch_global"] == 2 * BATCH, "rows of a step")
    saved, seconds = [], 0
    for (step, _, rate, _, norm), want in zip(training, (0.005, 0.01, 0.001)):  # warm-up; a tenth at the end
        check(math.isclose(rate, want, rel_tol=1e-7), training)
        k = out / f"checkpoints/step_{step:08.0f}"
        state = json.loads((k / "state.json").read_text())["content"]["state"]
        check(state["tokens"] == step * 2 * BATCH * TOKENS and state["seconds"] > seconds, state)
        seconds = state["seconds"]
        saved.append({part: tensors(k / f"{part}.safetensors") for part in ("model", "optimizer")})
        if step > 1:
            taken = check_update(step, rate, 0.1, *saved[-2:])
            check(norm > 0.5 and math.isclose(taken, 0.5, rel_tol=1e-5), "clipped", norm, taken)


def test_start(out):
    """What is written once, held against the checkpoint and against each other."""
    held = tensors(out / "checkpoints/latest/model.safetensors")
    lines = (out / "dtypes_report.txt").read_text().splitlines()
    check(lines[0] == "activations f32", lines[0])
    check(lines[1].split() == "parameter shape weight forward gradient moments".split(), lines[1])
    listed = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    check(listed.keys() == held.keys(), listed.keys() ^ held.keys())
    for name, (shape, *dtypes) in listed.items():
        check(shape == "x".join(map(str, held[name][0])) and dtypes == ["f32"] * 4, name, shape, dtypes)
    boot, step = (json.loads((out / name).read_text()) for name in ("mem_boot.json", "mem_step1.json"))
    for memory in (boot, step):
        check(sum(memory["bytes_by_purpose"].values()) == memory["allocated_bytes.all.current"], memory)
        check(0 < memory["reserved_bytes.all.current"] <= memory["reserved_bytes.all.peak"], memory)
        check(memory["allocated_bytes.all.current"] <= memory["reserved_bytes.all.peak"] + (1 << 20), memory)
    check((boot["step"], step["step"]) == (0, 1), boot, step)
    parameters = sum(len(values) for _, values in held.values())
    moments = boot["bytes_by_purpose"]["moments"]
    check(8 * parameters <= moments <= 8 * parameters + 64 * 2 * len(held), moments, parameters)
    check(math.isclose(float((out / "opt_state_mb.txt").read_text()), moments / 2**20, abs_tol=1e-3))
    env = json.loads((out / "env.json").read_text())
    check(env["command"][0] == program and env["config"]["model.dim"] == 32, env)
    check(env["switched_off"] == [] and env["device"] == "cpu" and env["threads"] == 1, env)
    metrics = json.loads((out / "metrics.json").read_text())
    check(metrics["verdict"] == "completed" and metrics["steps_done"] == metrics["steps"] == 6, metrics)
    check(metrics["total_fallbacks"] == 0 and 0 < metrics["sel_pct_at_max"] < 0.3, metrics)
    check(len(list((out / "tb").iterdir())) == 1, "an event file")


def test_switches(text, training):
    out, _, said = train("off", "--data", text, "--steps", 6, "--eval-every", 3, NSA_TB_DISABLE="1",
                         NSA_DISABLE_CSV_LOGS="1", NSA_DISABLE_AUX_STATS="1", NSA_HEARTBEAT_EVERY="4", NSA_USE_FA2="1",
                         NSA_PREFILL_BATCHED="1", NSA_DDP_STATIC_GRAPH="1", NSA_DDP_FIND_UNUSED="1",
                         NSA_TB_DISABEL="1")
    check(not list(out.glob("*.csv")) and not (out / "tb").exists(), list(out.iterdir()))
    ends = of(heartbeats(out), "step_end")
    check([b["step"] for b in ends] == [4, 6], "every fourth, and the last")
    check(all(b["gate_entropy_mean"] is None and b["sel_rows"] is None for b in ends), ends)
    check(math.isclose(ends[-1]["loss"], training[-1][1], rel_tol=1e-8), "switches change no number")
    env = json.loads((out / "env.json").read_text())
    check(env["switched_off"] == ["tensorboard", "csv", "statistics"], env)
    check(env["environment"]["NSA_TB_DISABLE"] == "1", env)
    for name in ("NSA_USE_FA2", "NSA_PREFILL_BATCHED", "NSA_DDP_STATIC_GRAPH", "NSA_DDP_FIND_UNUSED"):
        check(said.count(name) == 1 and f"{name}: accepted, has no effect" in said, said)
    check("NSA_TB_DISABEL: unknown name, not used; did you mean NSA_TB_DISABLE?" in said, said)
    out, _, _ = train("quiet", "--data", text, "--steps", 2, NSA_HEARTBEAT_EVERY="0")
    check(not (out / "heartbeat_rank0.jsonl").exists(), "a heartbeat")
    _, _, said = train("bad", "--data", text, code=2, NSA_HEARTBEAT_EVERY="often")
    check("NSA_HEARTBEAT_EVERY=often" in said and "integer" in said, said)
    for attention in ("full", "window"):
        out, _, _ = train(attention, "--data", text, "--steps", 2, "--attention", attention)
        check(not (out / "k_stats.csv").exists() and (out / "training.csv").exists(), "nothing is selected")


def test_narrow(text, training):
    """bf16: the same statistics up to rounding, and the report tells what is narrow."""
    out, _, _ = train("narrow", "--data", text, "--steps", 2, "--eval-every", 3, "--precision", "bf16")
    lines = (out / "dtypes_report.txt").read_text().splitlines()
    check(lines[0] == "activations bf16" and lines[2].split()[2:] == ["f32", "bf16", "f32", "f32"], lines[:3])
    ends = of(heartbeats(out), "step_end")
    check(math.isclose(ends[0]["loss"], training[0][1], rel_tol=0.02), ends[0])
    check(math.isclose(ends[0]["gate_entropy_mean"], math.log(3), rel_tol=0.01), ends[0])
    check(ends[0]["sel_rows"] == TOKENS * BATCH * LAYERS * GROUPS, ends[0])
    check(json.loads((out / "metrics.json").read_text())["dtype"] == "bf16", "metrics")


def test_traces(text, training):
    out, log, _ = train("traces", "--data", text, "--steps", 2, "--eval-every", 3, "--gc", NSA_TRACE_GRADS="1",
                        NSA_TRACE_MODULE_BWD="1")
    tensors = len((out / "dtypes_report.txt").read_text().splitlines()) - 2
    check(log.count(", gradient of ") == 2 * tensors, log)
    check(log.count("trace: backward of layer ") == 2 * LAYERS, log)
    norms = [float(line.split("norm ")[1].split(",")[0]) for line in log.splitlines() if "step 1, gradient of" in line]
    check(math.isclose(math.hypot(*norms), training[0][4], rel_tol=1e-4), "they make up the norm")


def test_resume(text, out):
    old = heartbeats(out)
    with open(out / "heartbeat_rank0.jsonl", "a") as file:
        file.write('{"ts":17')  # a kill in the middle of a line
    train("run", "--data", text, "--steps", 8, "--eval-every", 3, "--resume", out / "checkpoints/step_00000006")
    beats = heartbeats(out)
    check(beats[:len(old)] == old and beats[-1]["step"] == 8, "a resumed run adds to the heartbeats")
    steps = [r[0] for r in rows(out / "k_stats.csv", "step,k_mean,k_max,rows,pct_at_max")]
    check(steps == [1, 2, 3, 4, 5, 6, 7, 8], steps)
    check([r[0] for r in rows(out / "val.csv", "step,val_loss,ppl")] == [3, 6, 8], "and after the last step")
    first = rows(out / "training.csv", "step,loss,lr,toks_per_s,grad_norm")[0][1]
    check(math.isclose(json.loads((out / "metrics.json").read_text())["loss_first"], first, rel_tol=1e-8), first)
    check(json.loads((out / "mem_step1.json").read_text())["step"] == 7, "the first step of this run")
    check(len(list((out / "tb").iterdir())) == 2, "an event file for each run")


def test_bytes():
    """Losses are of tokens, bits of bytes: here each token is the three bytes of " th"."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 spells other bytes as 256, 257, ...
    spelled = {b: chr(b) for b in plain}
    spelled |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in plain)}
    names = [*spelled.values(), "th", spelled[32] + "th", "<|endoftext|>"]
    folder, text = root / "bpe", root / "th"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text(f"#version: 0.2\nt h\n{spelled[32]} th\n")
    text.write_text(" th" * 9000)
    out, log, _ = train("bytes", "--data", text, "--tokenizer", "gpt2", "--tokenizer-path", folder, "--steps", 1,
                        "--eval-every", 1, "--eval-batches", 1)
    (_, loss, _), = rows(out / "val.csv", "step,val_loss,ppl")
    bits = float(log.split("bits/byte ")[1].split()[0])
    check(math.isclose(bits, loss / math.log(2) / 3, rel_tol=0.01), loss, bits)


def test_loader():
    lines = "".join(json.dumps({"text": f"a document about {i} " * 20}) + "\n" for i in range(200))
    out, _, _ = train("stream", "--dataset", "fineweb_edu", "--steps", 2, given=lines)
    told = [b["msg"] for b in heartbeats(out) if b["msg"].startswith("fineweb")]
    check(told == ["fineweb_loader_warmup", "fineweb_loader_ready"], told)
    out, _, said = train("stream2", "--dataset", "fineweb_edu_local", "--data", root / "nowhere", code=2)
    told = [b["msg"] for b in heartbeats(out) if b["msg"].startswith("fineweb")]
    check(told == ["fineweb_loader_warmup", "fineweb_loader_error"] and "nowhere" in said, told, said)


corpus = runs.text()
folder, losses = test_run(corpus)
test_start(folder)
test_updates(corpus)
test_switches(corpus, losses)
test_narrow(corpus, losses)
test_traces(corpus, losses)
test_resume(corpus, folder)
test_bytes()
test_loader()
done()
