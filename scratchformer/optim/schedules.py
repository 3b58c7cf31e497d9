"""Learning-rate schedules: functions from the step number, counted from 0, to the learning rate of that step.

Each begins with a linear warm-up, (step + 1)/warmup of the peak: the first steps are small, because Adam's means are
still taken over few gradients. A schedule has no state; a resumed run asks it for the rate of its next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """Linear warm-up over `warmup` steps to `peak`, then constant."""

    peak: float
    warmup: int = 0

    def __call__(self, step: int) -> float:
        return self.peak * warm_up(step, self.warmup)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine from `peak` down to `floor` at step `total`, then constant at `floor`.

    Source: Loshchilov, Hutter, "SGDR", 2017, equation 5, without restarts.
    """

    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * warm_up(step, self.warmup)
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class InverseSquareRoot:
    """Linear warm-up, then `peak` · √(warmup/(step + 1)). Source: Vaswani et al., 2017, equation 3."""

    peak: float
    warmup: int

    def __call__(self, step: int) -> float:
        return self.peak * min(warm_up(step, self.warmup), math.sqrt(max(1, self.warmup) / (step + 1)))


def warm_up(step: int, warmup: int) -> float:
    """The share of the peak at `step`: (step + 1)/warmup, at most 1."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
