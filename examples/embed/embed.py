"""window.c from Python, through a shared library and ctypes; nothing but Python is needed.

    cc -O2 -shared -fPIC -DNSA_IMPLEMENTATION -x c nsa/nsa.h -o libnsa.so -lm
    python3 examples/embed/embed.py ./libnsa.so
"""
import sys
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_int64
from ctypes import c_size_t, c_void_p, cast, create_string_buffer


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int)] + [
        (name, c_int64) for name in ("batch", "token", "head")]


class Desc(Structure):
    _fields_ = ([(name, c_int) for name in "batch tokens heads kv_heads dim dim_v first count".split()]
                + [(name, c_void_p) for name in ("begins", "firsts", "counts")]
                + [(name, c_int) for name in "cmp_block cmp_stride slc_block slc_count slc_init "
                                             "slc_local window".split()]
                + [("scale", c_double)]
                + [(name, c_int) for name in "forced score_map window_rule gate "
                                             "gate_heads".split()]
                + [("gate_stride", c_int64)]
                + [(name, c_int) for name in "mask list_heads rows".split()]
                + [("pages", c_void_p)]
                + [(name, c_int) for name in "table_width page_tokens page_count threads isa "
                                             "products".split()])


class Attend(Structure):
    _fields_ = [(name, Tensor) for name in ("q", "k", "v", "out", "lse", "blocks")]


if len(sys.argv) != 2:
    sys.exit(__doc__)
nsa = CDLL(sys.argv[1])
nsa.nsa_desc_default.restype, nsa.nsa_tensor_bthd.restype = Desc, Tensor
nsa.nsa_status_name.restype = c_char_p
size, forward = nsa.nsa_attend_win_forward_workspace_size, nsa.nsa_attend_win_forward
size.restype, size.argtypes = c_size_t, [POINTER(Desc)]
forward.argtypes = [POINTER(Attend), POINTER(Desc), c_void_p, c_size_t]

T, H, D = 256, 4, 32
q = (c_float * (T * H * D))(*[i * 37 % 101 / 101 for i in range(T * H * D)])
kv = (c_float * (T * D))(*[i * 53 % 97 / 97 for i in range(T * D)])
out, lse = (c_float * (T * H * D))(), (c_float * (T * H))()


def view(array, heads, width):
    return nsa.nsa_tensor_bthd(cast(array, c_void_p), 0, T, heads, width)


d = nsa.nsa_desc_default(1, T, H, 1, D)
d.window = 64
x = Attend(view(q, H, D), view(kv, 1, D), view(kv, 1, D), view(out, H, D), view(lse, H, 1))
workspace = create_string_buffer(size(byref(d)))
status = forward(byref(x), byref(d), workspace, len(workspace))
print(f"{nsa.nsa_status_name(status).decode()}: {out[(255 * H + 3) * D]:.4f}")
