"""The operators nsa::... of PyTorch: schema, shapes, forward, backward, autocast.

For each: rooms() says what it returns, which is its fake kernel too; structs() makes the library's structs of views;
setup() saves what backward reads and no more. Tensors are (B, T, H, D), or (1, rows, H, D) with `begins` or `counts`;
`arrays` are the descriptor's, _ROWS in a schema. From torch 2.4 on they are operators of torch.library; before,
autograd Functions. Twin: __init__.py, the functions people call.
"""
from __future__ import annotations

import functools
import math
from operator import itemgetter
from typing import Any, Callable, Sequence

import torch
from torch import _C
from torch.autograd import forward_ad

from .. import _abi
from .. import _pack
from .._pack import (ARRAYS, PHI as _PHI, Packer, check_int, check_phi, in_pages, key_rows, key_stride, list_heads, list_width, option,
                     problem, rope_fields, slc_count, tokens_of)
from .._refused import refused
from . import _call
from ._native import DTYPES, Room, Slot, View, desc, is_lazy, parameters, planned, rows

#: Whether this torch has operators with fake kernels and autograd formulas (2.4 and later).
HAS_OPERATORS = hasattr(torch.library, "register_fake")

_ATTEND, _ATTENTION, _COMPRESS = Packer(_abi.Attend), Packer(_abi.Attention), Packer(_abi.Compress)
_SELECT, _GATE, _ROPE = Packer(_abi.Select), Packer(_abi.Gate), Packer(_abi.Rope)
_MERGE, _SCORE, _RANK = Packer(_abi.Merge), Packer(_abi.Score), Packer(_abi.Rank)
_ROWS = ", ".join(f"Tensor? {name}" for name in ARRAYS)
_library: Any = torch.library.Library("nsa", "DEF") if HAS_OPERATORS else None

#: What looks at operators, or changes their arguments, where a torch has it.
_LOOKING: Any = () if not HAS_OPERATORS else (
    _C._len_torch_dispatch_stack, _C._len_torch_function_stack, _C._are_functorch_transforms_active,
    _C._is_any_autocast_enabled, _C._is_tracing, _C._autograd._profiler_enabled)
_calls = _call.load(_LOOKING) if HAS_OPERATORS else None


class _Sites(dict):
    """An operator's calls in one step, by the number of results."""

    def __init__(self, is_tensor: bytes, single: bool):
        super().__init__()
        self._of = is_tensor, single

    def __missing__(self, wanted: int) -> Any:
        self[wanted] = _call.Site(_calls, *self._of)
        return self[wanted]


is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling if HAS_OPERATORS else lambda: False


def check_nested(name: str, x: Any) -> None:
    if not is_compiling():  # PyTorch 2.4 asks no tensor there, and compiles no nested one either
        _pack.check_nested(name, x)


# ---- Defining -----------------------------------------------------------------------------------

def _cast(arguments: Sequence[Any], device: str, keep: Sequence[int]) -> list[Any]:
    """As autocast does with scaled_dot_product_attention's: floating tensors, but no doubles."""
    dtype = torch.get_autocast_dtype(device) if hasattr(torch, "get_autocast_dtype") else (
        torch.get_autocast_gpu_dtype() if device == "cuda" else torch.get_autocast_cpu_dtype())
    return [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
            and i not in keep else x for i, x in enumerate(arguments)]


def _define(name: str, schema: str, rooms: Callable, structs: Callable, setup: Callable | None = None,
            backward: Callable | None = None, autocast: Sequence[int] | None = None, of: str | None = None) -> Callable:
    """autocast: None, or the places of arguments that are not cast. of: the library's function, if not `name`."""
    function, (taken, _, returned) = of or name, schema.partition(" -> ")
    arguments = taken[1:-1].split(", ")
    places = [i for i, argument in enumerate(arguments) if argument.startswith("Tensor")]
    written = [i for i, argument in enumerate(arguments) if "!" in argument]
    counts = next((i for i, argument in enumerate(arguments) if argument == "Tensor? counts"), None)
    results = returned.count("Tensor")  # rooms behind them are memory of the call alone
    if returned == "Tensor[]":
        results = len(arguments)  # or fewer

    rules = [(i, arguments[i].startswith("Tensor?"), arguments[i].split()[-1]) for i in places]

    def checked_rooms(*given: Any) -> Sequence[Room]:
        for i, optional, argument in rules:
            if given[i] is not None:
                _check_form(argument, given[i])
            elif not optional:
                raise refused("NULL", argument, "None, must be a tensor")
        return rooms(*given)

    def check_plain(given: Sequence[Any]) -> None:
        for i, _, argument in rules:
            if given[i] is not None and not isinstance(given[i], torch.Tensor):  # PyTorch's words would have all of its values
                raise refused("NULL", argument, f"{type(given[i]).__name__}, must be a tensor")
            check_nested(argument, given[i])

    def shaped(found: list[torch.Tensor]) -> Any:
        if returned in ("Tensor", "()"):
            return found[0] if found else None
        return found if returned == "Tensor[]" else tuple(found)

    sites = None
    if _calls is not None and not written:
        sites = _Sites(bytes([i in places for i in range(len(arguments))]), returned == "Tensor")

    def kernel(*given: Any, wanted: int = results) -> Any:
        if sites is not None:
            found = sites[wanted].call(given)
            if found is not None:
                return list(found) if returned == "Tensor[]" else found
        for i in written:
            if isinstance(given[i], torch.Tensor) and is_lazy(given[i]):
                raise refused("NULL", "out", "its memory would have the negatives of its values, or it has none (a ZeroTensor)")
        try:
            if counts is not None and given[counts] is not None and not name.startswith("compress"):
                _check_counts(given[counts], given[0].shape[1])
            plan, tensors = planned(function, given, places, checked_rooms, structs, wanted)
        except (AttributeError, RuntimeError):  # of what is no tensor, or of a shape that is not there
            check_plain(given)
            raise
        found = plan.run(tensors)
        for i in written:
            _increment_version(given[i])
        if sites is not None and plan.form is not None:
            sites[wanted].add(given, plan.form)
        return shaped(found)

    if not HAS_OPERATORS:
        function_of = _casting(_differentiable(kernel, setup, backward, places), autocast)
        return _taking(lambda given, wanted: function_of(*given), results)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    torch.library.register_fake("nsa::" + name, lambda *given: shaped(
        [room.empty(given[0].device) for room in checked_rooms(*given)][:results]), lib=_library)
    operator = getattr(torch.ops.nsa, name).default
    if backward is not None:
        _library.impl(name, _differentiable(_below_autograd(operator), setup, backward, places), "Autograd")
    if autocast is not None:
        for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            _library.impl(name, _cast_for(operator, device, autocast), key)
    recorded = operator if backward is None else _function(kernel, setup, backward, places)
    return _direct(operator, kernel, recorded, places, results, sites, check_plain)


def _increment_version(x: torch.Tensor) -> None:
    """What saved x for a backward must learn that it was written. Where the function for it is missing, an operation in
    place on none of its elements does the same."""
    if hasattr(torch.autograd.graph, "increment_version"):
        torch.autograd.graph.increment_version(x)
    else:
        with torch.no_grad():
            x.detach()[:0].zero_()


def _at_rest() -> bool:
    """Whether an operator would do no more than its kernel and its gradient: nothing looks at it, and nothing
    changes its arguments."""
    for looks in _LOOKING:
        if looks():
            return False
    return forward_ad._current_level < 0


def _direct(operator: Callable, kernel: Callable, recorded: Callable, places: Sequence[int], results: int,
            sites: dict[int, Any] | None, check_plain: Callable[[Sequence[Any]], None]) -> Callable:
    """The operator. Plain calls go past the dispatcher, which costs as much as the rest of what Python does; if they are
    not recorded for backward, only the results that are `wanted` are allocated."""
    tensors_of, plain, is_grad_enabled = itemgetter(*places), {torch.Tensor, torch.nn.Parameter}, torch.is_grad_enabled
    compiling, mark = is_compiling, _call.RECORDED

    def call(given: tuple[Any, ...], wanted: int) -> Any:
        if compiling():
            return operator(*given)
        if sites is not None:
            found = sites[wanted].at_rest(given)
            if found is mark:
                return recorded(*given)
            if found is not None:
                return found
        if _at_rest():
            tensors = [x for x in tensors_of(given) if x is not None]
            if plain.issuperset(map(type, tensors)) and not tensors[0].is_meta:
                if is_grad_enabled() and True in [x.requires_grad for x in tensors]:
                    return recorded(*given)
                return kernel(*given, wanted=wanted)
        check_plain(given)
        return operator(*given)
    return _taking(call, results)


def _taking(call: Callable, results: int) -> Callable:
    """A function of the operator's arguments. `of` takes the tuple of them, and how many results are wanted."""
    def taking(*given: Any) -> Any:
        return call(given, results)
    taking.of = call  # type: ignore[attr-defined]
    return taking


def _below_autograd(operator: Callable) -> Callable:
    """The operator without its gradient."""
    def run(*arguments: Any) -> Any:
        with _C._AutoDispatchBelowAutograd():
            return operator(*arguments)
    return run


def _function(run: Callable, setup: Callable | None, backward: Callable, places: Sequence[int]) -> Callable:
    """`run`, recorded for its gradient. torch.library.register_autograd would do the same, but it looks through all
    arguments for each of them at every call: 0.4 ms for the 24 of attention. A Function also takes its time for each
    argument; so it has the tensors that are there, and the tuple of all."""
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, arguments: tuple[Any, ...], *_: torch.Tensor) -> Any:
            found = run(*arguments)
            # As text, for compiled autograd with dynamic=True would make unknowns of numbers in a list; that of PyTorch 2.12
            # knows no iteration of bytes, that of 2.4 no index of them.
            ctx.places = "".join([chr(i) for i in places if arguments[i] is not None])
            save(ctx, arguments, found)
            return found

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if not torch.is_grad_enabled():
                return None, *found(ctx, gradients)
            return None, *_Once.apply(functools.partial(found, ctx, gradients), _ASKING,
                                      *[x for x in (*gradients, *ctx.saved_tensors) if x is not None])

    def found(ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """No closure has ctx: compiled autograd of PyTorch 2.4 would keep it."""
        batched = not is_compiling() and True in [x is not None and _is_batched(x) for x in gradients]
        of_all = _of_each(functools.partial(differentiate, ctx), gradients) if batched else differentiate(ctx, *gradients)
        return tuple([of_all[ord(place)] for place in ctx.places])

    save, differentiate, apply = setup, backward, Function.apply

    def recorded(*arguments: Any) -> Any:
        return apply(arguments, *[arguments[i] for i in places if arguments[i] is not None])
    return recorded


class _Once(torch.autograd.Function):
    """Gradients that were asked for with create_graph, and have none. They belong to all tensors that they are made of, so that
    who asks for one's second derivative meets the refusal: torch's own once_differentiable forgets these, and
    torch.autograd.grad or hessian would have zeros."""

    @staticmethod
    def forward(ctx: Any, found: Callable[[], tuple[Any, ...]], *_: torch.Tensor) -> tuple[Any, ...]:
        return found()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("trying to differentiate twice what is once_differentiable: nsa has first derivatives alone")


class _Undifferentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], name: str, *_: torch.Tensor) -> Any:
        ctx.name = name
        return run()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{ctx.name} has no gradients, for what it keeps of earlier tokens has no graph: call it under "
                                  "torch.no_grad(); to train, call it for all tokens at once")


def without_gradients(run: Callable[[], Any], name: str, tensors: Sequence[torch.Tensor | None]) -> Any:
    """What `run` makes of the tensors. If one of them asks for a gradient it refuses to be differentiated, for gradients that
    end there would be wrong in silence."""
    return _Undifferentiated.apply(run, name, *[x for x in tensors if x is not None])


#: So that there is a graph at all: of a plain sum's gradients nothing asks for a derivative.
_ASKING = torch.empty(0, requires_grad=True, device="cpu")
_is_batched: Callable[[Any], bool] = getattr(getattr(_C, "_functorch", None), "is_legacy_batchedtensor", lambda x: False)


def _of_each(function: Callable, given: Sequence[Any]) -> list[Any]:
    """Of gradients in a batch, which torch.autograd.grad(is_grads_batched=True) gives: the function of each, in one."""
    level = _C._vmapmode_increment_nesting() - 1
    _C._vmapmode_decrement_nesting()
    batches = [torch._remove_batch_dim(x, level, 1, 0) if x is not None and _is_batched(x) else None for x in given]
    count = next(len(x) for x in batches if x is not None)
    found = zip(*[function(*[x if of is None else of[i] for x, of in zip(given, batches)]) for i in range(count)])
    return [None if of[0] is None else torch._add_batch_dim(torch.stack(of), 0, level) for of in found]


def _differentiable(run: Callable, setup: Callable | None, backward: Callable | None, places: Sequence[int]) -> Callable:
    """`run` with its gradient."""
    if backward is None:
        return run
    recorded = _function(run, setup, backward, places)

    def apply(*arguments: Any) -> Any:
        _check_transforms(arguments)
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
            return recorded(*arguments)
        return run(*arguments)
    return apply


def _check_transforms(arguments: Sequence[Any]) -> None:
    """What would compute a derivative that is not there must not get zeros, or nothing."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("nsa has no derivatives in forward mode (jvp, dual tensors): backward has them")
    if HAS_OPERATORS and _C._are_functorch_transforms_active() and torch.is_grad_enabled() and any(
            x.requires_grad for x in tensors):
        raise NotImplementedError("nsa records no gradients within torch.func's transforms (grad, vjp, jacrev, vmap): "
                                  "torch.autograd.grad and backward() have them")


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

_RANKS = {"lse": 3, "dlse": 3, "lse_a": 3, "lse_b": 3, "weights": 3, "positions": 2, "kept": 1,
          **{prefix + name: 3 for prefix in ("", "k_", "v_") for name in _PHI}}


def _check_form(name: str, x: Any) -> None:
    """The arrays of the descriptor have checks of their own."""
    if name in ARRAYS:
        return
    if len(x.shape) != _RANKS.get(name, 4):
        raise refused("SIZE", name, f"shape {tuple(x.shape)}, must have {_RANKS.get(name, 4)} axes")
    if name in ("blocks", "positions"):
        if x.dtype != torch.int32:
            raise refused("DTYPE", name, f"{x.dtype}, must be int32")
    elif x.dtype not in DTYPES and name != "kept":
        raise refused("DTYPE", name, f"{x.dtype}, must be float32, bfloat16, float16 or float64")


def _expect(name: str, x: Any, *shape: Any) -> None:
    if tuple(x.shape) != shape:
        raise refused("SIZE", name, f"shape {tuple(x.shape)}, must be {shape}")


_SYMBOLIC = getattr(torch, "SymInt", ())


def integer(name: str, value: Any) -> Any:
    """A number of C; others give it as a tensor without axes (max_seqlen)."""
    if is_compiling() and not isinstance(value, torch.Tensor):  # of a graph that has it from a tensor nothing may be asked
        return value
    if type(value) is int and 0 <= value < 1 << 31 or isinstance(value, _SYMBOLIC):
        return value
    return check_int(name, value)


def _real(x: Any) -> torch.dtype:
    """What is summed in, and lse's dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _like(x: Any, *shape: Any) -> Room:
    return Room(shape or tuple(x.shape), x.dtype, rest=0.0)


def _lse(q: Any) -> Room:
    return Room(tuple(q.shape[:3]), _real(q), rest=-math.inf)


def _check_counts(counts: torch.Tensor, rows_there: int) -> None:
    """Rows that the tensors do not have must not be read. On CUDA the sum is trusted, because nobody waits for the
    device."""
    if counts.device.type != "cpu":
        return
    total = int(counts.sum())
    if total != rows_there:
        raise refused("SIZE", "counts", f"{total} queries in all, there are {rows_there} rows")


def _most(tokens: Any) -> Any:
    return max if type(tokens) is int else torch.sym_max


def cmp_count(options: str, tokens: Any) -> Any:
    """N(tokens), of any length: a graph for lengths of more than one kind holds it too."""
    return _pack.cmp_count(options, tokens, _most(tokens))


def _packed(begins: Any, x: Any) -> dict[str, int]:
    """The sizes of packed rows."""
    return {} if begins is None else {"rows": x.shape[1]}


def _lists(q: Any, kv_heads: Any, options: str) -> Room:
    return Room((*q.shape[:2], list_heads(options, kv_heads), list_width(options)), torch.int32, rest=-1.0)


def _gradients(tensors: Sequence[Any], mask: int) -> list[Room]:
    """Of those that are asked for."""
    return [Room(tuple(x.shape), x.dtype, zeroed=True, pooled=True) for i, x in enumerate(tensors) if mask >> i & 1]


def _named(names: Sequence[str], mask: int, found: Sequence[Any]) -> dict[str, Any]:
    """The gradients that are asked for, by their names."""
    return dict(zip([name for i, name in enumerate(names) if mask >> i & 1], found))


def _mask(ctx: Any, count: int) -> int:
    """The places, of the first `count`, whose gradients are asked for."""
    mask = 0
    for place, needed in zip(ctx.places, ctx.needs_input_grad[1:]):
        mask |= needed << ord(place)
    return mask & (1 << count) - 1


def _in_places(gradients: Sequence[torch.Tensor], mask: int, count: int) -> list[Any]:
    """None where none was asked for."""
    left = iter(gradients)
    return [next(left) if mask >> i & 1 else None for i in range(count)]


# ---- RoPE ---------------------------------------------------------------------------------------

def _rope_desc(x: View, positions: Any, begins: Any, firsts: Any, counts: Any, longest: int, first: int) -> Any:
    tokens = tokens_of(first + x.shape[1], counts if begins is None else begins, None, longest)
    arrays = begins, firsts, counts, None
    batch, count = problem(x.shape, arrays, tokens, first)
    if positions is not None:
        _expect("positions", positions, *x.shape[:2])
    return desc("", batch, tokens, x.shape[2], x.shape[2], 1, 1, first, count, arrays, **_packed(begins, x))


def _rope_fields(x: View, positions: Any, options: str) -> dict[str, tuple[Any, ...]]:
    return dict(rope_fields(options, x.shape[2], x.shape[3]), x=rows(x), positions=rows(positions))


def _rope_structs(arguments, returned):
    x, positions, *places, options = arguments
    fields = dict(_rope_fields(x, positions, options), out=rows(returned[0]))
    return (_ROPE, fields), _rope_desc(x, positions, *places)


def _rope_setup(ctx, inputs, output):
    _, *tensors, ctx.longest, ctx.first, ctx.options = inputs
    ctx.save_for_backward(*tensors)


def _rope_backward_structs(arguments, returned):
    dout, positions, *places, options = arguments
    fields = dict(_rope_fields(dout, positions, options), out=rows(dout))
    return (_ROPE, dict(x=rows(returned[0]), out=rows(dout))), (_ROPE, fields), _rope_desc(dout, positions, *places)


_ROPE_REST = ("Tensor? positions, Tensor? begins, Tensor? firsts, Tensor? counts, SymInt longest, SymInt first, "
              "str options")

rope_backward = _define("rope_backward", f"(Tensor dout, {_ROPE_REST}) -> Tensor",
                        lambda dout, *_: _gradients([dout], 1), _rope_backward_structs)


def _rope_gradient(ctx, dout):
    return (rope_backward(dout, *ctx.saved_tensors, ctx.longest, ctx.first, ctx.options), *[None] * 7)


rope = _define("rope", f"(Tensor x, {_ROPE_REST}) -> Tensor", lambda x, *_: [_like(x)], _rope_structs, _rope_setup,
               _rope_gradient, of="rope_forward")


# ---- Compression --------------------------------------------------------------------------------

_PHI_KINDS = {member.name.lower(): int(member) for member in _abi.Phi}


def _phi_fields(prefix: str, phi: str, x: View, given: Sequence[Any], block: int) -> dict[str, tuple[Any, ...]]:
    """phi's parameters, of which each shape is held against its rule."""
    width, hidden = x.shape[3], 0
    pos, w1, b1, w2, b2 = given
    if phi == "mlp" and w1 is not None:
        hidden = w1.shape[1]
    shapes = {"pos": (block, width), "w2": (width, hidden), "b2": (1, width),
              "w1": (hidden, block * width) if phi == "mlp" else (block, width),
              "b1": (1, hidden if phi == "mlp" else width)}
    check_phi(phi, [name for name, tensor in zip(_PHI, given) if tensor is not None])
    fields = {prefix + "phi": (_PHI_KINDS[phi],), prefix + "dim": (width,), prefix + "hidden": (hidden,),
              prefix + "x": rows(x)}
    for name, tensor in zip(_PHI, given):
        if tensor is not None:
            _expect(prefix + name, tensor, tensor.shape[0] if tensor.shape[0] == 1 else x.shape[2], *shapes[name])
            fields[prefix + name] = parameters(tensor)
    return fields


def _compress_desc(x: View, begins: Any, longest: int, options: str) -> Any:
    arrays = begins, None, None, None
    tokens = tokens_of(x.shape[1], begins, None, longest)
    batch, count = problem(x.shape, arrays, tokens, 0)
    return desc(options, batch, tokens, x.shape[2], x.shape[2], 1, 1, 0, count, arrays, **_packed(begins, x))


def _compress_rooms(x, pos, w1, b1, w2, b2, begins, longest, phi, options):
    # Packed sequences have at most as many blocks as one sequence of all rows; what is behind them stays 0.
    return [Room((x.shape[0], cmp_count(options, x.shape[1]), x.shape[2], x.shape[3]), x.dtype, begins is not None)]


def _compress_structs(arguments, returned):
    x, *given, begins, longest, phi, options = arguments
    fields = _phi_fields("", phi, x, given, option(options, "cmp_block"))
    return (_COMPRESS, dict(fields, out=rows(returned[0]))), _compress_desc(x, begins, longest, options)


def _compress_setup(ctx, inputs, output):
    *tensors, ctx.longest, ctx.phi, ctx.options = inputs
    ctx.save_for_backward(*tensors)


def _compress_backward_rooms(dout, *arguments):
    return _gradients(arguments[:6], arguments[-1])


def _compress_backward_structs(arguments, returned):
    dout, x, *given, begins, longest, phi, options, mask = arguments
    fields = _phi_fields("", phi, x, given, option(options, "cmp_block"))
    gradient = {name: (rows if name == "x" else parameters)(g)
                for name, g in _named(("x", *_PHI), mask, returned).items()}
    return ((_COMPRESS, dict(gradient, out=rows(dout))), (_COMPRESS, dict(fields, out=rows(dout))),
            _compress_desc(x, begins, longest, options))


compress_backward = _define(
    "compress_backward", "(Tensor dout, Tensor x, Tensor? pos, Tensor? w1, Tensor? b1, Tensor? w2, Tensor? b2, "
    "Tensor? begins, SymInt longest, str phi, str options, int mask) -> Tensor[]",
    _compress_backward_rooms, _compress_backward_structs)


def _compress_gradient(ctx, dout):
    mask = _mask(ctx, 6)
    found = compress_backward(dout, *ctx.saved_tensors, ctx.longest, ctx.phi, ctx.options, mask)
    return (*_in_places(found, mask, 6), None, None, None, None)


compress = _define(
    "compress", "(Tensor x, Tensor? pos, Tensor? w1, Tensor? b1, Tensor? w2, Tensor? b2, Tensor? begins, "
    "SymInt longest, str phi, str options) -> Tensor",
    _compress_rooms, _compress_structs, _compress_setup, _compress_gradient, autocast=(), of="compress_forward")


def _new_rows(name: str, out: Any, x: Any, pages: Any, tokens: int, options: str) -> dict[str, tuple[Any, ...]]:
    """The compressed rows of all steps, to which a step adds: in pages, or (B, N, Hk, D)."""
    step = option(options, "cmp_stride")
    count = cmp_count(options, tokens) if pages is None else x.shape[1] // step if step > 0 else 0
    _expect(name, out, x.shape[0], count, *x.shape[2:])
    if out.shape[-1] > 1 and out.strides[-1] != 1:
        raise refused("STRIDE", name, "the last axis must be packed")  # a copy would take what is written along
    return {name: rows(out)}


def _compress_step_structs(arguments, returned):
    x, out, *given, firsts, counts, pages, longest, phi, options = arguments
    arrays, tokens = (None, firsts, counts, pages), x.shape[1] if pages is None else longest
    batch, _ = problem((1 if counts is not None else x.shape[0], tokens), arrays, tokens, 0)
    fields = _phi_fields("", phi, x, given, option(options, "cmp_block"))
    fields.update(_new_rows("out", out, x, pages, tokens, options))
    sizes = {} if pages is None else in_pages(pages, x, 1)
    return (_COMPRESS, fields), desc(options, batch, tokens, x.shape[2], x.shape[2], 1, 1, 0, tokens, arrays, **sizes)


compress_step = _define(
    "compress_step", "(Tensor x, Tensor(a!) out, Tensor? pos, Tensor? w1, Tensor? b1, Tensor? w2, Tensor? b2, "
    "Tensor? firsts, Tensor? counts, Tensor? pages, SymInt longest, str phi, str options) -> ()",
    lambda *_: [], _compress_step_structs, of="compress_forward")


# ---- Attention over few keys --------------------------------------------------------------------

def _attend_desc(branch, q, k, v, blocks, arrays, tokens, first, options, stride=1):
    begins, _, _, pages = arrays
    batch, count = problem(q.shape, arrays, tokens, first)
    found, sizes = k.shape[1], _packed(begins, q)
    if pages is not None:
        sizes, batches = in_pages(pages, k, key_stride(options, branch, stride)), k.shape[0]
    elif begins is None:
        least, batches = key_rows(options, branch, stride, tokens, _most(tokens)), batch
        if found != least:
            raise refused("SIZE", "k", f"{found} rows, must be {least} for {tokens} tokens")
    else:
        least, batches = key_rows(options, branch, stride, q.shape[1], _most(q.shape[1])), 1
        of_tokens = branch != "cmp" and stride <= 1
        if of_tokens and found != least:
            raise refused("SIZE", "k", f"{found} rows, must be as q's {least}")
        if found < least:
            raise refused("SIZE", "k", f"{found} rows, must be {least}, what compress returns")
    _expect("k", k, batches, found, k.shape[2], q.shape[3])
    _expect("v", v, batches, found, k.shape[2], v.shape[3])
    if branch == "slc":
        if blocks is None:
            raise refused("NULL", "blocks", "None, must be the lists that each query reads")
        _expect("blocks", blocks, *_lists(q, k.shape[2], options).shape)
    return desc(options, batch, tokens, q.shape[2], k.shape[2], q.shape[3], v.shape[3], first, count, arrays, **sizes)


def _attend_rooms(q, k, v, *_):
    return [_like(q, *q.shape[:3], v.shape[3]), _lse(q)]


def _attend_backward_rooms(dout, dlse, *arguments):
    return _gradients(arguments[:3], arguments[-1])


def _make_attend(branch: str) -> Callable:
    name = "attend_" + branch

    def structs(arguments, returned):
        q, k, v, blocks, *arrays, tokens, first, options = arguments
        out, lse = returned
        x = dict(q=rows(q), k=rows(k), v=rows(v), out=rows(out), lse=rows(lse), blocks=rows(blocks))
        return (_ATTEND, x), _attend_desc(branch, q, k, v, blocks, arrays, tokens, first, options)

    def setup(ctx, inputs, output):
        *tensors, ctx.tokens, ctx.first, ctx.options = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    def backward_structs(arguments, returned):
        dout, dlse, q, k, v, blocks, *arrays, out, lse, tokens, first, options, mask = arguments
        x = dict(q=rows(q), k=rows(k), v=rows(v), out=rows(out), lse=rows(lse), blocks=rows(blocks))
        gradient = {n: rows(g) for n, g in _named("qkv", mask, returned).items()}
        gradient.update(out=rows(dout), lse=rows(dlse))
        return (_ATTEND, gradient), (_ATTEND, x), _attend_desc(branch, q, k, v, blocks, arrays, tokens, first, options)

    backward = _define(
        name + "_backward", f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? blocks, {_ROWS}, "
        "Tensor out, Tensor lse, SymInt tokens, SymInt first, str options, int mask) -> Tensor[]",
        _attend_backward_rooms, backward_structs)

    def gradient(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 11
        mask, saved = _mask(ctx, 3), ctx.saved_tensors
        dout = torch.zeros_like(saved[-2]) if dout is None else dout
        found = backward(dout, dlse, *saved, ctx.tokens, ctx.first, ctx.options, mask)
        return (*_in_places(found, mask, 3), *[None] * 8)

    return _define(name, f"(Tensor q, Tensor k, Tensor v, Tensor? blocks, {_ROWS}, SymInt tokens, SymInt first, "
                   "str options) -> (Tensor, Tensor)", _attend_rooms, structs, setup, gradient, autocast=(),
                   of=name + "_forward")


attend = {branch: _make_attend(branch) for branch in ("cmp", "slc", "win", "dense")}


# ---- Merge --------------------------------------------------------------------------------------

_PARTS = ("out_a", "out_b", "lse_a", "lse_b")


def _merge_desc(out_a, out_b, lse_a, lse_b):
    batch, tokens, heads, width = out_a.shape
    _expect("out_b", out_b, *out_a.shape)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _expect(name, lse, *out_a.shape[:3])
    return desc("", batch, tokens, heads, heads, 1, width, 0, tokens, ())


def _merge_structs(arguments, returned):
    out, lse = returned
    x = dict(zip(_PARTS, map(rows, arguments)), out=rows(out), lse=rows(lse))
    return (_MERGE, x), _merge_desc(*arguments)


def _merge_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _merge_backward_structs(arguments, returned):
    dout, dlse, *parts, mask = arguments
    gradient = {name: rows(g) for name, g in _named(_PARTS, mask, returned).items()}
    gradient.update(out=rows(dout), lse=rows(dlse))
    return (_MERGE, gradient), (_MERGE, dict(zip(_PARTS, map(rows, parts)))), _merge_desc(*parts)


merge_backward = _define("merge_backward", "(Tensor dout, Tensor? dlse, Tensor out_a, Tensor out_b, Tensor lse_a, "
                         "Tensor lse_b, int mask) -> Tensor[]",
                         lambda dout, dlse, *a: _gradients(a[:4], a[4]), _merge_backward_structs)


def _merge_gradient(ctx, dout, dlse):
    if dout is None and dlse is None:
        return None, None, None, None
    mask, saved = _mask(ctx, 4), ctx.saved_tensors
    dout = torch.zeros_like(saved[0]) if dout is None else dout
    return tuple(_in_places(merge_backward(dout, dlse, *saved, mask), mask, 4))


merge = _define("merge", "(Tensor out_a, Tensor out_b, Tensor lse_a, Tensor lse_b) -> (Tensor, Tensor)",
                lambda out_a, out_b, lse_a, lse_b: [_like(out_a), _like(lse_a)], _merge_structs, _merge_setup,
                _merge_gradient, of="merge_forward")


# ---- Selection ----------------------------------------------------------------------------------

def _selected(q: Any, kv_heads: Any, tokens: Any, options: str, scores: bool) -> list[Room]:
    """The lists, and what they were chosen by: of 0 tokens if nobody asks."""
    blocks = _lists(q, kv_heads, options)
    if not scores:
        return [blocks, Room((0,), _real(q))]
    return [blocks, Room((*blocks.shape[:3], slc_count(options, tokens)), _real(q), rest=-math.inf)]


def _select_rooms(q, k, lse, *rest):
    tokens, _, scores, options = rest[-4:]
    return _selected(q, k.shape[2], tokens, options, scores)


def _select_structs(arguments, returned):
    q, k, lse, *arrays, tokens, first, scores, options = arguments
    _expect("lse", lse, *q.shape[:3])
    x = dict(q=rows(q), k=rows(k), lse=rows(lse), blocks=rows(returned[0]))
    if scores:
        x["scores"] = rows(returned[1])
    return (_SELECT, x), _attend_desc("cmp", q, k, k, None, arrays, tokens, first, options)


select_blocks = _define("select_blocks", f"(Tensor q, Tensor k, Tensor lse, {_ROWS}, SymInt tokens, SymInt first, "
                        "bool scores, str options) -> (Tensor, Tensor)", _select_rooms, _select_structs, autocast=(2,))


def _score_rooms(q, k, weights, *rest):
    tokens, *_, scores, options = rest[-7:]
    return _selected(q, k.shape[2], tokens, options, scores)


def _score_structs(arguments, returned):
    q, k, weights, *arrays, tokens, first, act, pool, stride, scores, options = arguments
    if weights is not None:
        _expect("weights", weights, *q.shape[:3])
    kinds = _abi.Score(act=act, pool=pool)
    x = dict(act=(kinds.act,), pool=(kinds.pool,), stride=(stride,), q=rows(q), k=rows(k), weights=rows(weights),
             blocks=rows(returned[0]))
    if scores:
        x["scores"] = rows(returned[1])
    return (_SCORE, x), _attend_desc("score", q, k, k, None, arrays, tokens, first, options, stride)


score_blocks = _define("score_blocks", f"(Tensor q, Tensor k, Tensor? weights, {_ROWS}, SymInt tokens, "
                       "SymInt first, str act, str pool, int stride, bool scores, str options) -> (Tensor, Tensor)", _score_rooms,
                       _score_structs, autocast=())


# ---- Scores of given lists ----------------------------------------------------------------------

_LISTED = ("q", "k", "weights")


def _listed_rooms(q, k, weights, blocks, *_):
    return [Room(tuple(blocks.shape), _real(q), rest=-math.inf)]


def _listed(scores, q, k, weights, blocks, *rest):
    """The struct with these scores, and the descriptor."""
    *arrays, tokens, first, act, pool, stride, options = rest
    if weights is not None:
        _expect("weights", weights, *q.shape[:3])
    _expect("blocks", blocks, *_lists(q, k.shape[2], options).shape)
    kinds = _abi.Score(act=act, pool=pool)
    x = dict(act=(kinds.act,), pool=(kinds.pool,), stride=(stride,), q=rows(q), k=rows(k), weights=rows(weights),
             blocks=rows(blocks), scores=rows(scores))
    return (_SCORE, x), _attend_desc("score", q, k, k, None, arrays, tokens, first, options, stride)


def _listed_setup(ctx, inputs, output):
    ctx.rest = inputs[8:]
    ctx.save_for_backward(*inputs[:8])


def _listed_backward_structs(arguments, returned):
    dscores, *inputs, mask = arguments
    gradient = {name: rows(g) for name, g in _named(_LISTED, mask, returned).items()}
    return ((_SCORE, dict(gradient, scores=rows(dscores))), *_listed(dscores, *inputs))


_LISTED_SCHEMA = (f"Tensor q, Tensor k, Tensor? weights, Tensor blocks, {_ROWS}, SymInt tokens, SymInt first, str act, str pool, "
                  "int stride, str options")

score_lists_backward = _define("score_lists_backward", f"(Tensor dscores, {_LISTED_SCHEMA}, int mask) -> Tensor[]",
                               lambda dscores, *a: _gradients(a[:3], a[-1]), _listed_backward_structs,
                               of="score_blocks_backward")


def _listed_gradient(ctx, dscores):
    mask = _mask(ctx, 3)
    found = score_lists_backward(dscores, *ctx.saved_tensors, *ctx.rest, mask)
    return (*_in_places(found, mask, 3), *[None] * 11)


score_lists = _define("score_lists", f"({_LISTED_SCHEMA}) -> Tensor", _listed_rooms,
                      lambda arguments, returned: _listed(returned[0], *arguments), _listed_setup, _listed_gradient,
                      autocast=(), of="score_blocks_forward")


# ---- Ranking ------------------------------------------------------------------------------------

def _rank_rooms(scores, *rest):
    return [Room((*scores.shape[:3], list_width(rest[-1])), torch.int32, rest=-1.0)]


def _rank_structs(arguments, returned):
    scores, *arrays, tokens, first, options = arguments
    arrays.append(None)
    batch, count = problem(scores.shape, arrays, tokens, first)
    heads = scores.shape[2]
    _expect("scores", scores, *scores.shape[:3], slc_count(options, tokens))
    return ((_RANK, dict(scores=rows(scores), blocks=rows(returned[0]))),
            desc(options, batch, tokens, heads, heads, 1, 1, first, count, arrays, **_packed(arrays[0], scores)))


rank_queries = _define("rank_queries", "(Tensor scores, Tensor? begins, Tensor? firsts, Tensor? counts, SymInt tokens, "
                       "SymInt first, str options) -> Tensor", _rank_rooms, _rank_structs)


# ---- Gate ---------------------------------------------------------------------------------------

_GATED = ("logits", "cmp", "slc", "win")


def _gate_desc(logits, cmp, slc, win, options):
    batch, tokens, heads, width = cmp.shape
    for name, x in (("slc", slc), ("win", win)):
        _expect(name, x, *cmp.shape)
    _expect("logits", logits, batch, tokens, logits.shape[2], 3)
    return desc(options, batch, tokens, heads, logits.shape[2], 1, width, 0, tokens, (), gate_heads=logits.shape[2])


def _gate_structs(arguments, returned):
    return (_GATE, dict(zip(_GATED, map(rows, arguments)), out=rows(returned[0]))), _gate_desc(*arguments)


def _gate_setup(ctx, inputs, output):
    *tensors, ctx.options = inputs
    ctx.save_for_backward(*tensors)


def _gate_backward_structs(arguments, returned):
    dout, *inputs, options, mask = arguments
    gradient = {name: rows(g) for name, g in _named(_GATED, mask, returned).items()}
    return ((_GATE, dict(gradient, out=rows(dout))), (_GATE, dict(zip(_GATED, map(rows, inputs)))),
            _gate_desc(*inputs, options))


gate_backward = _define("gate_backward", "(Tensor dout, Tensor logits, Tensor cmp, Tensor slc, Tensor win, str options, "
                        "int mask) -> Tensor[]", lambda dout, *a: _gradients(a[:4], a[5]), _gate_backward_structs)


def _gate_gradient(ctx, dout):
    mask = _mask(ctx, 4)
    return (*_in_places(gate_backward(dout, *ctx.saved_tensors, ctx.options, mask), mask, 4), None)


gate = _define("gate", "(Tensor logits, Tensor cmp, Tensor slc, Tensor win, str options) -> Tensor",
               lambda logits, cmp, *_: [_like(cmp)], _gate_structs, _gate_setup, _gate_gradient, of="gate_forward")


# ---- The whole ----------------------------------------------------------------------------------

_WHOLE_IN = ("q", "k_cmp.x", "v_cmp.x", "k_slc", "v_slc", "k_win", "v_win", "gates")
_PHIS = tuple(f"{which}_cmp.{name}" for which in "kv" for name in _PHI)
_WHOLE_TENSORS = len(_WHOLE_IN) + len(_PHIS)


def _kept_rooms(q, k_cmp, v_cmp, options):
    """What backward reads of what forward wrote, but for the lists. It lies in one tensor of bytes, for
    each tensor more is microseconds more."""
    n = cmp_count(options, k_cmp.shape[1])
    heads, real, dim_v = tuple(q.shape[:3]), _real(q), v_cmp.shape[3]
    compressed = (q.shape[0], n, k_cmp.shape[2])
    return {"k_cmp.out": Room((*compressed, q.shape[3]), q.dtype), "v_cmp.out": Room((*compressed, dim_v), q.dtype),
            **{"out_" + branch: Room((*heads, dim_v), q.dtype) for branch in ("cmp", "slc", "win")},
            **{"lse_" + branch: Room(heads, real) for branch in ("cmp", "slc", "win")}}


def _whole_rooms(*arguments):
    q, k_cmp, v_cmp, k_slc = arguments[:4]
    options = arguments[-1]
    kept = sum(room.bytes for room in _kept_rooms(q, k_cmp, v_cmp, options).values())
    return [_like(q, *q.shape[:3], v_cmp.shape[3]), _lists(q, k_slc.shape[2], options),
            Room((kept,), torch.uint8, pooled=True)]


def _kept_views(kept: View, rooms: dict[str, Room]) -> dict[str, tuple[Any, ...]]:
    views, offset = {}, 0
    for name, room in rooms.items():
        views[name] = rows(View(Slot(kept.slot.place, offset), room.shape, room.dtype, kept.device))
        offset += room.bytes
    return views


def _whole(tensors, arrays, longest, first, phi_k, phi_v, options, written):
    """The struct of `tensors` and of what is `written`, and the descriptor."""
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = tensors[:8]
    begins, _, _, pages = arrays
    tokens = tokens_of(k_slc.shape[1], begins, pages, longest)
    batch, count = problem(q.shape, arrays, tokens, first)
    for name, x, like in (("k_cmp", k_cmp, k_slc), ("k_win", k_win, k_slc), ("v_win", v_win, v_slc),
                          ("v_cmp", v_cmp, v_slc)):
        _expect(name, x, *like.shape)
    batches = batch if begins is None else 1
    _expect("k_slc", k_slc, batches if pages is None else k_slc.shape[0], k_slc.shape[1], k_slc.shape[2], q.shape[3])
    _expect("v_slc", v_slc, *k_slc.shape[:3], v_slc.shape[3])
    sizes = dict(_packed(begins, q), gate_heads=gates.shape[2])
    if begins is not None:
        _expect("k_slc", k_slc, 1, q.shape[1], *k_slc.shape[2:])
    if pages is not None:
        sizes.update(in_pages(pages, k_slc, 1))
    _expect("gates", gates, *q.shape[:2], gates.shape[2], 3)
    d = desc(options, batch, tokens, q.shape[2], k_slc.shape[2], q.shape[3], v_slc.shape[3], first, count, arrays, **sizes)
    block = option(options, "cmp_block")
    fields = _phi_fields("k_cmp.", phi_k, k_cmp, tensors[8:13], block)
    fields.update(_phi_fields("v_cmp.", phi_v, v_cmp, tensors[13:18], block))
    fields.update(zip(_WHOLE_IN, map(rows, tensors[:8])))
    fields.update(written)
    return (_ATTENTION, fields), d


def _recorded(arguments, out, blocks, kept):
    """Forward's struct, in a forward and again in a backward."""
    *tensors, begins, longest, first, phi_k, phi_v, options = arguments
    written = _kept_views(kept, _kept_rooms(tensors[0], tensors[1], tensors[2], options))
    written.update(out=rows(out), blocks=rows(blocks))
    return _whole(tensors, (begins, None, None, None), longest, first, phi_k, phi_v, options, written)


def _whole_structs(arguments, returned):
    return _recorded(arguments, *returned)


def _whole_setup(ctx, inputs, output):
    ctx.rest = inputs[_WHOLE_TENSORS + 1:]
    ctx.save_for_backward(*inputs[:_WHOLE_TENSORS + 1], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _whole_backward_rooms(dout, *arguments):
    return _gradients(arguments[:_WHOLE_TENSORS], arguments[-1])


def _whole_backward_structs(arguments, returned):
    dout, *arguments, mask = arguments
    inputs, (blocks, kept) = arguments[:_WHOLE_TENSORS + 1], arguments[_WHOLE_TENSORS + 1:_WHOLE_TENSORS + 3]
    # x.out is not read, but it is part of the struct: the incoming gradient has its shape.
    x, d = _recorded([*inputs, *arguments[_WHOLE_TENSORS + 3:]], dout, blocks, kept)
    gradient = {name: (parameters if name in _PHIS else rows)(g)
                for name, g in _named(_WHOLE_IN + _PHIS, mask, returned).items()}
    return (_ATTENTION, dict(gradient, out=rows(dout))), x, d


_WHOLE_TENSOR_SCHEMA = (
    "Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_slc, Tensor v_slc, Tensor k_win, Tensor v_win, Tensor gates, "
    + ", ".join(f"Tensor? {name.replace('_cmp.', '_')}" for name in _PHIS))
_WHOLE_SCHEMA = _WHOLE_TENSOR_SCHEMA + ", Tensor? begins"
_WHOLE_REST = "SymInt longest, SymInt first, str phi_k, str phi_v, str options"

attention_backward = _define(
    "attention_backward", "(Tensor dout, " + _WHOLE_SCHEMA + ", Tensor blocks, Tensor kept, " + _WHOLE_REST
    + ", int mask) -> Tensor[]", _whole_backward_rooms, _whole_backward_structs)


def _whole_gradient(ctx, dout, *_):
    if dout is None:
        return (None,) * (_WHOLE_TENSORS + 6)
    mask = _mask(ctx, _WHOLE_TENSORS)
    found = attention_backward(dout, *ctx.saved_tensors, *ctx.rest, mask)
    return (*_in_places(found, mask, _WHOLE_TENSORS), None, None, None, None, None, None)


attention = _define("attention", "(" + _WHOLE_SCHEMA + ", " + _WHOLE_REST + ") -> (Tensor, Tensor, Tensor)",
                    _whole_rooms, _whole_structs, _whole_setup, _whole_gradient, autocast=(7,), of="attention_forward")


#: attention of the tuple of its arguments, and of how many results are wanted
attention_of: Callable = attention.of  # type: ignore[attr-defined]


# ---- A step of a serving engine -----------------------------------------------------------------

def _step_rooms(*arguments):
    q, v_cmp, k_slc = arguments[0], arguments[2], arguments[3]
    heads, real = tuple(q.shape[:3]), _real(q)
    scratch = [Room((*heads, v_cmp.shape[3]), q.dtype)] * 3 + [Room(heads, real)] * 3  # read by nobody
    return [_like(q, *heads, v_cmp.shape[3]), _lists(q, k_slc.shape[2], arguments[-1]), *scratch]


def _step_structs(arguments, returned):
    *tensors, k_rows, v_rows, firsts, counts, pages, longest, phi_k, phi_v, options = arguments
    tokens = tokens_of(tensors[3].shape[1], None, pages, longest)
    names = ("out", "blocks", *(kind + branch for kind in ("out_", "lse_") for branch in ("cmp", "slc", "win")))
    written = dict(zip(names, map(rows, returned)))
    written.update(_new_rows("k_cmp.out", k_rows, tensors[1], pages, tokens, options))
    written.update(_new_rows("v_cmp.out", v_rows, tensors[2], pages, tokens, options))
    return _whole(tensors, (None, firsts, counts, pages), longest, 0, phi_k, phi_v, options, written)


attention_step = _define(
    "attention_step", f"({_WHOLE_TENSOR_SCHEMA}, Tensor(a!) k_rows, Tensor(b!) v_rows, Tensor? firsts, Tensor? counts, "
    "Tensor? pages, SymInt longest, str phi_k, str phi_v, str options) -> (Tensor, Tensor)",
    _step_rooms, _step_structs, of="attention_forward")
