"""Reads a file of ours with the safetensors package, and has ours read one of its own.

usage: safetensors_python.py PROGRAM FOLDER. Twin: safetensors_sample.c.
"""
import subprocess
import sys

from packages import need

program, folder = sys.argv[1:]
need(folder, "numpy", "safetensors")

import numpy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

expected = {
    "f32": numpy.array([[1, 2, 3], [-4, 5.5, 1e-20]], numpy.float32),
    "f64": numpy.array([0.1, 0.2, -0.3, 1e300], numpy.float64),
    "f16": numpy.array([1, -2], numpy.float16),
    "i64": numpy.array([-7], numpy.int64),
}
ours, theirs = f"{folder}/ours.safetensors", f"{folder}/theirs.safetensors"

subprocess.run([program, "write", ours], check=True)
read = load_file(ours)
assert read.keys() == expected.keys(), read.keys()
for name, value in expected.items():
    assert read[name].dtype == value.dtype and numpy.array_equal(read[name], value), name
with safe_open(ours, "numpy") as file:
    assert file.get_slice("f32").get_shape() == [2, 3]

save_file(expected, theirs, metadata={"written by": "the package"})
subprocess.run([program, "check", theirs], check=True)
print("1 passed, 0 failed")
