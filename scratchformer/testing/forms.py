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

from ..notation.ratios import PLACES, ROUND_OFF, Compared, explanations, meaning, named, right_digits, sizes, times
from .failed_check import FailedCheck

Form = tuple[str, str]  # a sentence, and the name of the form


def forms(failed: FailedCheck, dy: Any, arrays: Mapping[str, Any], steps: Mapping[str, np.ndarray]) -> list[Form]:
    """The form of each wrong gradient, other than a constant factor; empty unless each has one.

    dy: an array, or a tuple of arrays. arrays: the arguments by name, numbers too, and the output as "y". steps: other
    arrays from which a factor may come.
    """
    first: dict[tuple[str, str], list[str]] = {}
    for name in failed.wrong:
        one = next(forms_of(name, failed, dy, arrays, steps), None)
        if one is None:
            return []
        first.setdefault(one, []).append(name)
    return together([(text.format(of=of(names)), form) for (text, form), names in first.items()])


def together(explanations: list[Form]) -> list[Form]:
    """One form of several, of which each explains some of the gradients."""
    return [(" ".join(text for text, _ in explanations), explanations[0][1])] if explanations else []


def of(names: list[str]) -> str:
    """ "The gradient of x is", "The gradients of x and w are"."""
    *others, last = names
    return f"The gradients of {', '.join(others)} and {last} are" if others else f"The gradient of {last} is"


def constant_factors(failed: FailedCheck, arrays: Mapping[str, Any]) -> list[Form]:
    """The gradients are the right ones times a number."""
    by_factor: dict[float, list[str]] = {}
    numbers = sizes(arrays)
    for name in failed.wrong:
        if (factor := failed.compared[name].factor()) is None:
            return []
        same = next((other for other in by_factor if math.isclose(other, factor, rel_tol=ROUND_OFF)), factor)
        by_factor.setdefault(same, []).append(name)
    for factor, names in by_factor.items():  # of a single element, any number is a multiple of any other
        single = sum(np.count_nonzero(failed.compared[name].known) for name in names) == 1
        if single and factor not in (0, -1) and not meaning(factor, numbers):
            return []
    forms = []
    for factor, names in by_factor.items():
        everywhere = " everywhere" * (factor == 0)
        text = f"{of(names)} {times(factor, numbers, 'it' if len(names) == 1 else 'they')}{everywhere}."
        forms.append((text, named(factor, numbers)))
    return together(sorted(forms, key=lambda form: form[1] != "unknown factor"))


def forms_of(
    name: str, failed: FailedCheck, dy: Any, arrays: Mapping[str, Any], steps: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, str]]:
    """The forms of one gradient: sentences that begin with {of}, and the names of the forms."""
    compared = failed.compared[name]
    analytic, right, like = compared.wrong, compared.right, compared.like
    whole = bool(np.isfinite(right).all())
    if whole and compared.factor() is None and (digits := right_digits(compared)) > 2:
        yield f"{{of}} right to {digits} digits: is a constant rounded, or something computed in fewer bits?", "rounded"
        return  # it is nearly equal to whatever the right one is equal to
    if not isinstance(dy, tuple) and np.shape(dy) == analytic.shape:
        if like(dy):
            yield "{of} dy itself, passed on unchanged.", "dy passed on"
        for sign, text in ((-1, "is missing from it"), (1, "is added to it")):
            if like(right + sign * dy):
                yield f"{{of}} right except that dy {text}.", f"dy {text}"
    for other, each in failed.compared.items():
        if other != name and each.right.shape == analytic.shape and like(each.right):
            yield f"{{of}} that of {other}.", "another gradient"
    if whole:
        yield from places(compared)
    by_ratio = list(explanations(compared, {**arrays, **steps, **arrays}, sizes(arrays)))
    weak = ("factors", PLACES)  # true, but what the Jacobian shows says more
    yield from (("{of} " + text, form) for text, form in by_ratio if form not in weak)
    jacobian = failed.jacobian(name) if not isinstance(dy, tuple) else None
    if jacobian is not None:
        yield from of_jacobian(compared, jacobian, np.asarray(dy), arrays)
    if isinstance(dy, tuple) and len(dy) > 1 and (jacobian := failed.jacobian(name)) is not None:
        yield from of_outputs(compared, jacobian, dy)
    yield from (("{of} " + text, form) for text, form in by_ratio if form in weak)


def places(compared: Compared) -> Iterator[tuple[str, str]]:
    """The right numbers in other places."""
    analytic, right, like = compared.wrong, compared.right, compared.like
    for a, b in itertools.combinations(range(right.ndim), 2):
        exchanged = right.swapaxes(a, b)
        if like(exchanged):
            yield f"{{of}} right with axes {a} and {b} exchanged.", "transpose"
        elif like(exchanged.reshape(right.shape)):
            yield f"{{of}} right with axes {a} and {b} exchanged, then reshaped.", "transpose"
    yield from cut_off(compared)
    yield from zeros(compared)
    for axis in range(right.ndim):
        yield from shifts(compared, axis)
    yield from row_lengths(compared)
    if analytic.size > 2 and Compared(*map(np.sort, (analytic.ravel(), right.ravel()))).equal.all():
        yield "{of} made of the right numbers in the wrong places.", "wrong places"


def cut_off(compared: Compared) -> Iterator[tuple[str, str]]:
    """The right numbers, but none beyond a limit."""
    wrong, limit = ~compared.equal, float(np.abs(compared.wrong).max(initial=0))
    ends = compared.wrong[wrong]
    if len(ends) > 1 and np.all(np.abs(ends) == limit) and np.all(ends * np.sign(compared.right[wrong]) == limit):
        if np.all(np.abs(compared.right[wrong]) > limit):
            yield f"{{of}} right except that numbers beyond −{limit:.6g} and {limit:.6g} are cut off.", "cut off"


def zeros(compared: Compared) -> Iterator[tuple[str, str]]:
    """A mask that is not the right one, as its zeros show."""
    zero, should_be = compared.wrong == 0, np.abs(compared.right) <= compared.tolerance
    if not (zero & ~should_be).any() or not (should_be & ~zero).any():
        return
    if np.all(zero != should_be):
        yield (
            "{of} zero exactly where it should not be: is a condition the wrong way round?",
            "zeros the wrong way round",
        )
    elif np.all(compared.equal | (zero != should_be)) and not np.all(zero | should_be):
        yield (
            "{of} zero in other places than it should be; where neither is zero, it is right.",
            "zeros in other places",
        )


def shifts(compared: Compared, axis: int) -> Iterator[tuple[str, str]]:
    """The right numbers in the right order along an axis, but some places further on, or further back."""
    size = compared.right.shape[axis]
    whole = [slice(None)] * axis
    for shift in sorted(range(1 - size, size), key=lambda each: (abs(each), -each)):
        if shift == 0:
            continue
        moved = np.roll(compared.right, shift, axis)
        ends = (*whole, slice(shift, None) if shift > 0 else slice(None, shift))
        text = f"{{of}} shifted by {shift:+d} along axis {axis}".replace("-", "−")
        free = moved.copy()
        free[(*whole, slice(None, shift) if shift > 0 else slice(shift, None))] = 0
        if compared.like(moved) or compared.like(free):
            yield f"{text}.", "shifted"
        kept = compared.part(ends)._replace(right=moved[ends])
        if 2 * abs(shift) <= size and size > 2 and kept.equal.all() and not compared.part(ends).equal.any():
            yield f"{text}, with other numbers in the {'first' if shift > 0 else 'last'} places.", "shifted"


def row_lengths(compared: Compared) -> Iterator[tuple[str, str]]:
    """The right rows, but longer ones: each with zeros after it, until the array is full."""
    rows = compared.right.reshape(-1, compared.right.shape[-1] if compared.right.ndim > 1 else 1)
    count, width = rows.shape
    for length in range(width + 1, min(8 * width, rows.size // 2)) if width > 1 else ():
        long = np.zeros((count, length))
        long[:, :width] = rows
        if compared.like(long.ravel()[: rows.size].reshape(compared.right.shape)):
            yield f"{{of}} right, but in rows of {length} numbers, where there should be {width}.", "row length"


def of_jacobian(
    compared: Compared, jacobian: np.ndarray, dy: np.ndarray, arrays: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Forms computed from the Jacobian, (outputs, elements of the tensor)."""
    analytic, like = compared.wrong, compared.like

    def gives(upstream: np.ndarray) -> bool:
        return like((np.broadcast_to(upstream, dy.shape).ravel() @ jacobian).reshape(analytic.shape))

    if gives(np.ones(dy.shape)):
        yield "{of} that of the sum of y, as if dy were 1 everywhere.", "dy not used"
    if len(jacobian) == jacobian.shape[1] and analytic.shape == dy.shape:
        diagonal = np.diagonal(jacobian).reshape(dy.shape) * dy
        if like(diagonal):
            yield (
                "{of} that of the diagonal of the Jacobian alone, but each element changes other outputs too.",
                "diagonal",
            )
        if like((jacobian @ dy.ravel()).reshape(dy.shape)):
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
        for function, text in ((np.sum, "sum"), (np.mean, "mean")):
            if gives(function(dy, axis, keepdims=True)):
                yield f"{{of}} what one gets with the {text} of dy over axis {axis} in place of dy.", f"{text} of dy"
        size = dy.shape[axis]
        for count in (n for n in range(1, size) if size % n == 0):
            if gives(np.concatenate([dy.take(range(count), axis)] * (size // count), axis)):
                first = "first dy" if count == 1 else f"first {count} dy"
                yield (
                    f"{{of}} what one gets with the {first} along axis {axis} in place of all others.",
                    "first dy for all",
                )


def of_outputs(compared: Compared, jacobian: np.ndarray, dy: tuple) -> Iterator[tuple[str, str]]:
    """Forms of the parts that several outputs give to a gradient: one is left out, or takes the way of another."""
    parts = np.split(jacobian, np.cumsum([part.size for part in dy])[:-1])

    def through(upstream: np.ndarray, part: np.ndarray) -> np.ndarray:
        return (upstream.ravel() @ part).reshape(compared.right.shape)

    right = sum(through(upstream, part) for upstream, part in zip(dy, parts, strict=True))
    for i, upstream in enumerate(dy):
        without = right - through(upstream, parts[i])
        if compared.like(without):
            yield f"{{of}} right except that what comes from y[{i}] is left out.", "output left out"
        for j, part in enumerate(parts):
            if j == i or dy[j].shape != upstream.shape:
                continue
            if compared.like(without + through(upstream, part)):
                yield (
                    f"{{of}} right except that dy[{i}] comes back through y[{j}] and not through y[{i}].",
                    "way of another",
                )
            if compared.like(right + through(upstream, part)):
                yield f"{{of}} right except that dy[{i}] comes back through y[{j}] too.", "way of another"


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
