"""Attention in half precision on a GPU, by the fused kernels of cuDNN, from NVIDIA's nvidia-cudnn-frontend.

Scores and probabilities stay in the registers of the processors. For the mathematics see `cupy_attention`.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

import cupy
import numpy as np

from ..backend import Array, is_recording, kept
from ..ops.checks import expect_like
from ..ops.patterns import Both, Causal, Full, Padding, Pattern
from .cupy_code import kernel

WIDEST = 128  # numbers in a head
LARGE = 1 << 24  # with so many scores cuDNN is asked for kernels in the first call, which takes a while
OFTEN = 24  # with fewer scores, after so many calls
_lock = threading.Lock()  # a handle has one stream
_calls: Counter[tuple] = Counter()


class FusedAttentionCache(NamedTuple):
    """What backward needs. This includes the returned y, so a caller must not change y before backward."""

    q: Array  # (B, H, T, D)
    k: Array  # (B, G, S, D)
    v: Array  # (B, G, S, D)
    y: Array  # (B, H, T, D)
    log_total: Array  # (B, H, T, 1): log Σ_s exp(z_ts)
    lengths: Array | None  # (B,), of the keys
    causal: bool


class Graph(NamedTuple):
    """What cuDNN runs: its inputs and outputs are numbered in the order in which they are passed."""

    graph: Any
    workspace: int  # bytes


@functools.cache
def library() -> Any:
    """The package cudnn, or None if it is not installed, or finds no cuDNN."""
    try:
        import cudnn

        cudnn.backend_version()
    except Exception:  # not only ImportError
        return None
    return cudnn


@functools.cache
def _handle(device: int) -> Any:
    return library().create_handle()


def kind(pattern: Pattern | None) -> tuple[bool, Array | None] | None:
    """Whether a pattern is causal, and its lengths, if it is a combination of `Full`, `Causal` and at most one
    `Padding`; None for any other.
    """
    if pattern is None or type(pattern) is Full:
        return False, None
    if type(pattern) is Causal:
        return True, None
    if type(pattern) is Padding:
        return False, pattern.lengths
    if type(pattern) is Both:
        first, second = kind(pattern.first), kind(pattern.second)
        if first and second and (first[1] is None or second[1] is None):
            return first[0] or second[0], second[1] if first[1] is None else first[1]
    return None


def fits(q: Array, k: Array, v: Array, pattern: Pattern | None) -> bool:
    """Whether cuDNN is to compute attention of these arrays."""
    D, found = q.shape[3], kind(pattern)
    return (
        q.itemsize == 2
        and q.shape[2] > 1  # in generation each length would need kernels of its own
        and D % 8 == 0
        and D <= WIDEST
        and found is not None
        and (not found[0] or q.shape[2] == k.shape[2])  # with T ≠ S it would align the beginnings
        and library() is not None
        and all(readable(x) for x in (q, k, v))
        and is_worthwhile(q, k)
        and graphs_for(q, k, v, found) is not None
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


class Layout(NamedTuple):
    """The shape and the strides, in numbers, of an array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(x: Array) -> Layout:
        return Layout(x.shape, tuple(n // x.itemsize for n in x.strides))


def like_heads(x: Array) -> Array:
    """Room for an array like x (B, H, T, D), in memory (B, T, H, D), so that joining the heads moves nothing."""
    B, H, T, D = x.shape
    return cupy.empty((B, T, H, D), x.dtype).transpose(0, 2, 1, 3)


def attention(q: Array, k: Array, v: Array, pattern: Pattern | None) -> tuple[Array, FusedAttentionCache]:
    """As `ops.attention`, for arguments that `fits`."""
    causal, lengths = kind(pattern)  # type: ignore[misc]  # it fits
    y, log_total = like_heads(q), cupy.empty((*q.shape[:3], 1), np.float32)
    if lengths is not None:
        lengths = lengths.clip(0, k.shape[2]).astype(np.int32)
    forward, _ = graphs_for(q, k, v, (causal, lengths))  # type: ignore[misc]
    run(forward, (q, k, v, y, log_total), lengths)
    clear_empty(lengths, y)
    return y, FusedAttentionCache(q, k, v, y, log_total, lengths, causal)


def attention_backward(dy: Array, cache: FusedAttentionCache) -> tuple[Array, Array, Array]:
    """(dq, dk, dv), as `ops.attention_backward`."""
    q, k, v, y, log_total, lengths, causal = cache
    expect_like("dy", dy, y.shape)
    dy = dy.astype(q.dtype, copy=False)
    if not readable(dy) or dy.strides != y.strides:
        dy, given = like_heads(q), dy
        dy[...] = given
    dq, dk, dv = (like_heads(x) for x in (q, k, v))
    _, backward = graphs_for(q, k, v, (causal, lengths))  # type: ignore[misc]
    run(backward, (q, k, v, y, dy, log_total, dq, dk, dv), lengths)
    clear_empty(lengths, dq, dk, dv)
    return dq, dk, dv


def clear_empty(lengths: Array | None, *arrays: Array) -> None:
    """Set the arrays, which are `like_heads`, to 0 for sequences of length 0: of these cuDNN makes NaN."""
    for x in arrays if lengths is not None else ():
        B, size = len(x), x.size // len(x)
        kernel("attention", "clear_empty", x.dtype.name, V=1, PER=1)((8, B), (256,), (x, lengths, np.int64(size)))


def graphs_for(q: Array, k: Array, v: Array, found: tuple[bool, Array | None]) -> tuple[Graph, Graph] | None:
    """The graphs of both directions for arrays with these shapes and strides; None if cuDNN has none."""
    causal, lengths = found
    of_q, of_k, of_v = (Layout.of(x) for x in (q, k, v))
    device = cupy.cuda.runtime.getDevice()
    return graphs(q.dtype.name, of_q, of_k, of_v, causal, lengths is not None, device)


def run(made: Graph, arrays: tuple, lengths: Array | None) -> None:
    """Write the outputs of a graph; arrays: its inputs and outputs."""
    cudnn, device = library(), cupy.cuda.runtime.getDevice()
    passed = dict(enumerate((x.data.ptr for x in arrays), start=1))
    if lengths is not None:
        B, _, T, _ = arrays[0].shape
        passed |= {100: all_of(B, T, device).data.ptr, 101: lengths.data.ptr}
    workspace, handle = cupy.cuda.alloc(max(1, made.workspace)), _handle(device)
    with _lock:
        cudnn.set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
        made.graph.execute(passed, workspace.ptr, handle=handle)


@kept(16)
def all_of(B: int, T: int, device: int) -> Array:
    """(B, 1, 1, 1), every element T: the number of queries of each sequence."""
    return cupy.full((B, 1, 1, 1), T, np.int32)


@kept(128)
def graphs(
    dtype: str, q: Layout, k: Layout, v: Layout, causal: bool, padded: bool, device: int
) -> tuple[Graph, Graph] | None:
    """Ask cuDNN for its fastest kernels, which takes up to a second. None if it refuses: it does not know
    this GPU, or is too old.
    """

    def by_positions(x: Layout) -> Layout:
        """The layout of `like_heads`."""
        _, H, T, D = x.shape
        return Layout(x.shape, (T * H * D, D, H * D, 1))

    B, H, T, _ = q.shape
    y, log_total = by_positions(q), Layout((B, H, T, 1), (H * T, T, 1, 1))
    options = dtype, causal, padded, device
    try:
        return (
            graph("forward", (q, k, v, y, log_total), *options),
            graph("backward", (q, k, v, y, y, log_total, *map(by_positions, (q, k, v))), *options),
        )
    except MemoryError:
        raise
    except Exception as error:  # cudnn has its own kinds
        say(f"{type(error).__name__}: {error}".partition("\n")[0])
        return None


@functools.cache
def say(why: str) -> None:
    """Say on stderr, once, why cuDNN does not compute attention."""
    print(f"cuDNN refuses attention of some shape ({why}), which is computed by products instead", file=sys.stderr)


def graph(direction: str, layouts: tuple, dtype: str, causal: bool, padded: bool, device: int) -> Graph:
    """One direction of attention: q, k, v -> y, log_total; or q, k, v, y, dy, log_total -> dq, dk, dv."""
    cudnn = library()
    half = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[dtype]
    made = cudnn.pygraph(
        io_data_type=half,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(device),
    )

    def tensor(number: int, layout: Layout, kind: Any = half) -> Any:
        found = made.tensor(name=f"x{number}", dim=[*layout.shape], stride=[*layout.strides], data_type=kind)
        return found.set_uid(number)

    count = 3 if direction == "forward" else 6
    inputs = [tensor(i, layout) for i, layout in enumerate(layouts[:count], start=1)]
    if direction == "backward":
        inputs[5].set_data_type(cudnn.data_type.FLOAT)
    B, _, _, D = layouts[0].shape
    options: dict[str, Any] = dict(attn_scale=1 / math.sqrt(D), use_causal_mask=causal)
    if padded:
        one_each = Layout((B, 1, 1, 1), (1, 1, 1, 1))
        numbers = [tensor(n, one_each, cudnn.data_type.INT32) for n in (100, 101)]
        options |= dict(use_padding_mask=True, seq_len_q=numbers[0], seq_len_kv=numbers[1])
    if direction == "forward":
        q, k, v = inputs
        outputs = made.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
    else:
        q, k, v, y, dy, log_total = inputs
        outputs = made.sdpa_backward(q=q, k=k, v=v, o=y, dO=dy, stats=log_total, **options)
    for number, (output, layout) in enumerate(zip(outputs, layouts[count:], strict=True), start=count + 1):
        output.set_output(True).set_uid(number).set_dim([*layout.shape]).set_stride([*layout.strides])
    if direction == "forward":
        outputs[1].set_data_type(cudnn.data_type.FLOAT)
    made.validate()
    made.build_operation_graph()
    made.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    made.check_support()
    made.build_plans()
    return Graph(made, made.get_workspace_size())
