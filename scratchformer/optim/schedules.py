"""Learning-rate schedules: functions from the step number t, counted from 0, to the learning rate of that step.

Each begins with a linear warm-up, (step + 1)/warmup of the peak, because Adam's means are taken over few gradients in
the first steps, which should therefore be small. A schedule has no state: a resumed run asks it for the next step.
Arguments that are not numbers raise TypeError, those out of range ValueError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..backend import cosine
from ..checks import as_integers, expect_at_least, expect_number, expect_positive


@dataclass(frozen=True)
class Constant:
    """Linear warm-up over `warmup` steps to `peak`, then constant:

        lr_t = peak min(1, (t + 1)/warmup)

    With warmup = 0 the learning rate is `peak` from the first step on.
    """

    peak: float
    warmup: int = 0

    def __post_init__(self) -> None:
        expect_schedule(self.peak, self.warmup)
        as_integers(self, "warmup")

    def __call__(self, step: int) -> float:
        expect_at_least(0, step=step)
        return self.peak * warm_up(int(step), self.warmup)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine from `peak` down to `floor` at step `total`, and `floor` after that.

        done_t = min(1, (t − warmup)/max(1, total − warmup))
        lr_t = peak (t + 1)/warmup where t < warmup, floor + (peak − floor) (1 + cos(π done_t))/2 elsewhere

    Source: Loshchilov, Hutter, "SGDR", 2017, equation 5, without restarts.
    """

    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        expect_schedule(self.peak, self.warmup)
        expect_positive(total=self.total)
        if self.warmup > self.total:
            raise ValueError(f"warmup: expected at most the total, {self.total}, got {self.warmup}")
        as_integers(self, "warmup", "total")
        expect_number("floor", self.floor)
        if self.floor > self.peak:
            raise ValueError(f"floor: expected at most the peak, {self.peak}, got {self.floor}")

    def __call__(self, step: int) -> float:
        expect_at_least(0, step=step)
        step = int(step)
        if step < self.warmup:
            return self.peak * warm_up(step, self.warmup)
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + float(cosine(math.pi * done)))


@dataclass(frozen=True)
class InverseSquareRoot:
    """Linear warm-up, then `peak` · √(warmup/(step + 1)), which is `peak` at the end of the warm-up:

        warm_t = min(1, (t + 1)/warmup)        lr_t = peak min(warm_t, √(max(1, warmup)/(t + 1)))

    Source: Vaswani et al., 2017, equation 3.
    """

    peak: float
    warmup: int

    def __post_init__(self) -> None:
        expect_schedule(self.peak, self.warmup)
        as_integers(self, "warmup")

    def __call__(self, step: int) -> float:
        expect_at_least(0, step=step)
        step = int(step)
        return self.peak * min(warm_up(step, self.warmup), math.sqrt(max(1, self.warmup) / (step + 1)))


def expect_schedule(peak: float, warmup: int) -> None:
    """Raise TypeError or ValueError unless `peak` is a learning rate and `warmup` a number of steps."""
    expect_number("peak", peak)
    expect_at_least(0, warmup=warmup)


def warm_up(step: int, warmup: int) -> float:
    """The fraction of the peak at `step`: (step + 1)/warmup, at most 1."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
