"""The rules of gradients, besides their values: who may write to which array, which may share memory, and so on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from ..backend import Array, Device, array_module, device_of, is_floating_type, to_cpu, to_device
from ..notation.ratios import other_shape

_SAME = 1e-9  # the relative difference allowed between two runs on the same numbers: a GPU adds in no fixed order

# What is checked after the values, and why it matters.
RULES = {
    "in_place": "Whoever still needs these numbers, such as another backward, would get others.",
    "memory": "Whoever writes to one of the two would change the other.",
    "same_bits": "Otherwise no run can be repeated exactly.",
    "types": "Otherwise one number of a wider type makes everything after it slower, and a narrower one loses digits.",
    "again": "Otherwise the gradient is wrong where an operation is used twice before its backward.",
    "linear": "Every gradient is linear in dy, so it is wrong for another loss.",
    "layouts": "So the results are wrong for a transposed or a sliced array.",
    "empty": "The last batch of a data set may have no rows left, after a filter.",
}
HOUSE = ("in_place", "memory", "same_bits", "types", "empty")  # those that other code need not follow


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


def chosen_rules(rules: bool | Mapping[str, bool], house: bool) -> dict[str, bool]:
    """Which rules are checked. rules: True for all, False for none, or those that differ from the default, which is all
    for `house` and otherwise all but `HOUSE`.
    """
    if isinstance(rules, bool):
        return dict.fromkeys(RULES, rules)
    if not isinstance(rules, Mapping) or not rules.keys() <= RULES.keys() or not set(rules.values()) <= {True, False}:
        known = ", ".join(map(repr, RULES))
        raise ValueError(f"rules: expected True, False, or a dict from some of {known} to True or False, got {rules!r}")
    return {name: rules.get(name, house or name not in HOUSE) for name in RULES}


@contextmanager
def rule(name: str) -> Iterator[None]:
    """A context in which a GradientError says that only this rule is broken, why that matters, and how to go on."""
    try:
        yield
    except GradientError as error:
        message = f"the values agree, but {error}\n  {RULES[name]} rules={{{name!r}: False}} switches this rule off."
        raise GradientError(message, error.diagnoses) from None


def is_array(x: Any) -> bool:
    """Whether `x` is an array of any library. Numbers, NumPy scalars and types such as np.float32 are not."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic | type)


def is_floating(x: Any) -> bool:
    """Whether `x` is a floating-point array, and so gets a gradient."""
    return is_array(x) and is_floating_type(x.dtype)


def copied(x: Any, device: Device, dtype: Any) -> Any:
    """A copy of an array on `device`, cast to `dtype` if it is floating-point, or to the complex type of its precision.

    The arrays in tuples, lists and dicts are copied too. Anything else is returned unchanged.
    """

    def copy_of(_: str, x: Array) -> Array:
        wide = np.result_type(dtype, np.complex64) if x.dtype.kind == "c" else dtype if is_floating(x) else None
        return to_device(x, device, wide).copy()

    return mapped(copy_of, "", x)


def mapped(function: Callable[[str, Any], Any], name: str, x: Any, is_leaf: Callable[[Any], bool] = is_array) -> Any:
    """`x` with `function(name, array)` in place of each array in it, or of each part that `is_leaf` accepts.

    The names are `mask`, or `mask[0]`, `mask['key']` and `mask.field` in tuples, lists, dicts and NamedTuples.
    """
    if is_leaf(x):
        return function(name, x)
    if isinstance(x, dict):
        twin = copy.copy(x)
        twin.update({key: mapped(function, f"{name}[{key!r}]", part, is_leaf) for key, part in x.items()})
        return twin
    if isinstance(x, tuple | list):
        places = [f".{field}" for field in x._fields] if hasattr(x, "_fields") else [f"[{i}]" for i in range(len(x))]
        parts = zip(places, x, strict=True)
        return rebuilt(x, [mapped(function, name + place, part, is_leaf) for place, part in parts])
    return x


def rebuilt(x: Any, parts: list) -> Any:
    """A tuple or list like `x`, also if it is a NamedTuple, of other parts."""
    return x._make(parts) if hasattr(x, "_make") else type(x)(parts)


def arrays_in(name: str, x: Any) -> dict[str, Array]:
    """The arrays in `x`, by name; see `mapped`."""
    arrays: dict[str, Array] = {}
    mapped(arrays.setdefault, name, x)
    return arrays


def floating_in(name: str, x: Any) -> dict[str, Array]:
    """The floating-point arrays in `x`, by name; the two parts of a complex one, which are views, as `x.real` and
    `x.imag`.
    """
    parts: dict[str, Array] = {}
    for place, array in arrays_in(name, x).items():
        if array.dtype.kind == "c":
            parts |= {f"{place}.real": array.real, f"{place}.imag": array.imag}
        elif is_floating(array):
            parts[place] = array
    return parts


def as_arrays(y: Any) -> Any:
    """`y` with an array in place of each floating-point or complex number in it."""
    return mapped(lambda _, number: np.asarray(number), "", y, lambda x: isinstance(x, float | complex | np.inexact))


def upstream(y: Any, parts: Iterator[Array]) -> Any:
    """`parts`, one for each of `floating_in("y", y)`, in the form of `y`. What else is in `y` has no gradient: it is
    left out of a tuple, list or dict, and None in a NamedTuple. If one part of a tuple is left, it is alone.
    """
    if is_array(y) and y.dtype.kind == "c":
        real, imaginary = next(parts), next(parts)
        return array_module(real).asarray(real + 1j * imaginary)
    if is_floating(y):
        return next(parts)
    if isinstance(y, dict):
        return {key: part for key in y if (part := upstream(y[key], parts)) is not None}
    if isinstance(y, tuple | list):
        inner = [upstream(part, parts) for part in y]
        kept = inner if hasattr(y, "_fields") else [part for part in inner if part is not None]
        return kept[0] if len(kept) == 1 < len(inner) else rebuilt(y, kept)
    return None


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
        same = max(_SAME, 100 * float(np.finfo(x.dtype).eps)) if x.dtype.kind in "fc" else _SAME
        if x.shape != y.shape or not np.all(np.abs(x - y) <= same * size):
            raise GradientError(f"{name}: {complaint}", diagnoses)
        if same_bits and not np.array_equal(x, y):
            raise GradientError(
                f"{name}: the last digits differ between two runs on the same numbers, by {np.abs(x - y).max():.1g}"
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
        self.copies = copied_to_cpu(self.named)

    def check(self, writer: str) -> None:
        """Raise GradientError naming `writer` if one of the arrays has changed; they are then as before."""
        changed = []
        for name, x in self.named.items():
            before, now = self.copies[name], to_cpu(x)
            if not np.array_equal(before, now, equal_nan=before.dtype.kind in "fc"):
                x[...] = array_module(x).asarray(before)
                changed.append(name)
        if changed:
            raise GradientError(f"{writer} writes to {changed[0]}")


def named_gradients(returned: Any, arguments: Mapping[str, Any], backward: str) -> dict[str, Array]:
    """The gradients that `backward` returned, by the names of `floating_in`. arguments: those with floating-point
    arrays, by name.

    The gradient of a tuple, list or dict has its form. It has none if that is None, or if there are gradients of the
    other arguments alone. Elsewhere None is skipped: it stands for an argument that was not given (a bias). Raises
    GradientError unless there is one gradient for each array, on the same device and of the same shape.
    """
    plain = [name for name, x in arguments.items() if is_floating(x)]
    alone = len(arguments) == 1 and not plain and not (isinstance(returned, tuple) and len(returned) == 1)
    gradients = (returned,) if alone else as_tuple(returned)
    if len(gradients) != len(arguments):
        gradients = tuple(g for g in gradients if g is not None)
    names = plain if len(gradients) == len(plain) else list(arguments)
    if len(gradients) != len(names):
        raise GradientError(
            f"{backward} returned {len(gradients)} gradient(s) for {len(names)} floating-point "
            f"argument(s): {', '.join(names) or 'none'}"
        )
    arrays: dict[str, Array] = {}
    leaves: dict[str, Any] = {}
    for name, gradient in zip(names, gradients, strict=True):
        x, parts = arguments[name], as_arrays(gradient)
        if name in plain:
            arrays[name], leaves[name] = x, gradient if x.ndim else parts
        elif gradient is not None or alone:
            arrays |= floating_in(name, x)
            parts = floating_in(name, parts + 0j if is_array(x) and is_floating(parts) else parts)
            if not parts.keys() == floating_in(name, x).keys():
                got = (
                    f"an array {gradient.shape}" if is_array(gradient) else ", ".join(parts) or type(gradient).__name__
                )
                raise GradientError(f"gradient of {name}: expected {', '.join(floating_in(name, x))}, got {got}")
            leaves |= parts
    for name, x in arrays.items():
        gradient = leaves[name]
        if not hasattr(gradient, "dtype"):
            raise GradientError(f"gradient of {name}: expected an array, got {type(gradient).__name__}")
        if is_array(gradient) and type(gradient) is not type(x):
            raise GradientError(
                f"gradient of {name} is a {type(gradient).__module__}.{type(gradient).__qualname__}, "
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}"
            )
        if gradient.dtype.kind == "c":
            raise GradientError(f"gradient of {name}: expected real numbers, got {gradient.dtype}: take the real part")
        if tuple(gradient.shape) != tuple(x.shape):
            others = (other for other, y in arrays.items() if tuple(y.shape) == tuple(gradient.shape))
            hint = other_shape(tuple(x.shape), tuple(gradient.shape)) or next(
                (f"That is the shape of {other}: are the gradients in the order of the arguments?" for other in others),
                "",
            )
            raise GradientError(
                f"gradient of {name}: expected shape {tuple(x.shape)}, got {tuple(gradient.shape)}"
                + f". {hint}" * bool(hint)
            )
    return {name: leaves[name] for name in arrays}


def labelled(name: str, y: Any) -> dict[str, Any]:
    """Names for an array, or for those of a tuple: `y` for a single one, otherwise `y[0]`, `y[1]`, ..."""
    arrays = as_tuple(y)
    return {name: arrays[0]} if len(arrays) == 1 else {f"{name}[{i}]": x for i, x in enumerate(arrays)}


def of_gradients(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """The gradients as "gradient of x"."""
    return {f"gradient of {name}": g for name, g in gradients.items()}


def copied_to_cpu(named: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Copies of arrays as NumPy arrays."""
    return {name: to_cpu(x).copy() for name, x in named.items()}
