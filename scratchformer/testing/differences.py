"""Numerical derivatives with an estimate of their own error, and the comparison of analytic gradients with them.

Along a direction u (one element, or a random direction) y is a function of a number, y(t) = op(x + t u). Its values at
±h and ±h/2 give two central differences, D(h) and D(h/2), and Richardson's V = (4 D(h/2) − D(h))/3, whose error is of
order h⁴. Σ V dy is the numeric derivative of F = Σ y dy. Its error is estimated as the sum of

    3 Σ |V − D(h/2)| |dy|         the change by extrapolation: the truncation error of D(h/2), larger than that of V
    3 Σ |2 A(h/2) − A(h)| |dy|    with A(h) = (y(h) − 2 y(0) + y(−h))/h: this is h y″ + O(h³) where y is smooth. With a
                                  kink within h of x, it is about the jump of y′, whatever h
    4 Σ noise/h |dy|              round-off, from the measured noise of each output, for the outputs that change at all
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

If even the smallest step is too large, as near a pole, smaller ones are tried, until round-off outweighs them. Nothing
more is gained by that at a kink at x itself. There the derivatives on the two sides are taken from y at ±h/4, ±h/2 and
±h, without y(0), so that they are right where y jumps too. The numeric value is the middle of the two. Any value
between them differs from it by at most half their distance; three times that is accepted, because several kinks may
meet at x.

A staircase, as rounding makes, looks like a line from afar. Where y seems to be a line and disagrees with the analytic
value, a third chord, of another length, must have the same slope.

Round-off is the change of y and of the gradients when all inputs change in their last digits. This is measured beside
x, at a distance of some hundred units in the last place in a random direction: there no elements are equal, and none is
at a kink or threshold, whose jump is no round-off. So a jump at one element widens no tolerance. Each output and each
element of a gradient has its own noise. If a derivative may be hidden by outputs in which round-off hides every change,
the gradient by the others, backward of their dy alone, must agree.

Equal elements (`ties`) are compared twice. Each alone is at a kink of a maximum; together they move along a line on
which the maximum is smooth, so what each of them gets must add up to the whole. Where three or more are equal, as for a
median, the gradient may be one that no single element shows. Then the elements are set apart in several orders, and any
derivative between those of these orders is accepted.

For most elements two evaluations are enough: if the analytic value is within rtol/10 of D(h/2) at the first step,
round-off included, and y does not bend, no other step is tried. That step was chosen before, so a wrong gradient would
have to be wrong by just the truncation error of D(h/2) to pass. Every other verdict, and every comparison along a
random direction, comes from the search.

Source: Richardson's extrapolation, and ECNoise's idea of measuring round-off from evaluations at almost the same point
(Moré, Wild, "Estimating computational noise", 2011).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, array_module, to_cpu
from ..shell.text import apart
from .ties import equals, in_ties, repeated, set_apart

_EPS, _SINGLE = float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps)
STEPS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # relative to the tensor's scale
FIRST_STEP = 1e-3  # usually good enough
_FINEST = 1e-6  # relative to the smallest of them: steps that are tried only near a pole or a kink
_ODD = (3 - 5**0.5) / 2  # no ratio of small numbers, so that no three chords of a staircase are parallel by chance
_DECADES = 2  # by which the derivatives of elements that move together may differ
_CLOSER = 100  # times as closely as one element
_NUDGES = 4  # evaluations for measuring noise
_MORE_NUDGES = 40  # where y does not change but the gradient is not 0: its round-off may be 0 at most points


@dataclass
class Variable:
    """A variable of the derivatives: its name in messages, the array (perturbed in place), its analytic gradient.

    scale: the size of its largest element. reach: how far a random direction may move each element; 0 counts as 1.
    """

    name: str
    array: Array
    gradient: np.ndarray

    def __post_init__(self) -> None:
        self.noise = np.zeros(self.gradient.shape)  # the round-off error of each element of the gradient
        self.base = to_cpu(self.array).copy()
        largest = float(np.abs(self.base).max(initial=0))
        self.scale = largest if largest > 0 else 1.0
        self.size = np.where(self.base == 0, 1.0, np.abs(self.base))
        self.reach = np.minimum(self.size / (100 * STEPS[0]), self.scale)  # by the smallest step at most a hundredth

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
        return functools.partial(_move, self, self.base, direction)


class Kink(NamedTuple):
    """What makes a comparison uncertain: y has a kink near x or at x, or jumps there, or x has equal elements. With the
    derivatives to its left and right.
    """

    within: float  # its distance from x is less than this
    left: float
    right: float
    at_x: str = ""  # if it is much nearer than the smallest step: what it is


AT_X = "a kink at this value: one-sided derivatives"
JUMP = "a jump at this value: the derivatives on its two sides"
TOGETHER = "moved together with all elements equal to it"
TIE = "equal elements: the derivatives, as one or another of them is larger,"


class NumericDerivative(NamedTuple):
    """A numerical derivative and a bound on its error."""

    value: float
    uncertainty: float
    doubt: float = 0.0  # the part of the uncertainty that is due to truncation and kinks
    kink: Kink | None = None
    moved: np.ndarray | None = None  # the outputs that have changed; the others count as constant
    unseen: float = 0.0  # what round-off in the others may hide


class Comparison(NamedTuple):
    """An analytic and a numeric derivative: where they were taken, and how much they may differ."""

    where: str  # "gamma[3]", "x along a random direction"
    analytic: float
    numeric: float
    rtol: float
    tolerance: float  # absolute: rtol of the larger one, plus the uncertainty due to round-off and kinks
    doubt: float = 0.0  # the part of the tolerance that is due to truncation and kinks
    kink: Kink | None = None
    noise: float = 0.0  # the round-off of the analytic one
    hidden: float = 0.0  # the part of the analytic one by outputs in which round-off hides every change

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
        return self.doubt > 0 and self.doubt >= max(abs(self.numeric), 0.999 * self.tolerance)

    @property
    def lost(self) -> float:
        """What round-off in y may hide."""
        return max(self.hidden, self.tolerance - self.doubt - self.noise - self.rtol * self.size)

    @property
    def note(self) -> str:
        """What a kink means for this comparison; empty if there is none."""
        if self.kink is None:
            return ""
        sides = "are {} and {}".format(*apart(self.kink.left, self.kink.right))
        if self.kink.at_x:
            return f"{self.kink.at_x} {sides}; any value between is accepted"
        near = f"a kink within {self.kink.within:.1g} of this value: one-sided derivatives"
        return f"{near} {sides}; compared to within {self.tolerance:.2g}"

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

    @property
    def rise(self) -> np.ndarray:
        """y(0) − y(−h) and y(h) − y(0), (2, outputs)."""
        return self.h * np.stack([self.slope - self.bend / 2, self.slope + self.bend / 2])


class Differences:
    """Central differences of F = Σ y dy, where `outputs()` gives the flat y for the tensors' current contents."""

    def __init__(self, outputs: Callable[[], np.ndarray], dy: np.ndarray) -> None:
        self.outputs = outputs
        self.dy, self.weight = dy, np.abs(dy)  # (outputs,)
        self.y = outputs()
        self.tensors: list[Variable] = []  # those whose noise was measured
        self.noise = np.zeros(self.y.shape)  # the round-off in each output
        self.measured_again = False
        self.eps = _EPS  # of the type that y is computed in
        self.grain = 0.0  # in all of them
        self.floor = 0.0  # of terms that cancel in a gradient
        self.best_step = FIRST_STEP  # of the last estimate; tried first, since it is likely the best again

    def measure_noise(
        self,
        tensors: list[Variable],
        evaluate: Callable[..., tuple[np.ndarray, list[np.ndarray]]],
        rng: np.random.Generator,
    ) -> None:
        """Measure the round-off in each output and in each element of a gradient by changing all inputs in their last
        digits; see the module's text.

        `evaluate()` gives the flat y and the tensors' gradients, `evaluate(dy)` those for another dy. Nudges do not
        reveal that y may be a difference of numbers as large as the inputs: the loss log Σ exp(z) − z_t changes in
        units of the last digit of z_t, however small the loss is. So the last digit of the largest input is taken as
        the grain of y.
        """
        self.tensors, self.evaluate = tensors, evaluate
        self.eps = _SINGLE if self._is_single() else _EPS
        largest = max((float(np.abs(t.base).max(initial=0)) for t in tensors), default=0.0)
        self.grain = self.eps * largest
        self.floor = self.eps * float(self.weight.max(initial=0)) * (1 + largest) ** 2
        self.cancelling = self.floor * (1 + largest) ** 2  # in a product of four
        signs = [rng.choice([-self.eps, self.eps], t.base.shape) for t in tensors]
        self.beside = [
            t.base * (1 + sign * rng.uniform(16, 1024, t.base.shape)) for t, sign in zip(tensors, signs, strict=True)
        ]
        of_y = self._measure_near([self.beside] * _NUDGES, rng)
        self.noise = 4 * self.eps * np.abs(self.y) + 0.75 * of_y.sum(axis=0)  # two differ by 4/3 of one, on average

    def measure_again(self) -> None:
        """Measure the round-off in the gradients at many more points, which lie in the same direction from x. Where y
        does not change, as where softmax saturates, a gradient may be a difference of numbers that are equal but for
        their last digit, and equal at most points.
        """
        if not self.measured_again:
            self.measured_again, rng = True, np.random.default_rng(0)
            far = rng.uniform(0.5, 4, _MORE_NUDGES)
            ways = [(t.base, x - t.base) for t, x in zip(self.tensors, self.beside, strict=True)]
            self._measure_near([[base + c * way for base, way in ways] for c in far], rng)

    def _measure_near(self, points: list[list[np.ndarray]], rng: np.random.Generator) -> np.ndarray:
        """The changes of y from near each point to near the next. Those of the gradients count as their noise."""
        values = []
        for point in points:
            for tensor, x in zip(self.tensors, point, strict=True):
                tensor.write(x * (1 + 4 * self.eps * rng.uniform(-1, 1, x.shape)))
            try:
                y, gradients = self.evaluate()
            except Exception:  # it is outside the domain of y
                y, gradients = self.y * np.nan, [t.gradient * np.nan for t in self.tensors]
            values.append([y, *(np.array(g) for g in gradients)])
        self._restore()
        of_y, *of_gradients = map(_changes, zip(*values, strict=True))
        for tensor, changes in zip(self.tensors, of_gradients, strict=True):
            cancelled = min(float(changes.max(initial=0)), self.cancelling)
            last = np.maximum(self.eps * np.abs(tensor.gradient), changes.max(axis=0))
            tensor.noise = np.maximum(tensor.noise, 4 * np.maximum(last, cancelled))
        return of_y

    def _is_single(self) -> bool:
        """Whether y is computed in float32: it has that type, or most of it does not change when the tensors change by
        1e-10 of their size, and when they change by a little more, it changes by a last digit of float32.
        """
        if self.y.dtype == np.float32:
            return True

        def changes(size: float) -> np.ndarray:
            rng = np.random.default_rng(0)
            for t in self.tensors:
                t.write(t.base * (1 + size * rng.uniform(0.5, 1, t.base.shape)))
            try:
                return np.abs(self.outputs() - self.y)
            except Exception:  # it is outside the domain of y
                return np.full(self.y.shape, np.inf)
            finally:
                self._restore()

        tiny = np.count_nonzero(changes(1e-10))
        if tiny > 0.1 * self.y.size or not (large := np.count_nonzero(changes(1e-2))) or tiny > 0.1 * large:
            return False
        digit, smallest = _SINGLE * float(np.abs(self.y).max(initial=0)), np.inf
        for size in (1e-7, 3e-7, 1e-6, 3e-6, 1e-5):
            change = changes(size)
            moved = change[change > 0]
            smallest = min(smallest, moved.min(initial=np.inf))
            if moved.size >= 0.5 * large:
                return bool(smallest < 2 * digit and np.median(moved) > digit / 64)
        return False

    def fold_triangle(self, tensor: Variable) -> str:
        """Where y ignores the elements above or below the diagonal of a symmetric matrix, as LAPACK's functions do, its
        gradient may count them all the same. Then what it has there is added to the elements across the diagonal, which
        stand for both. Returns a note; empty if nothing was added.
        """
        x, across = tensor.base, functools.partial(np.swapaxes, axis1=-1, axis2=-2)
        if x.ndim < 2 or x.shape[-1] != x.shape[-2] or not np.array_equal(x, across(x)):
            return ""
        for ignored in (np.triu(np.ones(x.shape[-2:], bool), 1), np.tril(np.ones(x.shape[-2:], bool), -1)):
            if np.isin(x[..., ignored], (0, 1)).all() or not tensor.gradient[..., ignored].any():
                continue
            draws = FIRST_STEP * tensor.scale * np.random.default_rng(0).standard_normal(x.shape)
            above, below = (self._moved(tensor.along(draws * place), 1.0) for place in (ignored, ignored.T))
            tensor.write(x)
            if np.array_equal(above, self.y) and not np.array_equal(below, self.y):
                g = tensor.gradient
                tensor.gradient = np.where(ignored, 0.0, g + across(np.where(ignored, g, 0.0)))
                return f"{tensor.name} is symmetric, and y ignores one of its triangles: two elements count as one"
        return ""

    def estimate(
        self,
        move: Callable[[float], None],
        scale: float,
        rtol: float,
        analytic: float = np.nan,
        steps: tuple[float, ...] = STEPS,
        search: bool = False,
    ) -> NumericDerivative:
        """Σ y′(0) dy along the line of `move`, from the step with the smallest estimated error; see the module's text.

        The search stops at the first step that is good to `rtol`. Where truncation and kinks outweigh round-off, all
        larger steps are worse; where round-off outweighs them, all smaller ones are. So each step rules out those on
        one side. Unless `search`, there is none if the first slope is within rtol/10 of the `analytic` value. The value
        is NaN if y was not finite at any step.
        """
        best, best_h, secants = NumericDerivative(np.nan, np.inf), np.inf, None
        fine: list[tuple[Secant, Secant]] = []  # those of the smallest of `steps`, and of smaller ones
        widest, moved = 0.0, np.zeros(self.y.shape, bool)
        left = list(steps)
        place = left.index(self.best_step if self.best_step in steps else FIRST_STEP)
        with np.errstate(all="ignore"):  # a step may leave the domain of a logarithm
            while left:
                step = left[place]
                half = self._secant(move, step * scale / 2)
                if not search:
                    search = True
                    if near := self._near(half, analytic, rtol):
                        best = near
                        break
                    if not half.moved.any() and place < len(left) - 1:
                        place = len(left) - 1  # the largest step shows most
                        continue
                whole = self._secant(move, step * scale)
                widest, moved = max(widest, whole.h), moved | whole.moved
                value, doubt = self._extrapolated(half, whole)
                round_off = self._rounding(whole.h, moved, widest)
                if doubt <= round_off and abs(self.dy @ value - analytic) > round_off:
                    chord = self._secant(move, _ODD * whole.h).slope  # y is a straight line, or a staircase
                    off = 3 * float(self.weight @ np.abs(chord - value))
                    doubt += off if off > 10 * round_off else 0.0
                differs = abs(float(self.dy @ value) - best.value) > doubt + round_off + best.uncertainty
                if whole.h < best_h if differs else doubt + round_off < best.uncertainty:
                    best_h, secants = whole.h, (half, whole)
                    best = NumericDerivative(float(self.dy @ value), doubt + round_off, doubt)
                    self.best_step = step
                if best.uncertainty <= rtol * abs(best.value):
                    break
                if doubt <= round_off:
                    left = left[place + 1 :]
                    place = 0 if doubt else len(left) - 1  # if nothing changes or bends, the largest step shows most
                else:  # also for NaN and infinity
                    left = left[:place]
                    if not left and step <= steps[0]:
                        fine.append((half, whole))
                        if step > _FINEST * steps[0] and not self._bends_at_x(half, whole):
                            left = [step / 10]
                    place = len(left) - 1
            if secants:
                best = best._replace(uncertainty=best.doubt + self._rounding(best_h, moved, widest))
            if best.doubt > max(rtol * abs(best.value), best.uncertainty / 2):
                if fine:
                    best = self._at_kink(best, move, fine)
                elif secants:
                    best = best._replace(kink=self._kink(*secants))
        move(0.0)
        return best._replace(moved=moved, unseen=self.round_off(widest, ~moved) if widest else 0.0)

    def compare(
        self, where: str, along: Sequence[tuple[Variable, Any]], scale: float, rtol: float, **search: Any
    ) -> Comparison:
        """Compare the gradients with central differences. along: the tensors that move, each with its direction, or
        with the index of the only element that does. search: the other options of `estimate`.

        Round-off may hide a change of some outputs. Where these may be the reason for a difference, the gradient by the
        others must agree.
        """
        move = _together([t.along_element(u) if isinstance(u, tuple) else t.along(u) for t, u in along])
        analytic = sum(_along(t.gradient, u) for t, u in along)
        estimate = self.estimate(move, scale, rtol, analytic, **search)
        noise = sum(_along(t.noise, u if isinstance(u, tuple) else np.abs(u)) for t, u in along)
        comparison = compare(where, analytic, estimate, noise, rtol)
        if comparison.agrees:
            return comparison
        if not np.any(estimate.moved):  # the gradient may be what is left of terms as large as those of other elements
            self.measure_again()
            noise = sum(float(t.noise.max() * (1 if isinstance(u, tuple) else np.abs(u).sum())) for t, u in along)
            comparison = compare(where, analytic, estimate, noise, rtol)
            if comparison.agrees:
                return comparison
        if comparison.error <= comparison.tolerance + estimate.unseen:
            gradients = self.evaluate(self.dy * estimate.moved)[1]
            by_name = {t.name: gradient for t, gradient in zip(self.tensors, gradients, strict=True)}
            seen = sum(_along(by_name[t.name], u) for t, u in along)
            if compare(where, seen, estimate, noise, rtol).agrees:
                hidden = abs(analytic - seen)
                return comparison._replace(tolerance=comparison.tolerance + hidden, hidden=hidden)
        if tie := self._between_orders(along):
            return compare(where, analytic, tie, noise, rtol)
        return comparison

    def round_off(self, h: float, moved: np.ndarray | bool = True) -> float:
        """A bound on the round-off error of a derivative with step h, of those outputs that have moved."""
        return 4 * float(np.sum(self.weight * (self.noise + self.grain), where=moved)) / h

    def resolution(self, tensor: Variable) -> float:
        """The smallest derivative of an output by `tensor` that the grain of y leaves visible, at the largest step."""
        return 4 * self.grain / (STEPS[-1] * tensor.scale)

    def _rounding(self, h: float, moved: np.ndarray, widest: float) -> float:
        """`round_off` of the outputs that have moved, and what the grain of y may hide in one that has not."""
        return self.round_off(h, moved) + 4 * self.grain * float(np.max(self.weight, where=~moved, initial=0)) / widest

    def _secant(self, move: Callable[[float], None], h: float) -> Secant:
        after, before = self._moved(move, h), self._moved(move, -h)
        return Secant(h, (after - before) / (2 * h), ((after - self.y) - (self.y - before)) / h)

    def _moved(self, move: Callable[[float], None], t: float) -> np.ndarray:
        move(t)
        try:
            return self.outputs()
        except Exception:  # outside the domain of y, as where a matrix has no inverse
            return np.full(self.y.shape, np.nan)

    def slope(self, move: Callable[[float], None], h: float) -> np.ndarray:
        """y′(0) of each output along the line of `move`, from steps h and h/2."""
        whole, half = self._secant(move, h), self._secant(move, h / 2)
        move(0.0)
        return (4 * half.slope - whole.slope) / 3

    def _extrapolated(self, half: Secant, whole: Secant) -> tuple[np.ndarray, float]:
        """V of each output, and the error of Σ V dy that is due to truncation and kinks."""
        value = (4 * half.slope - whole.slope) / 3
        bend = np.abs(2 * half.bend - whole.bend)
        return value, 3 * float(self.weight @ (np.abs(value - half.slope) + bend))

    def _near(self, secant: Secant, analytic: float, rtol: float) -> NumericDerivative | None:
        """The estimate by D(h) alone, if the analytic value is so near that there is nothing to search for. At a kink D
        is the middle of the two slopes, so y must not bend.
        """
        value = float(self.dy @ secant.slope)
        error, allowed = abs(value - analytic), 0.1 * rtol * abs(analytic)
        if not error <= allowed or self.weight @ np.abs(secant.bend) > 0.01 * (self.weight @ np.abs(secant.slope)):
            return None
        round_off = self._rounding(secant.h, secant.moved, secant.h)
        return NumericDerivative(value, round_off) if error + round_off <= allowed else None

    def _bends_at_x(self, half: Secant, whole: Secant) -> bool:
        """Whether A(h) does not depend on h: then there is a kink much nearer than h/2."""
        return bool(self.weight @ np.abs(half.bend - whole.bend) < 0.01 * (self.weight @ np.abs(whole.bend)))

    def _jump(self, half: Secant, whole: Secant) -> float:
        """How far y jumps at x: the difference of y(0) from the lines through y(h/2) and y(h) on either side."""
        return float(np.sum(np.abs(2 * half.rise - whole.rise) @ self.weight))

    def _kink(self, half: Secant, whole: Secant) -> Kink | None:
        """The kink within `whole.h`; None where y is only curved, so that A(h) is in proportion to h."""
        jump, change = np.abs(whole.bend), np.abs(2 * half.bend - whole.bend)
        if not self.weight @ change > 0.2 * float(self.weight @ jump):
            return None
        left, right = (2 * half.rise / half.h - whole.rise / whole.h) @ self.dy
        return Kink(whole.h, float(left), float(right))

    def _at_kink(
        self, best: NumericDerivative, move: Callable[[float], None], fine: list[tuple[Secant, Secant]]
    ) -> NumericDerivative:
        """The middle of the derivatives on the two sides of x, or `best` if that is more certain. `fine` are secants
        near x, the largest first.
        """
        (half, whole), *smaller = fine
        quarter = self._secant(move, half.h / 2)
        near = (half.rise - quarter.rise) / quarter.h  # the slopes from h/4 to h/2, and from h/2 to h
        far = (whole.rise - half.rise) / half.h
        jump = self._jump(half, whole)
        jumps = jump > 0.1 * float(np.sum(np.abs(whole.rise) @ self.weight)) + self.round_off(1.0, whole.moved)
        if jumps and smaller and not self._jump(*smaller[-1]) > 0.5 * jump:
            steep = []  # no jump after all
            for pair in smaller:
                value, doubt = self._extrapolated(*pair)
                steep.append(NumericDerivative(float(self.dy @ value), doubt + self.round_off(pair[0].h), doubt))
            return min(steep, key=lambda estimate: estimate.uncertainty)
        kink = self._kink(half, whole)
        if not (jumps or kink):
            return best
        left, right = 2 * near - far
        doubt = 1.5 * float(self.weight @ np.abs(right - left)) + 3 * float((np.abs(near - far) @ self.weight).sum())
        middle = float(self.dy @ (left + right)) / 2
        estimate = NumericDerivative(middle, doubt + 6 * self.round_off(whole.h, whole.moved), doubt)
        nearer = min(best, estimate, key=lambda each: each.uncertainty)
        at_x = JUMP if jumps else AT_X if self._bends_at_x(half, whole) else ""
        return nearer._replace(kink=Kink(whole.h, float(self.dy @ left), float(self.dy @ right), at_x))

    def _between_orders(self, along: Sequence[tuple[Variable, Any]]) -> NumericDerivative | None:
        """The derivative where x has equal elements: any between the derivatives after these have been set apart, in
        several orders. None if none of them moves, or the order makes no difference.
        """
        moved = np.concatenate([t.base[_direction(t, u) != 0] for t, u in along])
        if not (np.isin(moved, in_ties([t.base for t in self.tensors])).any() and self._order_matters):
            return None
        slopes, h = self._in_orders([(t, _direction(t, u)) for t, u in along])
        if not h or not np.ptp(slopes @ self.dy) > 0.01 * np.abs(slopes @ self.dy).max() + self.round_off(h):
            return None
        low, high = float((slopes @ self.dy).min()), float((slopes @ self.dy).max())
        doubt = 1.5 * (high - low)
        return NumericDerivative((low + high) / 2, doubt, doubt, Kink(h, low, high, TIE))

    @cached_property
    def _order_matters(self) -> bool:
        """Whether y' depends on the order in which equal elements are set apart."""
        rng = np.random.default_rng(0)
        along = [(t, t.reach * rng.standard_normal(t.base.shape)) for t in self.tensors]
        slopes, h = self._in_orders(along)
        if not h:
            return False
        limit = 0.01 * np.abs(slopes).max(axis=0) + 4 * self.noise / h
        closer, _ = self._in_orders(along, 0.5)
        return bool(np.any(np.ptp(slopes, axis=0) > limit) and np.all(np.abs(closer - slopes) < limit))

    def _in_orders(self, along: Sequence[tuple[Variable, np.ndarray]], gap: float = 1.0) -> tuple[np.ndarray, float]:
        """y' of each output along a direction, for each order of the equal elements, and the step: 0 if none are equal.
        Their distance is the usual one times `gap`.
        """
        orders, distance = set_apart([t.base for t in self.tensors], [gap * t.size for t in self.tensors])
        h = distance / (8 * max((float(np.abs(u).max()) for _, u in along), default=1.0))
        slopes = []
        for arrays in orders:
            apart = dict(zip((t.name for t in self.tensors), arrays, strict=True))
            for t in self.tensors:
                t.write(apart[t.name])
            moves = [functools.partial(_move, t, apart[t.name], u) for t, u in along]
            slopes.append(self._secant(_together(moves), h).slope)
        self._restore()
        return np.array(slopes), h

    def _restore(self) -> None:
        for tensor in self.tensors:
            tensor.write(tensor.base)


def _move(tensor: Variable, base: np.ndarray, direction: np.ndarray, t: float) -> None:
    tensor.write(base + t * direction)


def _direction(tensor: Variable, direction: Any) -> np.ndarray:
    """A direction as an array; for an index, 1 there and 0 elsewhere."""
    if not isinstance(direction, tuple):
        return direction
    one = np.zeros(tensor.base.shape)
    one[direction] = 1
    return one


def _along(gradient: np.ndarray, direction: Any) -> float:
    """The derivative along a direction, or by the element at an index."""
    return float(gradient[direction]) if isinstance(direction, tuple) else float(np.sum(gradient * direction))


def _changes(values: Sequence[np.ndarray]) -> np.ndarray:
    """The sizes of the changes from each of several arrays to the next; 0 where one is not finite."""
    return np.nan_to_num(np.abs(np.diff(values, axis=0, append=values[:1])), posinf=0)


def elements(tensor: Variable, count: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """The indices of all elements of a tensor, or of `count` random ones if it has more."""
    size = tensor.base.size
    chosen = range(size) if size <= count else np.sort(rng.choice(size, count, replace=False))
    return [tuple(map(int, np.unravel_index(flat, tensor.base.shape))) for flat in chosen]


def label(name: str, index: tuple[int, ...]) -> str:
    """The name of an element: `w[3, 1]`, or `scale` for an array without axes."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def compare_elements(
    tensor: Variable, differences: Differences, indices: list[tuple[int, ...]], rtol: float
) -> list[Comparison]:
    """Compare the gradient at `indices` with central differences."""
    comparisons = []
    for index in indices:
        steps, where = _steps_for(float(tensor.base[index]), tensor.scale), label(tensor.name, index)
        comparisons.append(differences.compare(where, [(tensor, index)], tensor.scale, rtol, steps=steps))
    return comparisons


def compare_groups(
    tensors: list[Variable], differences: Differences, rng: np.random.Generator, rtol: float
) -> tuple[dict[str, list[Comparison]], dict[str, list[tuple[int, ...]]]]:
    """Compare the gradients with central differences for many elements at once: those whose derivatives have about the
    same size by the analytic gradients move together, by random amounts. A group must agree more closely than to
    `rtol`, so that one wrong element among the others shows. Returns, by the name of the tensor, the comparisons, and
    the indices of elements that must be compared one by one: where a group disagrees, is at a kink, or could hide a
    wrong element.
    """
    rtol /= _CLOSER
    comparisons: dict[str, list[Comparison]] = {t.name: [] for t in tensors}
    alone: dict[str, list[tuple[int, ...]]] = {t.name: [] for t in tensors}
    scale = max(t.scale for t in tensors)
    sizes = [np.abs(t.gradient) * t.reach for t in tensors]
    orders = [np.ceil(np.log10(np.maximum(size, np.finfo(float).tiny)) / _DECADES) for size in sizes]
    for order in np.unique(np.concatenate([each.ravel() for each in orders])):
        places = [each == order for each in orders]
        signs = [rng.choice([-1, 1], place.shape) * rng.uniform(0.5, 1, place.shape) * place for place in places]
        along = [(t, t.reach / scale * u) for t, u in zip(tensors, signs, strict=True) if u.any()]
        where = f"{' and '.join(t.name for t, _ in along)} along a random direction"
        together = differences.compare(where, along, scale, rtol)
        smallest = min(float(size[place].min()) for size, place in zip(sizes, places, strict=True) if place.any())
        decided = together.doubt <= max(smallest / (200 * scale), together.tolerance / 2)  # or round-off is the limit
        for t, place in zip(tensors, places, strict=True):
            if not (together.agrees and not together.kink and decided):
                alone[t.name] += [tuple(map(int, index)) for index in np.argwhere(place)]
            elif place.any():
                comparisons[t.name].append(together)
    return comparisons, alone


def compare_equal(
    tensors: list[Variable],
    differences: Differences,
    elements: Mapping[str, Sequence[tuple[tuple[int, ...], Comparison]]],
    directions: Mapping[str, Sequence[Comparison]],
    rtol: float,
) -> dict[str, list[Comparison]]:
    """Compare the gradients along directions that keep equal elements equal, by the name of a tensor that moves.

    Where x_i and x_j are equal, their maximum has a kink in each of them. It is smooth if both move together, and so is
    sorting, or any other choice by size. `elements` are indices with their comparisons: the elements equal to one of
    them move together, unless there is no kink, in them or along the random `directions`. At a kink, the equal elements
    of other tensors move with them too, and those of opposite value move the other way: it may be the absolute values
    that are equal.
    """
    comparisons: dict[str, list[Comparison]] = {t.name: [] for t in tensors}
    tried = set()
    for tensor in tensors:
        along_random = directions[tensor.name]
        smooth = along_random and all(not c.kink and c.tolerance < c.size / 1000 for c in along_random)
        ties = not smooth and repeated(tensor.base)
        for index, comparison in elements[tensor.name]:
            if not (ties or comparison.kink):
                continue
            value = float(tensor.base[index])
            groups = [([tensor], 0.0)]
            if comparison.kink:
                groups += [(tensors, 0.0), *((group, -1.0) for group in ([tensor], tensors) if value)]
            for group, opposite in groups:
                along = [(t, equals(t.base, value) + opposite * equals(t.base, -value)) for t in group]
                along = [(t, direction) for t, direction in along if direction.any()]
                key = tuple((t.name, direction.tobytes()) for t, direction in along)
                if key in tried or sum(np.count_nonzero(direction) for _, direction in along) < 2:
                    continue
                tried.add(key)
                steps, where = _steps_for(value, tensor.scale), f"{label(tensor.name, index)}, {TOGETHER}"
                together = differences.compare(where, along, tensor.scale, rtol, steps=steps)
                if not together.agrees or together.size > together.tolerance:  # otherwise it decides nothing
                    for t, _ in along:
                        comparisons[t.name].append(together)
    return comparisons


def _steps_for(x: float, scale: float) -> tuple[float, ...]:
    """STEPS, and smaller ones for a number much smaller than `scale`: near the pole of 1/x, or the edge of the domain
    of log x, steps must be small compared with the number itself. 0 counts as 1.
    """
    smaller: list[float] = []
    while (smaller or STEPS)[0] * scale > 1e-2 * (abs(x) or 1):
        smaller.insert(0, (smaller or STEPS)[0] / 10)
    return (*smaller, *STEPS)


def _together(moves: Sequence[Callable[[float], None]]) -> Callable[[float], None]:
    def move(t: float) -> None:
        for each in moves:
            each(t)

    return move


def compare_directions(
    tensors: list[Variable], differences: Differences, count: int, rng: np.random.Generator, rtol: float
) -> list[Comparison]:
    """Compare the gradients of `tensors` along `count` random directions with central differences.

    A direction moves every element of all of them, each tensor in proportion to its scale, and tiny elements less.
    """
    scale = max(t.scale for t in tensors)
    where = f"{' and '.join(t.name for t in tensors)} along a random direction"
    comparisons = []
    for _ in range(count):
        along = [(t, t.reach / scale * rng.standard_normal(t.base.shape)) for t in tensors]
        comparisons.append(differences.compare(where, along, scale, rtol, search=True))
    return comparisons


def compare(where: str, analytic: float, estimate: NumericDerivative, noise: float, rtol: float) -> Comparison:
    """Compare two derivatives. They may differ by `rtol` of the larger one plus the uncertainties of both."""
    larger = max(abs(analytic), abs(estimate.value))
    tolerance = rtol * larger + estimate.uncertainty + noise
    return Comparison(where, analytic, estimate.value, rtol, tolerance, estimate.doubt, estimate.kink, noise)
