"""General forms of a wrong gradient, seen without knowledge of the operation: a constant factor, a transpose, ...

Each is computed from the numeric gradient, or from the numeric Jacobian J of the outputs by one tensor: the right
gradient is Jᵀ dy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .failed_check import FailedCheck

Form = tuple[str, str]  # a sentence, and the name of the form
ROUND_OFF = 1e-6  # of numeric derivatives, relative to the largest


def forms(failed: FailedCheck, dy: Any, arrays: Mapping[str, Any]) -> list[Form]:
    """The form of each wrong gradient, other than a constant factor; empty unless each has one.

    dy: an array, or a tuple of arrays. arrays: the arguments by name, numbers too, and the output as "y".
    """
    first: dict[tuple[str, str], list[str]] = {}
    for name in failed.wrong:
        one = next(forms_of(name, failed, dy, arrays), None)
        if one is None:
            return []
        first.setdefault(one, []).append(name)
    return together([(text.format(of=of(names)), form) for (text, form), names in first.items()])


def together(explanations: list[Form]) -> list[Form]:
    """One form of several, of which each explains some of the gradients."""
    return [(" ".join(text for text, _ in explanations), explanations[0][1])] if explanations else []


def agree(analytic: np.ndarray, right: np.ndarray) -> bool:
    """Whether two gradients are equal, wherever the second is known."""
    known = np.isfinite(right)
    if analytic.shape != right.shape or not known.any():
        return False
    analytic, right = analytic[known], right[known]
    return bool(np.abs(analytic - right).max() <= ROUND_OFF * max(np.abs(analytic).max(), np.abs(right).max()))


def of(names: list[str]) -> str:
    """ "The gradient of x is", "The gradients of x and w are"."""
    *others, last = names
    return f"The gradients of {', '.join(others)} and {last} are" if others else f"The gradient of {last} is"


def constant_factors(failed: FailedCheck, arrays: Mapping[str, Any]) -> list[Form]:
    """The gradients are the right ones times a number."""
    by_factor: dict[float, list[str]] = {}
    for name in failed.wrong:
        analytic, right = failed.analytic[name], failed.numeric[name]
        known = np.isfinite(right)
        size = float(right[known] @ right[known])
        factor = float(analytic[known] @ right[known]) / size if size else np.nan
        if not np.isfinite(factor) or not agree(analytic, factor * right):
            return []
        if abs(factor) < ROUND_OFF:
            factor = 0.0
        if np.count_nonzero(known) == 1 and not meaning(factor, arrays):
            return []  # any number is some multiple of another
        same = next((other for other in by_factor if math.isclose(other, factor, rel_tol=ROUND_OFF)), factor)
        by_factor.setdefault(same, []).append(name)
    forms = [
        (f"{of(names)} {times(factor, arrays, 'it' if len(names) == 1 else 'they')}.", named(factor, arrays))
        for factor, names in by_factor.items()
    ]
    return together(sorted(forms, key=lambda form: form[1] != "unknown factor"))


def named(factor: float, arrays: Mapping[str, Any]) -> str:
    if factor in (0, -1) or math.isclose(factor, -1, rel_tol=ROUND_OFF):
        return "sign" if factor else "zero"
    return "constant factor" if meaning(factor, arrays) else "unknown factor"


def times(factor: float, arrays: Mapping[str, Any], they: str) -> str:
    if factor == 0:
        return "zero everywhere"
    if math.isclose(factor, -1, rel_tol=ROUND_OFF):
        return "right except for the sign"
    amount, reason = meaning(factor, arrays) or (f"{factor:.6g}", "")
    times = f"{amount} of what {they} should be" if amount.startswith("1/") else f"{amount} times what {they} should be"
    return f"{times}: {reason}" if reason else times


def meaning(factor: float, arrays: Mapping[str, Any]) -> tuple[str, str] | None:
    """The factor as one would write it, and what it may come from: ("1/√5", "5 is the size of axis 3 of q")."""
    sign = "−" if factor < 0 else ""
    simple = {"2": 2.0, "1/2": 0.5, "4": 4.0, "1/4": 0.25}
    plain = next((text for text, value in simple.items() if math.isclose(abs(factor), value, rel_tol=ROUND_OFF)), "")
    for number, reasons in sizes(arrays).items():
        written = f"{number:.6g}"
        powers = {written: 1, f"1/{written}": -1, f"√{written}": 0.5, f"1/√{written}": -0.5}
        for amount, power in powers.items():
            if number > 0 and math.isclose(abs(factor), number**power, rel_tol=ROUND_OFF):
                root = f"perhaps √{written}, where " * bool(plain and abs(power) < 1)
                return sign + (plain or amount), f"{root}{written} is {' or '.join(reasons[:3])}"
    return (sign + plain, "") if plain else None


def sizes(arrays: Mapping[str, Any]) -> dict[float, list[str]]:
    """The numbers that a factor may come from, each with what it is, the likeliest first."""
    reasons: dict[float, list[str]] = {}

    def note(number: float, reason: str) -> None:
        if number not in (0, 1) and reason not in reasons.setdefault(number, []):
            reasons[number].append(reason)

    seen = set()
    for name, x in arrays.items():
        if isinstance(x, float):
            note(x, f"{name}")
            note(1 - x, f"1 − {name}")
        shape = np.shape(x) if hasattr(x, "shape") else ()
        if not shape or shape in seen:
            continue
        seen.add(shape)
        for axis, size in enumerate(shape):
            note(size, f"the size of axis {axis} of {name}")
        if len(shape) > 2:
            note(math.prod(shape[:-1]), f"the number of rows of {name}")
        if len(shape) > 1:
            note(math.prod(shape), f"the number of elements of {name}")
    return reasons


def forms_of(name: str, failed: FailedCheck, dy: Any, arrays: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The forms of one gradient: sentences that begin with {of}, and the names of the forms."""
    analytic, right = failed.analytic[name], failed.numeric[name]
    whole = bool(np.isfinite(right).all())
    if whole and (digits := right_digits(analytic, right)) > 2:
        yield f"{{of}} right to {digits} digits: is a constant rounded, or something computed in float32?", "rounded"
        return  # it is nearly equal to whatever the right one is equal to
    if not isinstance(dy, tuple) and np.shape(dy) == analytic.shape:
        if agree(analytic, dy):
            yield "{of} dy itself, passed on unchanged.", "dy passed on"
        for sign, text in ((-1, "is missing from it"), (1, "is added to it")):
            if agree(analytic, right + sign * dy):
                yield f"{{of}} right except that dy {text}.", f"dy {text}"
    for other, value in failed.numeric.items():
        if other != name and value.shape == analytic.shape and agree(analytic, value):
            yield f"{{of}} that of {other}.", "another gradient"
    if whole:
        yield from places(analytic, right)
    yield from factors(name, failed, arrays)
    jacobian = failed.jacobian(name) if not isinstance(dy, tuple) else None
    if jacobian is not None:
        yield from of_jacobian(analytic, jacobian, np.asarray(dy), arrays)


def right_digits(analytic: np.ndarray, right: np.ndarray) -> int:
    """The number of digits to which all elements are right."""
    scale, error = np.abs(right).max(initial=0), np.abs(analytic - right).max(initial=0)
    return math.floor(math.log10(scale / error)) if scale and 0 < error < math.inf else 0


def places(analytic: np.ndarray, right: np.ndarray) -> Iterator[tuple[str, str]]:
    """The right numbers in other places."""
    for a, b in itertools.combinations(range(right.ndim), 2):
        exchanged = right.swapaxes(a, b)
        if agree(analytic, exchanged):
            yield f"{{of}} right with axes {a} and {b} exchanged.", "transpose"
        elif agree(analytic, exchanged.reshape(right.shape)):
            yield f"{{of}} right with axes {a} and {b} exchanged, then reshaped.", "transpose"
    for axis in range(right.ndim):
        if agree(analytic, np.flip(right, axis)):
            yield f"{{of}} reversed along axis {axis}.", "reversed"
        for shift in (1, -1):
            rolled = np.roll(right, shift, axis)
            if agree(analytic, rolled) or agree(analytic, shifted(right, shift, axis)):
                yield f"{{of}} shifted by {shift:+d} along axis {axis}.".replace("-", "−"), "shifted"
    if analytic.size > 2 and agree(np.sort(analytic.ravel()), np.sort(right.ravel())):
        yield "{of} made of the right numbers in the wrong places.", "wrong places"
    for axis in range(right.ndim):
        for function, text in ((np.sum, "sum"), (np.mean, "mean")):
            if agree(analytic, np.broadcast_to(function(right, axis, keepdims=True), right.shape)):
                yield f"{{of}} replaced by its {text} over axis {axis}.", f"{text} over an axis"


def shifted(x: np.ndarray, shift: int, axis: int) -> np.ndarray:
    """`x` shifted by one along an axis, with zeros at the end that becomes free."""
    moved = np.roll(x, shift, axis)
    np.moveaxis(moved, axis, 0)[0 if shift > 0 else -1] = 0
    return moved


def factors(name: str, failed: FailedCheck, arrays: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A factor left out or put in: another array of the call, broadcast to the shape of the gradient."""
    analytic, right = failed.analytic[name], failed.numeric[name]
    for other, x in arrays.items():
        if not hasattr(x, "shape") or x.dtype.kind not in "fb" or not x.size or np.all(x == x.flat[0]):
            continue
        try:
            wide = np.broadcast_to(x, analytic.shape)
        except ValueError:
            continue
        if agree(analytic, right * wide):
            yield f"{{of}} multiplied by {other} once too often.", "factor put in"
        if agree(analytic * wide, right):
            yield f"{{of}} not multiplied by {other}, as it should be.", "factor left out"


def of_jacobian(
    analytic: np.ndarray, jacobian: np.ndarray, dy: np.ndarray, arrays: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Forms computed from the Jacobian, (outputs, elements of the tensor)."""

    def gives(upstream: np.ndarray) -> bool:
        return agree(analytic, (np.broadcast_to(upstream, dy.shape).ravel() @ jacobian).reshape(analytic.shape))

    if gives(np.ones(dy.shape)):
        yield "{of} that of the sum of y: dy is not used.", "dy not used"
    if len(jacobian) == jacobian.shape[1] and analytic.shape == dy.shape:
        diagonal = np.diagonal(jacobian).reshape(dy.shape) * dy
        right = (dy.ravel() @ jacobian).reshape(dy.shape)
        if agree(analytic, diagonal):
            yield (
                "{of} that of the diagonal of the Jacobian alone, but each element changes other outputs too.",
                "diagonal",
            )
        if agree(analytic, right - diagonal):
            yield "{of} right except that the diagonal of the Jacobian is left out.", "diagonal left out"
        if agree(analytic, (jacobian @ dy.ravel()).reshape(dy.shape)):
            yield "{of} J dy and not Jᵀ dy: the Jacobian is not transposed.", "Jacobian not transposed"
    for other, ids in arrays.items():
        if hasattr(ids, "dtype") and ids.dtype.kind in "iu" and 0 < ids.ndim <= dy.ndim and analytic.ndim:
            yield from repeated(other, ids, dy, gives)
    for axis in range(dy.ndim):
        if dy.shape[axis] < 2:
            continue
        for place, text in ((0, "first"), (-1, "last")):
            only = np.zeros(dy.shape)
            np.moveaxis(only, axis, 0)[place] = 1
            if gives(dy * only):
                yield f"{{of}} that of the {text} position along axis {axis} of y alone.", f"{text} alone"
            if gives(dy * (1 - only)):
                yield f"{{of}} right except that the {text} position along axis {axis} of y is left out.", "left out"
        for function, text in ((np.sum, "sum"), (np.mean, "mean")):
            if gives(function(dy, axis, keepdims=True)):
                yield f"{{of}} what one gets with the {text} of dy over axis {axis} in place of dy.", f"{text} of dy"


def repeated(name: str, ids: np.ndarray, dy: np.ndarray, gives: Any) -> Iterator[tuple[str, str]]:
    """Where an id occurs more than once, in the whole array or in a row, only the last or the first one counts."""
    if ids.shape != dy.shape[: ids.ndim]:
        return
    for flat in (ids.reshape(1, -1), ids.reshape(-1, ids.shape[-1])):
        for order, text in ((1, "first"), (-1, "last")):
            once = np.zeros(flat.shape)
            for row, values in enumerate(flat[:, ::order]):
                once[row, np.unique(values, return_index=True)[1]] = 1
            kept = once[:, ::order].reshape(ids.shape + (1,) * (dy.ndim - ids.ndim))
            if not kept.all() and gives(dy * kept):
                yield (
                    f"{{of}} right only where {name} does not repeat: of equal {name} only the {text} one counts.",
                    "counted once",
                )
