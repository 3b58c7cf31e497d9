"""The contract of gradients, besides their values: who may write to which array, and which arrays may share memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from ..backend import Array, Device, array_module, device_of, is_floating_type, to_cpu, to_device
from ..notation.ratios import other_shape

_SAME = 1e-9  # the relative difference allowed between two runs on the same numbers: a GPU adds in no fixed order


class CheckCall(NamedTuple):
    """A call of a check."""

    check: Callable
    args: tuple
    options: dict[str, Any]


class Diagnosis(NamedTuple):
    """What a mistake looks like.

    what: a sentence. source: "form", "catalogue" or "derivation". name: that of the form or the mistake, for tests.
    """

    what: str
    source: str
    name: str


class GradientError(AssertionError):
    """A gradient is wrong, or an operation or layer breaks the contract.

    diagnoses: what the mistake looks like, the likeliest first; see `diagnose`. Empty if no known mistake gives these
    gradients. call: the call of the check that failed.
    """

    __module__ = "scratchformer.testing"  # where users import it from, and what pytest shows
    call: CheckCall | None = None

    def __init__(self, message: str, diagnoses: Iterable[Diagnosis] = ()) -> None:
        super().__init__(message)
        self.diagnoses = tuple(diagnoses)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def repeatable(check: Callable[_P, _R]) -> Callable[_P, _R]:
    """A check that stores its call on the GradientError that it raises; of nested checks, the outermost one does."""

    @functools.wraps(check)
    def checked(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return check(*args, **options)
        except GradientError as error:
            error.call = CheckCall(checked, args, options)
            raise

    return checked


def is_array(x: Any) -> bool:
    """Whether `x` is an array of any library. Numbers, NumPy scalars and types such as np.float32 are not."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic | type)


def is_floating(x: Any) -> bool:
    """Whether `x` is a floating-point array, and so gets a gradient."""
    return is_array(x) and is_floating_type(x.dtype)


def copied(x: Any, device: Device, dtype: Any) -> Any:
    """A copy of an array on `device`, cast to `dtype` if it is floating-point.

    The arrays in tuples, lists and dicts are copied too. Anything else is returned unchanged.
    """
    if is_array(x):
        return to_device(x, device, dtype if is_floating(x) else None).copy()
    if isinstance(x, dict):
        twin = copy.copy(x)
        twin.update({key: copied(part, device, dtype) for key, part in x.items()})
        return twin
    if isinstance(x, tuple | list):
        return rebuilt(x, [copied(part, device, dtype) for part in x])
    return x


def rebuilt(x: Any, parts: list) -> Any:
    """A tuple or list like `x`, also if it is a NamedTuple, of other parts."""
    return x._make(parts) if hasattr(x, "_make") else type(x)(parts)


def arrays_in(name: str, x: Any) -> dict[str, Array]:
    """The arrays in `x`, by name: `mask`, or `mask[0]`, `mask['key']` and `mask.field` for those in tuples, lists,
    dicts and NamedTuples.
    """
    if is_array(x):
        return {name: x}
    parts: dict[str, Any] = {}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        parts = {f"{name}.{field}": part for field, part in zip(x._fields, x, strict=True)}
    elif isinstance(x, dict | tuple | list):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        parts = {f"{name}[{key!r}]": part for key, part in items}
    return {inner: array for place, part in parts.items() for inner, array in arrays_in(place, part).items()}


def as_tuple(x: Any) -> tuple:
    """`x` as a tuple: a single array becomes a tuple of one, None the empty tuple."""
    if x is None:
        return ()
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def shares_memory(x: Any, y: Any) -> bool:
    """Whether two arrays of one library share memory."""
    xp = array_module(x)
    if not x.ndim or not y.ndim:  # of these CuPy's shares_memory is always true
        return bool(xp.may_share_memory(x, y))
    return bool(xp.shares_memory(x, y))


def expect_apart(named: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raise GradientError if an array of `named` shares memory with one of `others`; numbers share with nothing."""
    arrays = {other: y for other, y in others.items() if is_array(y) and y.size}
    for name, x in named.items():
        if not is_array(x) or not x.size:
            continue
        for other, y in arrays.items():
            if type(x) is type(y) and shares_memory(x, y):
                raise GradientError(
                    f"{name} shares memory with {other}: writing to one would change the other, so return a copy"
                )


def expect_equal(
    named: Mapping[str, Any],
    expected: Mapping[str, Any],
    complaint: str,
    same_bits: bool = False,
    diagnoses: Iterable[Diagnosis] = (),
) -> None:
    """Raise GradientError with `complaint` if the arrays of two mappings differ by more than their last digits.

    With `same_bits`, also if they differ in the last digits.
    """
    for name, x in named.items():
        x, y = to_cpu(x), to_cpu(expected[name])
        if x.dtype.kind == "b":  # of which there is no difference
            if not np.array_equal(x, y):
                raise GradientError(f"{name}: {complaint}", diagnoses)
            continue
        size = max(np.abs(x).max(initial=0), np.abs(y).max(initial=0))
        if x.shape != y.shape or not np.all(np.abs(x - y) <= _SAME * size):
            raise GradientError(f"{name}: {complaint}", diagnoses)
        if same_bits and not np.array_equal(x, y):
            raise GradientError(
                f"{name}: the last digits differ between two runs on the same numbers, by {np.abs(x - y).max():.1g} "
                "(same_bits=False allows this, for code that adds in no fixed order)"
            )


def expect_arrays(named: Mapping[str, Any], device: Device) -> None:
    """Raise GradientError unless all are arrays on `device`, or NumPy numbers."""
    for name, x in named.items():
        if not hasattr(x, "dtype"):
            raise GradientError(f"{name}: expected an array, got {type(x).__name__}")
        if is_array(x) and device_of(x) != device:
            raise GradientError(f"{name} is on {device_of(x)}, the arguments are on {device}")


def expect_owned(named: Mapping[str, Any]) -> None:
    """Raise GradientError if two elements of an array share memory, as they do after `broadcast_to`."""
    for name, x in named.items():
        if any(stride == 0 and n > 1 for stride, n in zip(getattr(x, "strides", ()), x.shape, strict=False)):
            raise GradientError(
                f"{name} is a broadcast view: expected an array of its own, so that a caller can add to it"
            )


def expect_type(named: Mapping[str, Any], dtype: Any) -> None:
    """Raise GradientError unless all arrays have the type `dtype`."""
    dtype = np.dtype(dtype)
    for name, x in named.items():
        if hasattr(x, "dtype") and x.dtype != dtype:
            cause = " (often a float64 number such as np.sqrt(n): use math.sqrt(n); or a constant array: use x.dtype)"
            wide = dtype == np.float32 and x.dtype == np.float64
            raise GradientError(f"{name} is {x.dtype} where all floating-point inputs are {dtype}" + cause * wide)


class Untouched:
    """Remembers arrays, to find out later whether one was written to."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.named = {name: x for name, x in named.items() if is_array(x)}
        self.copies = {name: to_cpu(x).copy() for name, x in self.named.items()}

    def check(self, writer: str) -> None:
        """Raise GradientError naming `writer` if one of the arrays has changed."""
        for name, x in self.named.items():
            before, now = self.copies[name], to_cpu(x)
            if not np.array_equal(before, now, equal_nan=before.dtype.kind in "fc"):
                raise GradientError(f"{writer} writes to {name}")


def named_gradients(returned: Any, arrays: Mapping[str, Array], backward: str) -> dict[str, Array]:
    """The gradients that `backward` returned, keyed by the names of their arrays.

    None is skipped: it stands for an argument that was not given (a bias). Raises GradientError unless there is one
    gradient for each array, on the same device and of the same shape.
    """
    gradients = as_tuple(returned)
    if len(gradients) != len(arrays):
        gradients = tuple(g for g in gradients if g is not None)
    if len(gradients) != len(arrays):
        raise GradientError(
            f"{backward} returned {len(gradients)} gradient(s) for {len(arrays)} floating-point "
            f"argument(s): {', '.join(arrays) or 'none'}"
        )
    for (name, x), gradient in zip(arrays.items(), gradients, strict=True):
        if not hasattr(gradient, "dtype"):
            raise GradientError(f"gradient of {name}: expected an array, got {type(gradient).__name__}")
        if is_array(gradient) and type(gradient) is not type(x):
            raise GradientError(
                f"gradient of {name} is a {type(gradient).__module__}.{type(gradient).__qualname__}, "
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}"
            )
        if tuple(gradient.shape) != tuple(x.shape):
            hint = other_shape(tuple(x.shape), tuple(gradient.shape))
            raise GradientError(
                f"gradient of {name}: expected shape {tuple(x.shape)}, got {tuple(gradient.shape)}"
                + f". {hint}" * bool(hint)
            )
    return dict(zip(arrays, gradients, strict=True))


def labelled(name: str, arrays: Iterable[Any]) -> dict[str, Any]:
    """Names for the arrays of a tuple: `y` for a single one, otherwise `y[0]`, `y[1]`, ..."""
    arrays = tuple(arrays)
    return {name: arrays[0]} if len(arrays) == 1 else {f"{name}[{i}]": x for i, x in enumerate(arrays)}
