"""The smallest arguments with which a check still fails.

    x, gamma = shrink(lambda x, gamma: check_gradients(op, op_backward, x, gamma), (x, gamma))

Sizes are reduced first, then values. Hypothesis shrinks what its strategies draw, but it offers no public way to start
from a failure that is already known, and it does not know which axes arrays share.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..backend import array_module, to_cpu
from .contracts import CheckCall, GradientError, is_array

SECONDS = 2.0
_MANY_AXES = 6  # up to this many axes of one size, every combination of them is tried
_LONG = 16  # up to this length, the elements of an axis are dropped one by one
_MANY_VALUES = 8  # each of the first elements, up to this many, is tried with the value of every other

_NUMBERS = (0, 1, 2, 3, -1, -2, 0.5)
_DECIMALS = (0, 1, 2, 4)

_IN_SEARCH = ContextVar("searching", default=False)
Change = Callable[[np.ndarray], np.ndarray]


def shrink(check: Callable, args: Sequence[Any], seconds: float = SECONDS) -> tuple:
    """Smaller arguments for which `check(*args)` still raises GradientError for the same tensor, or the same reason.

    Axes of one size are shortened together, then in every combination. Values become zeros, ones, small integers, or
    numbers with few decimals. Arguments that are not arrays are kept, and so is the type of each array. Arguments that
    raise any other error are rejected. The search is deterministic, but stops after `seconds` of the thread's
    processor time, so that it does not depend on what else runs.

    Raises ValueError if the check passes.
    """
    return tuple(Search(check, args, seconds).args)


def shrink_call(call: CheckCall, error: GradientError, seconds: float = SECONDS) -> tuple[CheckCall, Search]:
    """A smaller call that fails in the same way as `error`, and its search. Options that do not matter are dropped."""
    check, args, options = call
    deadline = time.thread_time() + seconds

    def with_options(names: Iterable[str]) -> Callable:
        return lambda *xs: check(*xs[: len(args)], **dict(zip(names, xs[len(args) :], strict=True)))

    for name in call.options:
        fewer = {other: x for other, x in options.items() if other != name}
        if time.thread_time() < deadline and _fails(with_options(fewer), (*args, *fewer.values()), _reason(error)):
            options = fewer
    search = Search(with_options(options), (*args, *options.values()), deadline - time.thread_time())
    smaller = dict(zip(options, search.args[len(args) :], strict=True))
    return CheckCall(check, tuple(search.args[: len(args)]), smaller), search


def searching() -> bool:
    """Whether `shrink` or Hypothesis is running the check, so that nobody reads its message."""
    hypothesis = sys.modules.get("hypothesis")
    return _IN_SEARCH.get() or bool(hypothesis and hypothesis.currently_in_test_context())


class Search:
    """The search of `shrink`: `args` are the smallest arguments found, `error` is what the check raises for them.

    `finished` is False if the time ran out before everything was tried.
    """

    def __init__(self, check: Callable, args: Sequence[Any], seconds: float = SECONDS) -> None:
        self.check, self.args = check, list(args)
        self.deadline = time.thread_time() + seconds
        self.tries, self.finished = 0, True
        self.seen: set[tuple] = set()
        error = _failure(check, self.args)
        if error is None:
            raise ValueError("args: expected arguments for which the check fails, got a check that passes")
        self.error, self.reason = error, _reason(error)
        try:
            while self._shorten() | self._simplify():
                pass
        except TimeoutError:
            self.finished = False

    def _accept(self, changed: dict[int, np.ndarray]) -> bool:
        """Whether the check still fails with these arrays, by the number of their argument. If so, they are kept."""
        if time.thread_time() > self.deadline:
            raise TimeoutError
        args = [_as_kind_of(x, changed[i]) if i in changed else x for i, x in enumerate(self.args)]
        key = tuple((x.shape, x.tobytes()) for x in map(values, filter(is_array, args)))
        if key in self.seen:
            return False
        self.seen.add(key)
        self.tries += 1
        error = _fails(self.check, args, self.reason)
        if error is None:
            return False
        self.args, self.error = args, error
        return True

    def _arrays(self) -> dict[int, np.ndarray]:
        return {i: values(x) for i, x in enumerate(self.args) if is_array(x)}

    def _shorten(self) -> bool:
        """Shorten axes as far as possible. Returns whether any became shorter."""
        shorter = False
        for axes in _axes(self._arrays()):
            while self._shorten_together(axes):
                shorter = True
        return shorter

    def _shorten_together(self, axes: Sequence[tuple[int, int]]) -> bool:
        arrays = self._arrays()
        lengths = {arrays[i].shape[axis] for i, axis in axes}
        if len(lengths) > 1:
            return False  # one of them has become shorter since
        for kept in _selections(lengths.pop()):
            shorter: dict[int, np.ndarray] = {}
            for i, axis in axes:
                shorter[i] = np.take(shorter.get(i, arrays[i]), kept, axis)
            if self._accept(shorter):
                return True
        return False

    def _simplify(self) -> bool:
        """Make values simpler. Returns whether any became simpler."""
        simpler = False
        for i, start in self._arrays().items():
            for change in _changes(start):
                x = self._arrays()[i]
                candidate = change(x)
                if _complexity(candidate) < _complexity(x) and self._accept({i: candidate}):
                    simpler = True
        return simpler


def _failure(check: Callable, args: Sequence[Any]) -> GradientError | None:
    """The error that a check raises for copies of `args`. Warnings and what it prints are dropped."""
    copies = [_as_kind_of(x, values(x).copy()) if is_array(x) else x for x in args]
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    token = _IN_SEARCH.set(True)
    try:
        with warnings.catch_warnings(record=True), out, err:
            check(*copies)
    except GradientError as error:
        return error
    finally:
        _IN_SEARCH.reset(token)
    return None


def _fails(check: Callable, args: Sequence[Any], reason: str) -> GradientError | None:
    """The error that a check raises, if it is about `reason`. For a wrong gradient: if the same tensor is wrong."""
    try:
        error = _failure(check, args)
    except Exception:  # shapes that do not match, ids out of range, a kink: not the failure to be shrunk
        return None
    if error is None:
        return None
    tensor = re.search(r"wrong gradient at (.+):$", reason)
    others = re.search(r"\n  and others of (.+)", str(error.args[0]))
    alike = _reason(error) == reason or (tensor and others and f" {tensor[1]} (" in f" {others[1]}")
    return error if alike else None


def library(x: Any) -> str:
    """The name of the library of an array: "torch", "jax", "cupy", ..."""
    return type(x).__module__.partition(".")[0].removesuffix("lib")  # JAX's arrays are of jaxlib


def values(x: Any) -> np.ndarray:
    """An array of any library, as a NumPy array."""
    return x.detach().cpu().numpy() if library(x) == "torch" else to_cpu(x)


def _as_kind_of(x: Any, new: np.ndarray) -> Any:
    """An array with the values of `new`, of the library, device and type of `x`."""
    match library(x):
        case "torch":
            tensor = sys.modules["torch"].tensor(new, device=x.device, dtype=x.dtype)
            return tensor.requires_grad_(x.requires_grad)
        case "jax":
            return sys.modules["jax"].numpy.asarray(new, dtype=x.dtype)
    return array_module(x).asarray(new)


def _reason(error: GradientError) -> str:
    """What the message is about: its first line without indices, shapes and numbers."""
    line = str(error.args[0]).partition("\n")[0]
    line = re.sub(r" along a random direction| \(complex step\)", "", line)
    return re.sub(r"\[.*?\]|\(.*?\)|(?<![\w.])[-+]?\d[\d.e+-]*", "", line)


def _axes(arrays: dict[int, np.ndarray]) -> Iterator[tuple[tuple[int, int], ...]]:
    """The axes to shorten at once, as (argument, axis): all of one size, then each of them, then two of them, ..."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for i, x in arrays.items():
        for axis, n in enumerate(x.shape):
            by_size.setdefault(n, []).append((i, axis))
    groups = [axes for n, axes in by_size.items() if n > 1]
    yield from map(tuple, groups)
    for count in range(1, _MANY_AXES):
        for axes in groups:
            if count < len(axes) and (count == 1 or len(axes) <= _MANY_AXES):
                yield from itertools.combinations(axes, count)


def _selections(n: int) -> Iterator[list[int]]:
    """Which indices of an axis of length n to keep, the fewest first."""
    for k in sorted({*(2**i for i in range(n.bit_length())), *(3 * 2**i for i in range(n.bit_length())), n - 1}):
        if k < n:
            yield list(range(k))
            yield list(range(n - k, n))
    if n <= _LONG:
        for i in range(n):
            yield [i]
            yield [j for j in range(n) if j != i]


def _changes(x: np.ndarray) -> Iterator[Change]:
    """What may make the values of `x` simpler, the boldest first. Each is applied to what the ones before it left."""
    yield lambda x: np.zeros_like(x)
    yield lambda x: np.ones_like(x)
    if x.dtype.kind == "f":
        yield np.sign
        for decimals in (0, 1):
            yield functools.partial(_scaled, decimals=decimals)
        yield from (functools.partial(_rounded, decimals=decimals) for decimals in _DECIMALS)
    elif x.dtype.kind in "iu":  # 0, 1, 2, ... in their order: equal ids stay equal
        yield lambda x: np.unique(x, return_inverse=True)[1].reshape(x.shape).astype(x.dtype)
    length = x.size // 2
    while length:
        for start in range(0, x.size, length):
            part = slice(start, start + length)
            yield from (functools.partial(_replaced, part=part, number=number) for number in (0, 1))
        length //= 2
    for place in range(x.size):
        part = slice(place, place + 1)
        yield from (functools.partial(_replaced, part=part, number=number) for number in _NUMBERS)
        if x.dtype.kind == "f":
            yield from (functools.partial(_rounded, decimals=decimals, part=part) for decimals in _DECIMALS)
    for one, other in itertools.permutations(range(min(x.size, _MANY_VALUES)), 2):
        yield functools.partial(_merged, one=one, other=other)


def _scaled(x: np.ndarray, decimals: int) -> np.ndarray:
    """`x` divided by its largest value, with few decimals."""
    return _rounded(x / (np.abs(x).max(initial=0) or 1), decimals)


def _rounded(x: np.ndarray, decimals: int, part: slice = slice(None)) -> np.ndarray:
    """`x` with fewer decimals at the flat indices `part`."""
    return _replaced(x, part, np.round(x.reshape(-1)[part], decimals) + 0.0)  # + 0.0: no −0


def _replaced(x: np.ndarray, part: slice, number: Any) -> np.ndarray:
    """A copy of `x` with `number` at the flat indices `part`, or `x` itself if its type cannot hold that number."""
    twin = x.copy()
    twin.reshape(-1)[part] = np.asarray(number).astype(x.dtype)
    return twin if np.all(twin.reshape(-1)[part] == number) or x.dtype.kind == "f" else x


def _merged(x: np.ndarray, one: int, other: int) -> np.ndarray:
    """`x` with the value at the flat index `other` wherever it has the value at `one`."""
    return np.where(x == x.flat[one], x.flat[other], x)


def _complexity(x: np.ndarray) -> float:
    """How long the values are to read, with a point for every distinct one."""
    distinct, counts = np.unique(x, return_counts=True)
    return len(distinct) + sum(count * _length(float(v)) for v, count in zip(distinct, counts, strict=True))


def _length(number: float) -> float:
    """0 for zero, about the number itself for a small integer, and more for each decimal; a sign is half a point."""
    sign = 0.5 * (number < 0)
    if abs(number) < 10 and number == int(number):
        return abs(number) + sign
    return 10 + len(f"{abs(number):.12g}") + sign
