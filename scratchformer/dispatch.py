"""One name, several implementations: a reference operation and its fast twins.

An operation is a pair of functions. Decorated, their names dispatch:

    @operation
    def relu(x): ...                      # the reference, for every array library

    @backward
    def relu_backward(dy, cache): ...

    ops.relu.add_twin(np.ndarray, fits, forward, relu_backward)             # in kernels/: for NumPy arrays
    ops.relu.add_twin(np.ndarray, fits, forward, relu_backward, fast=True)  # one that runs inside `fast()`

`fits` and `forward` take the arguments of the operation. The twin runs if `fits` returns true; otherwise the next twin
is tried. If none fits, the reference runs. What `forward` returns as the cache is wrapped in a `TwinCache`, which
remembers the backward. So the cache of a twin never reaches a reference backward, and the backward of a twin gets a dy
of the shape and type of y.

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
from typing import Any, NamedTuple, ParamSpec, Protocol

import numpy as np

from .backend import library_of
from .checks import expect_gradient

__all__ = ["Operation", "backward", "fast", "operation", "reference_only"]

Arguments = ParamSpec("Arguments")


class Twin(NamedTuple):
    """A fast implementation of an operation, see the heading of this module."""

    operation: str  # the name of the reference
    fits: Callable[..., bool]
    forward: Callable
    backward: Any  # a function; None if the operation has no backward: then `forward` returns just the result
    bytes: int | None = None  # of a number of the first argument, if the twin is for such arrays alone
    adds: bool = False  # whether the backward takes `into` and `plus`, see `Operation.add_twin`


class TwinCache(NamedTuple):
    """The cache of a twin, and what its backward needs to know of y."""

    twin: Twin
    kept: Any
    shape: tuple[int, ...]
    dtype: np.dtype


NUMBERS = ("f", "b", "i", "u", "c", "V")  # values of NumPy's `dtype.kind`; "V" is bfloat16
_reference_depth = 0  # the number of open `reference_only()` blocks in the whole process
_fast_depth = 0  # the same for `fast()`, which threads enter
_entering = threading.RLock()  # held while these are changed: without the interpreter lock, += may lose a change
_loaders: list[Callable[[], object]] = []  # these import the modules that register fast twins, see `when_fast`


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside this block every forward call runs the reference operation, never a twin.

    It applies to the whole process, so that it covers the threads of a training loop with replicas. A cache that a twin
    made before the block still goes to that twin's backward.
    """
    global _reference_depth
    with _entering:
        _reference_depth += 1
    try:
        yield
    finally:
        with _entering:
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


def has_twin(op: Operation, *args: Any) -> bool:
    """Whether a twin with `fits` would run with these arguments, and not the reference."""
    twins = () if _reference_depth else op.chosen[bool(_fast_depth)].get(type(args[0]), ())
    kind = getattr(args[0], "dtype", None)
    return any(twin.bytes in (None, kind and kind.itemsize) and twin.fits(*args) for twin in twins)


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
    """A function that dispatches, as a type checker sees it. The cache is Any: that of a twin is a `TwinCache`."""

    __name__: str
    reference: Callable[Arguments, Any]
    given: Callable | None  # see `operation`
    gives: tuple[str, ...]
    chosen: tuple[dict[type, list[Twin]], dict[type, list[Twin]]]  # outside `fast()`, and inside: see `add_twin`

    def add_twin(
        self,
        kind: type,
        fits: Callable,
        forward: Callable,
        backward: Callable | None = None,
        fast: bool = False,
        bytes: int | None = None,
        adds: bool = False,
    ) -> None:
        """Register a twin for calls whose first argument is a `kind`: see the heading of this module.

        fast: the twin runs only inside `fast()`, where it is tried before the others. bytes: of a number of the first
        argument, an array; others are then not asked about. adds: the backward, `backward(dy, cache, into=, plus=)`,
        adds its gradients but the first, dx, to the arrays `into`, which it returns in their place, and the array
        `plus` to dx: see `nn.layer.add_gradients`.
        """

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Any: ...


def operation(reference: Any = None, given: Callable | None = None, gives: tuple[str, ...] = ()) -> Any:
    """Make `reference` an operation, which can have twins.

    given: a function of the same arguments that checks them. It may return a dict with what the equations take as given
    besides the arguments, by name. The reference calls it too. gives: those names in the dict that are not fields of
    the cache, or that the equations also define. `@operation(given=check)` is a decorator.
    """
    if reference is None:
        return functools.partial(operation, given=given, gives=gives)
    chosen: tuple[dict[type, list[Twin]], dict[type, list[Twin]]] = {}, {}
    signature = inspect.signature(reference)
    first, *_ = signature.parameters

    def add_twin(
        kind: type,
        fits: Callable,
        forward: Callable,
        backward: Callable | None = None,
        fast: bool = False,
        bytes: int | None = None,
        adds: bool = False,
    ) -> None:
        twin = Twin(reference.__name__, fits, forward, backward, bytes, adds)
        chosen[True].setdefault(kind, []).insert(0 if fast else len(chosen[True].get(kind, ())), twin)
        if not fast:
            chosen[False].setdefault(kind, []).append(twin)

    @functools.wraps(reference)
    def forward(*args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else kwargs.get(first)
        if not _reference_depth:
            for each in chosen[_fast_depth > 0].get(type(x), ()):
                if each.bytes is not None and x.dtype.itemsize != each.bytes:
                    continue
                try:
                    fits = each.fits(*args, **kwargs)
                except TypeError:
                    signature.bind(*args, **kwargs)  # raises if these are not the arguments of the operation
                    raise
                if not fits:
                    continue
                results = each.forward(*args, **kwargs)
                if each.backward is None:
                    return results
                y, kept = results
                return y, TwinCache(each, kept, y.shape, y.dtype)
        return reference(*args, **kwargs)

    vars(forward).update(reference=reference, add_twin=add_twin, chosen=chosen, given=given, gives=gives)
    return forward


def backward(reference: Callable) -> Operation[...]:
    """Make `reference` the backward of an operation. For the cache of a twin, that of the twin runs.

    If the cache is annotated as a NamedTuple or an Array, a cache of another type raises TypeError.
    """
    signature = inspect.signature(reference)
    first, second, *_ = signature.parameters
    operation = reference.__name__.removesuffix("_backward")
    expected = cache_type(reference, second)

    @functools.wraps(reference)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        cache: Any = args[1] if len(args) > 1 else kwargs[second] if second in kwargs else None
        if type(cache) is TwinCache:
            if cache.twin.operation != operation:
                raise TypeError(f"{second}: expected the cache of {operation}, got that of {cache.twin.operation}")
            dy = args[0] if len(args) == 2 else None
            if type(dy) is np.ndarray and dy.shape == cache.shape and dy.dtype == cache.dtype:
                return cache.twin.backward(dy, cache.kept, **kwargs)
            if len(args) == 2:
                return gradients_of(first, *args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            return gradients_of(first, given.pop(first), given.pop(second), **given)
        same_type = type(cache) is expected
        if not same_type or (expected is np.ndarray and cache.dtype.kind not in NUMBERS):
            expect_cache(second, cache, expected)
        return reference(*args, **kwargs)

    vars(dispatched).update(reference=reference)
    return dispatched  # type: ignore[return-value]


def twins_of(op: Any, kind: type = np.ndarray, fast: bool = False) -> list[Twin]:
    """The twins of an operation for a `kind` of array, in the order in which they are tried: those that also run
    outside `fast()`, or with `fast` the others.
    """
    plain = op.chosen[False].get(kind, [])
    return [twin for twin in op.chosen[True].get(kind, []) if twin not in plain] if fast else list(plain)


def gradients_of(name: str, dy: Any, cache: TwinCache, **kwargs: Any) -> Any:
    """What the backward of a twin gives for dy, which is called `name`. A dy of another type than y is converted first,
    and the gradients are then converted to the type of dy.
    """
    twin, kept, shape, dtype = cache
    same = getattr(dy, "shape", None) == shape and dy.dtype == dtype
    if same and not isinstance(dy, np.ma.MaskedArray | np.matrix):
        return twin.backward(dy, kept, **kwargs)
    expect_gradient(name, dy, shape)
    if not shape:
        return twin.backward(dy, kept, **kwargs)
    gradients = twin.backward(dy.astype(dtype), kept, **kwargs)
    if isinstance(gradients, tuple):
        return tuple(each.astype(dy.dtype, copy=False) for each in gradients)
    return gradients.astype(dy.dtype, copy=False)


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
    """Raise TypeError, naming the cache `name`, unless it is of the type that `cache_type` gives. An array must be of
    numbers.
    """
    if expected is None:
        return
    if expected is np.ndarray:
        dtype: Any = getattr(cache, "dtype", None)
        numbers = getattr(dtype, "kind", None) in NUMBERS if isinstance(dtype, np.dtype) else library_of(cache)
        fits = bool(numbers) and not isinstance(cache, np.ma.MaskedArray)
    else:
        fits = isinstance(cache, expected)
    if fits:
        return
    kind = "array" if expected is np.ndarray else expected.__name__
    got = "None" if cache is None else type(cache).__name__
    raise TypeError(f"{name}: expected the {kind} that forward returned, got {got}")
