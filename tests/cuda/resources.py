#!/usr/bin/env python3
"""Builds nsa_cuda.cuh for every architecture and reports what each kernel takes.

A spill, a stack frame, a warning of nvcc, ptxas or the host compiler, a product of a warpgroup that
ptxas makes synchronous (C7510 to C7519, said as information), or a runtime linked otherwise than
statically is a finding. The table is what bench/results/kernel_resources.md holds; a row of it that
is no longer so is a finding too, if nvcc is the version named there.

An architecture takes a minute, so its outcome is kept in WORK_FOLDER until a file under nsa/ changes.

usage: resources.py NVCC WORK_FOLDER [--arch 80,90a] [--against FILE] [--write FILE]
"""
import argparse
import hashlib
import json
import pathlib
import re
import subprocess
import sys

NSA = pathlib.Path(__file__).resolve().parent.parent.parent / "nsa"
ARCHITECTURES = "80,86,89,90,90a,100,120"
SHARED = "shared bytes"
WHOLE = "80"  # the architecture whose object is built and linked too
USER = """#define NSA_CUDA_IMPLEMENTATION
#include "nsa_cuda.cuh"
#define NSA_IMPLEMENTATION
#include "nsa.h"
int main(void) { return nsa_cuda_gate_forward(NULL, NULL, NULL) == NSA_OK; }
"""


def run(command):
    """What a command says; it must not fail."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(done.stdout + f"failed: {' '.join(str(word) for word in command)}")
    return done.stdout


def compile_one(nvcc, work, arch, whole):
    """nvcc's messages for the device code of one architecture; for the `whole`, an object too."""
    source = work / "user.cu"
    source.write_text(USER)
    flags = ["-Xcompiler", "-Wall,-Wextra", "-c"] if whole else ["-cubin"]
    if arch == "90":  # told by a message that it has no wgmma
        flags.append("-DNSA_CUDA_QUIET")
    return run([nvcc, "-std=c++17", "-O3", "-I", NSA, *flags, "-Xptxas",
                "-v,--warn-on-spills,--warn-on-local-memory-usage", "-gencode",
                f"arch=compute_{arch},code=sm_{arch}", source, "-o",
                work / ("user.o" if whole else "user.cubin")])


def kernel_name(mangled):
    """nsa__kernel<template arguments>, without the parameters' types."""
    name = run(["c++filt", mangled]).strip()
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
        elif re.search(r"\b(warning|error)\b|\(C75\d\d\)", line):  # C75..: wgmma made synchronous
            findings.append(line)
    return table, findings


def report(table, architectures):
    names = {mangled: kernel_name(mangled) for mangled in {kernel for kernel, _ in table}}
    lines = ["| kernel | " + " | ".join(f"sm_{a}" for a in architectures) + f" | {SHARED} |",
             "|---|" + "---|" * (len(architectures) + 1)]
    for mangled in sorted(names, key=names.get):
        cells = [table.get((mangled, a), ("", 0)) for a in architectures]
        lines.append(f"| {names[mangled]} | " + " | ".join(str(c[0]) for c in cells) +
                     f" | {max(c[1] for c in cells)} |")
    return "\n".join(lines) + "\n"


def release(nvcc):
    return run([nvcc, "--version"]).splitlines()[-2].replace("Cuda compilation tools, ", "nvcc ")


def cells(text):
    """{(kernel, column): cell} of the table in a text."""
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                      for line in text.splitlines() if line.startswith("|")]
    return {(row[0], column): cell for row in rows for column, cell in zip(head[1:], row[1:])}


def compare(kept, made):
    """What two tables say otherwise of the architectures that both have; shared memory is the most of
    any, so fewer architectures may take less."""
    kept, made = cells(kept), cells(made)
    both = {column for _, column in kept} & {column for _, column in made}
    return [f"{kernel}, {column}: {now}, kept is {was}"
            for kernel, column in sorted(kept.keys() | made.keys()) if column in both
            and (now := made.get((kernel, column))) != (was := kept.get((kernel, column)))
            and not (column == SHARED and now and was and int(now) < int(was))]


def links_statically(nvcc, work):
    """The program needs no libcudart of the machine that it runs on."""
    program = work / "user"
    run([nvcc, work / "user.o", "-o", program])
    return "libcuda" not in run(["ldd", program])


def outcome(nvcc, work, arch, whole):
    """(table, findings) of one architecture, from an earlier run if the sources are the same."""
    sources = sorted(NSA.rglob("*.cuh")) + [NSA / "nsa.h"]
    text = USER + "".join(path.read_text() for path in sources)
    kept = work / f"{arch}.json"
    digest = hashlib.sha256(text.encode()).hexdigest()
    if kept.exists() and json.loads(kept.read_text())["digest"] == digest:
        rows, findings = (json.loads(kept.read_text())[name] for name in ("rows", "findings"))
    else:
        table, findings = parse(compile_one(nvcc, work, arch, whole))
        if whole and not links_statically(nvcc, work):
            findings.append("the program needs a shared libcudart or libcuda")
        if not table:
            findings.append(f"no kernel was compiled for sm_{arch}")
        rows = [[*key, *value] for key, value in table.items()]
        kept.write_text(json.dumps({"digest": digest, "rows": rows, "findings": findings}))
    return {(kernel, a): (registers, shared) for kernel, a, registers, shared in rows}, findings


def main():
    options = argparse.ArgumentParser()
    options.add_argument("nvcc")
    options.add_argument("work", type=pathlib.Path)
    options.add_argument("--arch", default=ARCHITECTURES)
    options.add_argument("--against", type=pathlib.Path)
    options.add_argument("--write", type=pathlib.Path)
    given = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    architectures = given.arch.split(",")
    table, findings = {}, []
    for arch in architectures:
        rows, found = outcome(given.nvcc, given.work, arch, arch == WHOLE)
        table.update(rows)
        findings += found
        print(f"sm_{arch}: {len(rows)} kernels, {len(found)} findings", flush=True)
    version = release(given.nvcc)
    kept = given.against.read_text() if given.against else ""
    if version in kept:
        findings += compare(kept, report(table, architectures))
    elif kept:
        print(f"this is {version}: not compared with {given.against.name}")
    for finding in findings:
        print(finding)
    if given.write:
        given.write.write_text(
            "# Registers of each kernel\n\nWritten by `tests/cuda/resources.py --write` with " +
            version + ".\nRegisters of a thread, by "
            "architecture, and bytes of static shared memory (the tiles of attention and\nselection "
            "are dynamic). " + (f"{len(findings)} findings." if findings else
                                "No kernel spills, no compiler warns.") +
            "\n\n" + report(table, architectures))
    print(f"{len(table)} kernels of {len(architectures)} architectures, {len(findings)} findings")
    return min(len(findings), 99)


if __name__ == "__main__":
    sys.exit(main())
