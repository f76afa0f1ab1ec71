"""dlpack.c from Python: numpy arrays, strided ones too, without a copy, beside window attention in f64.

    cc -O2 -shared -fPIC examples/embed/dlpack.c -Insa -o libnsa_dlpack.so -lm
    python3 examples/embed/dlpack.py ./libnsa_dlpack.so

It needs numpy. With `pip install apache-tvm-ffi==0.1.15.post2` it calls through TVM-FFI too, and with
the word `tvm_ffi` as second argument it fails where that is missing.
"""
import sys
from ctypes import (CDLL, POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_uint8, c_uint16,
                    c_uint64, c_void_p)

import numpy as np

try:  # before the library, which looks for the host's functions when it is loaded
    import tvm_ffi
except ImportError:
    tvm_ffi = None


class DLTensor(Structure):
    _fields_ = [("data", c_void_p), ("device", c_int32), ("device_index", c_int32), ("ndim", c_int32),
                ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)),
                ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)]


def dltensor(array):
    n, code = array.ndim, {"f": 2, "i": 0}[array.dtype.kind]
    shape = (c_int64 * n)(*array.shape)
    strides = (c_int64 * n)(*(s // array.itemsize for s in array.strides))
    return DLTensor(array.ctypes.data, 1, 0, n, code, 8 * array.itemsize, 1, shape, strides, 0)


def reference(q, k, v, window):
    """Window attention in f64, (B, T, H, D)."""
    group, tokens = q.shape[2] // k.shape[2], q.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(group, axis=2) for x in (k, v))
    s = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[3])
    t = np.arange(tokens)
    sees = (t[:, None] >= t[None, :]) & (t[:, None] - t[None, :] < window)
    p = np.where(sees, np.exp(s - np.where(sees, s, -np.inf).max(-1, keepdims=True)), 0)
    return np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v)


def inputs(dtype):
    """Slices of a fused projection, (B, T, (H + 2 Hk) D), and an output in (B, H, T, D)."""
    batch, tokens, heads, kv_heads, dim = 2, 300, 6, 2, 40
    numbers = np.random.default_rng(1).standard_normal((batch, tokens, heads + 2 * kv_heads, dim))
    fused = numbers.astype(dtype)
    out = np.full((batch, heads, tokens, dim), np.nan, dtype).transpose(0, 2, 1, 3)
    return (fused[:, :, :heads], fused[:, :, heads:heads + kv_heads], fused[:, :, heads + kv_heads:],
            out)


def refuses(call, words):
    try:
        call()
    except ValueError as error:
        return words in str(error)
    return False


def check(name, win):
    """win(q, k, v, out, window) raises ValueError. Returns the number of failures."""
    failures = 0
    for dtype, limit in ((np.float32, 3e-6), (np.float16, 2e-3)):
        q, k, v, out = inputs(dtype)
        win(q, k, v, out, 64)
        error = np.abs(out - reference(q, k, v, 64)).max()
        print(f"{name}, {np.dtype(dtype).name}: from f64 by {error:.1e} at most")
        failures += not error < limit
    q, k, v, out = inputs(np.float32)
    for what, call, words in (
            ("heads that do not divide", lambda: win(q[:, :, :5], k, v, out[:, :, :5], 64), "multiple"),
            ("a window of 0", lambda: win(q, k, v, out, 0), "range"),
            ("rows that are not packed", lambda: win(q[..., ::2], k, v, out, 64), "packed"),
            ("three dimensions", lambda: win(q[0], k, v, out, 64), "four dimensions"),
            ("int64", lambda: win(q.astype(np.int64), k, v, out, 64), "none of"),
            ("shapes that do not fit", lambda: win(q, k[:, 1:], v, out, 64), "do not fit")):
        if not refuses(call, words):
            print(f"{name}: {what} is not refused in the library's words")
            failures += 1
    return failures


def by_ctypes(path):
    function = CDLL(path).nsa_dlpack_win
    function.restype, function.argtypes = c_char_p, [POINTER(DLTensor)] * 4 + [c_int64]

    def win(*arguments):
        error = function(*(byref(dltensor(x)) for x in arguments[:4]), arguments[4])
        if error:
            raise ValueError(error.decode())
    return win


if len(sys.argv) < 2:
    sys.exit(__doc__)
failed = check("ctypes", by_ctypes(sys.argv[1]))
if tvm_ffi is None:
    print("TVM-FFI: left out, apache-tvm-ffi is not installed")
    failed += sys.argv[2:] == ["tvm_ffi"]
else:
    failed += check("TVM-FFI", tvm_ffi.load_module(sys.argv[1]).nsa_win)
sys.exit(failed)
