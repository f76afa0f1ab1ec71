"""nsa without torch or jax: struct layouts, views, refusals, the primitives over numpy, the cache.

    python3 -m unittest discover -s python/tests -p test_core.py      (PYTHONPATH: where nsa was installed)

References are plain numpy in float64. Not here: the arithmetic at large, which tests/ of the library checks.
"""
import copy
import ctypes
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import types
import unittest

import numpy as np

import nsa
from nsa import _abi, _library, _views

RNG = np.random.default_rng(7)
ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "nsa" / "nsa.h"
sys.path.append(str(ROOT / "scripts"))
import check_docs  # noqa: E402


def run_pages(case, test, **given):
    """Runs what the documents say in Python and this test keeps, with what a reader has: the names that are left."""
    blocks = check_docs.fences_run_by(f"python/tests/{test}.py")
    case.assertTrue(blocks)
    for page, line, block in blocks:
        with case.subTest(page=page, line=line):
            names = dict(given)
            exec(compile(block, f"{page}:{line}", "exec"), names)
            yield names


def rows(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def softmax_attention(q, k, v, sees):
    """out and lse of (B, T, H, D) over keys (B, S, Hk, D) where sees[t, s]."""
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2).astype(float), np.repeat(v, group, 2).astype(float)
    score = np.einsum("bthd,bshd->bhts", q.astype(float), k) / np.sqrt(q.shape[3])
    score = np.where(sees, score, -np.inf)
    most = score.max(-1, keepdims=True)
    e = np.exp(score - most)
    out = np.einsum("bhts,bshd->bthd", e / e.sum(-1, keepdims=True), v)
    return out, np.moveaxis((most + np.log(e.sum(-1, keepdims=True)))[..., 0], 1, 2)


def window(tokens, width):
    t, s = np.arange(tokens)[:, None], np.arange(tokens)
    return (s <= t) & (s > t - width)


def scored_blocks(q, k, weights, tokens, stride, block, count, act, pool, forced, init, local, first=0):
    """(lists, scores) of a sequence's queries (n, H, D) from `first` on, by keys (tokens // stride, Hk, D), as the header's
    manual words it."""
    group, blocks = q.shape[1] // k.shape[1], -(-tokens // block)
    width = count + (init + local if forced != "inside" else 0)
    scores = np.full((len(q), k.shape[1], blocks), -np.inf)
    lists = np.full((len(q), k.shape[1], width), -1, np.int32)
    for row, g in np.ndindex(*scores.shape[:2]):
        t, dots = first + row, k[:, g].astype(float) @ q[row, g * group:(g + 1) * group].astype(float).T
        of_heads = 1 if weights is None else weights[row, g * group:(g + 1) * group].astype(float)
        value = ((np.maximum(dots, 0) if act == "relu" else dots) * of_heads).sum(1)
        for j in range(blocks):
            seen = [value[i] for i in range(len(k)) if i * stride // block == j and (i + 1) * stride - 1 <= t]
            if seen and not (forced == "tail" and not local and j == (t + 1) // block):  # there it is no candidate
                scores[row, g, j] = max(seen) if pool == "max" else np.mean(seen)
        whole, tail = (t + 1) // block, (t + 1) % block > 0
        places = list(range(whole if forced == "tail" else t // block + 1))
        at_t = ([whole] if tail and local else []) if forced == "tail" else places[len(places) - min(local, len(places)):]
        must = set(places[:init]) | set(at_t)
        room = count - (len(must) if forced == "inside" else 0)
        best = sorted(set(places) - must, key=lambda j: (-scores[row, g, j], j))[:room]
        found = sorted(must | set(best))
        lists[row, g, :len(found)] = found
    return lists, scores


#: (stride, act, pool, weights, forced, slc_init, slc_local)
SCORED = ((1, "relu", "max", True, "tail", 0, 1), (2, "linear", "mean", False, "inside", 0, 1),
          (4, "relu", "max", True, "tail", 1, 0), (4, "relu", "mean", True, "tail", 0, 1),
          (8, "linear", "max", True, "on_top", 1, 2), (16, "linear", "max", False, "tail", 0, 1))


class Pages(unittest.TestCase):
    def test_page(self):
        for said in run_pages(self, "test_core"):
            sees = np.tril(np.ones((256, 256), bool)) & ~np.tril(np.ones((256, 256), bool), -64)
            out, _ = softmax_attention(said["q"], said["k"], said["v"], sees)
            np.testing.assert_allclose(said["out"], out, atol=1e-5)


class BFloat16:
    """numpy's uint16 as torch gives its tensors of bfloat16; numpy has none of its own."""

    def __init__(self, bits):
        self.bits, self.shape, self.dtype = bits, bits.shape, "torch.bfloat16"
        self.device = types.SimpleNamespace(type="cpu")

    def data_ptr(self):
        return self.bits.ctypes.data

    def stride(self):
        return [step // 2 for step in self.bits.strides]


class Problem:
    """q, k, v of a small problem, and its descriptor."""

    def __init__(self, tokens=96, dtype=np.float32, **fields):
        self.B, self.T, self.H, self.Hk, self.D = 2, tokens, 4, 2, 16
        self.desc = nsa.desc(self.B, self.T, self.H, self.Hk, self.D, cmp_block=8, cmp_stride=4, slc_block=16,
                             slc_count=3, window=24, **fields)
        self.q = rows(self.B, self.T, self.H, self.D, dtype=dtype)
        self.k, self.v = (rows(self.B, self.T, self.Hk, self.D, dtype=dtype) for _ in range(2))
        self.out = np.full_like(self.q, np.nan)
        self.lse = np.full(self.q.shape[:3], np.nan, np.float64 if dtype == np.float64 else np.float32)

    def attend(self, **fields):
        return nsa.Attend(**{**dict(q=self.q, k=self.k, v=self.v, out=self.out, lse=self.lse), **fields})


class Layout(unittest.TestCase):
    def test_every_function_of_the_header_is_here(self):
        names = re.findall(r"^NSA_API .*?\bnsa_(\w+)\(", HEADER.read_text().split("#endif /* NSA_H */")[0], re.M)
        self.assertGreater(len(names), 50)
        elsewhere = {"tensor_bthd": nsa.Tensor, "tensor_bhtd": nsa.Tensor, "status_kind": nsa.Refused,
                     "status_name": nsa.Refused, "status_text": nsa.Refused, "status_where": nsa.Refused,
                     "desc_default": nsa.desc, "cache_size": nsa.Cache, "cache_init": nsa.Cache,
                     "cache_rewind": nsa.Cache.rewind, "cache_fork": nsa.Cache.fork,
                     "decode_workspace_size": nsa.Cache.decode, "decode": nsa.Cache.decode,
                     "convert_rows": None}  # rows of 8 bits with scales are no arrays of any host
        self.assertEqual([n for n in names if not hasattr(nsa, n) and n not in elsewhere], [])

    def test_every_struct_and_enum_of_the_header_is_here(self):
        names = re.findall(r"^typedef (?:struct|enum) nsa_(\w+)", HEADER.read_text().split("#endif /* NSA_H */")[0], re.M)
        self.assertGreater(len(names), 25)
        missing = {"".join(word.capitalize() for word in name.split("_")) for name in names} - set(nsa.__all__)
        self.assertEqual(missing, set())
        self.assertEqual([name for name in nsa.__all__ if not hasattr(nsa, name)], [])

    def test_every_letter_of_the_shapes_is_known(self):
        known = set(_library.extents(nsa.desc(1, 64, 2, 1, 16), False))
        for struct in set(_abi.STRUCTS.values()) - {_abi.Cache}:
            axes = {axis for shapes in struct._shapes_.values() for shape in shapes.values() for axis in shape}
            letters = {part for axis in axes - known for part in axis.split() if not part.isdigit()}
            fields = {"dim" if part == "D" else part for part in letters - known}
            self.assertEqual(fields - set(struct.kinds()), set(), struct)

    def test_every_view_has_a_shape(self):
        for name, struct in _abi.STRUCTS.items():
            without = [field for field, kind in struct.kinds().items()
                       if kind is nsa.Tensor and field not in struct._shapes_ and struct is not _abi.Cache]
            self.assertEqual(without, [], name)

    def test_another_layout_does_not_load(self):
        path = _library.library().path
        real = _abi.STRUCTS["nsa_reads"]
        for fields in ([("cmp", ctypes.c_int64), ("win", ctypes.c_int64), ("slc", ctypes.c_int64)],
                       [("cmp", ctypes.c_int64), ("slc", ctypes.c_int64)]):
            other = type("Reads", (nsa.Reads.__base__,), {"_fields_": fields})
            _abi.STRUCTS["nsa_reads"] = other
            try:
                with self.assertRaisesRegex(ImportError, "nsa_reads"):
                    _library.Library(path, ctypes.c_float)
            finally:
                _abi.STRUCTS["nsa_reads"] = real
        _abi.MEMBERS["NSA_F16"] += 1
        try:
            with self.assertRaisesRegex(ImportError, "NSA_F16"):
                _library.Library(path, ctypes.c_float)
        finally:
            _abi.MEMBERS["NSA_F16"] -= 1

    def test_without_openmps_runtime(self):
        path = _library.FOLDER / "libnsa_f32_serial.so"
        if not path.exists():
            self.skipTest("built without the serial libraries")
        p = Problem()
        nsa.attend_win_forward(p.attend(), p.desc)
        expected, alone = p.out.copy(), _library.Library(path, ctypes.c_float)
        p.out[:] = np.nan
        room = _library.memory(alone.nsa_attend_win_forward_workspace_size(ctypes.byref(p.desc)))
        alone.check(alone.nsa_attend_win_forward(ctypes.byref(p.attend()), ctypes.byref(p.desc),
                                                 ctypes.addressof(room), len(room)))
        np.testing.assert_array_equal(p.out, expected)

    def test_a_compiler_of_several_words(self):
        """As CC has them: "ccache gcc"."""
        for nvcc, code, words in ((f"'{sys.executable}' -c pass", 0, "-c pass -O3"),
                                  ("/", 1, "/: Permission denied; must be a compiler"),
                                  ("no_such_compiler -m64", 1, "no_such_compiler: No such file")):
            with self.subTest(nvcc), tempfile.TemporaryDirectory(prefix="a b") as folder:
                done = subprocess.run([sys.executable, "-m", "nsa.build", "cuda", "sm_80", "--to", folder],
                                      capture_output=True, text=True,
                                      env={**os.environ, "NVCC": nvcc, "PYTHONPATH": os.pathsep.join(sys.path)})
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertRegex(done.stderr if code else done.stdout, words)

    def test_pip_knows_what_was_built(self):
        """Or it would leave the library behind, and an upgrade would run it with a newer header's structs."""
        with tempfile.TemporaryDirectory() as site, tempfile.TemporaryDirectory() as elsewhere:
            info = pathlib.Path(site, "nsa_attention-0.dist-info")
            info.mkdir()
            (info / "METADATA").write_text("Name: nsa-attention\nVersion: 0\n")
            (info / "RECORD").write_text("nsa_attention-0.dist-info/RECORD,,\n")
            pathlib.Path(site, "nsa").symlink_to(_library.FOLDER)
            for to in ([], [], ["--to", elsewhere]):
                subprocess.run([sys.executable, "-m", "nsa.build", "cuda", "sm_80", *to], check=True, capture_output=True,
                               env={**os.environ, "NVCC": f"'{sys.executable}' -c pass",
                                    "PYTHONPATH": os.pathsep.join([site, *sys.path])})
            self.assertEqual((info / "RECORD").read_text(),
                             "nsa_attention-0.dist-info/RECORD,,\nnsa/libnsa_cuda.so,,\n")

    def test_version(self):
        self.assertRegex(nsa.__version__, r"^\d+\.\d+\.\d+$")


class Views(unittest.TestCase):
    def test_strided_views_are_not_copied(self):
        p = Problem()
        plain = p.attend()
        nsa.attend_win_forward(plain, p.desc)
        fused = np.zeros((p.B, p.T, p.H + 2 * p.Hk, p.D), np.float32)
        fused[:, :, :p.H], fused[:, :, p.H:p.H + p.Hk], fused[:, :, p.H + p.Hk:] = p.q, p.k, p.v
        other = np.zeros((p.B, p.H, p.T, p.D), np.float32)
        x = nsa.Attend(q=fused[:, :, :p.H], k=fused[:, :, p.H:p.H + p.Hk], v=fused[:, :, p.H + p.Hk:],
                       out=other.transpose(0, 2, 1, 3), lse=np.zeros_like(p.lse))
        self.assertEqual(x.q.data, fused.ctypes.data)
        nsa.attend_win_forward(x, p.desc)
        np.testing.assert_array_equal(other.transpose(0, 2, 1, 3), p.out)

    @unittest.skipUnless(hasattr(np.ndarray, "__dlpack__"), "a numpy without it, before 1.22")
    def test_dlpack(self):
        class Only:
            """An array of which nothing is known but DLPack."""
            def __init__(self, array):
                self.array = array

            def __dlpack__(self):
                return self.array.__dlpack__()

        p = Problem()
        nsa.attend_win_forward(p.attend(), p.desc)
        expected = p.out.copy()
        p.out[:] = 0
        wrapped = {name: Only(getattr(p, name)) for name in ("q", "k", "v", "out", "lse")}
        nsa.attend_win_forward(nsa.Attend(**wrapped), p.desc)
        np.testing.assert_array_equal(p.out, expected)

    def test_arrays_live_as_long_as_the_struct(self):
        x = nsa.Attend(q=rows(1, 64, 2, 16))
        self.assertEqual(next(x.views())[3].owner.shape, (1, 64, 2, 16))

    def test_what_cannot_be_viewed_is_refused(self):
        p = Problem()
        described = lambda **of: type("Array", (), {"__array_interface__": dict(of, shape=p.q.shape, version=3)})()
        for field, array, words in (
                ("q", p.q.astype(np.int64), "q: the dtype int64"),
                ("q", p.q[..., ::2], "q: the last axis must be packed"),
                ("q", p.q[0], r"q: 3 axes, must be \(B, count, H, Dk\)"),
                ("q", p.q.astype(">f4"), "dtype|order"),
                ("q", described(typestr="<i8"), "q: the dtype <i8"),
                ("q", described(typestr="<f4"), "q: its __array_interface__ has no address"),
                ("q", described(typestr="<f4", data=memoryview(b"")), "q: its __array_interface__ has no address"),
                ("lse", p.q, "lse: 4 axes")):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                p.attend(**{field: array})
        with self.assertRaisesRegex(TypeError, "no array"):
            p.attend(q="queries" and 3)
        with self.assertRaisesRegex(TypeError, "no field queries; it has q, k"):
            nsa.Attend(queries=p.q)
        with self.assertRaisesRegex(TypeError, "set it as a whole"):
            nsa.Attention().k_cmp.x = p.k

    def test_shapes_are_held_against_the_descriptor(self):
        p = Problem()
        for fields in (dict(q=p.q[:, :-1]), dict(k=p.k[:, :, :1]), dict(v=p.v[:1]), dict(lse=p.lse[:, :, :1])):
            with self.subTest(list(fields)), self.assertRaisesRegex(ValueError, "shape .* must be"):
                nsa.attend_win_forward(p.attend(**fields), p.desc)
        self.assertTrue(np.isnan(p.out).all())

    def test_read_only_arrays_are_not_written(self):
        p = Problem()
        p.out.setflags(write=False)
        with self.assertRaisesRegex(ValueError, "out: is read-only"):
            nsa.attend_win_forward(p.attend(), p.desc)
        p.out.setflags(write=True)
        p.q.setflags(write=False)
        nsa.attend_win_forward(p.attend(), p.desc)
        with self.assertRaisesRegex(ValueError, "k: is read-only"):
            locked = np.zeros_like(p.k)
            locked.setflags(write=False)
            nsa.attend_win_backward(nsa.Attend(k=locked, out=p.out), p.attend(), p.desc)


class Refusals(unittest.TestCase):
    def test_the_librarys_own_words(self):
        p = Problem()
        p.desc.cmp_stride = 5
        with self.assertRaises(nsa.Refused) as caught:
            nsa.attend_cmp_forward(p.attend(), p.desc)
        self.assertIsInstance(caught.exception, ValueError)
        self.assertEqual((caught.exception.kind, caught.exception.where), (nsa.Error.CMP_STRIDE, "cmp_stride"))
        self.assertRegex(str(caught.exception), "^cmp_stride: NSA_ERROR_CMP_STRIDE: 5, must be a divisor of cmp_block, which is 8$")
        self.assertTrue(np.isnan(p.out).all())

    def test_a_gradients_field_is_named(self):
        p = Problem()
        nsa.attend_win_forward(p.attend(), p.desc)
        with self.assertRaises(nsa.Refused) as caught:
            nsa.attend_win_backward(nsa.Attend(q=p.q), p.attend(), p.desc)
        self.assertEqual((caught.exception.kind, caught.exception.where), (nsa.Error.NULL, "dx.out"))

    def test_lists_that_are_no_lists(self):
        p = Problem()
        blocks = np.full((p.B, p.T, p.Hk, 3), -1, np.int32)
        blocks[:, :, :, 0] = 0
        self.assertIsNone(nsa.check_blocks(blocks, p.desc))
        blocks[1, 5, 1] = [3, 0, -1]
        fault = nsa.check_blocks(blocks, p.desc)
        self.assertEqual((fault.batch, fault.query, fault.kv_head, fault.slot, fault.value), (1, 5, 1, 0, 3))
        self.assertEqual(fault.reason, "not a candidate of its query")
        with self.assertRaises(nsa.Refused):
            nsa.attend_slc_forward(p.attend(blocks=blocks), p.desc)
        nsa.normalize_blocks(blocks, p.desc)
        self.assertIsNone(nsa.check_blocks(blocks, p.desc))
        self.assertEqual(blocks[1, 5, 1].tolist(), [0, -1, -1])

    def test_an_option_by_its_name(self):
        self.assertEqual(nsa.desc(1, 8, 2, 1, 16, gate="softmax").gate, nsa.GateKind.SOFTMAX)
        with self.assertRaisesRegex(ValueError, "gate: 'relu' is none of sigmoid, softmax, none"):
            nsa.desc(1, 8, 2, 1, 16, gate="relu")
        with self.assertRaisesRegex(TypeError, "no field windows"):
            nsa.desc(1, 8, 2, 1, 16, windows=3)

    def test_a_number_is_no_array(self):
        """Where an array is wanted it would be taken for an address, and read."""
        for name in ("begins", "firsts", "counts", "pages"):
            for number in (0, 64, True):
                with self.assertRaisesRegex(TypeError, f"{name}: .* is no array"):
                    nsa.desc(1, 64, 2, 1, 16, **{name: number})
        with self.assertRaisesRegex(TypeError, "frequencies: int is no array"):
            nsa.Rope(heads=1, dim=16, frequencies=64)

    def test_true_is_no_number(self):
        for yes in True, np.True_, np.array(True):
            for name in "batch", "window", "gate":
                with self.assertRaisesRegex(TypeError, f"{name}: .*True.*, must be an integer"):
                    nsa.desc(**{**dict(batch=1, tokens=8, heads=2, kv_heads=1, dim=16), name: yes})
        with self.assertRaisesRegex(TypeError, "begins: False, must be an integer"):
            nsa.desc(1, 8, 2, 1, 16, begins=[False, True])

    def test_a_dtype_that_no_field_has(self):
        """The message has the dtypes of this field, not those of all."""
        p = Problem()
        for name, x in ("begins", np.zeros(2, np.int64)), ("pages", np.zeros((1, 2), np.uint32)):
            with self.assertRaisesRegex(nsa.Refused, f"^{name}: the dtype {x.dtype}, must be int32$"):
                nsa.desc(1, 8, 2, 1, 16, **{name: x})
        for name, dtypes in ("q", "float32, bfloat16, float16 or float64"), ("blocks", "int32"), ("lse", "float32, or float64 .*"):
            with self.assertRaisesRegex(nsa.Refused, f"^{name}: the dtype int64, must be {dtypes}$"):
                p.attend(**{name: np.zeros((p.B, p.T, p.H, 1)[:3 + (name != "lse")], np.int64)})
        with self.assertRaisesRegex(nsa.Refused, "^frequencies: the dtype int64, must be float64$"):
            nsa.Rope(heads=1, dim=4, frequencies=np.ones(2, np.int64))


class Strangers(unittest.TestCase):
    """What people bring, and what the C library cannot see: memory, owners, processes, numbers of Python."""

    WRONG = np.float32(7.5)

    def packed(self, begins, rows_, **fields):
        d = nsa.desc(len(begins) - 1, max(1, *np.diff(begins)), 4, 2, 16, cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3,
                     window=24, begins=np.array(begins, np.int32), **fields)
        q, k, v = rows(1, rows_, 4, 16), rows(1, rows_, 2, 16), rows(1, rows_, 2, 16)
        return d, q, k, v

    def test_rows_of_no_query(self):
        """The last `first` rows of each packed sequence, and those before the first sequence."""
        for begins, first in (([0, 30, 37], 5), ([4, 30, 37], 0), ([0, 3, 37], 9)):
            d, q, k, v = self.packed(begins, 37)
            d.first, d.count = first, max(0, d.tokens - first)
            out, lse = np.full((1, 37, 4, 16), self.WRONG), np.full((1, 37, 4), self.WRONG)
            for call in (nsa.attend_win_forward, nsa.attend_dense_forward):
                call(nsa.Attend(q=q, k=k, v=v, out=out, lse=lse), d)
                rest = np.ones(37, bool)
                for a, b in zip(begins, begins[1:]):
                    rest[a:max(a, b - first)] = False
                self.assertTrue((out[0, rest] == 0).all() and np.isneginf(lse[0, rest]).all())
                self.assertTrue((out[0, ~rest] != self.WRONG).all() and np.isfinite(lse[0, ~rest]).all())
            turned = np.full_like(out, self.WRONG)
            nsa.rope_forward(nsa.Rope(x=q, out=turned, heads=4, dim=16), d)
            self.assertTrue((turned[0, rest] == 0).all())
            inside = q.copy()  # where the input is the output its other rows stay
            nsa.rope_forward(nsa.Rope(x=inside, out=inside, heads=4, dim=16), d)
            np.testing.assert_array_equal(inside[0, rest], q[0, rest])
            lists = np.full((1, 37, 2, 3), 77, np.int32)
            scores = np.full((1, 37, 2, nsa.slc_count(d, d.tokens)), self.WRONG)
            nsa.score_blocks(nsa.Score(q=q, k=k, blocks=lists, scores=scores), d)
            self.assertTrue((lists[0, rest] == -1).all() and (lists[0, ~rest] != 77).all())
            self.assertTrue(np.isneginf(scores[0, rest]).all())

    def decoded(self, cache, counts, **fields):
        batch, count = cache.desc.batch, max(counts)
        x = dict(q=rows(batch, count, 4, 16), gates=rows(batch, count, 4, 3))
        for name in ("k_slc", "v_slc", "k_win", "v_win"):
            x[name] = rows(batch, count, 2, 16)
        for name in ("out", "out_cmp", "out_slc", "out_win"):
            x[name] = np.full((batch, count, 4, 16), self.WRONG)
        for name in ("lse_cmp", "lse_slc", "lse_win"):
            x[name] = np.full((batch, count, 4), self.WRONG)
        x["blocks"] = np.full((batch, count, 2, 3), 77, np.int32)
        x.update(fields)
        phi = nsa.Compress(dim=16, x=x["k_slc"]), nsa.Compress(dim=16, x=x["v_slc"])
        cache.decode(nsa.Attention(k_cmp=phi[0], v_cmp=phi[1], **x), count, np.array(counts, np.int32))
        return x

    def cache(self, batch=2, tokens=80, **fields):
        return nsa.Cache(nsa.desc(batch, tokens, 4, 2, 16, cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, window=24),
                         **fields)

    def test_rows_behind_count(self):
        x = self.decoded(self.cache(max_rewind=15), [3, 12])
        for name, value in (("out", 0), ("out_cmp", 0), ("out_win", 0), ("lse_slc", -np.inf), ("blocks", -1)):
            self.assertTrue((x[name][0, 3:] == value).all(), name)
            self.assertFalse((x[name][0, :3] == self.WRONG).any() or (x[name][1] == self.WRONG).any(), name)

    def test_a_cache_does_not_write_to_what_is_read_only(self):
        for name, shape, dtype in (("out", (2, 3, 4, 16), np.float32), ("lse_win", (2, 3, 4), np.float32),
                                   ("blocks", (2, 3, 2, 3), np.int32)):
            memory = bytes(int(np.prod(shape)) * 4)
            cache, locked = self.cache(max_rewind=15), np.frombuffer(memory, dtype).reshape(shape)
            with self.assertRaisesRegex(nsa.Refused, f"{name}: is read-only, and would be written"):
                self.decoded(cache, [3, 3], **{name: locked})
            self.assertEqual((memory, cache.lengths), (bytes(len(memory)), [0, 0]))

    def test_threads_share_a_cache(self):
        cache, refused = self.cache(batch=1, tokens=100), []

        def append():
            for _ in range(90):
                try:
                    self.decoded(cache, [1])
                except nsa.Refused as why:
                    refused.append(str(why))

        threads = [threading.Thread(target=append) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((cache.lengths, len(refused)), ([100], 80))
        self.assertRegex(refused[0], r"count: 1 tokens more, and sequences hold \[100\]: of at most 100")

    def test_a_child_of_who_has_computed(self):
        """OpenMP's threads are the parent's: a child that asked for two would wait for them for ever."""
        program = ("import os, numpy as np, nsa; x = np.ones((1, 4096, 8, 32), np.float32); o = np.empty_like(x)\n"
                   "l = np.empty((1, 4096, 8), np.float32); d = nsa.desc(1, 4096, 8, 8, 32, threads=2)\n"
                   "go = lambda: nsa.attend_win_forward(nsa.Attend(q=x, k=x, v=x, out=o, lse=l), d)\n"
                   "go(); child = os.fork(); go(); os._exit(0) if not child else 0\n"
                   "print(os.waitpid(child, 0)[1], d.threads)")
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"})
        self.assertEqual(found.stdout.split(), ["0", "2"], found.stderr)

    def test_a_child_of_who_is_in_a_cache(self):
        """Its thread is the parent's: what it has half done nobody finishes, and nobody would open its lock."""
        cache, other = nsa.Cache(Problem().desc), nsa.Cache(Problem().desc)
        entered, leave = threading.Event(), threading.Event()

        def inside():
            with cache._lock:
                entered.set()
                leave.wait()
        thread = threading.Thread(target=inside)
        thread.start()
        entered.wait()
        with other._lock:  # of the thread that forks
            child = os.fork()
            if child == 0:
                try:
                    signal.alarm(300)
                    other.rewind(0, 0)
                    for call in lambda: cache.rewind(0, 0), lambda: other.fork(0, cache, 0, 0), lambda: copy.copy(cache):
                        with self.assertRaisesRegex(nsa.Refused, "^cache: another thread was in a call of it when"):
                            call()
                    os._exit(0)
                finally:
                    os._exit(4)
        leave.set()
        thread.join()
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        cache.rewind(0, 0)

    def test_fields_that_a_function_does_not_use(self):
        """A window has no use for blocks: their fields may hold anything, as the header says."""
        p = Problem()
        nsa.attend_win_forward(p.attend(), p.desc)
        expected = p.out.copy()
        for fields in (dict(cmp_stride=5), dict(cmp_block=0, cmp_stride=0), dict(slc_block=0, slc_count=0), dict(slc_local=0)):
            d, p.out[:] = copy.copy(p.desc), 0
            for name, value in fields.items():
                setattr(d, name, value)
            nsa.attend_win_forward(p.attend(), d)
            np.testing.assert_array_equal(p.out, expected)
            with self.assertRaises(nsa.Refused):
                nsa.select_blocks_workspace_size(d)
        p.desc.slc_block, p.desc.slc_count = 0, 0
        out = np.zeros((p.B, nsa.cmp_count(p.desc, p.T), p.Hk, p.D), np.float32)
        nsa.compress_forward(nsa.Compress(dim=p.D, x=p.k, out=out), p.desc)
        np.testing.assert_allclose(out[:, 1], p.k[:, 4:12].mean(1), rtol=1e-5, atol=1e-6)

    def test_integers_beyond_those_of_c(self):
        cache, d, p = self.cache(), nsa.desc(1, 64, 2, 1, 16), Problem()
        for where, call in (
                ("tokens", lambda: nsa.desc(1, 2**32 + 200, 2, 1, 16)), ("batch", lambda: nsa.desc(2**32 + 1, 8, 2, 1, 16)),
                ("window", lambda: nsa.desc(1, 8, 2, 1, 16, window=np.int64(2**32 + 5))),
                ("gate_stride", lambda: nsa.desc(1, 8, 2, 1, 16, gate_stride=2**64 + 1)),
                ("length", lambda: cache.rewind(0, 2**32)), ("sequence", lambda: cache.rewind(2**32, 0)),
                ("length", lambda: cache.fork(0, cache, 1, 2**32)), ("count", lambda: self.decoded_count(cache, 2**32 + 1)),
                ("max_rewind", lambda: self.cache(max_rewind=2**32)), ("tokens", lambda: nsa.cmp_count(d, 2**32 + 64)),
                ("query", lambda: nsa.rank_blocks([1.0], 2**32, d)), ("slc", lambda: nsa.block_overlap_range(d, 64, 2**32)),
                ("tokens", lambda: nsa.block_map(d, 2**32)), ("x", lambda: nsa.bf16_to_f32(2**16)),
                ("x", lambda: nsa.f16_to_f32(-1)), ("heads", lambda: nsa.Rope(heads=2**32 + 4, dim=16)),
                ("scale", lambda: nsa.desc(1, 8, 2, 1, 16, scale=10**400))):
            with self.subTest(where), self.assertRaises(nsa.Refused) as caught:
                call()
            self.assertEqual(caught.exception.where, where)
        self.assertEqual(nsa.desc(1, 8, 2, 1, 16, window=np.int64(5)).window, 5)

    def decoded_count(self, cache, count):
        cache.decode(nsa.Attention(), count)

    def test_copies(self):
        begins = np.array([0, 5, 12], np.int32)
        d = nsa.desc(2, 7, 2, 1, 16, begins=begins, window=9)
        for made in (copy.copy(d), copy.deepcopy(d), pickle.loads(pickle.dumps(d))):
            self.assertEqual((made.window, made.tokens), (9, 7))
            nsa.desc_check(made)
        deep = copy.deepcopy(d)
        begins[:] = 9, 5, 0
        nsa.desc_check(deep)  # its begins are its own
        with self.assertRaises(nsa.Refused):
            nsa.desc_check(copy.copy(d))
        x = copy.deepcopy(nsa.Attention(k_cmp=nsa.Compress(dim=16, x=rows(1, 8, 1, 16)), q=rows(1, 8, 1, 16)))
        self.assertEqual([path for path, *_ in x.views()], ["k_cmp.x", "q"])
        cache = self.cache(max_rewind=15)
        self.decoded(cache, [5, 9])
        other = copy.deepcopy(cache)
        state = RNG.bit_generator.state
        a = self.decoded(cache, [4, 4])
        RNG.bit_generator.state = state
        b = self.decoded(other, [4, 4])
        np.testing.assert_array_equal(a["out"], b["out"])
        other.rewind(0, 0)
        self.assertEqual((cache.lengths, other.lengths), ([9, 13], [0, 13]))

    def test_a_flag_of_dlpack(self):
        class Locked:
            def __init__(self, array):
                self.array = array
                array.setflags(write=False)

            def __dlpack__(self, *, max_version=None, **_):
                return self.array.__dlpack__(max_version=max_version)

        if np.lib.NumpyVersion(np.__version__) < "2.1.0":
            self.skipTest("numpy before 2.1 has no flag")
        p = Problem()
        with self.assertRaisesRegex(nsa.Refused, "out: is read-only"):
            nsa.attend_win_forward(p.attend(out=Locked(p.out)), p.desc)
        p.out.setflags(write=True)
        nsa.attend_win_forward(p.attend(q=Locked(p.q)), p.desc)

    def test_capsules_of_dlpack(self):
        """A copy is read and not written to; a capsule of another version, or that is none, is named."""
        if np.lib.NumpyVersion(np.__version__) < "2.1.0":
            self.skipTest("numpy before 2.1 has no versions")

        class Made:
            def __init__(self, capsule):
                self.capsule = capsule

            def __dlpack__(self, **_):
                return self.capsule

        p = Problem()
        versioned = lambda x, **more: Made(x.__dlpack__(max_version=(1, 0), **more))
        with self.assertRaisesRegex(nsa.Refused, "out: is read-only"):
            nsa.attend_win_forward(p.attend(out=versioned(p.out, copy=True)), p.desc)
        nsa.attend_win_forward(p.attend(q=versioned(p.q, copy=True)), p.desc)
        later, taken = versioned(p.q), Made(p.q.__dlpack__())
        _views._Managed.from_address(_views._pointer(later.capsule, b"dltensor_versioned", "q")).major = 2
        np.from_dlpack(type("Array", (), {"__dlpack__": lambda *_, **__: taken.capsule, "__dlpack_device__": lambda _: (1, 0)})())
        for words, array in (("q: DLPack 2.[0-9]*, must be of version 1", later), ("q: its __dlpack__ gave None", Made(None)),
                             ("q: its __dlpack__ gave .*used.*, must be a capsule", taken)):
            with self.subTest(words), self.assertRaisesRegex(nsa.Refused, words):
                p.attend(q=array)


class Words(unittest.TestCase):
    def test_every_function_has_the_headers_words(self):
        public = [(name, getattr(nsa, name)) for name in nsa.__all__ if callable(getattr(nsa, name))
                  and not isinstance(getattr(nsa, name), type)]
        public += [(name, of) for name, of in vars(nsa.Cache).items() if callable(of) and not name.startswith("_")]
        self.assertGreater(len(public), 60)
        self.assertEqual([name for name, of in public if not (of.__doc__ or "").strip()], [])
        words = " ".join(re.sub(r"[/*]", " ", HEADER.read_text().split("#endif /* NSA_H */")[0]).split())
        for name, (_, _, _, comment) in _abi.prototypes(ctypes.c_float).items():
            of = getattr(nsa, name[4:], None)
            if of is not None:
                said, plain = " ".join(of.__doc__.split()), " ".join(re.sub(r"[/*]", " ", comment).split())
                self.assertIn(plain[-60:].replace('"', "'"), " ".join(re.sub(r"[/*]", " ", said).split()).replace('"', "'"))
                self.assertIn(plain[-60:], words)
        self.assertIn("dx.lse, the incoming gradient of lse", nsa.attend_slc_backward.__doc__)

    def test_a_refusal_names_the_rule_that_is_broken(self):
        for fields, words in (
                (dict(window=0), "window: NSA_ERROR_SIZE: 0, must be >= 1"),
                (dict(slc_count=0), "slc_count: NSA_ERROR_SIZE: 0, must be 1 .. 2^29 - 1"),
                (dict(slc_count=2), "slc_count: NSA_ERROR_SLC_COUNT: 2, must be at least slc_init + slc_local, 1 + 2, or "
                                    'forced "on_top"'),
                (dict(slc_local=0), 'slc_local: NSA_ERROR_SLC_LOCAL: 0, must be >= 1, or forced "on_top" (>= 0) or "tail" (0 or 1)'),
                (dict(slc_block=24), "slc_block: NSA_ERROR_SLC_BLOCK: 24, must be a multiple of cmp_stride, 16, and at least "
                                     "cmp_block, 32"),
                (dict(kv_heads=3), "heads: NSA_ERROR_HEADS: 4, must be a multiple of kv_heads, which is 3"),
                (dict(gate_heads=3), "gate_heads: NSA_ERROR_HEADS: 3, must be heads or kv_heads: 4 or 2"),
                (dict(list_heads=3), "list_heads: NSA_ERROR_HEADS: 3, must be 0, or a multiple of kv_heads that divides heads: "
                                     "of 2, dividing 4"),
                (dict(first=65), "first: NSA_ERROR_RANGE: 65, must be 0 .. tokens, which is 64"),
                (dict(first=60), "count: NSA_ERROR_RANGE: 64, must be 0 .. tokens - first, 64 - 60"),
                (dict(gate=9), "gate: NSA_ERROR_OPTION: 9, must be of sigmoid (0), softmax (1), none (2)"),
                (dict(scale=1e39), "scale: NSA_ERROR_SCALE: 1e+39: must be finite and at most 1e38")):
            d = nsa.desc(1, 64, 4, 2, 16)
            for name, value in fields.items():
                setattr(d, name, value)
            with self.subTest(words), self.assertRaises(nsa.Refused) as caught:
                nsa.desc_check(d)
            self.assertEqual(str(caught.exception), words)

    def test_the_limits_that_are_named_are_the_librarys(self):
        named = {**_library._RULES["SIZE"]}
        for name, words in named.items():
            least, most = {">=": (words.split()[-1], None), "0": (0, None)}.get(words.split()[0], (None, None))
            if " .. " in words:
                least, most = (int(eval(part.replace("^", "**"))) for part in words.split(" .. "))
            if name not in nsa.Desc.kinds() or name in ("heads", "kv_heads", "gate_heads"):
                continue  # others must be of one multiple
            for value, kind in ((int(least) - 1, "SIZE"), *([(most + 1, "SIZE")] if most is not None and most < 2**31 - 1 else [])):
                d = nsa.desc(1, 64, 4, 2, 16, forced="on_top", pages=np.zeros((1, 1), np.int32), table_width=1, page_tokens=64,
                             page_count=1)
                setattr(d, name, value)
                status = _library.library().nsa_desc_check(ctypes.byref(d))
                with self.subTest(name=name, value=value):
                    self.assertEqual(nsa.Error(_library.library().nsa_status_kind(status)).name,
                                     "HEADS" if name == "list_heads" and value > 0 else kind)
                    self.assertEqual(_library.library().nsa_status_where(status).decode(), name)

    def test_refused_everywhere(self):
        p, cache = Problem(), Strangers.cache(self)
        for call in (lambda: p.attend(q=p.q[0]), lambda: p.attend(q=p.q[..., ::2]), lambda: p.attend(q=p.q.astype(np.int64)),
                     lambda: nsa.desc(1, 8, 2, 1, 16, gate="relu"), lambda: nsa.attend_win_forward(p.attend(k=p.k[:1]), p.desc),
                     lambda: nsa.Cache(p.desc, "f31"), lambda: cache.rewind(0, 7), lambda: cache.rewind(5, 0),
                     lambda: cache.fork(0, nsa.Cache(p.desc, "f64"), 0, 0), lambda: nsa.rank_blocks([1.0, 2.0], 0, p.desc),
                     lambda: nsa.rank_blocks([], -1, p.desc), lambda: nsa.block_map(p.desc, -1)):
            with self.assertRaises(nsa.Refused) as caught:
                call()
            self.assertIsInstance(caught.exception.kind, nsa.Error)
            again = pickle.loads(pickle.dumps(caught.exception))
            self.assertEqual((str(again), again.kind, again.where), (str(caught.exception), caught.exception.kind,
                                                                     caught.exception.where))


class Primitives(unittest.TestCase):
    def test_win_and_dense(self):
        for dtype, tolerance in ((np.float32, 2e-6), (np.float64, 1e-14)):
            p = Problem(dtype=dtype)
            for call, sees in ((nsa.attend_win_forward, window(p.T, 24)), (nsa.attend_dense_forward, window(p.T, p.T))):
                call(p.attend(), p.desc)
                out, lse = softmax_attention(p.q, p.k, p.v, sees)
                np.testing.assert_allclose(p.out, out, atol=tolerance, rtol=tolerance)
                np.testing.assert_allclose(p.lse, lse, atol=tolerance, rtol=tolerance)

    def test_rows_of_bf16(self):
        d = nsa.desc(1, 96, 4, 2, 16, window=24)
        given = {name: rows(1, 96, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        bits = {name: (x.view(np.uint32) >> 16).astype(np.uint16) for name, x in given.items()}
        exact = {name: (x.astype(np.uint32) << 16).view(np.float32) for name, x in bits.items()}
        expected, _ = softmax_attention(*exact.values(), window(96, 24))
        outs, own = {}, [isa for isa in (nsa.Isa.AVX512_BF16, nsa.Isa.NEON_BF16) if nsa.isa_available(isa)]
        for products, tolerance in ((nsa.Products.F32, 2e-6), (nsa.Products.BF16, 2e-6 if not own else 1e-2)):
            d.products, out = products, np.full(given["q"].shape, np.nan, np.float32)
            nsa.attend_win_forward(nsa.Attend(lse=np.zeros((1, 96, 4), np.float32), out=out,
                                              **{name: BFloat16(x) for name, x in bits.items()}), d)
            np.testing.assert_allclose(out, expected, atol=tolerance, rtol=tolerance)
            outs[products] = out
        # Where the processor multiplies pairs of bf16, that is what was called.
        self.assertEqual(np.array_equal(*outs.values()), not own)

    def test_gradient_is_that_of_differences(self):
        p = Problem(tokens=40, dtype=np.float64)
        x = p.attend()
        nsa.attend_win_forward(x, p.desc)
        weight = rows(*p.out.shape, dtype=np.float64)
        kept, grads = p.out.copy(), [np.zeros_like(a) for a in (p.q, p.k, p.v)]
        nsa.attend_win_backward(nsa.Attend(q=grads[0], k=grads[1], v=grads[2], out=weight), x, p.desc)
        for array, gradient in zip((p.q, p.k, p.v), grads):
            for at in [tuple(RNG.integers(n) for n in array.shape) for _ in range(5)]:
                value, sums = array[at], []
                for step in (1e-5, -1e-5):
                    array[at] = value + step
                    nsa.attend_win_forward(x, p.desc)
                    sums.append((p.out * weight).sum())
                array[at] = value
                self.assertAlmostEqual((sums[0] - sums[1]) / 2e-5, gradient[at], delta=1e-7)
        np.testing.assert_array_equal(kept.shape, p.out.shape)

    def test_compress_select_gate_rope(self):
        p = Problem()
        n = nsa.cmp_count(p.desc, p.T)
        k_cmp = np.zeros((p.B, n, p.Hk, p.D), np.float32)
        nsa.compress_forward(nsa.Compress(phi="mean", dim=p.D, x=p.k, out=k_cmp), p.desc)
        expected = np.stack([p.k[:, 4 * i:4 * i + 8].mean(1) for i in range(n)], 1)
        np.testing.assert_allclose(k_cmp, expected, atol=1e-6)
        nsa.attend_cmp_forward(p.attend(k=k_cmp, v=k_cmp), p.desc)
        blocks = np.zeros((p.B, p.T, p.Hk, nsa.block_list_width(p.desc)), np.int32)
        nsa.select_blocks(nsa.Select(q=p.q, k=k_cmp, lse=p.lse, blocks=blocks), p.desc)
        self.assertIsNone(nsa.check_blocks(blocks, p.desc))
        self.assertEqual(set(blocks[:, -1, :, 0].flat), {0})
        logits = rows(p.B, p.T, p.H, 3)
        branches = [rows(*p.out.shape) for _ in range(3)]
        nsa.gate_forward(nsa.Gate(logits=logits, cmp=branches[0], slc=branches[1], win=branches[2], out=p.out), p.desc)
        expected = sum(branch / (1 + np.exp(-logits[..., i:i + 1])) for i, branch in enumerate(branches))
        np.testing.assert_allclose(p.out, expected, atol=2e-6)
        apart = np.moveaxis(np.ascontiguousarray(np.moveaxis(logits, -1, 0)), 0, -1)  # three tensors
        x = nsa.Gate(logits=apart, cmp=branches[0], slc=branches[1], win=branches[2], out=np.zeros_like(p.out))
        out = x.arrays["out"].owner
        with self.assertRaisesRegex(ValueError, "logits: its gates lie 768 elements apart, desc.gate_stride is 0"):
            nsa.gate_forward(x, p.desc)
        p.desc.gate_stride = p.B * p.T * p.H
        nsa.gate_forward(x, p.desc)
        np.testing.assert_array_equal(out, p.out)
        turned = np.zeros_like(p.q)
        nsa.rope_forward(nsa.Rope(x=p.q, out=turned, heads=p.H, dim=p.D), p.desc)
        pairs = p.q[..., 0::2] + 1j * p.q[..., 1::2]
        angle = np.arange(p.T)[:, None, None] * 10000.0 ** (-np.arange(0, p.D, 2) / p.D)
        pairs = pairs * np.exp(1j * angle)
        np.testing.assert_allclose(turned, np.stack([pairs.real, pairs.imag], -1).reshape(turned.shape), atol=1e-5)

    def test_block_index(self):
        d = nsa.desc(1, 256, 2, 1, 16)
        self.assertEqual((nsa.cmp_count(d, 256), nsa.slc_count(d, 256), nsa.window_begin(d, 200)), (15, 4, 0))
        indptr, indices, weights = nsa.block_map(d, 256)
        row = dict(zip(indices[indptr[1]:indptr[2]], weights[indptr[1]:indptr[2]]))
        self.assertEqual(row, {3: 1.0, 4: 2.0, 5: 2.0, 6: 2.0, 7: 1.0})
        self.assertEqual(nsa.block_overlap_range(d, 256, 1), (3, 8))
        self.assertEqual(nsa.cmp_begins(d), [0, 15])
        self.assertEqual(nsa.rank_blocks([0, 3, 1, 2, 0, 0, 0], 6 * 64, nsa.desc(1, 512, 2, 1, 16, slc_count=4)),
                         [0, 1, 5, 6])
        self.assertEqual(nsa.rank_blocks([0, 3, 1, 2], 999, nsa.desc(1, 256, 2, 1, 16, slc_count=2, mask="none")), [1, 3])
        with self.assertRaises(nsa.Refused):
            nsa.cmp_count(nsa.desc(1, 256, 2, 1, 16, cmp_stride=0), 256)

    def test_keys_that_stand_for_several_tokens(self):
        for dtype in (np.float64, np.float32):
            for stride, act, pool, weighs, forced, init, local in SCORED:
                p = Problem(50, dtype, forced=forced, slc_init=init, slc_local=local)
                k, weights = rows(p.B, 50 // stride, p.Hk, p.D, dtype=dtype), rows(p.B, 50, p.H, dtype=dtype)
                lists = np.full((p.B, 50, p.Hk, nsa.block_list_width(p.desc)), 77, np.int32)
                scores = np.zeros((p.B, 50, p.Hk, 4), p.lse.dtype)
                x = nsa.Score(act=act, pool=pool, q=p.q, k=k, blocks=lists, scores=scores, stride=stride)
                if weighs:
                    x.weights = weights
                nsa.score_blocks(x, p.desc)
                self.assertIsNone(nsa.check_blocks(lists, p.desc))
                for b in range(p.B):
                    expected, its = scored_blocks(p.q[b], k[b], weights[b] if weighs else None, 50, stride, 16, 3, act, pool,
                                                  forced, init, local)
                    with self.subTest(stride=stride, forced=forced, dtype=dtype.__name__):
                        np.testing.assert_allclose(scores[b], its, atol=1e-4 if dtype == np.float32 else 1e-12)
                        if dtype == np.float64:
                            np.testing.assert_array_equal(lists[b], expected)

    def test_packed_keys_that_stand_for_several_tokens(self):
        lengths, begins = (21, 0, 30), np.array([2, 23, 23, 53], np.int32)
        d = nsa.desc(3, 30, 4, 2, 16, slc_block=16, slc_count=2, forced="tail", slc_init=0, slc_local=1, begins=begins)
        q, whole = rows(55, 4, 16, dtype=np.float64), rows(12, 2, 16, dtype=np.float64)
        lists = np.full((1, 55, 2, 3), 77, np.int32)
        x = nsa.Score(q=q[None, :53], k=whole[None], blocks=lists[:, :53], stride=4)
        nsa.score_blocks(x, d)
        at = 0
        for length, begin in zip(lengths, begins):
            expected, _ = scored_blocks(q[begin:begin + length], whole[at:at + length // 4], None, length, 4, 16, 2, "linear",
                                        "max", "tail", 0, 1)
            np.testing.assert_array_equal(lists[0, begin:begin + length], expected)
            at += length // 4
        self.assertTrue((lists[0, :2] == -1).all())
        self.assertTrue((lists[0, 53:] == 77).all())

    def test_a_refusal_says_which_sequence_and_what_of_it(self):
        def call(d, n, keys=(1, 50), dtype=np.float32):
            x = nsa.Attend(q=rows(1, n, 4, 16).astype(dtype), k=rows(*keys, 2, 16), v=rows(*keys, 2, 16), out=rows(1, n, 4, 16),
                           lse=rows(1, n, 4))
            nsa.attend_win_forward(x, d)
        packed = [nsa.desc(2, 30, 4, 2, 16, begins=np.array(b, np.int32)) for b in ((0, 40, 50), (0, 25, 50))]
        firsts = [nsa.desc(2, 30, 4, 2, 16, count=4, firsts=np.array(f, np.int32), counts=np.array(c, np.int32))
                  for f, c in (((28, 0), (4, 1)), ((0, 31), (4, 1)))]
        for words, arguments in (("begins: .*sequence 0 has 40 tokens, must be at most the longest, which is 30", (packed[0], 50)),
                                 ("count 4 of sequence 0, must be 0 .. 2", (firsts[0], 5, (2, 30))),
                                 ("first 31 of sequence 1, must be 0 .. 30", (firsts[1], 5, (2, 30))),
                                 ("q: NSA_ERROR_DTYPE: int32, must be float32, ", (packed[1], 50, (1, 50), np.int32))):
            with self.subTest(words), self.assertRaisesRegex(nsa.Refused, words):
                call(*arguments)
        with self.assertRaisesRegex(nsa.Refused, "blocks: NSA_ERROR_DTYPE: must be int32$"):
            nsa.check_blocks(rows(2, 96, 2, 3), Problem().desc)
        for bits in (1 << 16, -1, 1 << 40):
            with self.subTest(bits), self.assertRaisesRegex(nsa.Refused, f"x: {bits}, must be 0 .. 65535"):
                nsa.bf16_to_f32(bits)
        with self.assertRaisesRegex(TypeError, "source: NoneType, must be a Cache"):
            nsa.Cache(Problem().desc).fork(0, None, 0, 0)

    def test_arguments_of_another_kind_are_named(self):
        p = Problem()
        x, none = p.attend(), nsa.Select()
        for words, call in (
                ("x: NoneType, must be nsa.Attend$", lambda: nsa.attend_win_forward(None, p.desc)),
                ("x: Select, must be nsa.Attend$", lambda: nsa.attend_win_forward(none, p.desc)),
                ("desc: NoneType, must be nsa.Desc$", lambda: nsa.attend_win_forward(x, None)),
                ("x: Desc, must be nsa.Attend$", lambda: nsa.attend_win_forward(p.desc, x)),
                ("x: Select, must be nsa.Attend$", lambda: nsa.attend_win_backward(x, none, p.desc)),
                ("desc: NoneType, must be nsa.Desc$", lambda: nsa.Cache(None)),
                ("desc: NoneType, must be nsa.Desc$", lambda: nsa.check_pages(None)),
                ("x: Attend, must be nsa.Attention$", lambda: nsa.Cache(p.desc).decode(x, 1)),
                ("workspace: int, must be a buffer of bytes", lambda: nsa.attend_win_forward(x, p.desc, workspace=1 << 20)),
                ("scores: int, must be numbers in one axis", lambda: nsa.rank_blocks(7, 0, p.desc)),
                ("scores: list, must be numbers in one axis", lambda: nsa.rank_blocks(["a"], 0, p.desc)),
                ("rope: NoneType, must be nsa.Rope$", lambda: nsa.rope_frequencies(None)),
                ("scale: None, must be a number$", lambda: nsa.desc(1, 8, 2, 1, 16, scale=None)),
                ("parameters: None, must be a configuration's rope_parameters", lambda: nsa.rope_options(None))):
            with self.subTest(words), self.assertRaisesRegex(TypeError, "^" + words):
                call()
        hidden = np.ma.array(p.q, mask=p.q > 2)
        for words, call in (
                ("q: has masked elements", lambda: nsa.Attend(q=hidden)),
                ("tokens: -1, must be >= 0", lambda: nsa.block_map(p.desc, -1)),
                ("workspace: is read-only", lambda: nsa.attend_win_forward(x, p.desc, workspace=bytes(1 << 20))),
                (r"workspace: its bytes have strides of \(2,\), must be in one piece", lambda: nsa.attend_win_forward(
                    x, p.desc, workspace=memoryview(bytearray(1 << 20))[::2])),
                ("dim: NSA_ERROR_SIZE: 15, must be even, 2 .. 576$", lambda: nsa.rope_frequencies(nsa.Rope(heads=1, dim=15))),
                ("out: NSA_ERROR_NULL: not given, must be an array$", lambda: nsa.attend_win_forward(
                    nsa.Attend(q=p.q, k=p.k, v=p.v, lse=p.lse), p.desc))):
            with self.subTest(words), self.assertRaisesRegex(nsa.Refused, "^" + words):
                call()
        nsa.Attend(q=np.ma.array(p.q)), nsa.Attend(q=np.ma.array(p.q, mask=False))

    def test_scores_of_lists_that_are_given(self):
        d = nsa.desc(1, 20, 4, 2, 16, slc_block=4, slc_count=8, slc_init=0, slc_local=1, begins=np.array([2, 22], np.int32))
        q, k = rows(1, 22, 4, 16), rows(1, 22, 2, 16)
        lists = np.full((1, 22, 2, 8), -1, np.int32)
        lists[0, 2:] = [[[j if 4 * j <= t else -1 for j in range(8)]] * 2 for t in range(20)]
        lists[0, :2] = 77  # of no query
        lists.flags.writeable = False
        scores = np.full((1, 22, 2, 8), 7, np.float32)
        nsa.score_blocks_forward(nsa.Score(q=q, k=k, blocks=lists, scores=scores), d)
        _, expected = scored_blocks(q[0, 2:], k[0, 2:], None, 20, 1, 4, 8, "linear", "max", "inside", 0, 1)
        np.testing.assert_allclose(scores[0, 2:, :, :5], expected, atol=1e-5)
        self.assertTrue((scores[0, 2:, :, 5:] == -np.inf).all() and (scores[0, :2] == -np.inf).all())
        self.assertTrue((lists[0, :2] == 77).all())
        for name, more in (("scores", dict(scores=scores[..., :5].copy())), ("blocks", dict(blocks=lists[..., :5]))):
            with self.subTest(name), self.assertRaisesRegex(nsa.Refused, name + r": shape .*nsa_block_list_width"):
                nsa.score_blocks_forward(nsa.Score(**{**dict(q=q, k=k, blocks=lists, scores=scores), **more}), d)
        # Backward: what comes in may be read-only, what is added to may not.
        dq, dk, dscores = np.zeros_like(q), np.zeros_like(k), np.where(np.isfinite(scores), 1, 0).astype(np.float32)
        dscores.flags.writeable = False
        x = nsa.Score(q=q, k=k, blocks=lists)
        nsa.score_blocks_backward(nsa.Score(q=dq, k=dk, scores=dscores), x, d)
        self.assertTrue(np.abs(dq[0, 2:]).min() > 0 and not dq[0, :2].any() and np.isfinite(dk).all())
        dq.flags.writeable = False
        with self.assertRaisesRegex(nsa.Refused, "q: is read-only"):
            nsa.score_blocks_backward(nsa.Score(q=dq, k=dk, scores=dscores), x, d)

    def test_a_stride_that_does_not_fit_is_named(self):
        p = Problem()
        lists = np.zeros((p.B, p.T, p.Hk, 3), np.int32)
        for stride, k, words in ((4, p.k, r"k: shape \(2, 96, 2, 16\), must be .* \(2, 24, 2, 16\)"),
                                 (3, p.k, "stride: 3, must be a divisor of slc_block, which is 16"),
                                 (32, p.k, "stride: 32, must be a divisor of slc_block"),
                                 (-1, p.k, "stride: -1, must be >= 0"),
                                 (2**32 + 1, p.k, "stride: 4294967297, must be of 32 bits")):
            with self.subTest(stride), self.assertRaisesRegex(nsa.Refused, words):
                nsa.score_blocks(nsa.Score(q=p.q, k=k, blocks=lists, stride=stride), p.desc)

    def test_every_key_is_seen_and_each_head_has_lists(self):
        p = Problem(mask="none", list_heads=4)
        nsa.attend_win_forward(p.attend(), p.desc)
        t, s = np.arange(p.T)[:, None], np.arange(p.T)
        out, lse = softmax_attention(p.q, p.k, p.v, abs(t - s) < 24)
        np.testing.assert_allclose(p.out, out, atol=2e-6, rtol=2e-6)
        blocks = np.zeros((p.B, p.T, p.H, 3), np.int32)
        scores = np.zeros((p.B, p.T, p.H, nsa.slc_count(p.desc, p.T)), np.float32)
        nsa.score_blocks(nsa.Score(act="linear", pool="max", q=p.q, k=p.k, blocks=blocks, scores=scores), p.desc)
        dots = np.einsum("bthd,bshd->bths", p.q, np.repeat(p.k, p.H // p.Hk, 2))
        expected = dots.reshape(p.B, p.T, p.H, -1, 16).max(-1)
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        best = np.sort(np.argsort(-expected, -1, kind="stable")[..., :3], -1)
        np.testing.assert_array_equal(blocks, best)
        again = np.zeros_like(blocks)
        nsa.rank_queries(nsa.Rank(scores=scores, blocks=again), p.desc)
        np.testing.assert_array_equal(again, blocks)
        nsa.attend_slc_forward(p.attend(blocks=blocks), p.desc)
        for head in range(p.H):
            for query in (0, 50, p.T - 1):
                sees = np.isin(np.arange(p.T) // 16, blocks[1, query, head])
                out, _ = softmax_attention(p.q[1:, query:query + 1, head:head + 1], p.k[1:, :, head // 2:head // 2 + 1],
                                           p.v[1:, :, head // 2:head // 2 + 1], sees[None])
                np.testing.assert_allclose(p.out[1, query, head], out[0, 0, 0], atol=2e-6, rtol=2e-6)
        self.assertIsNone(nsa.check_blocks(blocks, p.desc))
        with self.assertRaisesRegex(ValueError, r"blocks: shape .* must be \(B, count, list heads"):
            nsa.attend_slc_forward(p.attend(blocks=blocks[:, :, :2]), p.desc)

    def test_merge(self):
        p, q = Problem(), Problem()
        both, lse = np.zeros_like(p.out), np.zeros_like(p.lse)
        nsa.attend_win_forward(p.attend(), p.desc)
        nsa.attend_win_forward(q.attend(), q.desc)
        x = nsa.Merge(out_a=p.out, lse_a=p.lse, out_b=q.out, lse_b=q.lse, out=both, lse=lse)
        nsa.merge_forward(x, p.desc)
        np.testing.assert_allclose(lse, np.logaddexp(p.lse, q.lse), rtol=1e-6)
        share = np.exp(p.lse - lse)[..., None]
        np.testing.assert_allclose(both, share * p.out + (1 - share) * q.out, atol=2e-6)
        dout = np.ones_like(both)
        gradient = nsa.Merge(out_a=np.zeros_like(both), lse_a=np.zeros_like(lse), out=dout)
        nsa.merge_backward(gradient, x, p.desc)
        found = {path: array.owner for path, _, _, array in gradient.views()}
        np.testing.assert_allclose(found["out_a"], np.broadcast_to(share, both.shape), atol=2e-6)
        moved = (share * (1 - share) * (p.out - q.out)).sum(-1)
        np.testing.assert_allclose(found["lse_a"], moved, atol=1e-5)

    def test_packed_sequences_equal_each_alone(self):
        p = Problem()
        lengths = [40, 7, 49]
        begins = np.array([0, 40, 47, 96], np.int32)
        q, k, v = p.q[:1], p.k[:1], p.v[:1]
        out, lse = np.zeros_like(q), np.zeros(q.shape[:3], np.float32)
        d = nsa.desc(3, max(lengths), p.H, p.Hk, p.D, window=24, begins=begins)
        nsa.attend_win_forward(nsa.Attend(q=q, k=k, v=v, out=out, lse=lse), d)
        for a, b in zip(begins, begins[1:]):
            alone, its = np.zeros_like(q[:, a:b]), np.zeros_like(lse[:, a:b])
            nsa.attend_win_forward(nsa.Attend(q=q[:, a:b], k=k[:, a:b], v=v[:, a:b], out=alone, lse=its),
                                   nsa.desc(1, int(b - a), p.H, p.Hk, p.D, window=24))
            np.testing.assert_array_equal(out[:, a:b], alone)


def whole(p, q, k, v, gates):
    """nsa_attention's struct over given rows, with its outputs; k and v shared by the branches."""
    B, count = q.shape[:2]
    n, real = nsa.cmp_count(p.desc, p.T), p.lse.dtype
    room = {name: np.zeros(q.shape, q.dtype) for name in ("out", "out_cmp", "out_slc", "out_win")}
    room.update({name: np.zeros(q.shape[:3], real) for name in ("lse_cmp", "lse_slc", "lse_win")})
    room["blocks"] = np.zeros((B, count, p.Hk, nsa.block_list_width(p.desc)), np.int32)
    compressed = [np.zeros((B, n, p.Hk, p.D), q.dtype) for _ in range(2)]
    parts = [nsa.Compress(phi="mean", dim=p.D, x=x) for x in (k, v)]
    if count == p.T:
        for part, out in zip(parts, compressed):
            part.out = out
    return nsa.Attention(q=q, k_cmp=parts[0], v_cmp=parts[1], k_slc=k, v_slc=v, k_win=k, v_win=v, gates=gates,
                         **room), room


class Whole(unittest.TestCase):
    def test_decoding_has_the_bits_of_the_whole(self):
        for dtype in (np.float32, np.float64):
            p = Problem(dtype=dtype)
            gates = rows(p.B, p.T, p.H, 3, dtype=dtype)
            x, full = whole(p, p.q, p.k, p.v, gates)
            nsa.attention_forward(x, p.desc)
            cache = nsa.Cache(p.desc, "f64" if dtype == np.float64 else "f32", max_rewind=30)
            first = 0
            for count in (31, 1, 1, 20, 1):
                some = slice(first, first + count)
                step, room = whole(p, *(np.ascontiguousarray(a[:, some]) for a in (p.q, p.k, p.v, gates)))
                reads = cache.decode(step, count)
                for name in ("out", "blocks", "lse_slc"):
                    np.testing.assert_array_equal(room[name], full[name][:, some], err_msg=name)
                first += count
            self.assertEqual(cache.lengths, [first, first])
            self.assertEqual(reads[0].win, 24 * p.Hk)
            cache.rewind(0, first - 3)
            other = nsa.Cache(p.desc, "f64" if dtype == np.float64 else "f32", max_rewind=30)
            other.fork(1, cache, 0, first - 3)
            self.assertEqual((cache.lengths, other.lengths), ([first - 3, first], [0, first - 3]))
            with self.assertRaises(nsa.Refused) as caught:
                cache.rewind(1, first + 1)
            self.assertEqual(caught.exception.kind, nsa.Error.REWIND)

    def test_a_fork_that_does_not_fit_says_what_differs(self):
        def cache(dtype="f32", max_rewind=3, **fields):
            return nsa.Cache(nsa.desc(**{**dict(batch=1, tokens=96, heads=4, kv_heads=2, dim=16, window=24), **fields}), dtype,
                             max_rewind)

        for words, other in (("max_rewind 3, and this cache of 4", cache(max_rewind=4)), ("dtype f32, .* of bf16", cache("bf16")),
                             ("window 24, .* of 16", cache(window=16)), ("cmp_stride 16, .* of 32", cache(cmp_stride=32)),
                             ("kv_heads 2, .* of 4", cache(kv_heads=4)), ("tokens 96, .* of 8", cache(tokens=8))):
            with self.subTest(words), self.assertRaisesRegex(nsa.Refused, f"^source: of {words}: must be the same$") as caught:
                other.fork(0, cache(), 0, 0)
            self.assertEqual((caught.exception.kind, caught.exception.where), (nsa.Error.CACHE, "source"))
        p = Problem()
        long, short = nsa.Cache(p.desc, max_rewind=3), copy.copy(p.desc)
        short.tokens = short.count = 3
        long.decode(whole(p, *(x[:, :4].copy() for x in (p.q, p.k, p.v)), rows(p.B, 4, p.H, 3))[0], 4)
        with self.assertRaisesRegex(nsa.Refused, "^length: 4, and this cache has room for 3$"):
            nsa.Cache(short, max_rewind=3).fork(0, long, 0, 4)

    def test_caches_of_8_bits(self):
        p = Problem()
        gates = rows(p.B, p.T, p.H, 3)
        x, full = whole(p, p.q, p.k, p.v, gates)
        nsa.attention_forward(x, p.desc)
        for dtype, off in (("i8", 0.1), ("f8", 0.5)):
            cache, first = nsa.Cache(p.desc, dtype, max_rewind=30), 0
            for count in (31, 1, 20):
                some = slice(first, first + count)
                step, room = whole(p, *(np.ascontiguousarray(a[:, some]) for a in (p.q, p.k, p.v, gates)))
                cache.decode(step, count)
                apart = np.abs(room["out_win"] - full["out_win"][:, some]).max()
                self.assertTrue(0 < apart < off, (dtype, apart))
                first += count

    def test_the_wholes_gradient(self):
        p = Problem(tokens=40, dtype=np.float64)
        gates = rows(p.B, p.T, p.H, 3, dtype=np.float64)
        x, room = whole(p, p.q, p.k, p.v, gates)
        nsa.attention_forward(x, p.desc)
        weight = rows(*p.out.shape, dtype=np.float64)
        dq, dk, dgates = np.zeros_like(p.q), np.zeros_like(p.k), np.zeros_like(gates)
        dx = nsa.Attention(q=dq, k_cmp=nsa.Compress(phi="mean", dim=p.D, x=dk), k_slc=dk, k_win=dk, gates=dgates,
                           out=weight)
        nsa.attention_backward(dx, x, p.desc)
        for array, gradient in ((p.q, dq), (p.k, dk), (gates, dgates)):
            for at in [tuple(RNG.integers(n) for n in array.shape) for _ in range(4)]:
                value, sums = array[at], []
                for step in (1e-6, -1e-6):
                    array[at] = value + step
                    nsa.attention_forward(x, p.desc)
                    sums.append((room["out"] * weight).sum())
                array[at] = value
                self.assertAlmostEqual((sums[0] - sums[1]) / 2e-6, gradient[at], delta=1e-6)


class Serving(unittest.TestCase):
    """A step of a serving engine: sequences at positions of their own, whose rows lie in pages."""
    PAGE, PAGES = 16, 12

    def setUp(self):
        self.lengths, self.p = (41, 96), Problem()
        self.gates = rows(2, self.p.T, self.p.H, 3)
        order = np.random.default_rng(2).permutation(self.PAGES).astype(np.int32)
        self.table = np.full((2, 6), -1, np.int32)
        self.table[0, :3], self.table[1] = order[:3], order[3:9]
        self.k, self.v = (self.paged(x) for x in (self.p.k, self.p.v))
        cmp_rows = (self.PAGES, self.PAGE // 4, self.p.Hk, self.p.D)
        self.compressed = [np.zeros(cmp_rows, np.float32) for _ in range(2)]

    def paged(self, x):
        found = np.full((self.PAGES, self.PAGE, *x.shape[2:]), np.nan, np.float32)
        for b, length in enumerate(self.lengths):
            for s in range(length):
                found[self.table[b, s // self.PAGE], s % self.PAGE] = x[b, s]
        return found

    def desc(self, first, each, **fields):
        p = self.p
        return nsa.desc(2, p.T, p.H, p.Hk, p.D, cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, window=24,
                        **{**dict(count=max(each), firsts=np.array(first, np.int32), counts=np.array(each, np.int32),
                                  pages=self.table, table_width=6, page_tokens=self.PAGE, page_count=self.PAGES), **fields})

    def step(self, first, each, **fields):
        total, p = sum(each), self.p
        q, gates = (np.concatenate([x[b, f:f + c] for b, (f, c) in enumerate(zip(first, each))])[None]
                    for x in (p.q, self.gates))
        room = {name: np.zeros(q.shape, np.float32) for name in ("out", "out_cmp", "out_slc", "out_win")}
        room.update({name: np.zeros(q.shape[:3], np.float32) for name in ("lse_cmp", "lse_slc", "lse_win")})
        d = self.desc(first, each, **fields)
        room["blocks"] = np.zeros((1, total, p.Hk, nsa.block_list_width(d)), np.int32)
        phis = [nsa.Compress(phi="mean", dim=p.D, x=x, out=out) for x, out in zip((self.k, self.v), self.compressed)]
        nsa.attention_forward(nsa.Attention(q=q, k_cmp=phis[0], v_cmp=phis[1], k_slc=self.k, v_slc=self.v, k_win=self.k,
                                            v_win=self.v, gates=gates, **room), d)
        return room["out"][0], room["blocks"][0]

    def test_steps_have_the_bits_of_each_sequence_alone(self):
        p, found = self.p, ([], [])
        for firsts, counts in (((0, 0), (40, 60)), ((40, 60), (1, 36))):
            out, blocks = self.step(firsts, counts)
            found[0].append((out[:counts[0]], blocks[:counts[0]]))
            found[1].append((out[counts[0]:], blocks[counts[0]:]))
        for b, length in enumerate(self.lengths):
            alone = Problem(tokens=length)
            alone.B, alone.desc.batch = 1, 1
            x, room = whole(alone, *(np.ascontiguousarray(a[b:b + 1, :length]) for a in (p.q, p.k, p.v, self.gates)))
            nsa.attention_forward(x, alone.desc)
            for i, name in enumerate(("out", "blocks")):
                np.testing.assert_array_equal(np.concatenate([part[i] for part in found[b]]), room[name][0], err_msg=name)

    def test_what_is_no_step(self):
        self.assertIsNone(nsa.check_pages(self.desc((0, 0), (40, 60))))
        self.table[1, 2] = self.PAGES
        fault = nsa.check_pages(self.desc((0, 0), (40, 60)))
        self.assertEqual((fault.sequence, fault.slot, fault.value, fault.reason), (1, 2, self.PAGES, "not a page"))
        with self.assertRaises(nsa.Refused) as caught:
            self.step((0, 0), (40, 60))
        self.assertEqual((caught.exception.kind, caught.exception.where), (nsa.Error.PAGES, "pages"))
        self.table[1, 2] = self.table[1, 1]
        for fields, words in ((dict(table_width=5), r"pages: shape \(2, 6\), must be \(2, 5\)"),
                              (dict(counts=np.array([40], np.int32)), r"counts: shape \(1,\), must be \(2,\)"),
                              (dict(page_count=self.PAGES + 1), "shape .* must be"),
                              (dict(pages=self.table.T), "pages: .* must be packed")):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                self.step((0, 0), (40, 60), **fields)


if __name__ == "__main__":
    unittest.main()
