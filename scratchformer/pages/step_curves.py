"""The error of a numerical gradient as a function of the step: truncation at large steps, round-off at small ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from ..catalogue import OperationCase
from ..dispatch import reference_only
from ..testing.differences import Variable, elements
from .svg import Canvas, width

STEPS = tuple(10 ** (-k / 2) for k in range(2, 29))  # 1e-1 to 1e-14
ELEMENTS = 12  # of each argument, at most
SEED = 1


class Errors(NamedTuple):
    """For each of STEPS, the relative error ‖numerical − analytic‖/‖analytic‖ over some elements of all arguments."""

    central: list[float]  # (L(x + h) − L(x − h))/2h in float64
    forward: list[float]  # (L(x + h) − L(x))/h in float64
    single: list[float]  # the central one in float32


def step_errors(case: OperationCase) -> Errors:
    """The errors for an operation with the arguments of a case and a random dy; L = Σ y dy."""
    with reference_only(), threadpool_limits(1, "blas"):
        analytic, central, forward = _slopes(case, np.float64)
        _, single, _ = _slopes(case, np.float32)
    length = np.linalg.norm(analytic)
    return Errors(
        *([float(np.linalg.norm(row - analytic) / length) for row in rows] for rows in (central, forward, single))
    )


def _slopes(case: OperationCase, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The analytic gradient (elements,), and the central and forward differences (STEPS, elements)."""
    args = [np.array(x, dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in case.args]
    y, cache = case.op(*args, **case.options)
    dy = np.random.default_rng(SEED).standard_normal(np.shape(y)).astype(dtype)
    gradients = case.op_backward(dy if np.shape(y) else float(dy), cache)
    floating = [x for x in args if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    analytic, columns = [], []
    for x, gradient in zip(floating, gradients, strict=True):
        tensor = Variable("", x, gradient)
        for index in elements(tensor, ELEMENTS, np.random.default_rng(SEED)):
            analytic.append(float(gradient[index]))
            columns.append(_at_all_steps(tensor.along_element(index), lambda: case.op(*args, **case.options)[0], dy))
    central, forward = (np.array(rows).T for rows in zip(*columns, strict=True))
    return np.array(analytic), central, forward


def _at_all_steps(move: Callable, outputs: Callable, dy: np.ndarray) -> tuple[list[float], list[float]]:
    """The central and forward differences of Σ y dy for each step."""
    move(0.0)
    y = outputs()
    central, forward = [], []
    for h in STEPS:
        move(h)
        after = outputs()
        move(-h)
        before = outputs()
        central.append(float(np.sum((after - before) * dy, dtype=np.float64)) / (2 * h))
        forward.append(float(np.sum((after - y) * dy, dtype=np.float64)) / h)
    move(0.0)
    return central, forward


CENTRAL, ONE_SIDED, SINGLE = "central", "forward", "central, float32"
STYLES = {CENTRAL: ("forward", ""), ONE_SIDED: ("backward", "6 3"), SINGLE: ("plain", "2 3")}
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 400, 52, 390, 46, 270
LOWEST, HIGHEST = -16, 1  # exponents of the error


def step_curve(case: OperationCase) -> tuple[str, str]:
    """The curve of the error over the step for an operation, as an SVG, and what it shows, in words."""
    errors, name = step_errors(case), case.op.__name__
    canvas = Canvas(WIDTH)
    x = 4.0
    for label, (colour, dash) in STYLES.items():
        canvas.line([(x, 10), (x + 24, 10)], colour, dash=dash)
        canvas.text(x + 30, 14, label)
        x += 44 + width(label)
    _axes(canvas)
    for row, (colour, dash) in zip(errors, STYLES.values(), strict=True):
        canvas.line([_place(h, error) for h, error in zip(STEPS, row, strict=True)], colour, dash=dash)
    words = in_words(errors)
    return canvas.svg(f"{name}: the error of the numerical gradient over the step", words, f"steps-{name}"), words


def _axes(canvas: Canvas) -> None:
    canvas.text(4, 36, "relative error of the numerical gradient", size=10)
    canvas.line([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)])
    for exponent in range(-14, 0, 2):
        x, _ = _place(10.0**exponent, 1)
        canvas.line([(x, BOTTOM), (x, BOTTOM + 4)])
        canvas.text(x, BOTTOM + 18, _power(exponent), "middle", size=10)
    for exponent in range(-16, 1, 4):
        _, y = _place(1, 10.0**exponent)
        canvas.line([(LEFT - 4, y), (LEFT, y)])
        canvas.text(LEFT - 8, y + 4, _power(exponent), "end", size=10)
    for exponent in (-12, -5):
        x, _ = _place(10.0**exponent, 1)
        canvas.line([(x, TOP), (x, BOTTOM)], dash="1 4")
        canvas.text(x + 4, TOP + 8, f"h = {_power(exponent)}", size=10)
    canvas.text((LEFT + RIGHT) / 2, BOTTOM + 36, "step h", "middle", size=10)


def _place(h: float, error: float) -> tuple[float, float]:
    """The point of the picture for a step and an error."""
    exponent = min(max(math.log10(max(error, 1e-300)), LOWEST), HIGHEST)
    across = (math.log10(h) + 14) / 13
    up = (exponent - LOWEST) / (HIGHEST - LOWEST)
    return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def in_words(errors: Errors) -> str:
    """What a reader sees in the curve."""
    at = {round(math.log10(h), 1): error for h, error in zip(STEPS, errors.central, strict=True)}
    best, step = min(zip(errors.central, STEPS, strict=True))
    one_sided, one_sided_step = min(zip(errors.forward, STEPS, strict=True))
    single, single_step = min(zip(errors.single, STEPS, strict=True))
    round_off = (
        f"Round-off, about 10⁻¹⁶ of L, is divided by h, so the error grows as h shrinks: {_number(at[-5.0])} at "
        f"h = 10⁻⁵, {_number(at[-12.0])} at 10⁻¹²."
    )
    in_single = f"In float32 no step does better than {_number(single)} (h = {_number(single_step)})."
    if at[-1.0] < 1e-12:
        linear = errors.forward[0] < 1e-12  # at the largest step
        form = "linear" if linear else "a polynomial of second degree"
        kind = "difference" if linear else "central difference"
        return (
            f"Over these steps y is {form} in every element of its arguments, so a {kind} has no truncation error at "
            f"any step, and the largest steps are the best. {round_off} {in_single}"
        )
    if best < 1e-12:
        across = max(h for h, error in zip(STEPS, errors.central, strict=True) if error < 1e-10)
        return (
            f"y consists of straight pieces. Steps larger than {_number(across)} reach across a kink, and then the "
            f"difference is wrong whatever the gradient. Smaller steps stay on one piece, where there is no "
            f"truncation error. {round_off} {in_single}"
        )
    return (
        f"Central differences are best near h = {_number(step)}, with an error of {_number(best)}. Larger steps are "
        f"worse because of truncation, which grows with h². {round_off} A forward difference has a truncation error "
        f"that grows with h, so its best error is {_number(one_sided)}, near h = {_number(one_sided_step)}. {in_single}"
    )


def _number(x: float) -> str:
    """x to one digit: 3·10⁻¹¹, or 10⁻⁵ for a power of ten."""
    exponent = math.floor(math.log10(x))
    digit = round(x / 10.0**exponent)
    if digit == 10:
        digit, exponent = 1, exponent + 1
    return _power(exponent) if digit == 1 else f"{digit}·{_power(exponent)}"


def _power(exponent: int) -> str:
    return "1" if exponent == 0 else "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
