#!/usr/bin/env python3
"""Compares the static shared memory that the executor counts for a kernel with what ptxas says.

The executor holds launches to it (simt/README.md), so it must be right. PROGRAM is a test of
launches; it prints "SYMBOL BYTES" of each kernel where NSA_TEST_TABLE is set. ptxas's numbers are
those of bench/results/kernel_resources.md, the most of any architecture, which resources.py holds
to nvcc. No nvcc is needed here.

usage: static_shared.py FILE PROGRAM...
"""
import os
import pathlib
import subprocess
import sys

from resources import SHARED, cells, kernel_name


def counted(programs):
    """{kernel: bytes}, the most that any of the programs counts."""
    most = {}
    for program in programs:
        said = subprocess.run([program], text=True, stdout=subprocess.PIPE, check=True,
                              env={**os.environ, "NSA_TEST_TABLE": "1"}).stdout
        for line in said.splitlines():
            symbol, _, size = line.rpartition(" ")
            if symbol.startswith("_Z") and size.isdigit():
                name = kernel_name(symbol)
                most[name] = max(most.get(name, 0), int(size))
    return most


def main():
    kept = {kernel: int(cell) for (kernel, column), cell in
            cells(pathlib.Path(sys.argv[1]).read_text()).items() if column == SHARED}
    made = counted(sys.argv[2:])
    findings = [f"{kernel}: the executor counts {size} static bytes, ptxas {kept.get(kernel)}"
                for kernel, size in sorted(made.items()) if kept.get(kernel) != size]
    for finding in findings:
        print(finding)
    print(f"{len(made)} kernels, {len(findings)} findings")
    return min(len(findings), 99) if made else 99


if __name__ == "__main__":
    sys.exit(main())
