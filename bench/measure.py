#!/usr/bin/env python3
"""All that the tables of the CPU need, measured anew: some two hours of a machine that does nothing else.

  measure.py BIN [NAME...]    BIN is the folder of the built programs; with names only those files of
                              bench/results, as cpu_beside

It then writes the goals and the tables. What is not here takes a day or another machine: cpu_million.json
(bench_attention --shape 1,1,64,1048576), cpu_pytorch.json (compare_pytorch.py).
"""
import pathlib
import subprocess
import sys

BENCH = pathlib.Path(__file__).resolve().parent
SHAPES = ("16,1,64", "16,4,128", "12,12,64", "12,2,64", "64,4,128")
LENGTHS = (1024, 2048, 3072, 4096)


def attention(*shapes):
    return ["bench_attention", *(word for shape in shapes for word in ("--shape", shape))]


# of rows of bf16, where the processor multiplies them: Linux's names of AVX512-BF16 and of Arm's
BF16_UNITS = {"avx512_bf16", "bf16"}
FILES = {
    "cpu": attention(*(f"16,1,64,{n}" for n in LENGTHS), *(f"{shape},8192" for shape in SHAPES)),
    "cpu_64k": attention(*(f"{shape},65536" for shape in SHAPES[:4])),
    "cpu_beside": ["bench_attention", "--quick", "--beside", "2"],
    "many_threads": ["many_threads"],
    "decode": ["bench_decode"],
    "tinylm": ["bench_tinylm"],
}


def run(*command):
    print("$", *command, flush=True)
    subprocess.run(command, check=True, cwd=BENCH.parent)


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
            program, *options = FILES[name]
            # two cores, as the threads of the tables: busy processes beside them share these
            run("taskset", "-c", "0,1", pathlib.Path(arguments[0]).resolve() / program, *options, "--json", to)
    run(BENCH / "goals.py")
    run(BENCH.parent / "scripts" / "write_numbers.py")


if __name__ == "__main__":
    main(sys.argv[1:])
