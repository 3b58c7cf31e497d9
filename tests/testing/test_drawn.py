"""`check_drawn` finds what is wrong only for numbers, or sizes, of one kind."""

import inspect

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.testing import GradientError, check_drawn, check_gradients
from scratchformer.testing.draw import Sizes
from scratchformer.testing.drawn import KINDS
from scratchformer.testing.gradcheck import check_in_groups


def scaled(slope):
    """A pair x → 2 x whose backward has another slope where `slope` says so."""
    return lambda x: (2 * x, x), lambda dy, x: dy * slope(x).astype(x.dtype)


NUMBERS = "With normal numbers it is right, so the numbers make it wrong"


@pytest.mark.diagnosis
@pytest.mark.parametrize(
    ("kind", "slope", "cause"),
    [
        ("whole and repeated numbers and equal sizes", lambda x: np.where(x == 1, 3, 2), NUMBERS),
        (
            "whole and repeated numbers and equal sizes",
            lambda x: np.full(x.shape, 3 if len({*x.shape}) == 1 else 2),
            r"The sizes make it wrong: it is right with B = \d, T = \d, C = \d, and wrong with B = 3, T = 3, C = 3",
        ),
        ("recorded activations", lambda x: np.where((x > 4) & (x < 7), 3, 2), NUMBERS),
        ("numbers of very different sizes", lambda x: np.where(abs(x) > 100, 3, 2), NUMBERS),
    ],
)
def test_a_mistake_for_one_kind_of_numbers_is_found(kind, slope, cause):
    op, op_backward = scaled(slope)
    with pytest.raises(GradientError, match=rf"for {kind}: .*wrong gradient at x[\s\S]*{cause}") as caught:
        check_drawn(op, op_backward, "B T C")
    assert caught.value.diagnoses[-1].name in ("numbers matter", "sizes matter")


SHAPES = {"attention": ("B H T D",) * 3, "layernorm": ("B T C", "C", "C")}


@pytest.mark.parametrize("pick", [lambda size: np.where(size > 1e-3, size, np.inf).argmin(), np.argmax])
@pytest.mark.parametrize("name", SHAPES)
def test_one_element_that_is_wrong_by_a_ten_thousandth_is_found_in_its_group(name, pick):
    op, op_backward, args = getattr(ops, name), getattr(ops, f"{name}_backward"), [*map(Sizes(0), SHAPES[name])]

    def wrong(dy, cache):
        gradients = op_backward(dy, cache)
        gradients[0].flat[pick(np.abs(gradients[0]))] *= 1.0001
        return gradients

    assert check_in_groups(op, op_backward, *args, rules=False)
    with pytest.raises(GradientError, match="wrong gradient"):
        check_in_groups(op, wrong, *args, rules=False)


@pytest.mark.parametrize("name", SHAPES)
def test_all_draws_need_no_more_evaluations_than_one_check_of_every_element(name):
    op, op_backward, counts = getattr(ops, name), getattr(ops, f"{name}_backward"), []

    def counted(*args, **options):
        counts.append(1)
        return op(*args, **options)

    check_gradients(counted, op_backward, *map(Sizes(0), SHAPES[name]))
    alone = len(counts)
    check_drawn(counted, op_backward, *SHAPES[name])
    assert len(counts) - alone <= alone


def test_a_common_offset_is_found_where_y_does_not_depend_on_it():
    def softmax(z):
        top = z.max(axis=-1, keepdims=True)
        e = np.exp(z - top)
        total = e.sum(axis=-1, keepdims=True)
        return e / total, (z, top + np.log(total))

    def softmax_backward(dy, cache):
        z, log_sum = cache
        p = np.exp(z - log_sum)
        return p * (dy - (dy * p).sum(axis=-1, keepdims=True))

    with pytest.raises(GradientError, match="with 2²² added to z in float32, y is the same"):
        check_drawn(softmax, softmax_backward, "N C")


def test_letters_functions_and_other_arguments():
    def op(x, ids, factor):
        if len(x) != ids.size:
            raise ValueError("x: expected a row for each id")
        return x * factor, factor

    reports = check_drawn(op, lambda dy, factor: dy * factor, "BT C", lambda draw: draw.integers("B T", 5), 3)
    assert len(reports) == len(KINDS)


def test_kinds_outside_the_domain_are_left_out():
    def log(x):
        if (x <= -1).any():
            raise ValueError("x: expected numbers above −1")
        return np.log1p(x), x

    squares = check_drawn(log, lambda dy, x: dy / (1 + x), lambda draw: draw("N C") ** 2)
    assert len(squares) == len(KINDS)
    with pytest.raises(ValueError, match="above −1"):
        check_drawn(log, lambda dy, x: dy / (1 + x), "N C")


def test_recorded_sizes_are_in_the_opposite_order():
    first, recorded = Sizes(3), KINDS["recorded activations"](3)
    sizes = [(getattr(first, letter), getattr(recorded, letter)) for letter in "BTCDE"]
    assert sorted(sizes) == sorted(sizes, key=lambda pair: -pair[1])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("attention", ("B H T D", "B H S D", "B H S D")),
        ("cross_entropy", ("N V", lambda draw: draw.integers("N", draw.V))),
        ("layernorm", ("B T C", "C", "C")),
        ("max_pool", ("B T C",)),
        ("softmax", ("B T C",)),
    ],
)
def test_right_operations_are_accepted_for_every_kind(name, args):
    for seed in range(3):
        reports = check_drawn(getattr(ops, name), getattr(ops, f"{name}_backward"), *args, seed=seed)
        assert len(reports) == len(KINDS)


@pytest.mark.parametrize("letters", ["B,T", "B 3", "(B, T)", "B×T"])
def test_a_shape_that_is_not_words_of_letters(letters):
    with pytest.raises(ValueError, match="argument 0: expected a shape in letters such as 'B T C', got"):
        check_drawn(lambda x: (x * x, x), lambda dy, x: 2 * x * dy, letters)


@pytest.mark.diagnosis
def test_what_equal_elements_get_is_told():
    with pytest.raises(GradientError, match=r"must add up to .*: they add up to 2 times that\.") as caught:
        check_drawn(lambda x: (x.max(-1), x), lambda dy, x: (x == x.max(-1, keepdims=True)) * dy[..., None], "B C")
    assert "No known mistake" not in str(caught.value)


OTHER = {"seed": 3, "rtol": 1e-5, "max_elements": 20, "directions": 1, "complex_step": True, "order": 2, "rules": True}
OPTIONS = [
    name for name, each in inspect.signature(check_gradients).parameters.items() if each.kind is each.KEYWORD_ONLY
]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_check_gradients_is_passed_on(name):
    def cube_backward_backward(ddx, cache):
        dy, x = cache
        return 3 * x * x * ddx, 6 * x * dy * ddx

    value = OTHER.get(name, inspect.signature(check_gradients).parameters[name].default)
    more = (cube_backward_backward,) if name == "order" else ()
    check_drawn(lambda x: (x**3, x), lambda dy, x: 3 * x * x * dy, *more, "B C", **{name: value})


@pytest.mark.parametrize("rules", [True, {"in_place": True}])
def test_writing_to_an_argument_is_found(rules):
    def shifted_backward(dy, x):
        dy *= 2
        return dy

    with pytest.raises(GradientError, match=r"wr(ote|ites) to"):
        check_drawn(lambda x: (2 * x, x), shifted_backward, "B C", rules=rules)


def test_a_wrong_second_derivative_is_found():
    def square_backward_backward(ddx, cache):
        dy, x = cache
        return 2 * x * ddx, 2 * dy * ddx * np.where(x > 100, 2, 1)

    with pytest.raises(GradientError, match="for numbers of very different sizes"):
        check_drawn(lambda x: (x * x, x), lambda dy, x: 2 * x * dy, square_backward_backward, "B C", order=2)
