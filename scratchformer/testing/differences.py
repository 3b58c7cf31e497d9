"""Numerical derivatives with an estimate of their own error, and the comparison of analytic gradients with them.

Along a direction u (one element, or a random direction) y is a function of a number, y(t) = op(x + t u). Its values at
±h and ±h/2 give two central differences, D(h) and D(h/2), and Richardson's V = (4 D(h/2) − D(h))/3, whose error is of
order h⁴. Σ V dy is the numeric derivative of F = Σ y dy. Its error is estimated as the sum of

    3 Σ |V − D(h/2)| |dy|         the change by extrapolation: the truncation error of D(h/2), larger than that of V
    3 Σ |2 A(h/2) − A(h)| |dy|    with A(h) = (y(h) − 2 y(0) + y(−h))/h: this is h y″ + O(h³) where y is smooth. With a
                                  kink within h of x, it is about the jump of y′, whatever h
    4 noise/h                     round-off, from the measured noise of F (`Differences.measure_noise`)
    4 Σ grain/h |dy|              the last digit of the largest input, for the outputs that change at all
                                  (for all that never changed together: of one output, at the largest h tried)

For a kink at distance δ, the first two terms add up to δ/2h + 3 |1 − 3δ/h| times the jump, and the error of V is
|1/2 − 7δ/6h| times the jump (both for δ < h/2; beyond that, the error of V is a third of the first term). So the
estimate is never below the error.

The step with the smallest estimate is used, unless a smaller step gives another value and neither estimate covers the
difference: then y changes over less than the larger step, as where softmax saturates, and the smaller step is right.
The step is chosen without looking at the analytic value (and is optimal up to a factor of about two in the estimate,
provided the measured round-off is right: see `Differences.estimate`). So with a kink near x the check takes smaller
steps, with a kink at x itself it cannot decide, and trying many steps cannot make a wrong gradient pass. Absolute
values are taken for each output, so that kinks cannot cancel.

With a kink at x itself, y has a derivative on each side: 2 R(h/2) − R(h) and 2 L(h/2) − L(h), where the slope from x to
x + h is R(h) = D(h) + A(h)/2, and that from x − h to x is L(h) = D(h) − A(h)/2. The numeric value is then the middle of
the two. Any value between them differs from it by at most half their distance; three times that is accepted, because
several kinks may meet at x.

For most elements two evaluations are enough: if the analytic value is within rtol/10 of D(h/2) at the first step,
round-off included, no other step is tried. That step was chosen before, so a wrong gradient would have to be wrong by
just the truncation error of D(h/2) to pass. Every other verdict, and every comparison along a random direction, comes
from the search.

Source: Richardson's extrapolation, and ECNoise's idea of measuring round-off from evaluations at almost the same point
(Moré, Wild, "Estimating computational noise", 2011).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..backend import Array, array_module, to_cpu

_EPS = float(np.finfo(np.float64).eps)
STEPS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # relative to the tensor's scale
FIRST_STEP = 1e-3  # usually good enough
_NUDGES = 4  # evaluations for measuring noise


@dataclass
class Tensor:
    """A variable of the derivatives: its name in messages, the array (perturbed in place), its analytic gradient.

    scale: the size of its largest element. reach: how far a random direction may move each element; 0 counts as 1.
    """

    name: str
    array: Array
    gradient: np.ndarray
    noise: float = 0.0  # the round-off error of an element of the gradient

    def __post_init__(self) -> None:
        self.base = to_cpu(self.array).copy()
        largest = float(np.abs(self.base).max(initial=0))
        self.scale = largest if largest > 0 else 1.0
        size = np.where(self.base == 0, 1.0, np.abs(self.base))
        self.reach = np.minimum(size / (100 * STEPS[0]), self.scale)  # by the smallest step at most a hundredth

    def write(self, values: np.ndarray) -> None:
        """Overwrite the array with NumPy values."""
        self.array[...] = array_module(self.array).asarray(values)

    def along_element(self, index: tuple[int, ...]) -> Callable[[float], None]:
        """A function of t that sets the array to x + t u, where u is 1 at `index` and 0 elsewhere."""

        def move(t: float) -> None:
            self.array[index] = float(self.base[index]) + t

        return move

    def along(self, direction: np.ndarray) -> Callable[[float], None]:
        """A function of t that sets the array to x + t u, where u is `direction`."""
        return lambda t: self.write(self.base + t * direction)


class Kink(NamedTuple):
    """A kink that makes a comparison uncertain, and the derivatives to its left and right."""

    within: float  # its distance from x is less than this
    left: float
    right: float
    at_x: bool = False  # much nearer than the smallest step


class Estimate(NamedTuple):
    """A numerical derivative and a bound on its error."""

    value: float
    uncertainty: float
    doubt: float = 0.0  # the part of the uncertainty that is due to truncation and kinks
    kink: Kink | None = None


class Comparison(NamedTuple):
    """An analytic and a numeric derivative: where they were taken, and how much they may differ."""

    where: str  # "gamma[3]", "x along a random direction"
    analytic: float
    numeric: float
    rtol: float
    tolerance: float  # absolute: rtol of the larger one, plus the uncertainty due to round-off and kinks
    doubt: float = 0.0  # the part of the tolerance that is due to truncation and kinks
    kink: Kink | None = None

    @property
    def error(self) -> float:
        return abs(self.analytic - self.numeric)

    @property
    def size(self) -> float:
        return max(abs(self.analytic), abs(self.numeric))

    @property
    def relative_error(self) -> float:
        """The error relative to the larger of the two."""
        return self.error / self.size if self.size else 0.0

    @property
    def agrees(self) -> bool:
        return self.excess <= 1

    @property
    def open(self) -> bool:
        """Whether a kink, not round-off, makes the tolerance so large that even a gradient of zero would pass."""
        return self.size > 0 and self.doubt >= max(self.size, 0.999 * self.tolerance)

    @property
    def note(self) -> str:
        """What a kink means for this comparison; empty if there is none."""
        if self.kink is None:
            return ""
        sides = f"one-sided derivatives are {self.kink.left:.6g} and {self.kink.right:.6g}"
        if self.kink.at_x:
            return f"a kink at this value: {sides}; any value between is accepted"
        return f"a kink within {self.kink.within:.1g} of this value: {sides}; compared to within {self.tolerance:.2g}"

    @property
    def excess(self) -> float:
        """The error as a multiple of the tolerance; above 1 the two disagree."""
        if self.error == 0:
            return 0.0
        if not (np.isfinite(self.numeric) and np.isfinite(self.tolerance)):
            return np.inf
        return self.error / self.tolerance if self.tolerance else np.inf


class Secant(NamedTuple):
    """D(h) = (y(h) − y(−h))/2h and A(h) = (y(h) − 2 y(0) + y(−h))/h of each output."""

    h: float
    slope: np.ndarray
    bend: np.ndarray

    @property
    def moved(self) -> np.ndarray:
        """Which outputs have changed."""
        return (self.slope != 0) | (self.bend != 0)


class Differences:
    """Central differences of F = Σ y dy, where `outputs()` gives the flat y for the tensors' current contents."""

    def __init__(self, outputs: Callable[[], np.ndarray], dy: np.ndarray) -> None:
        self.outputs = outputs
        self.dy, self.weight = dy, np.abs(dy)  # (outputs,)
        self.y = outputs()
        self.noise = 0.0  # in F
        self.grain = 0.0  # in each output
        self.best_step = FIRST_STEP  # of the last estimate; tried first, since it is likely the best again

    def measure_noise(
        self,
        tensors: list[Tensor],
        evaluate: Callable[[], tuple[np.ndarray, list[np.ndarray]]],
        rng: np.random.Generator,
    ) -> None:
        """Measure the round-off in F and in each tensor's gradient by changing every input in its last digits.

        `evaluate()` gives the flat y and the tensors' gradients. Changing an input by a few units in the last place has
        the same effect as rounding inside the operation, however badly conditioned that is. It does not reveal that y
        may be a difference of numbers as large as the inputs: the loss log Σ exp(z) − z_t changes in units of the last
        digit of z_t, however small the loss is. So the last digit of the largest input is taken as the grain of y.
        """
        self.noise = 4 * _EPS * float(self.weight @ np.abs(self.y))
        self.grain = _EPS * max((float(np.abs(t.base).max(initial=0)) for t in tensors), default=0.0)
        for tensor in tensors:
            tensor.noise = 4 * _EPS * float(np.abs(tensor.gradient).max(initial=0))
        for _ in range(_NUDGES):
            for tensor in tensors:
                tensor.write(tensor.base * (1 + 4 * _EPS * rng.uniform(-1, 1, tensor.base.shape)))
            y, gradients = evaluate()
            self.noise += float(self.weight @ np.abs(y - self.y))
            for tensor, gradient in zip(tensors, gradients, strict=True):
                change = float(np.abs(gradient - tensor.gradient).max(initial=0))
                tensor.noise = max(tensor.noise, 4 * change)
        for tensor in tensors:
            tensor.write(tensor.base)

    def estimate(
        self,
        move: Callable[[float], None],
        scale: float,
        rtol: float,
        analytic: float | None = None,
        steps: tuple[float, ...] = STEPS,
    ) -> Estimate:
        """Σ y′(0) dy along the line of `move`, from the step with the smallest estimated error; see the module's text.

        The search stops at the first step that is good to `rtol`. Where truncation and kinks outweigh round-off, all
        larger steps are worse; where round-off outweighs them, all smaller ones are. So each step rules out those on
        one side. There is no search if the first slope is within rtol/10 of the `analytic` value. The value is NaN if y
        was not finite at any step.
        """
        best, best_h, secants = Estimate(np.nan, np.inf), np.inf, None
        widest, moved = 0.0, np.zeros(self.y.shape, bool)
        left = list(steps)
        place = left.index(self.best_step if self.best_step in steps else FIRST_STEP)
        with np.errstate(all="ignore"):  # a step may leave the domain of a logarithm
            while left:
                h = left[place] * scale
                half = self._secant(move, h / 2)
                if analytic is not None:
                    near, analytic = self._near(half, analytic, rtol), None
                    if near:
                        best = near
                        break
                    if not half.moved.any() and place < len(left) - 1:
                        place = len(left) - 1  # the largest step shows most
                        continue
                whole = self._secant(move, h)
                widest, moved = max(widest, h), moved | whole.moved
                value = (4 * half.slope - whole.slope) / 3
                bend = np.abs(2 * half.bend - whole.bend)
                doubt = 3 * float(self.weight @ (np.abs(value - half.slope) + bend))
                round_off = self._rounding(h, moved, widest)
                differs = abs(float(self.dy @ value) - best.value) > doubt + round_off + best.uncertainty
                if h < best_h if differs else doubt + round_off < best.uncertainty:
                    best_h = h
                    best, secants = Estimate(float(self.dy @ value), doubt + round_off, doubt), (half, whole)
                    self.best_step = left[place]
                if best.uncertainty <= rtol * abs(best.value):
                    break
                if doubt <= round_off:
                    left = left[place + 1 :]
                    place = 0 if doubt else len(left) - 1  # if nothing changes or bends, the largest step shows most
                else:  # also for NaN and infinity
                    left = left[:place]
                    place = len(left) - 1
            if secants and best.doubt > rtol * abs(best.value):
                if h == steps[0] * scale and doubt > round_off:
                    best = self._with_near_kink(best, half, whole, round_off)
                else:
                    best = best._replace(kink=self._kink(*secants))
        move(0.0)
        return best

    def round_off(self, h: float) -> float:
        """A bound on the round-off error of a derivative with step h."""
        return 4 * self.noise / h

    def resolution(self, tensor: Tensor) -> float:
        """The smallest derivative of an output by `tensor` that the grain of y leaves visible, at the largest step."""
        return 4 * self.grain / (STEPS[-1] * tensor.scale)

    def _rounding(self, h: float, moved: np.ndarray, widest: float) -> float:
        """`round_off`, and what the grain of y may hide."""
        unseen = np.max(self.weight, where=~moved, initial=0) / widest
        return self.round_off(h) + 4 * self.grain * (float(np.sum(self.weight, where=moved)) / h + unseen)

    def _secant(self, move: Callable[[float], None], h: float) -> Secant:
        move(h)
        after = self.outputs()
        move(-h)
        before = self.outputs()
        return Secant(h, (after - before) / (2 * h), ((after - self.y) - (self.y - before)) / h)

    def slope(self, move: Callable[[float], None], h: float) -> np.ndarray:
        """y′(0) of each output along the line of `move`, from steps h and h/2."""
        whole, half = self._secant(move, h), self._secant(move, h / 2)
        move(0.0)
        return (4 * half.slope - whole.slope) / 3

    def _near(self, secant: Secant, analytic: float, rtol: float) -> Estimate | None:
        """The estimate by D(h) alone, if the analytic value is so near that there is nothing to search for."""
        value = float(self.dy @ secant.slope)
        error, allowed = abs(value - analytic), 0.1 * rtol * abs(analytic)
        if not error <= allowed:
            return None
        round_off = self._rounding(secant.h, secant.moved, secant.h)
        return Estimate(value, round_off) if error + round_off <= allowed else None

    def _kink(self, half: Secant, whole: Secant) -> Kink | None:
        """The kink within `whole.h`; None where y is only curved, so that A(h) is in proportion to h."""
        jump, change = np.abs(whole.bend), np.abs(2 * half.bend - whole.bend)
        if not self.weight @ change > 0.2 * float(self.weight @ jump):
            return None
        left, right = _sides(half, whole)
        return Kink(whole.h, float(self.dy @ left), float(self.dy @ right))

    def _with_near_kink(self, best: Estimate, half: Secant, whole: Secant, round_off: float) -> Estimate:
        """The middle of the one-sided derivatives at the smallest step, or `best` if that is more certain."""
        kink = self._kink(half, whole)
        if kink is None:
            return best
        left, right = _sides(half, whole)
        at_x = bool(self.weight @ np.abs(half.bend - whole.bend) < 0.01 * (self.weight @ np.abs(whole.bend)))
        doubt = 1.5 * float(self.weight @ np.abs(right - left))
        middle = Estimate((kink.left + kink.right) / 2, doubt + 3 * round_off, doubt)
        nearer = min(best, middle, key=lambda estimate: estimate.uncertainty)
        return nearer._replace(kink=kink._replace(at_x=at_x))


def _sides(half: Secant, whole: Secant) -> tuple[np.ndarray, np.ndarray]:
    """The derivatives of each output to the left of x and to its right."""
    left = 2 * (half.slope - half.bend / 2) - (whole.slope - whole.bend / 2)
    right = 2 * (half.slope + half.bend / 2) - (whole.slope + whole.bend / 2)
    return left, right


def elements(tensor: Tensor, count: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """The indices of all elements of a tensor, or of `count` random ones if it has more."""
    size = tensor.base.size
    chosen = range(size) if size <= count else np.sort(rng.choice(size, count, replace=False))
    return [tuple(int(i) for i in np.unravel_index(flat, tensor.base.shape)) for flat in chosen]


def label(name: str, index: tuple[int, ...]) -> str:
    """The name of an element: `w[3, 1]`, or `scale` for an array without axes."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def compare_elements(
    tensor: Tensor, differences: Differences, indices: list[tuple[int, ...]], rtol: float
) -> list[Comparison]:
    """Compare the gradient at `indices` with central differences."""
    found = []
    for index in indices:
        analytic = float(tensor.gradient[index])
        steps = _steps_for(float(tensor.base[index]), tensor.scale)
        estimate = differences.estimate(tensor.along_element(index), tensor.scale, rtol, analytic, steps)
        found.append(compare(label(tensor.name, index), analytic, estimate, tensor.noise, rtol))
    return found


def _steps_for(x: float, scale: float) -> tuple[float, ...]:
    """STEPS, and smaller ones for a number much smaller than `scale`: near the pole of 1/x, or the edge of the domain
    of log x, steps must be small compared with the number itself. 0 counts as 1.
    """
    smaller: list[float] = []
    while (smaller or STEPS)[0] * scale > 1e-2 * (abs(x) or 1):
        smaller.insert(0, (smaller or STEPS)[0] / 10)
    return (*smaller, *STEPS)


def _together(moves: list[Callable[[float], None]]) -> Callable[[float], None]:
    def move(t: float) -> None:
        for each in moves:
            each(t)

    return move


def compare_directions(
    tensors: list[Tensor], differences: Differences, count: int, rng: np.random.Generator, rtol: float
) -> list[Comparison]:
    """Compare the gradients of `tensors` along `count` random directions with central differences.

    A direction moves every element of all of them, each tensor in proportion to its scale, and tiny elements less.
    """
    scale = max(t.scale for t in tensors)
    where = f"{' and '.join(t.name for t in tensors)} along a random direction"
    found = []
    for _ in range(count):
        directions = [t.reach / scale * rng.standard_normal(t.base.shape) for t in tensors]
        moves = [t.along(direction) for t, direction in zip(tensors, directions, strict=True)]
        estimate = differences.estimate(_together(moves), scale, rtol)
        analytic = sum(float(np.sum(t.gradient * d)) for t, d in zip(tensors, directions, strict=True))
        noise = sum(t.noise * float(np.abs(d).sum()) for t, d in zip(tensors, directions, strict=True))
        found.append(compare(where, analytic, estimate, noise, rtol))
    return found


def compare(where: str, analytic: float, estimate: Estimate, noise: float, rtol: float) -> Comparison:
    """Compare two derivatives. They may differ by `rtol` of the larger one plus the uncertainties of both."""
    larger = max(abs(analytic), abs(estimate.value))
    tolerance = rtol * larger + estimate.uncertainty + noise
    return Comparison(where, analytic, estimate.value, rtol, tolerance, estimate.doubt, estimate.kink)
