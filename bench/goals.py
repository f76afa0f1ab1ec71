#!/usr/bin/env python3
"""What the CPU path was meant to reach beside what it reached, from the files of this folder's benches.

  goals.py [FOLDER]    of the files there (default: bench/results), which measure.py makes, and
                       compare_pytorch.py's cpu_pytorch.json, writes
                         goals.json       from cpu.json, cpu_64k.json, cpu_beside.json,
                                          many_threads.json, flags.json, tinylm.json
                         goals_bf16.json  from cpu_bf16_f32.json and cpu_bf16.json, decode.json and
                                          decode_bf16.json, of a machine that has units for bf16

Measures nothing. scripts/write_numbers.py makes the table of it.
"""
import json
import pathlib
import sys

SHAPE = {"heads": 16, "kv_heads": 1, "dim": 64}
BRANCHES = ("cmp", "slc", "win", "dense")
EIGHT, MANY = 8192, 65536


class Rows:
    """The rows of the reports, found by what they are about; each must be there once."""

    def __init__(self, folder, names):
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise SystemExit(f"goals.py: {folder} has no {' and no '.join(missing)}")
        reports = [json.loads((folder / name).read_text()) for name in names]
        self.reports = reports
        self.rows = [row for report in reports for row in report["rows"]]

    def all(self, **about):
        return [row for row in self.rows if all(row.get(name) == value for name, value in about.items())]

    def one(self, **about):
        found = self.all(**about)
        if len(found) != 1:
            raise SystemExit(f"goals.py: {len(found)} rows where {about}, one is needed")
        return found[0]

    def figure(self, name, **about):
        return self.one(**about)[name]


def over_peak(cpu, pass_name, branches):
    about = {**SHAPE, "pass": pass_name, "tokens": EIGHT, "threads": 2}
    return " / ".join(f"{100 * cpu.figure('over_peak', branch=b, **about):.0f}" for b in branches)


def slowdown(beside, pass_name):
    """Times beside two busy processes over those without."""
    def one(branch):
        alone, busy = (beside.figure("ms", **SHAPE, branch=branch, threads=2, beside=n, **{"pass": pass_name})
                       for n in (0, 2))
        return f"{busy / alone:.2f}"
    return " / ".join(one(branch) for branch in ("nsa", "dense"))


def efficiency(many, pass_name):
    return many.figure("efficiency", **SHAPE, branch="nsa", tokens=EIGHT, threads=64, **{"pass": pass_name})


def over_dense(cpu, pass_name):
    about = {**SHAPE, "branch": "nsa", "pass": pass_name, "threads": 2}
    return " / ".join(f"{cpu.figure('over_dense', tokens=t, **about):.2f}" for t in (EIGHT, MANY))


def milliseconds(cpu, tokens, branch, passes):
    return sum(cpu.figure("ms", **SHAPE, branch=branch, tokens=tokens, threads=2, **{"pass": p})
               for p in passes)


def crossover(cpu, passes):
    """The tokens from which NSA is faster, between two lengths measured: the ratio as a line."""
    lengths = sorted({row["tokens"] for row in cpu.all(**SHAPE, branch="nsa", threads=2)})
    ratio = {t: milliseconds(cpu, t, "dense", passes) / milliseconds(cpu, t, "nsa", passes)
             for t in lengths}
    for low, high in zip(lengths, lengths[1:]):
        if ratio[low] < 1 <= ratio[high]:
            at = low + (high - low) * (1 - ratio[low]) / (ratio[high] - ratio[low])
            return f"{at / 1000:.1f}k"
    raise SystemExit("goals.py: no two lengths have the crossover between them")


def per_key(cpu, pass_name):
    """Time per head and key of slc with a head of keys for every query head, over one for 16."""
    about = {"branch": "slc", "pass": pass_name, "tokens": EIGHT, "threads": 1, "dim": 64}
    alone = cpu.figure("ms", heads=12, kv_heads=12, **about) / 12
    return alone / (cpu.figure("ms", heads=16, kv_heads=1, **about) / 16)


def two_threads(cpu, pass_name):
    about = {**SHAPE, "branch": "nsa", "pass": pass_name, "tokens": EIGHT}
    return cpu.figure("ms", threads=1, **about) / cpu.figure("ms", threads=2, **about)


def flags(report, pass_name, compiler):
    about = {"branch": "nsa", "pass": pass_name, "compiler": compiler}
    return report.figure("ms", flags="-O3 -march=native", **about) / report.figure("ms", flags="-O2",
                                                                                   **about)


def production(tinylm, model):
    return f"{tinylm.figure('tokens_per_second', model=model, layers=12, tokens=2048):.0f}"


def over_f32(f32, bf16, shape, pass_name, branches):
    """Times of rows of f32 over those of bf16."""
    about = {**dict(zip(("heads", "kv_heads", "dim"), shape)), "pass": pass_name, "tokens": EIGHT, "threads": 2}
    return " / ".join(f"{f32.figure('ms', branch=b, **about) / bf16.figure('ms', branch=b, **about):.2f}"
                      for b in branches)


def step_over_f32(f32, bf16):
    about = {**SHAPE, "branch": "decode", "tokens": MANY, "batch": 16, "threads": 2}
    return f"{f32.figure('ms', **about) / bf16.figure('ms', **about):.2f}"


def over_sdpa(pytorch):
    about = {**SHAPE, "part": "attention-bf16", "what": "nsa", "tokens": EIGHT}
    return " / ".join(f"{pytorch.figure('over_pytorch', **about, **{'pass': p}):.1f}" for p in ("fwd", "bwd"))


def step_over_pytorch(pytorch, part):
    return f"{pytorch.figure('over_pytorch', part=part, what='dense'):.2f}"


def small_step_over_pytorch(pytorch):
    """The better of both precisions, of ours and of PyTorch's."""
    def best(what):
        return max(pytorch.figure("tokens_per_second", part=part, what=what) for part in ("tiny-f32", "tiny-bf16"))
    return f"{best('dense') / best('pytorch'):.2f}"


def both(figure, report, *arguments):
    return " / ".join(f"{figure(report, p, *arguments):.2f}" for p in ("fwd", "bwd"))


def goals_of_bf16(f32, bf16, steps, steps_bf16, pytorch):
    rows = []
    for shape in ((16, 1, 64), (16, 4, 128)):
        name = f"rows of bf16 over f32, {shape[0]}/{shape[1]}/{shape[2]}, 8k, two threads"
        rows += [(f"{name}, forward: dense / slc / win", "1.6", "1.75",
                  over_f32(f32, bf16, shape, "fwd", ("dense", "slc", "win"))),
                 ("ditto: cmp / NSA", "1.4 / 1.5", "1.6 / 1.65", over_f32(f32, bf16, shape, "fwd", ("cmp", "nsa"))),
                 ("ditto, backward: NSA", "1.4", "1.6", over_f32(f32, bf16, shape, "bwd", ("nsa",)))]
    return rows + [
        ("ditto, a step of decoding, 64k tokens, batch of 16, 16/1/64", "1.5", "1.8", step_over_f32(steps, steps_bf16)),
        ("NSA over PyTorch's attention, bf16, 16/1/64, 8k, forward / backward", "7 / 5", "8 / 6", over_sdpa(pytorch)),
        ("the trainer over PyTorch, 12 layers, dim 768, S 2048, dense attention: bf16 / f32", "1.1 / 1.6", "1.3 / 1.8",
         f"{step_over_pytorch(pytorch, 'large-bf16')} / {step_over_pytorch(pytorch, 'large-f32')}"),
        ("ditto, dim 128, 2 layers, S 256, B 8: the better of bf16 and f32", "1.3", "1.6",
         small_step_over_pytorch(pytorch)),
    ]


def goals(cpu, beside, many, tinylm, built):
    of_eight = "8k tokens, 16 heads over 1, 64 wide, two threads"
    return [
        (f"share of the multiply-add units' peak, forward, %: dense / slc; {of_eight}", "75 / 70", "82 / 78",
         over_peak(cpu, "fwd", ("dense", "slc"))),
        ("ditto: cmp / win", "64 / 64", "72 / 72", over_peak(cpu, "fwd", ("cmp", "win"))),
        ("the same, backward: dense / slc", "75 / 75", "80 / 80", over_peak(cpu, "bwd", ("dense", "slc"))),
        ("ditto: cmp / win", "62 / 62", "70 / 70", over_peak(cpu, "bwd", ("cmp", "win"))),
        ("NSA over dense, forward, 8k / 64k (bound 2.43 / 9.25)", "2.15 / 8.6", "2.25 / 8.9",
         over_dense(cpu, "fwd")),
        ("NSA over dense, backward, 8k / 64k", "2.2 / 8.6", "2.35 / 8.9", over_dense(cpu, "bwd")),
        ("crossover, forward / both, tokens", "3.0k / 4k", "2.9k / 3.2k",
         f"{crossover(cpu, ['fwd'])} / {crossover(cpu, ['fwd', 'bwd'])}"),
        ("slc, time per key at G = 1 over G = 16, forward / backward", "1.25", "1.15",
         both(per_key, cpu)),
        ("two busy processes beside two threads on two cores, times as slow, forward: NSA / dense", "2.6", "2.2",
         slowdown(beside, "fwd")),
        ("ditto, backward", "2.6", "2.2", slowdown(beside, "bwd")),
        ("64 simulated threads, 8k, share of 64 times as fast: forward / backward", "0.80 / 0.70", "0.9",
         both(efficiency, many)),
        ("two threads over one, forward / backward", "1.85", "1.95", both(two_threads, cpu)),
        *((f"`{cc} -O2` over `-O3 -march=native`, forward / backward", "0.95", "1.0", both(flags, built, cc))
          for cc in ("gcc", "clang")),
        ("TinyLM, dim 128, 2 layers, S 256, B 8, tokens/s", "25k", "45k",
         f"{tinylm.figure('tokens_per_second', model='dim 128, S 256, B 8') / 1000:.1f}k"),
        ("TinyLM of 12 layers, dim 768, S 2048, without / with checkpointing, tokens/s", "150 / 110",
         "220 / 170", f"{production(tinylm, 'dim 768, S 2048, B 1')} / "
         f"{production(tinylm, 'the same with checkpointing')}"),
    ]


def write(path, reports, goals):
    """The table, with the days and commits of the reports that it is of; they are of one kind of machine."""
    origin = {"machine": reports[0].reports[0]["machine"], **{
        name: ", ".join(dict.fromkeys(one[name] for of in reports for one in of.reports)) for name in ("date", "commit")}}
    names = ("what", "must", "goal", "measured")
    path.write_text(json.dumps({**origin, "rows": [dict(zip(names, row)) for row in goals]}, indent=1) + "\n")
    for what, must, goal, measured in goals:
        print(f"{what}: {measured} (must {must}, goal {goal})")


def main(arguments):
    if arguments[:1] in (["-h"], ["--help"]):
        return print(__doc__)
    if len(arguments) > 1:
        raise SystemExit(__doc__)
    folder = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parent / "results")
    reports = [Rows(folder, names) for names in (
        ["cpu.json", "cpu_64k.json"], ["cpu_beside.json"], ["many_threads.json"], ["tinylm.json"], ["flags.json"])]
    write(folder / "goals.json", reports, goals(*reports))
    reports = [Rows(folder, [f"{name}.json"]) for name in (
        "cpu_bf16_f32", "cpu_bf16", "decode", "decode_bf16", "cpu_pytorch")]
    write(folder / "goals_bf16.json", reports, goals_of_bf16(*reports))


if __name__ == "__main__":
    main(sys.argv[1:])
