"""One name, several implementations: a reference operation and its fast twins.

An operation is a pair of functions. Decorated, their names dispatch:

    @operation
    def relu(x): ...                      # the reference, for every array library

    @backward
    def relu_backward(dy, cache): ...

    @ops.relu.twin(np.ndarray)            # in kernels/: for NumPy arrays; returns a FastCache
    def relu(x): ...

    @ops.relu_backward.twin(FastCache)
    def relu_backward(dy, cache): ...

The forward is chosen by the type of the first array, the backward by the type of the cache. So the cache of a fused
forward never reaches a reference backward. Inside `reference_only()` every forward call runs the reference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_reference_depth = 0  # the number of open `reference_only()` blocks in the whole process


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


def operation(reference: Callable) -> Callable:
    """Make `reference` an operation, for which twins can be registered with `.twin(array_type)`."""
    twins: dict[type, Callable] = {}
    first, *_ = inspect.signature(reference).parameters

    @functools.wraps(reference)
    def forward(*args, **kwargs):
        x = args[0] if args else kwargs.get(first)
        twin = twins.get(type(x)) if twins and not _reference_depth else None
        return (twin or reference)(*args, **kwargs)

    def twin(array_type: type) -> Callable:
        """Register the decorated function for calls whose first argument is an `array_type`."""
        return functools.partial(_register, twins, array_type)

    forward.reference = reference
    forward.twins = twins
    forward.twin = twin
    return forward


def backward(reference: Callable) -> Callable:
    """Make `reference` the backward of an operation, for which twins can be registered with `.twin(CacheType)`."""
    twins: dict[type, Callable] = {}
    _, second, *_ = inspect.signature(reference).parameters

    @functools.wraps(reference)
    def dispatched(*args, **kwargs):
        cache = args[1] if len(args) > 1 else kwargs.get(second)
        return twins.get(type(cache), reference)(*args, **kwargs)

    def twin(cache_type: type) -> Callable:
        """Register the decorated function for caches of `cache_type`."""
        return functools.partial(_register, twins, cache_type)

    dispatched.reference = reference
    dispatched.twins = twins
    dispatched.twin = twin
    return dispatched


def _register(twins: dict[type, Callable], kind: type, function: Callable) -> Callable:
    if kind in twins:
        raise ValueError(f"{function.__name__}: there is already a twin for {kind.__name__}")
    twins[kind] = function
    return function
