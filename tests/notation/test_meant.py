"""A message about an equation says what was probably meant."""

import re

import numpy as np
import pytest

from scratchformer.notation import DerivationError, NotationError, check_derivation, parse

RNG = np.random.default_rng(0)


def linear(x, w):
    """Rows times columns.

        y_no = Σ_i x_ni w_io
        dx_ni = Σ_o dy_no w_io        dw_io = Σ_n x_ni dy_no

    The end.
    """
    return x @ w, (x, w)


def linear_backward(dy, cache):
    x, w = cache
    return dy @ w.T, x.T @ dy


def check_equations(text, names):
    check_derivation(lambda: 0.0, None, names=names, docstring=text)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("dx_ni = Σ_o dy_no w_io   ", "dx_ni = Σ_o dy_no w_io dw_io = Σ_n x_ni dy_no   ", "equation begin with dw_io"),
        ("Σ_o dy_no w_io  ", "Σ_o dy_on w_io  ", "y is defined as y_no: is dy_on meant to be it?"),
        ("Σ_n x_ni dy_no", "Σ_n x_ni dy_no/N", "The right side is 1/4 of what it should be: .*4 is N"),
        ("Σ_n x_ni dy_no", "x_n · dy_n", "a dot product is a sum, Σ_c x_nc dy_nc"),
        ("Σ_o dy_no w_io  ", "Σ_i dy_ni w_io  ", "i is an index of this equation already: in the sum, write i'"),
    ],
)  # fmt: skip
def test_what_was_meant_is_said(right, wrong, says):
    assert linear.__doc__.count(right) == 1
    docstring = linear.__doc__.replace(right, wrong)
    with pytest.raises(DerivationError, match=re.compile(says, re.DOTALL)):
        check_derivation(linear, linear_backward, RNG.normal(size=(4, 3)), RNG.normal(size=(3, 2)), docstring=docstring)


def test_an_index_that_leaves_an_array_is_named():
    text = "Text.\n\n    y_s = Σ_k x_{s−k} w_k\n\nText."
    x, w = RNG.normal(size=5), RNG.normal(size=2)
    names = {"x": x, "w": w, "y": np.convolve(x, w)[:5]}
    with pytest.raises(DerivationError, match=r"index s − k leaves x: it goes from -1 to 4, .*5.*\n.*0 ≤ s − k < 5"):
        check_equations(text, names)
    check_equations(text.replace("Σ_k", "Σ_{k, 0 ≤ s − k < 5}"), names)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (r"y = \frac{a}{b}", r"for \frac type a/b"),
        (r"y_i = \sum_i x_i", r"for \sum type Σ_i or sum_i"),
        (r"y_i = \gamma x_i", r"for \gamma type gamma"),
        (r"y_i = \mathcal{X}_i", r"for \mathcal type Σ_i, √(a)"),
        ("y = ‖a‖", "√(Σ_i a_i²)"),
        ("y = x @ w", "as in Σ_i x_ni w_io"),
        ("y == x", 'write "="'),
        ("y = x.sum()", "write x.sum() as Σ_i x_i"),
        ("dx_i = dy_i s'_i", "a prime marks an index"),
    ],
)
def test_what_has_no_meaning_is_told_what_to_type(text, says):
    with pytest.raises(NotationError) as error:
        parse(text)
    assert says in str(error.value)


def test_letters_are_free_after_their_sum():
    twice = "y_n = (Σ_i x_ni) · Σ_i x_ni"
    x = RNG.normal(size=(3, 2))
    check_equations(f"Text.\n\n    {twice}\n\nText.", {"x": x, "y": x.sum(1) ** 2})
    nested = twice.replace("(Σ_i x_ni)", "Σ_i x_ni")
    with pytest.raises(DerivationError, match="in the sum, write i'"):
        check_equations(f"Text.\n\n    {nested}\n\nText.", {"x": x, "y": x.sum(1) ** 2})
