"""What the ratio of a wrong array and the right one tells."""

import numpy as np
import pytest

from scratchformer.notation.ratios import (
    Compared,
    explanations,
    factor_everywhere,
    other_shape,
    right_digits,
    sizes,
    times,
)
from scratchformer.testing import GradientError, check_gradients

X = np.random.default_rng(0).normal(size=(4, 5))
SIGMA = np.abs(X).sum(axis=1, keepdims=True)
P = 1 / (1 + np.exp(-X))
ROW = np.arange(4)[:, None]
WRONG = {
    "2 times what it should be: perhaps the 2 in the derivative of a square, or 2 is N": lambda g: 2 * g,
    "1/2 of what it should be: perhaps the 2 in the derivative of a square, or 2 is N": lambda g: g / 2,
    "√2 times what it should be: 2 is N": lambda g: np.sqrt(2) * g,
    "−2 times what it should be: perhaps the 2 in the derivative of a square, or 2 is N": lambda g: -2 * g,
    "right except for the sign": lambda g: -g,
    "zero": lambda g: 0 * g,
    "0.37 times what it should be": lambda g: 0.37 * g,
    "1.00001 times what it should be": lambda g: 1.00001 * g,
    "right except where x < 0: there it is zero.": lambda g: np.where(X < 0, 0, g),
    "right except where x > 1: there it is 0.37 times what it should be.": lambda g: np.where(X > 1, 0.37 * g, g),
    "right except where x is between 0 and 1: there it is zero.": lambda g: np.where((X > 0) & (X < 1), 0, g),
    "2/3 of what it should be": lambda g: 2 * g / 3,
    "right except where x > 0: there its sign is wrong.": lambda g: np.where(X > 0, -g, g),
    "right except at index 2 of axis 0: there it is zero.": lambda g: np.where(ROW == 2, 0, g),
    "right except at [1, 2]: there it is zero.": lambda g: np.where(np.arange(20).reshape(4, 5) == 7, 0, g),
    "what it should be times a number for each index of axis 0: 1, 2, 3, 4.": lambda g: g * (ROW + 1),
    "multiplied by σ once too often.": lambda g: g * SIGMA,
    "not multiplied by σ, as it should be.": lambda g: g / SIGMA,
    "what it should be times the square of σ.": lambda g: g * SIGMA**2,
    "not multiplied by 2 x, as it should be.": lambda g: g / (2 * X),
    "not multiplied by 1 − p², as it should be.": lambda g: g / (1 - P**2),
    "not multiplied by p (1 − p), as it should be.": lambda g: g / (P * (1 - P)),
    "not multiplied by the square of σ, as it should be.": lambda g: g / SIGMA**2,
}


def told(wrong, right, **arrays):
    compared, numbers = Compared(wrong, right), {2.0: ["N"]}
    factor = factor_everywhere(compared, numbers)
    if factor is not None:
        return times(factor, numbers, "it")
    return next((text for text, _ in explanations(compared, arrays, numbers)), None)


@pytest.mark.parametrize("said", WRONG)
def test_a_ratio_is_told(said):
    right = np.random.default_rng(1).normal(size=X.shape)
    assert told(WRONG[said](right), right, x=X, σ=SIGMA, p=P) == said


def test_what_a_factor_may_come_from():
    numbers = sizes({"y": np.zeros((2, 3, 7))})
    assert times(2 / 7, numbers, "it").endswith("perhaps 2, the size of axis 0 of y, over 7, the size of axis 2 of y")
    assert times(1 / 21, numbers, "it") == "1/21 of what it should be: 21 is the size of axes 1 and 2 of y together"
    assert times(0.5, {}, "it") == "1/2 of what it should be: perhaps the 2 in the derivative of a square"
    assert times(7 / 2, numbers, "it").startswith("7/2 times what it should be")


def test_noise_has_no_ratio():
    right, noise = np.random.default_rng(1).normal(size=(2, 4, 5))
    assert told(noise, right, x=X, σ=SIGMA, p=P) is None


def test_small_elements_count_as_much_as_large_ones():
    """Two of three are doubled: no factor, no rounding, whatever their size."""
    right = np.array([1e-8, -3e-8, 1.0])
    wrong = right * [2, 2, 1]
    assert right_digits(Compared(wrong, right)) == 0
    assert told(wrong, right, x=np.array([-1.0, -2.0, 1.0])).startswith("right except where x < 0: there it is 2 times")
    assert right_digits(Compared(right.astype(np.float32), right)) >= 7


@pytest.mark.diagnosis
def test_a_zero_gradient_does_not_mean_that_dy_is_not_used():
    def of_the_others(dy, x):
        return dy * (x < 0)

    with pytest.raises(GradientError) as caught:
        check_gradients(lambda x: (np.maximum(x, 0), x), of_the_others, np.abs(X))
    assert "not used" not in str(caught.value) and "depend" not in str(caught.value)
    assert caught.value.diagnoses[0].what == "The gradient of x is zero everywhere."


def test_the_two_numbers_of_a_message_differ():
    with pytest.raises(GradientError) as caught:
        check_gradients(lambda x: (3 * x, None), lambda dy, _: 3 * (1 + 1e-13) * dy, X, rtol=0)
    analytic, numeric = (line.split()[1] for line in str(caught.value).splitlines()[1:3])
    assert analytic != numeric


@pytest.mark.parametrize(
    ("expected", "shape", "says"),
    [
        ((5,), (2, 5), "Is a sum over the first axis missing?"),
        ((5,), (3, 2, 5), "Is a sum over the first 2 axes missing?"),
        ((2, 5), (5,), "Does a sum run over an axis too many?"),
        ((2, 5), (5, 2), "Is it transposed?"),
        ((5,), (2,), "Does a sum run over another axis than it should?"),
        ((2, 5), (2, 4), ""),
    ],
)
def test_another_shape(expected, shape, says):
    assert other_shape(expected, shape) == says
