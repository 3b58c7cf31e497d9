"""What a wrong array is beside the right one, told by their ratio: a factor everywhere, in each row, or in some places.

Each explanation is true of every element, to round-off. It is a sentence, of which the beginning is missing ("The
gradient of x is"), and a name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..shell.text import apart

ROUND_OFF = 1e-6  # of numeric derivatives, relative
_ROUND = (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 5.0, 6.0, 10.0, 0.5, -0.5)  # thresholds that one would write
PLACES = "in some places"  # the form of an explanation that gives no factor
_DIFFERENT = 6  # the most factors that are listed

Explanation = tuple[str, str]  # a sentence without its subject, and the name of its form


class Compared(NamedTuple):
    """A wrong array and the right one, of one shape. tolerance: of each element, absolute."""

    wrong: np.ndarray
    right: np.ndarray  # NaN where it is not known
    tolerance: np.ndarray | float = 0.0

    @property
    def known(self) -> np.ndarray:
        return np.isfinite(self.right)

    @property
    def equal(self) -> np.ndarray:
        """Where the two are equal, or the right one is not known."""
        return self.multiple(1.0) | ~self.known

    def multiple(self, factor: Any) -> np.ndarray:
        """Where the first is `factor` times the second."""
        allowed = ROUND_OFF * np.abs(factor * self.right) + self.tolerance * np.maximum(1, np.abs(factor))
        return np.abs(self.wrong - factor * self.right) <= allowed

    def like(self, other: np.ndarray) -> bool:
        """Whether the wrong array is this one, where that is known, and much nearer to it than to the right one."""
        known = np.isfinite(other)
        if self.wrong.shape != other.shape or not known.any():
            return False
        off, size = np.abs(self.wrong - other)[known], np.abs(other)[known]
        error = np.abs(self.wrong - self.right)[known]
        explained = (off <= error / 100) | (off <= ROUND_OFF * size) | self.equal[known]
        return bool(off.max() <= ROUND_OFF * max(np.abs(self.wrong[known]).max(), size.max()) and explained.all())

    def part(self, place: Any) -> Compared:
        tolerance = np.broadcast_to(self.tolerance, self.right.shape)[place]
        return self._replace(wrong=self.wrong[place], right=self.right[place], tolerance=tolerance)

    def factor(self) -> float | None:
        """The number by which all known elements are multiplied; None if there is none, or nothing to tell it from."""
        known = self.part(self.known)
        if not known.right.size or known.wrong.shape != known.right.shape:
            return None
        largest = int(np.argmax(np.abs(known.right)))
        if not abs(known.right[largest]) > 10 * np.ravel(known.tolerance)[largest]:
            return None
        factor = float(known.wrong @ known.right / (known.right @ known.right))
        if not math.isfinite(factor):
            return None
        nearest = float(np.round(factor))
        if abs(factor - nearest) < 1e-3 and nearest != 1 and known.multiple(nearest).all():
            return nearest
        off, error = np.abs(known.wrong - factor * known.right), np.abs(known.wrong - known.right)
        return factor if np.all(known.multiple(factor) & (off <= error / 100 + known.tolerance)) else None


def factor_everywhere(compared: Compared, numbers: Mapping[float, list[str]]) -> float | None:
    """The factor of all elements. Of a single element any number is a multiple, so it must have a meaning."""
    factor = compared.factor()
    single = np.count_nonzero(compared.known) == 1
    return None if single and factor not in (None, 0, -1) and not meaning(factor, numbers) else factor


def explanations(
    compared: Compared, arrays: Mapping[str, Any], numbers: Mapping[float, list[str]]
) -> Iterator[Explanation]:
    """Factors that are not the same everywhere: that of an array, one for each row, or in some places only.

    arrays: by name, those that the factor or the places may come from.
    """
    if compared.wrong.shape != compared.right.shape:
        return
    yield from of_arrays(compared, arrays)
    in_some = list(in_places(compared, arrays, numbers))
    yield from (each for each in in_some if each[1] != PLACES)
    yield from by_row(compared, numbers)
    yield from (each for each in in_some if each[1] == PLACES)


def of_arrays(compared: Compared, arrays: Mapping[str, Any]) -> Iterator[Explanation]:
    """Another array, or a power of it, put in or left out; or a slope that one would compute from it, left out."""
    for name, x in arrays.items():
        if (wide := broadcast(x, compared.right.shape, "fb")) is None:
            continue
        with np.errstate(all="ignore"):
            for written, factor in powers(name, wide.astype(float)):
                if compared.multiple(factor)[compared.known].all():
                    once = written == name
                    yield (
                        f"multiplied by {name} once too often." if once else f"what it should be times {written}.",
                        "factor put in",
                    )
                if compared._replace(wrong=compared.wrong * factor).equal.all():
                    yield f"not multiplied by {written}, as it should be.", "factor left out"
            for written, factor in slopes(name, wide.astype(float)):
                if compared._replace(wrong=compared.wrong * factor).equal.all():
                    yield f"not multiplied by {written}, as it should be.", "factor left out"


def powers(name: str, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield name, x
    if np.all(x > 0):
        yield f"the square of {name}", x**2
        yield f"the root of {name}", np.sqrt(x)


def slopes(name: str, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Slopes of x², −x²/2, x²/4, x³ and of tanh and the sigmoid, where x is their value."""
    yield from ((f"2 {name}", 2 * x), (f"−{name}", -x), (f"{name}/2", x / 2), (f"3 {name}²", 3 * x**2))
    if np.all(np.abs(x) < 1):
        yield f"1 − {name}²", 1 - x**2
    if np.all((x > 0) & (x < 1)):
        yield f"{name} (1 − {name})", x * (1 - x)


def broadcast(x: Any, shape: tuple[int, ...], kinds: str) -> np.ndarray | None:
    """An array of these kinds of numbers, broadcast to a shape; None if it is constant, or does not fit."""
    if not hasattr(x, "shape") or x.dtype.kind not in kinds or not x.size or np.all(x == x.flat[0]):
        return None
    try:
        return np.broadcast_to(x, shape)
    except ValueError:
        return None


def in_places(
    compared: Compared, arrays: Mapping[str, Any], numbers: Mapping[float, list[str]]
) -> Iterator[Explanation]:
    """The gradient is right but for some elements: where these are, and their factor."""
    wrong = ~compared.equal
    if not 0 < np.count_nonzero(wrong) < np.count_nonzero(compared.known):
        return
    part, how, name = compared.part(wrong), "", PLACES
    if (factor := factor_everywhere(part, numbers)) is not None:
        name = "factor in some places"
        how = ": there its sign is wrong" if factor == -1 else f": there it is {times(factor, numbers, 'it')}"
    elif np.all(np.abs(part.right) <= part.tolerance):
        how = ": there it should be 0"
    for place in places(wrong, compared.known, arrays):
        yield f"right except {place}{how}.", name
        break


def places(wrong: np.ndarray, known: np.ndarray, arrays: Mapping[str, Any]) -> Iterator[str]:
    """What the wrong elements have in common, and no other has, the simplest first."""
    for axis in range(wrong.ndim) if wrong.ndim > 1 else ():
        rows = np.moveaxis(wrong | ~known, axis, 0).reshape(wrong.shape[axis], -1)
        if np.array_equal(rows.all(axis=1), np.moveaxis(wrong, axis, 0).reshape(len(rows), -1).any(axis=1)):
            inside = np.flatnonzero(rows.all(axis=1))
            if len(inside) == 1:
                yield f"at index {inside[0]} of axis {axis}"
            elif 1 < len(inside) < len(rows) and np.ptp(inside) == len(inside) - 1 and inside[-1] == len(rows) - 1:
                yield f"from index {inside[0]} of axis {axis} on"
            elif 1 < len(inside) < len(rows) and np.ptp(inside) == len(inside) - 1 and inside[0] == 0:
                yield f"before index {inside[-1] + 1} of axis {axis}"
    if np.count_nonzero(wrong) > 1:
        for name, x in arrays.items():
            if (wide := broadcast(x, wrong.shape, "fiu")) is not None:
                yield from conditions(name, wide[known], wrong[known])
    indices = np.argwhere(wrong)
    if len(indices) == 1:
        yield f"at [{', '.join(map(str, indices[0]))}]"


def conditions(name: str, x: np.ndarray, wrong: np.ndarray) -> Iterator[str]:
    """A condition on x that holds for the wrong elements and for no others."""
    for value in (0.0, *np.unique(x[wrong])[:1]):
        if float(f"{value:g}") == value and np.array_equal(x == value, wrong):
            yield f"where {name} = {value:g}"
    inside, outside = x[wrong], x[~wrong]
    for low, high, sign, strict in (outside, inside, ">", "≥"), (inside, outside, "<", "≤"):
        if len(low) and len(high) and low.max() < high.min():
            edge = low.max() if sign == ">" else high.min()  # of those that are right
            between = [value for value in _ROUND if low.max() <= value <= high.min()]
            value = between[0] if between else (low.max() + high.min()) / 2
            included = value == (high.min() if sign == ">" else low.max()) and value != edge
            yield f"where {name} {strict if included else sign} {value:.3g}" + " or so" * (not between)
    between = (inside.min() <= x) & (x <= inside.max())
    if len(inside) > 2 and np.array_equal(between, wrong) and (x < inside.min()).any() and (x > inside.max()).any():
        low, high = x[x < inside.min()].max(), x[x > inside.max()].min()
        edges = [
            next((f"{value:g}" for value in _ROUND if a <= value <= b), f"about {(a + b) / 2:.3g}")
            for a, b in ((low, inside.min()), (inside.max(), high))
        ]
        yield f"where {name} is between {' and '.join(edges)}"
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    if np.array_equal(counts[place.reshape(x.shape)] > 1, wrong):
        yield f"where a value of {name} occurs more than once"


def by_row(compared: Compared, numbers: Mapping[float, list[str]]) -> Iterator[Explanation]:
    """A factor for each index of one axis."""
    if compared.right.ndim < 2:
        return
    for axis, size in enumerate(compared.right.shape):
        rows = [compared.part((*([slice(None)] * axis), i)) for i in range(size)]
        if any(np.count_nonzero(row.known) < 2 for row in rows):
            continue
        factors = [factor for row in rows if (factor := row.factor()) is not None]
        if len(factors) < size or np.ptp(factors) <= ROUND_OFF * np.abs(factors).max():
            continue
        listed = ", ".join(f"{factor:.6g}" for factor in factors[:_DIFFERENT]) + ", ..." * (size > _DIFFERENT)
        yield f"what it should be times a number for each index of axis {axis}: {listed}.", "factors"


def named(factor: float, numbers: Mapping[float, list[str]]) -> str:
    if factor in (0, -1):
        return "sign" if factor else "zero"
    return "constant factor" if meaning(factor, numbers) else "unknown factor"


def times(factor: float, numbers: Mapping[float, list[str]], they: str) -> str:
    """What a gradient with this factor is: "2 times what it should be"."""
    if factor == 0:
        return "zero"
    if factor == -1:
        return "right except for the sign"
    amount, reason = meaning(factor, numbers) or (as_number(factor), "")
    times = f"{amount} {'of' if '/' in amount and abs(factor) < 1 else 'times'} what {they} should be"
    return f"{times}: {reason}" if reason else times


def as_number(factor: float) -> str:
    """The factor in digits, or as a fraction of small numbers if its digits do not end: "2/3"."""
    if not math.isclose(float(f"{factor:.5g}"), factor, rel_tol=ROUND_OFF):
        for below in range(1, 10):
            above = int(np.rint(factor * below))
            if above and math.isclose(above / below, factor, rel_tol=ROUND_OFF):
                return f"{above}/{below}".replace("-", "−")
    return apart(factor, 1.0)[0]


def meaning(factor: float, numbers: Mapping[float, list[str]]) -> tuple[str, str] | None:
    """The factor as one would write it, and what it may come from: ("1/√5", "5 is the size of axis 3 of q")."""
    sign = "−" if factor < 0 else ""
    simple = {"2": 2.0, "1/2": 0.5, "3": 3.0, "1/3": 1 / 3, "4": 4.0, "1/4": 0.25}
    plain = next((text for text, value in simple.items() if math.isclose(abs(factor), value, rel_tol=ROUND_OFF)), "")
    square = "perhaps the 2 in the derivative of a square" * (plain in ("2", "1/2"))
    for number, reasons in numbers.items():
        written = f"{number:.6g}"
        powers = {written: 1, f"1/{written}": -1, f"√{written}": 0.5, f"1/√{written}": -0.5}
        for amount, power in powers.items():
            if number > 0 and math.isclose(abs(factor), number**power, rel_tol=ROUND_OFF):
                root = f"{square or 'perhaps'}{', or' * bool(square)} √{written}, where " * bool(
                    plain and abs(power) < 1
                )
                root = root or f"{square}, or " * bool(square)
                return sign + (plain or amount), f"{root}{written} is {' or '.join(reasons[:3])}"
    if plain:
        return sign + plain, square
    for a, b in itertools.permutations((number for number in numbers if number == int(number) > 1), 2):
        if math.isclose(abs(factor), a / b, rel_tol=ROUND_OFF):
            return f"{sign}{a:g}/{b:g}", f"perhaps {a:g}, {numbers[a][0]}, over {b:g}, {numbers[b][0]}"
    return None


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
            for axis, (a, b) in enumerate(itertools.pairwise(shape)):
                note(a * b, f"the size of axes {axis} and {axis + 1} of {name} together")
        if len(shape) > 1:
            note(math.prod(shape), f"the number of elements of {name}")
    return reasons


def right_digits(compared: Compared) -> int:
    """The number of digits to which each element is right."""
    error, size = np.abs(compared.wrong - compared.right), np.abs(compared.right)
    if not np.all(error <= np.maximum(size, np.ravel(compared.tolerance).max(initial=0))):
        return 0
    with np.errstate(all="ignore"):
        worst = float(np.max(np.where(error <= compared.tolerance, 0, error / size), initial=0))
    return math.floor(-math.log10(worst)) if 0 < worst < 1 else 0


def other_shape(expected: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Why an array may have this shape instead of another; "" if nothing simple explains it."""
    if len(shape) > len(expected) and shape[len(shape) - len(expected) :] == expected:
        return f"Is a sum over the first {len(shape) - len(expected)} axes missing?".replace(
            "first 1 axes", "first axis"
        )
    if len(shape) < len(expected):
        return "Does a sum run over an axis too many?"
    if sorted(shape) == sorted(expected):
        return "Is it transposed?"
    if len(shape) == len(expected) == 1:
        return "Does a sum run over another axis than it should?"
    return ""
