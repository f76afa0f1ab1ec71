"""What PyTorch adds to a call: the same problem by nsa.h alone and through nsa.torch.

    python3 python/examples/overhead.py [--tokens 64] [--threads 2] [--seconds 20]

By nsa.h alone: structs, buffers and workspace are there already, and one C function is called. "fresh" is the same,
but for the output and the gradients, which are allocated in each call, gradients zeroed: as whoever keeps them must
do, in C too. Through nsa.torch: attention() is called with tensors, which allocates what it returns, and backward()
allocates gradients. They take turns; of each the least time counts, and the median stands behind it. What PyTorch
itself takes is in the lines "a Function": one that saves its inputs, and calls the C functions as "fresh" does, and no
more. On a busy machine differences say little; so the last lines have nsa.torch alone, with a C function in its place
that does nothing.
"""
import argparse
import ctypes
import statistics
import time

import torch

import nsa
import nsa.torch as nt
from nsa._library import library, memory
from nsa.torch import _call, _native


def problem(tokens, heads, kv_heads, dim):
    torch.manual_seed(0)
    q, gates = torch.randn(1, tokens, heads, dim), torch.randn(1, tokens, heads, 3)
    return [q, *(torch.randn(1, tokens, kv_heads, dim) for _ in range(6)), gates]


class Alone:
    """nsa_attention_forward and _backward on buffers that are kept."""

    def __init__(self, tensors):
        q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = tensors
        _, tokens, heads, dim = q.shape
        kv_heads = k_slc.shape[2]
        self.d = nsa.desc(1, tokens, heads, kv_heads, dim, threads=torch.get_num_threads())
        n = nsa.cmp_count(self.d, tokens)
        phis = [nsa.Compress(phi="mean", dim=dim, x=x, out=torch.empty(1, n, kv_heads, dim)) for x in (k_cmp, v_cmp)]
        outs = {name: torch.empty_like(q) for name in ("out", "out_cmp", "out_slc", "out_win")}
        lses = {name: torch.empty(1, tokens, heads) for name in ("lse_cmp", "lse_slc", "lse_win")}
        blocks = torch.empty(1, tokens, kv_heads, nsa.block_list_width(self.d), dtype=torch.int32)
        self.x = nsa.Attention(q=q, k_cmp=phis[0], v_cmp=phis[1], k_slc=k_slc, v_slc=v_slc, k_win=k_win, v_win=v_win,
                               gates=gates, blocks=blocks, **outs, **lses)
        g = self.gradients = [torch.zeros_like(t) for t in tensors]
        self.dx = nsa.Attention(
            q=g[0], k_cmp=nsa.Compress(phi="mean", dim=dim, x=g[1]), v_cmp=nsa.Compress(phi="mean", dim=dim, x=g[2]),
            k_slc=g[3], v_slc=g[4], k_win=g[5], v_win=g[6], gates=g[7], out=torch.ones_like(q))
        self.lib, x, dx, d = library(), ctypes.byref(self.x), ctypes.byref(self.dx), ctypes.byref(self.d)
        self.rooms = [memory(self.lib.nsa_attention_forward_workspace_size(x, d)),
                      memory(self.lib.nsa_attention_backward_workspace_size(dx, x, d))]
        rooms = [(ctypes.addressof(room), len(room)) for room in self.rooms]
        self.forward = lambda: self.lib.check(self.lib.nsa_attention_forward(x, d, *rooms[0]))
        self.backward = lambda: self.lib.check(self.lib.nsa_attention_backward(dx, x, d, *rooms[1]))

    def step(self):
        """Forward, then backward into gradients that are zeroed first."""
        self.forward()
        for gradient in self.gradients:
            gradient.zero_()
        self.backward()


class Fresh(Alone):
    """The same, but for the output and gradients: each call allocates them, and returns them."""

    def __init__(self, tensors):
        super().__init__(tensors)
        dx, self.tensors = self.dx, tensors
        views = self.x.out, dx.q, dx.k_cmp.x, dx.v_cmp.x, dx.k_slc, dx.v_slc, dx.k_win, dx.v_win, dx.gates
        self.addresses = [ctypes.c_void_p.from_address(ctypes.addressof(view)) for view in views]

    def output(self):
        out = torch.empty_like(self.tensors[0])
        self.addresses[0].value = out.data_ptr()
        self.forward()
        return out

    def gradients_of(self, tensors):
        gradients = [torch.zeros_like(t) for t in tensors]
        for address, gradient in zip(self.addresses[1:], gradients):
            address.value = gradient.data_ptr()
        self.backward()
        return gradients

    def step(self):
        return self.output(), self.gradients_of(self.tensors)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fresh, *tensors):
        ctx.fresh = fresh
        ctx.save_for_backward(*tensors)
        return fresh.output()

    @staticmethod
    def backward(ctx, dout):
        return None, *ctx.fresh.gradients_of(ctx.saved_tensors)


def in_turns(calls, seconds):
    """The least time of each, and the median, in microseconds."""
    for call in calls:
        call()
    times, end = [[] for _ in calls], time.perf_counter() + seconds
    while not times[0] or time.perf_counter() < end:
        for its, call in zip(times, calls):
            begin = time.perf_counter()
            call()
            its.append((time.perf_counter() - begin) * 1e6)
    return [(min(its), statistics.median(its)) for its in times]


def more(t, *others):
    return ", ".join(f"{100 * (t / other - 1):5.1f} %" for other in others)


def without_c(call, calls=10):
    """The least microseconds of a call whose C functions do nothing, and its plans are there already."""
    call()
    for plan in _native._plans.values():
        nothing = ctypes.CDLL(str(library().path)).nsa_python_layout  # 0: there is no such entry
        nothing.restype, nothing.argtypes = ctypes.c_int, plan.function.argtypes
        plan.call_instead(nothing)
    _call.forget()
    call()
    best = float("inf")
    for _ in range(2000):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - begin)
    _native._plans.clear()
    _call.forget()
    return best * 1e6 / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("tokens", 64), ("heads", 16), ("kv-heads", 1), ("dim", 64), ("threads", 2), ("seconds", 20)):
        parser.add_argument("--" + name, type=int, default=value)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    tensors = problem(a.tokens, a.heads, a.kv_heads, a.dim)
    learning = [t.clone().requires_grad_() for t in tensors]
    alone, fresh, ones = Alone(tensors), Fresh(tensors), torch.ones_like(tensors[0])

    def step(call):
        for t in learning:
            t.grad = None
        call(*learning).backward(ones)

    print(f"torch {torch.__version__}, {a.tokens} tokens, {a.heads}/{a.kv_heads}/{a.dim}, {a.threads} threads, "
          "microseconds")
    function = lambda *x: Function.apply(fresh, *x)  # noqa: E731
    forward = in_turns([alone.forward, fresh.output, lambda: nt.attention(*tensors), lambda: nt.attention(*learning),
                        lambda: function(*learning)], a.seconds / 2)
    both = in_turns([alone.step, fresh.step, lambda: step(nt.attention), lambda: step(function)], a.seconds / 2)
    print(f"{'':31}      nsa.h      fresh    PyTorch     more = of nsa.h, of fresh; by medians")
    for name, (c, f, *times), i in (("forward", forward, 0), ("forward, recorded for backward", forward, 1),
                                    ("ditto, a Function", forward, 2), ("forward and backward", both, 0),
                                    ("ditto, a Function", both, 1)):
        (c, c_median), (f, f_median), (t, median) = c, f, times[i]
        print(f"{name:31} {c:10.1f} {f:10.1f} {t:10.1f} {t - c:8.1f} = {more(t, c, f)}; "
              f"{median - c_median:8.1f} = {more(median, c_median, f_median)}")
    for name, call in (("forward", lambda: nt.attention(*tensors)),
                       ("forward, recorded for backward", lambda: nt.attention(*learning))):
        print(f"{name:32} nsa.torch without the C function {without_c(call):6.1f}")


if __name__ == "__main__":
    main()
