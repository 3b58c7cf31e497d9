"""Attention in half precision on a GPU, by the fused kernels of cuDNN, from NVIDIA's nvidia-cudnn-frontend.

Scores and probabilities stay in the registers of the processors. The backward computes the probabilities again, from
log Σ_s exp(z_hts), which the forward keeps.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import Counter
from typing import Any

import cupy
import numpy as np

from ..backend import Array, is_recording, kept
from ..ops.attention import check_attention
from ..ops.patterns import Both, Causal, Full, Padding, Pattern
from .cupy_code import alike, kernel

WIDEST = 128  # numbers in a head
LARGE = 1 << 24  # with so many scores cuDNN is asked for kernels in the first call, which takes a while
OFTEN = 24  # with fewer scores, after so many calls
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # the shape and the strides, in numbers, of an array
_lock = threading.Lock()  # a handle has one stream
_calls: Counter[tuple] = Counter()


@functools.cache
def library() -> Any:
    """The package cudnn, or None if it is not installed, or has no cuDNN."""
    try:
        import cudnn

        cudnn.backend_version()
    except Exception:  # not only ImportError
        return None
    return cudnn


@functools.cache
def _handle(device: int) -> Any:
    return library().create_handle()


def joined(pattern: Pattern | None) -> list[Pattern]:
    """The patterns that `&` has joined to this one; none for None."""
    if type(pattern) is Both:
        return joined(pattern.first) + joined(pattern.second)
    return [] if pattern is None else [pattern]


def fits(q: Array, k: Array, v: Array, pattern: Pattern | None = None) -> bool:
    """Whether cuDNN is to compute attention of these arrays: it knows `Full`, `Causal` and one `Padding`, joined."""
    if not (alike(q, k, v) and q.itemsize == 2 and q.size and k.size and library()):
        return False
    check_attention(q, k, v, pattern)
    kinds, (T, D) = [type(p) for p in joined(pattern)], q.shape[2:]
    return (
        T > 1  # in generation each length would need kernels of its own
        and D % 8 == 0
        and D <= WIDEST
        and {*kinds} <= {Full, Causal, Padding}
        and kinds.count(Padding) <= 1
        and (Causal not in kinds or T == k.shape[2])  # otherwise it would align the beginnings
        and all(readable(x) for x in (q, k, v))
        and is_worthwhile(q, k)
        and graphs_for(q, k, v, pattern) is not None
    )


def is_worthwhile(q: Array, k: Array) -> bool:
    """Whether there are many scores, or arrays of these shapes came often, or will come again in a recorded step.
    Counts the calls.
    """
    if q.size // q.shape[3] * k.shape[2] >= LARGE or is_recording():
        return True
    _calls[q.shape, k.shape] += 1
    return _calls[q.shape, k.shape] > OFTEN


def readable(x: Array) -> bool:
    """Whether the numbers of a head are neighbours, and start at a multiple of 16 bytes."""
    return x.strides[3] == x.itemsize and not any(n % 16 for n in (x.data.ptr, *x.strides[:3]))


def like_heads(x: Array) -> Array:
    """Room for an array like x (B, H, T, D), in memory (B, T, H, D), so that joining the heads moves nothing."""
    B, H, T, D = x.shape
    return cupy.empty((B, T, H, D), x.dtype).transpose(0, 2, 1, 3)


def attention(q: Array, k: Array, v: Array, pattern: Pattern | None = None) -> tuple[Array, tuple]:
    """As `ops.attention`. The cache has the returned y, so a caller must not change it before backward."""
    y, log_total = like_heads(q), cupy.empty((*q.shape[:3], 1), np.float32)
    lengths = next((p.lengths for p in joined(pattern) if isinstance(p, Padding)), None)
    if lengths is not None:
        lengths = lengths.clip(0, k.shape[2]).astype(np.int32)
    forward, backward = graphs_for(q, k, v, pattern)
    run(forward, (q, k, v, y, log_total), lengths)
    clear_empty(lengths, y)
    return y, (q, k, v, y, log_total, lengths, backward)


def attention_backward(dy: Array, cache: tuple) -> tuple[Array, Array, Array]:
    """(dq, dk, dv), as `ops.attention_backward`."""
    q, k, v, y, log_total, lengths, backward = cache
    if not readable(dy) or dy.strides != y.strides:
        dy, given = like_heads(q), dy
        dy[...] = given
    dq, dk, dv = (like_heads(x) for x in (q, k, v))
    run(backward, (q, k, v, y, dy, log_total, dq, dk, dv), lengths)
    clear_empty(lengths, dq, dk, dv)
    return dq, dk, dv


def clear_empty(lengths: Array | None, *arrays: Array) -> None:
    """Set the arrays, which are `like_heads`, to 0 for sequences of length 0: of these cuDNN makes NaN."""
    for x in arrays if lengths is not None else ():
        B, size = len(x), x.size // len(x)
        kernel("attention", "clear_empty", x.dtype.name, V=1, PER=1)((8, B), (256,), (x, lengths, np.int64(size)))


def run(graph: tuple[Any, int], arrays: tuple, lengths: Array | None) -> None:
    """Write the outputs of a graph; arrays: its inputs and outputs."""
    (made, size), device = graph, cupy.cuda.runtime.getDevice()
    passed = dict(enumerate((x.data.ptr for x in arrays), start=1))
    if lengths is not None:
        passed |= {100: all_of(len(lengths), arrays[0].shape[2], device).data.ptr, 101: lengths.data.ptr}
    workspace, handle = cupy.cuda.alloc(max(1, size)), _handle(device)
    with _lock:
        library().set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
        made.execute(passed, workspace.ptr, handle=handle)


@kept(16)
def all_of(B: int, T: int, device: int) -> Array:
    """(B, 1, 1, 1), every element T: the number of queries of each sequence."""
    return cupy.full((B, 1, 1, 1), T, np.int32)


def graphs_for(q: Array, k: Array, v: Array, pattern: Pattern | None) -> Any:
    """The graphs of both directions for arrays with these shapes and strides; None if cuDNN has none."""
    kinds = {type(p) for p in joined(pattern)}
    layouts = ((x.shape, tuple(n // x.itemsize for n in x.strides)) for x in (q, k, v))
    return graphs(*layouts, q.dtype.name, Causal in kinds, Padding in kinds, cupy.cuda.runtime.getDevice())


@kept(128)
def graphs(q: Layout, k: Layout, v: Layout, *options: Any) -> Any:
    """Ask cuDNN for its fastest kernels, which takes up to a second. None if it refuses: it does not know
    this GPU, or is too old.
    """

    def by_positions(x: Layout) -> Layout:  # that of `like_heads`
        _, H, T, D = x[0]
        return x[0], (T * H * D, D, H * D, 1)

    (B, H, T, _), gradients = q[0], tuple(map(by_positions, (q, k, v)))
    y, log_total = gradients[0], ((B, H, T, 1), (H * T, T, 1, 1))
    try:
        return graph((q, k, v), (y, log_total), *options), graph((q, k, v, y, y, log_total), gradients, *options)
    except MemoryError:
        raise
    except Exception as error:  # cudnn has its own kinds
        say(f"{type(error).__name__}: {error}".partition("\n")[0])
        return None


@functools.cache
def say(why: str) -> None:
    """Say on stderr, once, why cuDNN does not compute attention."""
    print(f"cuDNN refuses attention of some shape ({why}), which is computed by products instead", file=sys.stderr)


def graph(inputs: tuple, outputs: tuple, dtype: str, causal: bool, padded: bool, device: int) -> tuple[Any, int]:
    """One direction of attention, and the bytes of its workspace: from q, k, v to y and log_total; or from q, k, v, y,
    dy and log_total to dq, dk and dv. They are numbered in this order.
    """
    cudnn = library()
    half = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[dtype]
    single, whole = cudnn.data_type.FLOAT, cudnn.data_type.INT32
    made = cudnn.pygraph(
        io_data_type=half, intermediate_data_type=single, compute_data_type=single, handle=_handle(device)
    )

    def tensor(number: int, layout: Layout, kind: Any) -> Any:
        shape, strides = layout
        return made.tensor(name=f"x{number}", dim=[*shape], stride=[*strides], data_type=kind).set_uid(number)

    tensors = [tensor(i, layout, single if i == 6 else half) for i, layout in enumerate(inputs, start=1)]
    (B, _, _, D), is_forward = inputs[0][0], len(inputs) == 3
    options: dict[str, Any] = dict(attn_scale=1 / math.sqrt(D), use_causal_mask=causal)
    if padded:
        of_q, of_kv = (tensor(number, ((B, 1, 1, 1), (1, 1, 1, 1)), whole) for number in (100, 101))
        options |= dict(use_padding_mask=True, seq_len_q=of_q, seq_len_kv=of_kv)
    options |= dict(zip(("q", "k", "v", "o", "dO", "stats"), tensors, strict=False))
    results = made.sdpa(generate_stats=True, **options) if is_forward else made.sdpa_backward(**options)
    for number, (result, (shape, strides)) in enumerate(zip(results, outputs, strict=True), start=len(inputs) + 1):
        result.set_output(True).set_uid(number).set_dim([*shape]).set_stride([*strides])
    if is_forward:
        results[1].set_data_type(single)
    made.validate()
    made.build_operation_graph()
    made.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    made.check_support()
    made.build_plans()
    return made, made.get_workspace_size()
