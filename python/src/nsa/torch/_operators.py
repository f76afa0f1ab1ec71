"""The operators nsa::... of PyTorch: schema, shapes, forward, backward, autocast.

For each: shapes() allocates what it returns, and is its fake kernel; the kernel fills that; setup() saves what
backward reads and no more. Tensors are (B, T, H, D), or (1, rows, H, D) with `begins`. From torch 2.4 on they
are operators of torch.library; before, autograd Functions. Twin: __init__.py, the functions people call.
"""
from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

from .. import _abi
from .._pack import PHI as _PHI, Packer, cmp_count, list_width, option, parse
from ._native import desc, native, parameters, rows

#: Whether this torch has operators with fake kernels and autograd formulas (2.4 and later).
HAS_OPERATORS = hasattr(torch.library, "register_fake")

_ATTEND, _ATTENTION, _COMPRESS = Packer(_abi.Attend), Packer(_abi.Attention), Packer(_abi.Compress)
_SELECT, _GATE, _ROPE = Packer(_abi.Select), Packer(_abi.Gate), Packer(_abi.Rope)
_MERGE, _SCORE = Packer(_abi.Merge), Packer(_abi.Score)
_library: Any = torch.library.Library("nsa", "DEF") if HAS_OPERATORS else None


# ---- Defining -----------------------------------------------------------------------------------

def _cast(arguments: Sequence[Any], device: str, keep: Sequence[int]) -> list[Any]:
    """As autocast does with scaled_dot_product_attention's: floating tensors, but no doubles."""
    dtype = torch.get_autocast_dtype(device) if hasattr(torch, "get_autocast_dtype") else (
        torch.get_autocast_gpu_dtype() if device == "cuda" else torch.get_autocast_cpu_dtype())
    return [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
            and i not in keep else x for i, x in enumerate(arguments)]


def _define(name: str, schema: str, shapes: Callable, kernel: Callable, setup: Callable | None = None,
            backward: Callable | None = None, autocast: Sequence[int] | None = None) -> Callable:
    """autocast: None, or the places of arguments that are not cast."""
    if not HAS_OPERATORS:
        return _casting(_differentiable(kernel, setup, backward), autocast)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    torch.library.register_fake("nsa::" + name, shapes, lib=_library)
    operator = getattr(torch.ops.nsa, name).default
    if backward is not None:
        _library.impl(name, _differentiable(_below_autograd(operator), setup, backward), "Autograd")
    if autocast is not None:
        for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            _library.impl(name, _cast_for(operator, device, autocast), key)
    return operator


def _below_autograd(operator: Callable) -> Callable:
    def run(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)
    return run


def _differentiable(run: Callable, setup: Callable | None, backward: Callable | None) -> Callable:
    """`run` with its gradient. torch.library.register_autograd would do the same, but it looks through all
    arguments for each of them at every call: 0.4 ms for the 24 of attention."""
    if backward is None or setup is None:
        return run
    save, differentiate = setup, backward

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            found = run(*arguments)
            save(ctx, arguments, found)
            return found

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return differentiate(ctx, *gradients)

    def apply(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
            return Function.apply(*arguments)
        return run(*arguments)
    return apply


def _cast_for(run: Callable, device: str, keep: Sequence[int]) -> Callable:
    def cast(*arguments: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return run(*_cast(arguments, device, keep))
    return cast


def _casting(run: Callable, keep: Sequence[int] | None) -> Callable:
    """What the autocast keys of operators do, for a torch without operators."""
    if keep is None:
        return run
    on = {"cpu": _cast_for(run, "cpu", keep), "cuda": _cast_for(run, "cuda", keep)}

    def apply(*arguments: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.is_cuda for x in arguments):
            return (on["cuda"] if torch.is_autocast_enabled() else run)(*arguments)
        return (on["cpu"] if torch.is_autocast_cpu_enabled() else run)(*arguments)
    return apply


# ---- Shapes -------------------------------------------------------------------------------------

def _expect(name: str, x: Any, *shape: Any) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, must be {shape}")


def _packed(x: Any) -> Any:
    """With a packed last axis, which autograd's own gradients need not have."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _real(x: torch.Tensor) -> torch.dtype:
    """What is summed in, and lse's dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _problem(q: torch.Tensor, begins: Any, tokens: int, first: int) -> tuple[int, int, int]:
    """(sequences, tokens of the longest, query rows of each)."""
    if begins is None:
        return q.shape[0], tokens, q.shape[1]
    if begins.dtype != torch.int32 or begins.dim() != 1 or q.shape[0] != 1:
        raise ValueError("begins: must be int32 of one axis, with tensors of (1, rows, heads, width)")
    _check_begins(begins, q.shape[1])
    return begins.shape[0] - 1, tokens, tokens - first


def _check_begins(begins: torch.Tensor, total: int) -> None:
    """On the CPU: rows that the tensors do not have must not be read. On CUDA no kernel leaves its views, and
    nobody waits for the device."""
    if begins.device.type == "cpu" and type(begins) is torch.Tensor and begins.shape[0]:
        ends = begins.tolist()
        if ends[-1] > total:
            raise ValueError(f"begins: ends at row {ends[-1]}, there are {total}")


def _zeros(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Room for a gradient; nothing where it is not wanted."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if wanted else x.new_empty(0)


def _mask(ctx: Any, count: int) -> int:
    return sum(1 << i for i in range(count) if ctx.needs_input_grad[i])


def _or_none(gradients: Sequence[torch.Tensor], mask: int) -> list[Any]:
    return [g if mask >> i & 1 else None for i, g in enumerate(gradients)]


# ---- RoPE ---------------------------------------------------------------------------------------

def _rope_desc(x: torch.Tensor, positions: Any, begins: Any, longest: int, first: int) -> bytes:
    batch, tokens, count = _problem(x, begins, longest if begins is not None else first + x.shape[1], first)
    if positions is not None:
        _expect("positions", positions, *x.shape[:2])
    return desc("", batch, tokens, x.shape[2], x.shape[2], 1, 1, first, count, begins)


def _rope_fields(x: Any, options: str) -> dict[str, tuple[Any, ...]]:
    made = _abi.Rope(**parse(options, _abi.Rope))
    fields = {name: (getattr(made, name),) for name, of in _abi.Rope.kinds().items() if of is not _abi.Tensor}
    fields.update(heads=(x.shape[2],), dim=(x.shape[3],))
    return fields


def _positions(positions: Any) -> tuple[int, ...]:
    if positions is None:
        return (0, 0, 0, 0, 0)
    batch, token = positions.stride()
    return positions.data_ptr(), 4, batch, token, 0


def _rope_shapes(x, positions, begins, longest, first, options):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rope_kernel(x, positions, begins, longest, first, options):
    out, x = _rope_shapes(x, positions, begins, longest, first, options), _packed(x)
    fields = _rope_fields(x, options)
    fields.update(x=rows(x), out=rows(out), positions=_positions(positions))
    native(x).run("rope_forward", x, (_ROPE.pack(fields),), _rope_desc(x, positions, begins, longest, first))
    return out


def _rope_setup(ctx, inputs, output):
    _, positions, begins, ctx.longest, ctx.first, ctx.options = inputs
    ctx.save_for_backward(positions, begins)


def _rope_backward_kernel(dout, positions, begins, longest, first, options):
    dx, dout = torch.zeros(dout.shape, dtype=dout.dtype, device=dout.device), _packed(dout)
    fields = _rope_fields(dout, options)
    fields.update(x=rows(dout), out=rows(dout), positions=_positions(positions))
    gradient = _ROPE.pack(dict(x=rows(dx), out=rows(dout)))
    native(dout).run("rope_backward", dout, (gradient, _ROPE.pack(fields)),
                     _rope_desc(dout, positions, begins, longest, first))
    return dx


rope_backward = _define("rope_backward", "(Tensor dout, Tensor? positions, Tensor? begins, SymInt longest, SymInt first, "
                        "str options) -> Tensor", _rope_shapes, _rope_backward_kernel)


def _rope_gradient(ctx, dout):
    positions, begins = ctx.saved_tensors
    return rope_backward(dout, positions, begins, ctx.longest, ctx.first, ctx.options), None, None, None, None, None


rope = _define("rope", "(Tensor x, Tensor? positions, Tensor? begins, SymInt longest, SymInt first, str options) -> Tensor",
               _rope_shapes, _rope_kernel, _rope_setup, _rope_gradient)


# ---- Compression --------------------------------------------------------------------------------

def _phi_fields(prefix: str, phi: str, x: torch.Tensor, given: Sequence[Any], block: int) -> dict[str, tuple[Any, ...]]:
    """phi's parameters, of which each shape is held against its rule."""
    width, hidden = x.shape[3], 0
    pos, w1, b1, w2, b2 = given
    if phi == "mlp" and w1 is not None:
        hidden = w1.shape[1]
    shapes = {"pos": (block, width), "w2": (width, hidden), "b2": (1, width),
              "w1": (hidden, block * width) if phi == "mlp" else (block, width),
              "b1": (1, hidden if phi == "mlp" else width)}
    fields = {prefix + "phi": (int(_abi.Phi[phi.upper()]),), prefix + "dim": (width,), prefix + "hidden": (hidden,),
              prefix + "x": rows(x)}
    for name, tensor in zip(_PHI, given):
        if tensor is not None:
            _expect(prefix + name, tensor, tensor.shape[0] if tensor.shape[0] == 1 else x.shape[2], *shapes[name])
            fields[prefix + name] = parameters(tensor)
    return fields


def _compress_desc(x: torch.Tensor, begins: Any, longest: int, options: str) -> bytes:
    batch, tokens, count = _problem(x, begins, longest if begins is not None else x.shape[1], 0)
    return desc(options, batch, tokens, x.shape[2], x.shape[2], 1, 1, 0, count, begins)


def _compress_shapes(x, pos, w1, b1, w2, b2, begins, longest, phi, options):
    # Packed sequences have at most as many blocks as one sequence of all rows; what is behind them stays 0.
    shape = (x.shape[0], cmp_count(options, x.shape[1]), x.shape[2], x.shape[3])
    make = torch.empty if begins is None else torch.zeros
    return make(shape, dtype=x.dtype, device=x.device)


def _compress_kernel(x, pos, w1, b1, w2, b2, begins, longest, phi, options):
    out = _compress_shapes(x, pos, w1, b1, w2, b2, begins, longest, phi, options)
    x = _packed(x)
    fields = _phi_fields("", phi, x, [_packed(p) for p in (pos, w1, b1, w2, b2)], option(options, "cmp_block"))
    fields["out"] = rows(out)
    native(x).run("compress_forward", x, (_COMPRESS.pack(fields),), _compress_desc(x, begins, longest, options))
    return out


def _compress_setup(ctx, inputs, output):
    *tensors, ctx.longest, ctx.phi, ctx.options = inputs
    ctx.save_for_backward(*tensors)


def _compress_backward_shapes(dout, x, pos, w1, b1, w2, b2, begins, longest, phi, options, mask):
    return [_zeros(t, bool(mask >> i & 1)) if t is not None else x.new_empty(0)
            for i, t in enumerate((x, pos, w1, b1, w2, b2))]


def _compress_backward_kernel(dout, x, pos, w1, b1, w2, b2, begins, longest, phi, options, mask):
    found = _compress_backward_shapes(dout, x, pos, w1, b1, w2, b2, begins, longest, phi, options, mask)
    dout, x, given = _packed(dout), _packed(x), [_packed(p) for p in (pos, w1, b1, w2, b2)]
    fields = _phi_fields("", phi, x, given, option(options, "cmp_block"))
    fields["out"] = rows(dout)
    gradient = {name: (rows if name == "x" else parameters)(g)
                for i, (name, g) in enumerate(zip(("x", *_PHI), found)) if g.numel() and mask >> i & 1}
    gradient["out"] = rows(dout)
    native(x).run("compress_backward", x, (_COMPRESS.pack(gradient), _COMPRESS.pack(fields)),
                  _compress_desc(x, begins, longest, options))
    return found


compress_backward = _define(
    "compress_backward", "(Tensor dout, Tensor x, Tensor? pos, Tensor? w1, Tensor? b1, Tensor? w2, Tensor? b2, "
    "Tensor? begins, SymInt longest, str phi, str options, int mask) -> Tensor[]",
    _compress_backward_shapes, _compress_backward_kernel)


def _compress_gradient(ctx, dout):
    mask = _mask(ctx, 6)
    found = compress_backward(dout, *ctx.saved_tensors, ctx.longest, ctx.phi, ctx.options, mask)
    return (*_or_none(found, mask), None, None, None, None)


compress = _define(
    "compress", "(Tensor x, Tensor? pos, Tensor? w1, Tensor? b1, Tensor? w2, Tensor? b2, Tensor? begins, "
    "SymInt longest, str phi, str options) -> Tensor",
    _compress_shapes, _compress_kernel, _compress_setup, _compress_gradient, autocast=())


# ---- Attention over few keys --------------------------------------------------------------------

def _attend_desc(branch, q, k, v, blocks, begins, tokens, first, options):
    batch, tokens, count = _problem(q, begins, tokens, first)
    key_rows = k.shape[1]
    if begins is None:
        least = cmp_count(options, tokens) if branch == "cmp" else tokens
        if key_rows != least:
            raise ValueError(f"k: {key_rows} rows, must be {least} for {tokens} tokens")
    elif branch != "cmp" and key_rows != q.shape[1]:
        raise ValueError(f"k: {key_rows} rows, must be as q's {q.shape[1]}")
    elif branch == "cmp" and key_rows < cmp_count(options, q.shape[1]):
        raise ValueError(f"k: {key_rows} rows, must be {cmp_count(options, q.shape[1])}, what compress returns")
    _expect("k", k, q.shape[0], key_rows, k.shape[2], q.shape[3])
    _expect("v", v, q.shape[0], key_rows, k.shape[2], v.shape[3])
    if branch == "slc":
        _expect("blocks", blocks, q.shape[0], q.shape[1], k.shape[2], list_width(options))
    return desc(options, batch, tokens, q.shape[2], k.shape[2], q.shape[3], v.shape[3], first, count, begins)


def _attend_shapes(q, k, v, blocks, begins, tokens, first, options):
    return (torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device),
            torch.empty(q.shape[:3], dtype=_real(q), device=q.device))


def _attend_backward_shapes(dout, dlse, q, k, v, blocks, begins, out, lse, tokens, first, options, mask):
    return [_zeros(t, bool(mask >> i & 1)) for i, t in enumerate((q, k, v))]


def _make_attend(branch: str) -> Callable:
    name = "attend_" + branch

    def kernel(q, k, v, blocks, begins, tokens, first, options):
        out, lse = _attend_shapes(q, k, v, blocks, begins, tokens, first, options)
        q, k, v, blocks = _packed(q), _packed(k), _packed(v), _packed(blocks)
        d = _attend_desc(branch, q, k, v, blocks, begins, tokens, first, options)
        x = _ATTEND.pack(dict(q=rows(q), k=rows(k), v=rows(v), out=rows(out), lse=rows(lse), blocks=rows(blocks)))
        native(q).run(name + "_forward", q, (x,), d)
        return out, lse

    def setup(ctx, inputs, output):
        q, k, v, blocks, begins, ctx.tokens, ctx.first, ctx.options = inputs
        ctx.save_for_backward(q, k, v, blocks, begins, *output)
        ctx.set_materialize_grads(False)

    def backward_kernel(dout, dlse, q, k, v, blocks, begins, out, lse, tokens, first, options, mask):
        found = _attend_backward_shapes(dout, dlse, q, k, v, blocks, begins, out, lse, tokens, first, options, mask)
        dout, q, k, v, blocks = (_packed(x) for x in (dout, q, k, v, blocks))
        d = _attend_desc(branch, q, k, v, blocks, begins, tokens, first, options)
        x = _ATTEND.pack(dict(q=rows(q), k=rows(k), v=rows(v), out=rows(out), lse=rows(lse), blocks=rows(blocks)))
        gradient = {n: rows(g) for i, (n, g) in enumerate(zip("qkv", found)) if mask >> i & 1}
        gradient.update(out=rows(dout), lse=rows(dlse))
        native(q).run(name + "_backward", q, (_ATTEND.pack(gradient), x), d)
        return found

    backward = _define(
        name + "_backward", "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? blocks, "
        "Tensor? begins, Tensor out, Tensor lse, SymInt tokens, SymInt first, str options, int mask) -> Tensor[]",
        _attend_backward_shapes, backward_kernel)

    def gradient(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 8
        mask, saved = _mask(ctx, 3), ctx.saved_tensors
        dout = torch.zeros_like(saved[5]) if dout is None else dout
        found = backward(dout, dlse, *saved, ctx.tokens, ctx.first, ctx.options, mask)
        return (*_or_none(found, mask), None, None, None, None, None)

    return _define(name, "(Tensor q, Tensor k, Tensor v, Tensor? blocks, Tensor? begins, SymInt tokens, SymInt first, "
                   "str options) -> (Tensor, Tensor)", _attend_shapes, kernel, setup, gradient, autocast=())


attend = {branch: _make_attend(branch) for branch in ("cmp", "slc", "win", "dense")}


# ---- Merge --------------------------------------------------------------------------------------

def _merge_desc(out_a, out_b, lse_a, lse_b):
    batch, tokens, heads, width = out_a.shape
    _expect("out_b", out_b, *out_a.shape)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _expect(name, lse, *out_a.shape[:3])
    return desc("", batch, tokens, heads, heads, 1, width, 0, tokens, None)


def _merge_shapes(out_a, out_b, lse_a, lse_b):
    return (torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device),
            torch.empty(lse_a.shape, dtype=lse_a.dtype, device=lse_a.device))


def _merge_views(out_a, out_b, lse_a, lse_b):
    return dict(out_a=rows(out_a), out_b=rows(out_b), lse_a=rows(lse_a), lse_b=rows(lse_b))


def _merge_kernel(out_a, out_b, lse_a, lse_b):
    out, lse = _merge_shapes(out_a, out_b, lse_a, lse_b)
    out_a, out_b = _packed(out_a), _packed(out_b)
    x = _MERGE.pack(dict(_merge_views(out_a, out_b, lse_a, lse_b), out=rows(out), lse=rows(lse)))
    native(out).run("merge_forward", out, (x,), _merge_desc(out_a, out_b, lse_a, lse_b))
    return out, lse


def _merge_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _merge_backward_shapes(dout, dlse, out_a, out_b, lse_a, lse_b, mask):
    return [_zeros(t, bool(mask >> i & 1)) for i, t in enumerate((out_a, out_b, lse_a, lse_b))]


def _merge_backward_kernel(dout, dlse, out_a, out_b, lse_a, lse_b, mask):
    found = _merge_backward_shapes(dout, dlse, out_a, out_b, lse_a, lse_b, mask)
    dout, out_a, out_b = _packed(dout), _packed(out_a), _packed(out_b)
    gradient = {name: rows(g) for i, (name, g) in enumerate(zip(("out_a", "out_b", "lse_a", "lse_b"), found))
                if mask >> i & 1}
    gradient.update(out=rows(dout), lse=rows(dlse))
    x = _MERGE.pack(_merge_views(out_a, out_b, lse_a, lse_b))
    native(dout).run("merge_backward", dout, (_MERGE.pack(gradient), x), _merge_desc(out_a, out_b, lse_a, lse_b))
    return found


merge_backward = _define("merge_backward", "(Tensor dout, Tensor? dlse, Tensor out_a, Tensor out_b, Tensor lse_a, "
                         "Tensor lse_b, int mask) -> Tensor[]", _merge_backward_shapes, _merge_backward_kernel)


def _merge_gradient(ctx, dout, dlse):
    if dout is None and dlse is None:
        return None, None, None, None
    mask, saved = _mask(ctx, 4), ctx.saved_tensors
    dout = torch.zeros_like(saved[0]) if dout is None else dout
    return tuple(_or_none(merge_backward(dout, dlse, *saved, mask), mask))


merge = _define("merge", "(Tensor out_a, Tensor out_b, Tensor lse_a, Tensor lse_b) -> (Tensor, Tensor)", _merge_shapes,
                _merge_kernel, _merge_setup, _merge_gradient)


# ---- Selection ----------------------------------------------------------------------------------

def _select_shapes(q, k, lse, begins, tokens, first, options):
    return torch.empty((*q.shape[:2], k.shape[2], list_width(options)), dtype=torch.int32, device=q.device)


def _select_kernel(q, k, lse, begins, tokens, first, options):
    blocks = _select_shapes(q, k, lse, begins, tokens, first, options)
    q, k = _packed(q), _packed(k)
    d = _attend_desc("cmp", q, k, k, None, begins, tokens, first, options)
    _expect("lse", lse, *q.shape[:3])
    x = _SELECT.pack(dict(q=rows(q), k=rows(k), lse=rows(lse), blocks=rows(blocks)))
    native(q).run("select_blocks", q, (x,), d)
    return blocks


select_blocks = _define("select_blocks", "(Tensor q, Tensor k, Tensor lse, Tensor? begins, SymInt tokens, SymInt first, "
                        "str options) -> Tensor", _select_shapes, _select_kernel, autocast=(2,))


def _score_shapes(q, k, weights, begins, tokens, first, act, pool, options):
    return torch.empty((*q.shape[:2], k.shape[2], list_width(options)), dtype=torch.int32, device=q.device)


def _score_kernel(q, k, weights, begins, tokens, first, act, pool, options):
    blocks = _score_shapes(q, k, weights, begins, tokens, first, act, pool, options)
    q, k = _packed(q), _packed(k)
    d = _attend_desc("score", q, k, k, None, begins, tokens, first, options)
    if weights is not None:
        _expect("weights", weights, *q.shape[:3])
    kinds = _abi.Score(act=act, pool=pool)
    x = _SCORE.pack(dict(act=(kinds.act,), pool=(kinds.pool,), q=rows(q), k=rows(k), weights=rows(weights),
                         blocks=rows(blocks)))
    native(q).run("score_blocks", q, (x,), d)
    return blocks


score_blocks = _define("score_blocks", "(Tensor q, Tensor k, Tensor? weights, Tensor? begins, SymInt tokens, "
                       "SymInt first, str act, str pool, str options) -> Tensor", _score_shapes, _score_kernel, autocast=())


# ---- Gate ---------------------------------------------------------------------------------------

def _gate_desc(logits, cmp, slc, win, options):
    batch, tokens, heads, width = cmp.shape
    for name, x in (("slc", slc), ("win", win)):
        _expect(name, x, *cmp.shape)
    _expect("logits", logits, batch, tokens, logits.shape[2], 3)
    gated = f"gate_heads={logits.shape[2]}"
    return desc(options + "," + gated if options else gated, batch, tokens, heads, logits.shape[2], 1, width, 0,
                tokens, None)


def _gate_shapes(logits, cmp, slc, win, options):
    return torch.empty(cmp.shape, dtype=cmp.dtype, device=cmp.device)


def _gate_kernel(logits, cmp, slc, win, options):
    out = _gate_shapes(logits, cmp, slc, win, options)
    logits, cmp, slc, win = (_packed(x) for x in (logits, cmp, slc, win))
    x = _GATE.pack(dict(logits=rows(logits), cmp=rows(cmp), slc=rows(slc), win=rows(win), out=rows(out)))
    native(cmp).run("gate_forward", cmp, (x,), _gate_desc(logits, cmp, slc, win, options))
    return out


def _gate_setup(ctx, inputs, output):
    *tensors, ctx.options = inputs
    ctx.save_for_backward(*tensors)


def _gate_backward_shapes(dout, logits, cmp, slc, win, options, mask):
    return [_zeros(t, bool(mask >> i & 1)) for i, t in enumerate((logits, cmp, slc, win))]


def _gate_backward_kernel(dout, logits, cmp, slc, win, options, mask):
    found = _gate_backward_shapes(dout, logits, cmp, slc, win, options, mask)
    dout, logits, cmp, slc, win = (_packed(x) for x in (dout, logits, cmp, slc, win))
    x = _GATE.pack(dict(logits=rows(logits), cmp=rows(cmp), slc=rows(slc), win=rows(win)))
    gradient = {n: rows(g) for i, (n, g) in enumerate(zip(("logits", "cmp", "slc", "win"), found)) if mask >> i & 1}
    gradient["out"] = rows(dout)
    native(cmp).run("gate_backward", cmp, (_GATE.pack(gradient), x), _gate_desc(logits, cmp, slc, win, options))
    return found


gate_backward = _define("gate_backward", "(Tensor dout, Tensor logits, Tensor cmp, Tensor slc, Tensor win, str options, "
                        "int mask) -> Tensor[]", _gate_backward_shapes, _gate_backward_kernel)


def _gate_gradient(ctx, dout):
    mask = _mask(ctx, 4)
    return (*_or_none(gate_backward(dout, *ctx.saved_tensors, ctx.options, mask), mask), None)


gate = _define("gate", "(Tensor logits, Tensor cmp, Tensor slc, Tensor win, str options) -> Tensor", _gate_shapes,
               _gate_kernel, _gate_setup, _gate_gradient)


# ---- The whole ----------------------------------------------------------------------------------

_WHOLE_IN = ("q", "k_cmp.x", "v_cmp.x", "k_slc", "v_slc", "k_win", "v_win", "gates")
_WHOLE_OUT = ("out", "blocks", "k_cmp.out", "v_cmp.out", "out_cmp", "out_slc", "out_win", "lse_cmp", "lse_slc",
              "lse_win")
_PHIS = tuple(f"{which}_cmp.{name}" for which in "kv" for name in _PHI)
_WHOLE_TENSORS = len(_WHOLE_IN) + len(_PHIS)


def _whole_shapes(*arguments):
    q, k_cmp, v_cmp, k_slc, _, _, _, _ = arguments[:8]
    options = arguments[-1]
    dim_v = v_cmp.shape[3]
    n = cmp_count(options, k_cmp.shape[1])

    def make(*shape, dtype=q.dtype):
        return torch.empty(shape, dtype=dtype, device=q.device)
    heads, real = q.shape[:3], _real(q)
    return (make(*heads, dim_v), make(*q.shape[:2], k_slc.shape[2], list_width(options), dtype=torch.int32),
            make(q.shape[0], n, k_cmp.shape[2], q.shape[3]), make(q.shape[0], n, k_cmp.shape[2], dim_v),
            make(*heads, dim_v), make(*heads, dim_v), make(*heads, dim_v),
            make(*heads, dtype=real), make(*heads, dtype=real), make(*heads, dtype=real))


def _whole(arguments, outputs):
    """(the struct's fields, the descriptor)"""
    *tensors, begins, longest, first, phi_k, phi_v, options = arguments
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = tensors[:8]
    tokens = longest if begins is not None else k_slc.shape[1]
    batch, tokens, count = _problem(q, begins, tokens, first)
    for name, x, like in (("k_cmp", k_cmp, k_slc), ("k_win", k_win, k_slc), ("v_win", v_win, v_slc),
                          ("v_cmp", v_cmp, v_slc)):
        _expect(name, x, *like.shape)
    _expect("k_slc", k_slc, q.shape[0], k_slc.shape[1], k_slc.shape[2], q.shape[3])
    _expect("v_slc", v_slc, *k_slc.shape[:3], v_slc.shape[3])
    if begins is not None:
        _expect("k_slc", k_slc, 1, q.shape[1], *k_slc.shape[2:])
    _expect("gates", gates, *q.shape[:2], gates.shape[2], 3)
    gated = f"gate_heads={gates.shape[2]}"
    d = desc(options + "," + gated if options else gated, batch, tokens, q.shape[2], k_slc.shape[2], q.shape[3],
             v_slc.shape[3], first, count, begins)
    block = option(options, "cmp_block")
    fields = _phi_fields("k_cmp.", phi_k, k_cmp, tensors[8:13], block)
    fields.update(_phi_fields("v_cmp.", phi_v, v_cmp, tensors[13:18], block))
    fields.update(zip(_WHOLE_IN, map(rows, tensors[:8])))
    fields.update(zip(_WHOLE_OUT, map(rows, outputs)))
    return fields, d


def _whole_packed(arguments):
    return [*map(_packed, arguments[:_WHOLE_TENSORS]), *arguments[_WHOLE_TENSORS:]]


def _whole_kernel(*arguments):
    outputs, arguments = _whole_shapes(*arguments), _whole_packed(arguments)
    fields, d = _whole(arguments, outputs)
    native(arguments[0]).run("attention_forward", arguments[0], (_ATTENTION.pack(fields),), d)
    return outputs


def _whole_setup(ctx, inputs, output):
    ctx.rest = inputs[_WHOLE_TENSORS + 1:]
    ctx.save_for_backward(*inputs[:_WHOLE_TENSORS + 1], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _whole_backward_shapes(dout, *arguments):
    mask = arguments[-1]
    return [_zeros(t, bool(mask >> i & 1)) if t is not None else dout.new_empty(0)
            for i, t in enumerate(arguments[:_WHOLE_TENSORS])]


def _whole_backward_kernel(dout, *arguments):
    found = _whole_backward_shapes(dout, *arguments)
    *arguments, mask = arguments
    inputs, saved = arguments[:_WHOLE_TENSORS + 1], arguments[_WHOLE_TENSORS + 1:_WHOLE_TENSORS + 10]
    rest, dout = arguments[_WHOLE_TENSORS + 10:], _packed(dout)
    # x.out is not read, but it is part of the struct: the incoming gradient has its shape.
    fields, d = _whole(_whole_packed([*inputs, *rest]), (dout, *saved))
    gradient = {"out": rows(dout)}
    for i, (name, g) in enumerate(zip(_WHOLE_IN + _PHIS, found)):
        if mask >> i & 1:
            gradient[name] = (rows if i < len(_WHOLE_IN) else parameters)(g)
    native(dout).run("attention_backward", dout, (_ATTENTION.pack(gradient), _ATTENTION.pack(fields)), d)
    return found


_WHOLE_SCHEMA = ("Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_slc, Tensor v_slc, Tensor k_win, Tensor v_win, "
                 "Tensor gates, " + ", ".join(f"Tensor? {name.replace('_cmp.', '_')}" for name in _PHIS)
                 + ", Tensor? begins")
_WHOLE_REST = "SymInt longest, SymInt first, str phi_k, str phi_v, str options"

attention_backward = _define(
    "attention_backward", "(Tensor dout, " + _WHOLE_SCHEMA + ", Tensor blocks, Tensor rows_k, Tensor rows_v, "
    "Tensor out_cmp, Tensor out_slc, Tensor out_win, Tensor lse_cmp, Tensor lse_slc, Tensor lse_win, " + _WHOLE_REST
    + ", int mask) -> Tensor[]", _whole_backward_shapes, _whole_backward_kernel)


def _whole_gradient(ctx, dout, *_):
    if dout is None:
        return (None,) * (_WHOLE_TENSORS + 6)
    mask = _mask(ctx, _WHOLE_TENSORS)
    found = attention_backward(dout, *ctx.saved_tensors, *ctx.rest, mask)
    return (*_or_none(found, mask), None, None, None, None, None, None)


attention = _define("attention", "(" + _WHOLE_SCHEMA + ", " + _WHOLE_REST + ") -> (" + ", ".join(["Tensor"] * 10) + ")",
                    _whole_shapes, _whole_kernel, _whole_setup, _whole_gradient, autocast=(7,))
