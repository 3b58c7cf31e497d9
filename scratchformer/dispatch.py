"""One name, several implementations: a reference operation and its fast twins.

An operation is a pair of functions. Decorated, their names dispatch:

    @operation
    def relu(x): ...                      # the reference, for every array library

    @backward
    def relu_backward(dy, cache): ...

    ops.relu.add_twin(np.ndarray, fits, forward, relu_backward)             # in kernels/: for NumPy arrays
    ops.relu.add_twin(np.ndarray, fits, forward, relu_backward, fast=True)  # one that runs inside `fast()`

`fits` and `forward` take the arguments of the operation. The twin runs if `fits` returns true; otherwise the next one
is asked, and in the end the reference runs. What `forward` returns as the cache is wrapped in a `TwinCache`, which
remembers the backward. So the cache of a fused forward never reaches a reference backward, and the backward of a twin
gets a dy of the shape and type of y.

The twin is chosen by the type of the first array. Inside `reference_only()` every forward call runs the reference. Fast
twins need libraries that take time to import, and compile themselves when they are first called. So they run only
inside `fast()`, which training and generation enter.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

__all__ = ["Operation", "backward", "fast", "operation", "reference_only"]

Arguments = ParamSpec("Arguments")
Function = TypeVar("Function", bound=Callable)


class Twin(NamedTuple):
    """A fast implementation of an operation, see the heading of this module."""

    operation: str  # the name of the reference
    fits: Callable[..., bool]
    forward: Callable
    backward: Callable | None  # None if the operation has no backward: then `forward` returns just the result


class TwinCache(NamedTuple):
    """The cache of a twin, and what its backward needs to know of y."""

    twin: Twin
    kept: Any
    shape: tuple[int, ...]
    dtype: np.dtype


NUMBERS = ("f", "b", "i", "u", "c", "V")  # values of NumPy's `dtype.kind`; "V" is bfloat16
_reference_depth = 0  # the number of open `reference_only()` blocks in the whole process
_fast_depth = 0  # the same for `fast()`, which threads enter
_entering = threading.RLock()
_loaders: list[Callable[[], object]] = []  # these import the modules that register fast twins, see `when_fast`


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside this block every forward call runs the reference operation, never a twin.

    It applies to the whole process, so that it covers the threads of a training loop with replicas. A cache that a twin
    made before the block still goes to that twin's backward.
    """
    global _reference_depth
    _reference_depth += 1
    try:
        yield
    finally:
        _reference_depth -= 1


@contextmanager
def fast() -> Iterator[None]:
    """Inside this block forward calls run the twins of the extra `fast`, as far as it is installed.

    `Replicas` and the generators enter it by themselves; enter it around a training loop of your own. It applies to the
    whole process, and `reference_only()` has precedence. The first block imports Numba and MKL, and the first calls in
    it compile the twins, for which Numba keeps a cache on disk. Results differ from those outside in the last bits.
    SCRATCHFORMER_FAST=0 or NUMBA_DISABLE_JIT=1 in the environment makes the block do nothing.
    """
    global _fast_depth
    with _entering:
        while _loaders:
            _loaders.pop()()
        _fast_depth += 1
    try:
        yield
    finally:
        with _entering:
            _fast_depth -= 1


def is_fast() -> bool:
    """Whether fast twins run: inside `fast()`, and not inside `reference_only()`."""
    return _fast_depth > 0 and not _reference_depth


def when_fast(load: Callable[[], object]) -> None:
    """Call `load` when the first block of `fast()` is entered."""
    _loaders.append(load)


def turned_off() -> str:
    """The setting in the environment that keeps `fast()` from doing anything, or ""."""
    if os.environ.get("SCRATCHFORMER_FAST") == "0":
        return "SCRATCHFORMER_FAST=0"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return f"NUMBA_DISABLE_JIT={os.environ['NUMBA_DISABLE_JIT']}"
    return ""


class Operation(Protocol[Arguments]):
    """A function that dispatches, as a type checker sees it. The cache is Any: a twin has a cache type of its own."""

    __name__: str
    reference: Callable[Arguments, Any]
    twins: dict[type, Callable]  # by the type of the array, or of the cache
    fast_twins: dict[type, Callable]  # those that run inside `fast()`

    def twin(self, kind: type, fast: bool = False) -> Callable[[Function], Function]:
        """Register the decorated function for calls whose first argument (a backward: whose cache) is a `kind`.

        fast: only inside `fast()`, where it goes before a twin without. (The cache already tells a backward.)
        """

    def add_twin(
        self, kind: type, fits: Callable, forward: Callable, backward: Callable | None = None, fast: bool = False
    ) -> None:
        """Register a twin for calls whose first argument is a `kind`: see the heading of this module."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Any: ...


def operation(reference: Callable[Arguments, Any]) -> Operation[Arguments]:
    """Make `reference` an operation, for which twins can be registered with `.twin(array_type)`."""
    twins: dict[type, Callable] = {}
    fast_twins: dict[type, Callable] = {}
    chosen: tuple[dict[type, list[Twin]], ...] = {}, {}  # outside `fast()`, and inside: those that are asked, in order
    first, *_ = inspect.signature(reference).parameters

    def add_twin(
        kind: type, fits: Callable, forward: Callable, backward: Callable | None = None, fast: bool = False
    ) -> None:
        twin = Twin(reference.__name__, fits, forward, backward)
        chosen[True].setdefault(kind, []).insert(0 if fast else len(chosen[True].get(kind, ())), twin)
        if not fast:
            chosen[False].setdefault(kind, []).append(twin)

    @functools.wraps(reference)
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(first)
        if not _reference_depth:
            for each in chosen[bool(_fast_depth)].get(type(x), ()):
                if each.fits(*args, **kwargs):
                    return results_of(each, *args, **kwargs)
        twin = None
        if (twins or fast_twins) and not _reference_depth:
            twin = (fast_twins.get(type(x)) if _fast_depth else None) or twins.get(type(x))
        return (twin or reference)(*args, **kwargs)

    return _with_twins(forward, reference, twins, fast_twins, add_twin=add_twin, chosen=chosen)


def backward(reference: Callable) -> Operation[...]:
    """Make `reference` the backward of an operation, for which twins can be registered with `.twin(CacheType)`.

    If the cache is annotated as a NamedTuple or an Array, a cache of another type raises TypeError.
    """
    twins: dict[type, Callable] = {}
    signature = inspect.signature(reference)
    names = tuple(signature.parameters)
    second = names[1]
    expected = cache_type(reference, second)

    @functools.wraps(reference)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        cache = args[1] if len(args) > 1 else kwargs.get(second)
        if type(cache) is TwinCache and f"{cache.twin.operation}_backward" == reference.__name__:
            given = signature.bind(*args, **kwargs).arguments if kwargs else dict(zip(names, args, strict=True))
            return gradients_of(names[0], given.pop(names[0]), given.pop(second), **given)
        twin = twins.get(type(cache))
        if twin is None:
            expect_cache(second, cache, expected)
            twin = reference
        return twin(*args, **kwargs)

    return _with_twins(dispatched, reference, twins, twins)


def results_of(twin: Twin, *args: Any, **kwargs: Any) -> Any:
    """What a twin gives: (y, cache), or the result of an operation without backward."""
    if twin.backward is None:
        return twin.forward(*args, **kwargs)
    y, kept = twin.forward(*args, **kwargs)
    return y, TwinCache(twin, kept, y.shape, y.dtype)


def gradients_of(name: str, dy: Any, cache: TwinCache, **kwargs: Any) -> Any:
    """What the backward of a twin gives for dy, which is called `name`. A dy of another type than y is converted first,
    and the gradients are then converted to the type of dy.
    """
    twin, kept, shape, dtype = cache
    given = getattr(dy, "dtype", None)
    if given == dtype and dy.shape == shape and not isinstance(dy, np.ma.MaskedArray):
        return twin.backward(dy, kept, **kwargs)  # type: ignore[misc]
    from .ops.checks import expect_gradient  # not above: the modules of operations import this one

    expect_gradient(name, dy, shape)
    if not shape:
        return twin.backward(dy, kept, **kwargs)  # type: ignore[misc]
    gradients = twin.backward(dy.astype(dtype), kept, **kwargs)  # type: ignore[misc]
    if isinstance(gradients, tuple):
        return tuple(each.astype(given, copy=False) for each in gradients)
    return gradients.astype(given, copy=False)


def cache_type(backward: Callable, argument: str) -> type | None:
    """The type of the cache that `backward` takes, from its annotation: a NamedTuple, a slice, or ndarray for an Array
    of any library. None for any other annotation.
    """
    annotation = inspect.signature(backward).parameters[argument].annotation
    if annotation == "Array":
        return np.ndarray
    if isinstance(annotation, str):
        annotation = getattr(backward, "__globals__", {}).get(annotation, {"slice": slice}.get(annotation))
    return annotation if annotation is slice or hasattr(annotation, "_fields") else None


def expect_cache(name: str, cache: Any, expected: type | None) -> None:
    """Raise TypeError, naming the cache `name`, unless it is of the type that `cache_type` found. An array must be of
    numbers.
    """
    if expected is None:
        return
    if expected is np.ndarray:
        dtype: Any = getattr(cache, "dtype", None)
        fits = getattr(dtype, "kind", None) in NUMBERS and dtype.names is None
        fits = fits and not isinstance(cache, np.ma.MaskedArray)
    else:
        fits = isinstance(cache, expected)
    if fits:
        return
    kind = "array" if expected is np.ndarray else expected.__name__
    found = "None" if cache is None else type(cache).__name__
    raise TypeError(f"{name}: expected the {kind} that forward returned, got {found}")


def _with_twins(dispatched: Callable, reference: Callable, twins: dict, fast_twins: dict, **others: Any) -> Any:
    def twin(kind: type, fast: bool = False) -> Callable[[Function], Function]:
        return functools.partial(_register, fast_twins if fast else twins, kind)

    vars(dispatched).update(reference=reference, twins=twins, fast_twins=fast_twins, twin=twin, **others)
    return dispatched


def _register(twins: dict[type, Callable], kind: type, function: Function) -> Function:
    if kind in twins:
        raise ValueError(f"{function.__name__}: there is already a twin for {kind.__name__}")
    twins[kind] = function
    return function
