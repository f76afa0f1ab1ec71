#!/usr/bin/env python3
"""Builds nsa_cuda.cuh for every architecture and reports what each kernel takes.

A spill, a stack frame, a warning of nvcc, ptxas or the host compiler, or a runtime linked otherwise
than statically is a finding. The table is what bench/results/kernel_resources.md holds.

usage: resources.py NVCC WORK_FOLDER [--arch 80,90a] [--write FILE]
"""
import argparse
import pathlib
import re
import subprocess
import sys

NSA = pathlib.Path(__file__).resolve().parent.parent.parent / "nsa"
ARCHITECTURES = "80,86,89,90a,100,120"
USER = """#define NSA_CUDA_IMPLEMENTATION
#include "nsa_cuda.cuh"
#define NSA_IMPLEMENTATION
#include "nsa.h"
int main(void) { return nsa_cuda_gate_forward(NULL, NULL, NULL) == NSA_OK; }
"""


def compile_all(nvcc, work, architectures):
    """nvcc's messages for one object of all architectures."""
    source = work / "user.cu"
    source.write_text(USER)
    command = [nvcc, "-std=c++17", "-O3", "-I", NSA, "-Xcompiler", "-Wall,-Wextra", "-Xptxas",
               "-v,--warn-on-spills,--warn-on-local-memory-usage", "--threads", "2",
               "-c", source, "-o", work / "user.o"]
    for arch in architectures:
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    run = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if run.returncode:
        sys.exit(run.stdout + f"{source} does not compile")
    return run.stdout


def kernel_name(mangled):
    """nsa__kernel<template arguments>, without the parameters' types."""
    demangled = subprocess.run(["c++filt", mangled], text=True, stdout=subprocess.PIPE, check=True)
    name = demangled.stdout.strip()
    depth = 0
    for i, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0 and i:
            name = name[:i]
            break
    return name.replace("void ", "").replace("nsa__cuda_", "").replace("nsa__", "")


def parse(text):
    """{(kernel, arch): (registers, static shared bytes)} and the findings."""
    table, findings, kernel, arch, frame = {}, [], None, None, ""
    for line in text.splitlines():
        entry = re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line)
        used = re.search(r"Used (\d+) registers", line)
        if entry:
            kernel, arch = entry.groups()
        elif "stack frame" in line:
            frame = line.strip()
        elif used:
            shared = re.search(r"(\d+) bytes smem", line)
            table[kernel, arch] = (int(used.group(1)), int(shared.group(1)) if shared else 0)
            if not frame.startswith("0 bytes stack frame, 0 bytes spill stores"):
                findings.append(f"{kernel_name(kernel)}, sm_{arch}: {frame}")
        elif re.search(r"\b(warning|error)\b", line):
            findings.append(line)
    return table, findings


def report(table, architectures):
    names = {mangled: kernel_name(mangled) for mangled in {kernel for kernel, _ in table}}
    lines = ["| kernel | " + " | ".join(f"sm_{a}" for a in architectures) + " | shared bytes |",
             "|---|" + "---|" * (len(architectures) + 1)]
    for mangled in sorted(names, key=names.get):
        cells = [table.get((mangled, a), ("", 0)) for a in architectures]
        lines.append(f"| {names[mangled]} | " + " | ".join(str(c[0]) for c in cells) +
                     f" | {max(c[1] for c in cells)} |")
    return "\n".join(lines) + "\n"


def links_statically(nvcc, work):
    """The program needs no libcudart of the machine that it runs on."""
    program = work / "user"
    subprocess.run([nvcc, work / "user.o", "-o", program], check=True)
    needs = subprocess.run(["ldd", program], text=True, stdout=subprocess.PIPE, check=True).stdout
    return "libcuda" not in needs


def main():
    options = argparse.ArgumentParser()
    options.add_argument("nvcc")
    options.add_argument("work", type=pathlib.Path)
    options.add_argument("--arch", default=ARCHITECTURES)
    options.add_argument("--write", type=pathlib.Path)
    given = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    architectures = given.arch.split(",")
    table, findings = parse(compile_all(given.nvcc, given.work, architectures))
    if not links_statically(given.nvcc, given.work):
        findings.append("the program needs a shared libcudart or libcuda")
    for arch in architectures:
        if not any(a == arch for _, a in table):
            findings.append(f"no kernel was compiled for sm_{arch}")
    for finding in findings:
        print(finding)
    if given.write:
        version = subprocess.run([given.nvcc, "--version"], text=True, stdout=subprocess.PIPE,
                                 check=True).stdout.splitlines()[-2]
        given.write.write_text(
            "# Registers of each kernel\n\nWritten by `tests/cuda/resources.py --write` with " +
            version.replace("Cuda compilation tools, ", "nvcc ") + ".\nRegisters of a thread, by "
            "architecture, and bytes of static shared memory (the tiles of attention and\nselection "
            "are dynamic). No kernel spills.\n\n" + report(table, architectures))
    print(f"{len(table)} kernels of {len(architectures)} architectures, {len(findings)} findings")
    return min(len(findings), 99)


if __name__ == "__main__":
    sys.exit(main())
