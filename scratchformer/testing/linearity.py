"""The check that a backward is linear in dy, as every vector-Jacobian product is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..backend import Array, array_module
from .contracts import GradientError, as_tuple
from .layouts import difference
from .runs import CheckedRun, like

Gradients = Mapping[str, np.ndarray]  # "gradient of x": the array
Noise = Mapping[str, float]  # and its round-off

# Large, so that clipping shows; negative, so that an absolute value shows; a power of two, so that nothing is rounded.
_FACTOR = -1024.0


def check_linearity(run: CheckedRun, dy: Any, gradients: Gradients, noise: Noise, wide: Noise, layouts: bool) -> None:
    """Raise GradientError unless backward(−1024 dy + 1) = −1024 backward(dy) + backward(1), where `gradients` are
    backward(dy). With `layouts`, each dy of ones is a single number in memory, as a sum sends its gradient back. `wide`
    also bounds the round-off of terms that cancel in backward(dy), where it is hidden, but not for another dy.
    """
    of_ones = _of_one_number(run, dy) if layouts else _backward(run, dy, _ones)
    mixed = _backward(run, dy, lambda part: _FACTOR * part + 1)
    expected = {name: _FACTOR * g + of_ones[name] for name, g in gradients.items()}
    if not difference(mixed, expected, noise, factor=-_FACTOR):
        return
    if layouts and (layout := difference(of_ones, _backward(run, dy, _ones), wide)):
        raise GradientError(f"with dy broadcast from one number, {layout}")
    scaled = _backward(run, dy, lambda part: _FACTOR * part)
    wrong = difference(scaled, {name: _FACTOR * g for name, g in gradients.items()}, noise, factor=-_FACTOR)
    for_dy = "−1024 dy"
    if not wrong:  # then −1024 dy + 1 may differ by round-off
        for_dy, wrong = "−1024 dy + 1", difference(mixed, expected, wide, factor=-_FACTOR)
    if wrong:
        cause = nonlinearity(run, dy, gradients, noise)
        raise GradientError(f"backward is not linear in dy: for {for_dy}, {wrong}" + f"\n  {cause}" * bool(cause))


def nonlinearity(run: CheckedRun, dy: Any, gradients: Gradients, noise: Noise) -> str:
    """A simple reason why backward is not linear in dy, such as a dy that is squared; empty if none is found."""
    of_zero = _backward(run, dy, lambda part: 0 * part)
    if not difference(of_zero, gradients, noise):
        large = _backward(run, dy, lambda part: _FACTOR * part)
        same = any(map(np.any, gradients.values())) and not difference(large, gradients, noise)
        return "backward(0) = backward(dy) = backward(−1024 dy): it does not depend on dy" if same else ""
    if wrong := difference(of_zero, {name: 0 * g for name, g in gradients.items()}, noise):
        return f"for dy = 0, {wrong}: something that does not depend on dy is added"
    doubled = _backward(run, dy, lambda part: 2 * part)
    negative = _backward(run, dy, lambda part: -part)
    for name, g in gradients.items():
        if not np.any(np.abs(g) > noise[name]):
            continue
        if _is(doubled, 4, name, g, noise):
            return f"{name}: backward(2 dy) = 4 backward(dy), as if dy were squared"
        if _is(doubled, 1, name, g, noise):
            return f"{name}: backward(2 dy) = backward(dy), so the size of dy is not used"
        if _is(doubled, 2, name, g, noise) and _is(negative, 1, name, g, noise):
            return f"{name}: backward(−dy) = backward(dy), so the sign of dy is not used"
    return ""


def _is(gradients: Gradients, factor: float, name: str, gradient: np.ndarray, noise: Noise) -> bool:
    """Whether a gradient is `factor` times the one of dy."""
    return not difference({name: gradients[name]}, {name: factor * gradient}, noise, factor=factor)


def _backward(run: CheckedRun, dy: Any, change: Callable[[Array], Array]) -> Gradients:
    """The gradients for dy with each of its arrays changed."""
    return run.outcome(like(dy, [array_module(part).asarray(change(part)) for part in as_tuple(dy)])).named_gradients()


def _of_one_number(run: CheckedRun, dy: Any) -> Gradients:
    try:
        return _backward(run, dy, _one_number)
    except Exception as error:
        raise GradientError(f"with dy broadcast from one number, it raises {type(error).__name__}: {error}") from error


def _ones(part: Array) -> Array:
    return array_module(part).ones_like(part)


def _one_number(part: Array) -> Array:
    """Ones that share one place in memory."""
    xp = array_module(part)
    return xp.broadcast_to(xp.ones((), part.dtype), part.shape)
