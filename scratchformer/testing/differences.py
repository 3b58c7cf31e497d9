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

The step with the smallest estimate is used. It is chosen without looking at the analytic value (and is optimal up to a
factor of about two in the estimate, provided the measured round-off is right: see `Differences.estimate`). So with a
kink near x the check takes smaller steps, with a kink at x itself it cannot decide, and trying many steps cannot make a
wrong gradient pass. Absolute values are taken for each output, so that kinks cannot cancel.

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
    """A variable of the derivatives: its name in messages, the array (perturbed in place), its analytic gradient."""

    name: str
    array: Array
    gradient: np.ndarray
    noise: float = 0.0  # the round-off error of an element of the gradient

    def __post_init__(self) -> None:
        self.base = to_cpu(self.array).copy()
        largest = float(np.abs(self.base).max(initial=0))
        self.scale = largest if largest > 0 else 1.0

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


class Estimate(NamedTuple):
    """A numerical derivative and a bound on its error."""

    value: float
    uncertainty: float
    doubt: float = 0.0  # the part of the uncertainty that is due to truncation and kinks


class Comparison(NamedTuple):
    """An analytic and a numeric derivative: where they were taken, and how much they may differ."""

    where: str  # "gamma[3]", "x along a random direction"
    analytic: float
    numeric: float
    rtol: float
    tolerance: float  # absolute: rtol of the larger one, plus the uncertainty due to round-off and kinks
    doubt: float = 0.0  # the part of the tolerance that is due to truncation and kinks

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
    def excess(self) -> float:
        """The error as a multiple of the tolerance; above 1 the two disagree."""
        if self.error == 0:
            return 0.0
        if not (np.isfinite(self.numeric) and np.isfinite(self.tolerance)):
            return np.inf
        return self.error / self.tolerance if self.tolerance else np.inf


class Differences:
    """Central differences of F = Σ y dy, where `outputs()` gives the flat y for the tensors' current contents."""

    def __init__(self, outputs: Callable[[], np.ndarray], dy: np.ndarray) -> None:
        self.outputs = outputs
        self.dy = dy  # (outputs,)
        self.y = outputs()
        self.noise = 0.0  # in F
        self.grain = 0.0  # in each output
        self.best_step = FIRST_STEP  # of the last estimate; tried first, since it is likely the best again

    def measure_noise(
        self,
        tensors: list[Tensor],
        gradients: Callable[[], list[np.ndarray]],
        rng: np.random.Generator,
    ) -> None:
        """Measure the round-off in F and in each tensor's gradient by changing every input in its last digits.

        Changing an input by a few units in the last place has the same effect as rounding inside the operation, however
        badly conditioned that is. It does not reveal that y may be a difference of numbers as large as the inputs: the
        loss log Σ exp(z) − z_t changes in units of the last digit of z_t, however small the loss is. So the last digit
        of the largest input is taken as the grain of y.
        """
        weight = np.abs(self.dy)
        self.noise = 4 * _EPS * float(weight @ np.abs(self.y))
        self.grain = _EPS * max((float(np.abs(t.base).max(initial=0)) for t in tensors), default=0.0)
        for tensor in tensors:
            tensor.noise = 4 * _EPS * float(np.abs(tensor.gradient).max(initial=0))
        for _ in range(_NUDGES):
            for tensor in tensors:
                tensor.write(tensor.base * (1 + 4 * _EPS * rng.uniform(-1, 1, tensor.base.shape)))
            self.noise += float(weight @ np.abs(self.outputs() - self.y))
            for tensor, gradient in zip(tensors, gradients(), strict=True):
                change = float(np.abs(gradient - tensor.gradient).max(initial=0))
                tensor.noise = max(tensor.noise, 4 * change)
        for tensor in tensors:
            tensor.write(tensor.base)

    def estimate(self, move: Callable[[float], None], scale: float, rtol: float) -> Estimate:
        """Σ y′(0) dy along the line of `move`, from the step with the smallest estimated error; see the module's text.

        The search stops at the first step that is good to `rtol`. Where truncation and kinks outweigh round-off, all
        larger steps are worse; where round-off outweighs them, all smaller ones are. So each step rules out those on
        one side. The value is NaN if y was not finite at any step.
        """
        weight = np.abs(self.dy)
        best = Estimate(np.nan, np.inf)
        widest, moved = 0.0, np.zeros(self.y.shape, bool)
        left, place = list(STEPS), STEPS.index(self.best_step)
        with np.errstate(all="ignore"):  # a step may leave the domain of a logarithm
            while left:
                h = left[place] * scale
                slope, bend = self._slope_and_bend(move, h)
                half_slope, half_bend = self._slope_and_bend(move, h / 2)
                widest, moved = max(widest, h), moved | (slope != 0) | (bend != 0)
                value = (4 * half_slope - slope) / 3
                doubt = float(weight @ (3 * (np.abs(value - half_slope) + np.abs(2 * half_bend - bend))))
                unseen = np.max(weight, where=~moved, initial=0) / widest
                round_off = self.round_off(h) + 4 * self.grain * (float(np.sum(weight, where=moved)) / h + unseen)
                if doubt + round_off < best.uncertainty:
                    best = Estimate(float(self.dy @ value), doubt + round_off, doubt)
                    self.best_step = left[place]
                if best.uncertainty <= rtol * abs(best.value):
                    break
                if doubt <= round_off:
                    left = left[place + 1 :]
                    place = 0 if doubt else len(left) - 1  # if nothing changes or bends, the largest step shows most
                else:  # also for NaN and infinity
                    left = left[:place]
                    place = len(left) - 1
        move(0.0)
        return best

    def round_off(self, h: float) -> float:
        """A bound on the round-off error of a derivative with step h."""
        return 4 * self.noise / h

    def _slope_and_bend(self, move: Callable[[float], None], h: float) -> tuple[np.ndarray, np.ndarray]:
        """For each output, D(h) = (y(h) − y(−h))/2h and A(h) = (y(h) − 2 y(0) + y(−h))/h."""
        move(h)
        after = self.outputs()
        move(-h)
        before = self.outputs()
        return (after - before) / (2 * h), ((after - self.y) - (self.y - before)) / h

    def slope(self, move: Callable[[float], None], h: float) -> np.ndarray:
        """y′(0) along the line of `move`, from steps h and h/2."""
        slope, half = self._slope_and_bend(move, h)[0], self._slope_and_bend(move, h / 2)[0]
        move(0.0)
        return (4 * half - slope) / 3


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
        estimate = differences.estimate(tensor.along_element(index), tensor.scale, rtol)
        analytic = float(tensor.gradient[index])
        found.append(compare(label(tensor.name, index), analytic, estimate, tensor.noise, rtol))
    return found


def _together(moves: list[Callable[[float], None]]) -> Callable[[float], None]:
    def move(t: float) -> None:
        for each in moves:
            each(t)

    return move


def compare_directions(
    tensors: list[Tensor], differences: Differences, count: int, rng: np.random.Generator, rtol: float
) -> list[Comparison]:
    """Compare the gradients of `tensors` along `count` random directions with central differences.

    A direction moves every element of all of them, each tensor in proportion to its scale.
    """
    scale = max(t.scale for t in tensors)
    where = f"{' and '.join(t.name for t in tensors)} along a random direction"
    found = []
    for _ in range(count):
        directions = [t.scale / scale * rng.standard_normal(t.base.shape) for t in tensors]
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
    return Comparison(where, analytic, estimate.value, rtol, tolerance, estimate.doubt)
