"""What an operation keeps for its backward, and what its fast twin gains, measured while the site is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
from tracing import one_thread

from scratchformer import reference_only
from scratchformer.catalogue import OPERATIONS, Draw

SIZES = dict(
    B=2, T=256, S=256, C=256, H=8, G=8, D=32, I=256, O=1024, F=1024, V=1000, K=16,
)  # fmt: skip
TIMES = 4  # the fastest of so many is taken


class SizedDraw(Draw):
    """Draws with the sizes above, in float32, and remembers the letters that were used."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.used = dict(SIZES), {}

    def shape(self, letters: str) -> tuple[int, ...]:
        self.used |= {letter: getattr(self, letter) for letter in letters.split()}
        return super().shape(letters)

    def __call__(self, letters: str) -> np.ndarray:
        return super().__call__(letters).astype(np.float32)


class KeptArray(NamedTuple):
    """An array of a cache. origin: the argument that it is, or "y" for the result, or "" for one made for it."""

    name: str
    array: np.ndarray
    origin: str


class Cost(NamedTuple):
    seconds: float  # of one core's time, for forward and backward
    kept: list[KeptArray]
    results: list[np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(kept.array.nbytes for kept in self.kept)


class TwinComparison(NamedTuple):
    sizes: dict[str, int]
    reference: Cost
    twin: Cost | None

    @property
    def difference(self) -> float:
        """The largest difference between the two, relative to the largest number of its array."""
        assert self.twin is not None
        pairs = zip(self.reference.results, self.twin.results, strict=True)
        return max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30)) for a, b in pairs)


def compare(name: str) -> TwinComparison:
    """Run the first case of an operation with the reference, and with its twin if there is one."""
    draw = SizedDraw()
    case = OPERATIONS[name](draw)
    arguments = inspect.signature(case.op).bind(*case.args).arguments
    forward = partial(case.op, *case.args, **case.options)
    both = [reference_only, nullcontext] if getattr(case.op, "twins", None) else [reference_only]
    with one_thread():
        times = [[timed(way, forward, case.op_backward) for way in both] for _ in range(TIMES)]  # in turns
        measured = [
            measure(way, forward, case.op_backward, arguments, min(seconds))
            for way, seconds in zip(both, zip(*times, strict=True), strict=True)
        ]
    return TwinComparison(draw.used, measured[0], measured[1] if len(measured) > 1 else None)


def measure(way: Callable, forward: Callable, op_backward: Callable, arguments: dict[str, Any], seconds: float) -> Cost:
    with way():
        y, cache = forward()
        gradients = op_backward(upstream(y), cache)
    results = [y, *(gradients if isinstance(gradients, tuple) else [gradients])]
    kept = [KeptArray(name, array, origin(array, arguments, y)) for name, array in arrays(cache)]
    return Cost(seconds, kept, [np.asarray(result) for result in results if result is not None])


def upstream(y: Any) -> np.ndarray:
    """The gradient that the backward gets."""
    return np.asarray(np.random.default_rng(0).normal(size=np.shape(y)), np.float32)


def timed(way: Callable, forward: Callable, op_backward: Callable) -> float:
    """The time that this thread computes, whatever else the machine does."""
    with way():
        dy = upstream(forward()[0])
        start = thread_time()
        op_backward(dy, forward()[1])
        return thread_time() - start


def arrays(cache: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Every array of a cache, with the names of its fields."""
    if isinstance(cache, np.ndarray):
        yield name, cache
    elif isinstance(cache, tuple):
        fields = getattr(cache, "_fields", map(str, range(len(cache))))
        for field, value in zip(fields, cache, strict=True):
            yield from arrays(value, f"{name}.{field}" if name else field)


def origin(array: np.ndarray, arguments: dict[str, Any], y: Any) -> str:
    known = {**arguments, "y": y}
    for name, other in known.items():
        if isinstance(other, np.ndarray) and np.may_share_memory(array, other):
            return name
    return ""
