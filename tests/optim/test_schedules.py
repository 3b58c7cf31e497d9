"""Learning-rate schedules, by value."""

import itertools
import math
from dataclasses import FrozenInstanceError
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.optim import Constant, Cosine, InverseSquareRoot

PEAK, WARMUP, TOTAL, FLOOR = 0.8, 10, 110, 0.2

SCHEDULES = {
    "Constant": Constant(PEAK, WARMUP),
    "Cosine": Cosine(PEAK, WARMUP, TOTAL, FLOOR),
    "InverseSquareRoot": InverseSquareRoot(PEAK, WARMUP),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_warm_up_is_a_straight_line_that_never_starts_at_zero(schedule):
    for step in range(WARMUP):
        assert schedule(step) == pytest.approx(PEAK * (step + 1) / WARMUP)


@pytest.mark.parametrize(
    ("name", "step", "value"),
    [
        ("Constant", WARMUP, PEAK),
        ("Constant", 10**6, PEAK),
        ("Cosine", WARMUP, PEAK),
        ("Cosine", (WARMUP + TOTAL) // 2, (PEAK + FLOOR) / 2),
        ("Cosine", WARMUP + (TOTAL - WARMUP) // 4, FLOOR + (PEAK - FLOOR) * (1 + math.sqrt(0.5)) / 2),
        ("Cosine", TOTAL, FLOOR),
        ("Cosine", TOTAL + 1, FLOOR),
        ("Cosine", 10**6, FLOOR),
        ("InverseSquareRoot", WARMUP, PEAK * math.sqrt(WARMUP / (WARMUP + 1))),
        ("InverseSquareRoot", 4 * WARMUP - 1, PEAK / 2),
        ("InverseSquareRoot", 100 * WARMUP - 1, PEAK / 10),
    ],
)
def test_values_after_the_warm_up(name, step, value):
    assert SCHEDULES[name](step) == pytest.approx(value)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_it_falls_only_after_the_warm_up_and_has_no_jump(schedule):
    values = [schedule(step) for step in range(2 * TOTAL)]
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert max(abs(s) for s in steps) <= PEAK / WARMUP + 1e-12
    assert all(s > 0 for s in steps[: WARMUP - 1])
    assert all(s <= 1e-15 for s in steps[WARMUP - 1 :])
    assert max(values) == pytest.approx(PEAK)


@pytest.mark.parametrize("schedule", [Constant(PEAK), Cosine(PEAK, 0, TOTAL), InverseSquareRoot(PEAK, 0)])
def test_without_a_warm_up_it_begins_at_the_peak(schedule):
    assert schedule(0) == pytest.approx(PEAK)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_cannot_be_changed(schedule):
    with pytest.raises(FrozenInstanceError):
        schedule.peak = 1.0


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 200))
def test_the_cosine_stays_between_floor_and_peak_whatever_its_sizes(warmup, rest, step):
    value = Cosine(PEAK, warmup, warmup + rest, FLOOR)(step)
    assert 0 < value <= PEAK
    assert value >= FLOOR or step < warmup


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(math.nan), "peak: expected a finite number >= 0, got nan"),
        (lambda: Constant(math.inf), "peak: expected a finite number >= 0, got inf"),
        (lambda: Cosine(-PEAK, 1, TOTAL), "peak: expected a finite number >= 0, got -"),
        (lambda: InverseSquareRoot("0.1", 1), "peak: expected a number, got '0.1'"),
        (lambda: InverseSquareRoot(PEAK, -1), "warmup: expected a number >= 0, got -1"),
        (lambda: Constant(PEAK, 1.5), "warmup: expected an integer, got 1.5"),
        (lambda: Cosine(PEAK, 0, 0), "total: expected a number >= 1, got 0"),
        (lambda: Cosine(PEAK, 11, 10), "warmup: expected at most the total, 10, got 11"),
        (lambda: Cosine(PEAK, np.int8(127), np.int8(126)), "warmup: expected at most the total, 126, got 127"),
        (lambda: Constant(None), "peak: expected a number, got None"),
        (lambda: Constant(True), "peak: expected a number, got True"),
        (lambda: Constant(PEAK, True), "warmup: expected an integer, got True"),
        (lambda: Cosine(PEAK, 1, 2.5), "total: expected an integer, got 2.5"),
        (lambda: Cosine(PEAK, 1, TOTAL, "0"), "floor: expected a number, got '0'"),
        (lambda: Cosine(PEAK, 1, TOTAL, -FLOOR), "floor: expected a finite number >= 0, got -"),
        (lambda: InverseSquareRoot(PEAK, 2**31), "warmup: expected a number <= "),
        (lambda: InverseSquareRoot(PEAK, 1)(0.5), "step: expected an integer, got 0.5"),
        (lambda: Cosine(PEAK, 0, TOTAL, math.nan), "floor: expected a finite number >= 0, got nan"),
        (lambda: Cosine(1e-3, 5, 10, floor=1.0), "floor: expected at most the peak, 0.001, got 1.0"),
        *((lambda s=s: s(-1), "step: expected a number >= 0, got -1") for s in SCHEDULES.values()),
    ],
)
def test_numbers_out_of_range(make, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        make()


def test_steps_of_small_integers():
    """127 + 1 does not fit."""
    for make in (partial(Constant, 1e-3), partial(InverseSquareRoot, 1e-3), lambda n: Cosine(1e-3, n, 1000)):
        assert make(np.int8(100))(np.int8(127)) == make(100)(127)
        assert make(200)(np.int8(127)) == make(200)(127)
