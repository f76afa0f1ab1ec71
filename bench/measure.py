#!/usr/bin/env python3
"""All that the tables of the CPU need, measured anew: some two hours of a machine that does nothing else.

  measure.py BIN [NAME...]    BIN is the folder of the built programs; with names only those files of
                              bench/results, as cpu_beside

It then writes the goals and the tables. What is not here takes a day or another machine: cpu_million.json
(bench_attention --shape 1,1,64,1048576), cpu_pytorch.json (compare_pytorch.py).
"""
import json
import pathlib
import subprocess
import sys
import tempfile

BENCH = pathlib.Path(__file__).resolve().parent
SHAPES = ("16,1,64", "16,4,128", "12,12,64", "12,2,64", "64,4,128")
LENGTHS = (1024, 2048, 3072, 4096)


def attention(*shapes):
    return ["bench_attention", *(word for shape in shapes for word in ("--shape", shape))]


# of rows of bf16, where the processor multiplies them: Linux's names of AVX512-BF16 and of Arm's
BF16_UNITS = {"avx512_bf16", "bf16"}


def decode_formats():
    """A step at 64k tokens: every format of the cache, for one sequence and for many."""
    shapes = {1: ("16,1,64", "16,1,128", "128,1,576/512"), 4: ("16,1,64",), 16: ("16,1,64", "16,1,128"), 64: ("16,1,64",)}
    return [["bench_decode", "--dtype", dtype, "--batch", str(batch), "--threads", str(threads),
             *(word for shape in shapes[batch] for word in ("--shape", f"{shape},65536"))]
            for dtype in ("f32", "bf16", "f16", "i8", "f8") for batch in shapes for threads in (1, 2)]


FILES = {
    "cpu": attention(*(f"16,1,64,{n}" for n in LENGTHS), *(f"{shape},8192" for shape in SHAPES)),
    "cpu_64k": attention(*(f"{shape},65536" for shape in SHAPES[:4])),
    "cpu_beside": ["bench_attention", "--quick", "--beside", "2"],
    "many_threads": ["many_threads"],
    "decode": ["bench_decode"],
    "decode_formats": decode_formats(),  # several commands, whose rows go to one file
    "tinylm": ["bench_tinylm"],
}


def run(*command):
    print("$", *command, flush=True)
    subprocess.run(command, check=True, cwd=BENCH.parent)


def measure(bin_folder, command, to):
    """One command's file, or what several leave, in one. Two cores, as the threads of the tables: busy processes beside
    them share these."""
    if isinstance(command[0], str):
        program, *options = command
        run("taskset", "-c", "0,1", bin_folder / program, *options, "--json", to)
        return
    with tempfile.TemporaryDirectory() as folder:
        part, rows = pathlib.Path(folder) / "part.json", []
        for one in command:
            measure(bin_folder, one, part)
            report = json.loads(part.read_text())
            rows += report["rows"]
            to.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


def main(arguments):
    if BF16_UNITS & set(pathlib.Path("/proc/cpuinfo").read_text().split()):
        FILES["cpu_bf16_f32"] = FILES["cpu"]  # what bf16 is held against may come from another machine than cpu.json
        for name in ("cpu", "decode"):
            FILES[f"{name}_bf16"] = [*FILES[name], "--dtype", "bf16"]
    names = arguments[1:] or [*FILES, "flags"]
    if not arguments or arguments[0].startswith("-") or set(names) - {*FILES, "flags"}:
        raise SystemExit(__doc__)
    for name in names:
        to = BENCH / "results" / f"{name}.json"
        if name == "flags":
            run(BENCH / "compare_flags.py", to)
        else:
            measure(pathlib.Path(arguments[0]).resolve(), FILES[name], to)
    run(BENCH / "goals.py")
    run(BENCH.parent / "scripts" / "write_numbers.py")


if __name__ == "__main__":
    main(sys.argv[1:])
