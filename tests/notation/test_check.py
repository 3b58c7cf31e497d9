"""check_derivation on operations of a user's own: what passes, and what each kind of mistake says."""

import functools
import inspect
import linecache
import re

import numpy as np
import pytest

from scratchformer.notation import DerivationError, NotationError, check_derivation, plant_mistakes

X = np.random.default_rng(0).standard_normal((3, 4))


def swish(x):
    """y = x σ(x), elementwise.

    Backward. The product rule:

        s_i = 1/(1 + exp(−x_i))            y_i = x_i s_i
        ∂s_i/∂x_i = s_i (1 − s_i)          dx_i = dy_i (s_i + x_i s_i (1 − s_i))

        dx = dy * (s + x * s * (1 - s))
    """
    s = 1 / (1 + np.exp(-x))
    return x * s, (x, s)


def swish_backward(dy, cache):
    x, s = cache
    dx = dy * (s + x * s * (1 - s))
    return dx


def affine(x, w):
    """y = x w.

        y_no = Σ_i x_ni w_io
        dx_ni = Σ_o dy_no w_io        dw_io = Σ_n x_ni dy_no

    The end.
    """
    return x @ w, (x, w)


def affine_backward(dy, cache):
    x, w = cache
    return dy @ w.T, x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def changed(function, *pairs):
    """The docstring of a function with replacements."""
    text = function.__doc__
    for old, new in pairs:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def failure(*pairs, op=swish, op_backward=swish_backward, args=(X,)):
    with pytest.raises(DerivationError) as raised:
        check_derivation(op, op_backward, *args, docstring=changed(op, *pairs))
    return str(raised.value)


def test_a_right_derivation():
    report = check_derivation(swish, swish_backward, X)
    assert [row.kind for row in report.rows] == ["defines", "compared", "compared", "gradient", "code"]
    assert report.worst < 1e-14
    np.testing.assert_allclose(report.values["s"], 1 / (1 + np.exp(-X)))
    assert "worst error" in str(report)


def test_a_wrong_second_line_names_line_equation_and_values():
    message = failure(("s_i (1 − s_i)          dx", "s_i (1 + s_i)          dx"))
    assert re.search(r"swish: line 6: ∂s_i/∂x_i = s_i \(1 \+ s_i\)\n", message)
    assert re.search(r"at row \d, i = \d the left side is [\d.e-]+, the right side [\d.e-]+", message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dx_i = dy_i (s_i + x_i s_i", "dx_i = dy_i (s_i − x_i s_i", "line 6: dx_i .* is not true: relative error"),
        ("exp(−x_i))", "exp(x_i))", "line 5: y_i = x_i s_i\n    is not true"),
        ("y_i = x_i s_i", "y_i = x_i", "line 5: y_i = x_i\n    is not true"),
        ("y_i = x_i s_i", "y_i = x_j s_i", "index j is on the right only"),
        ("∂s_i/∂x_i", "∂s_i/∂y_i", "no equation above computes s from y"),
        ("            y_i = x_i s_i", "", "no equations above lead from x to the output y"),
        ("y_i = x_i s_i", "y_i = x_i r_i", "r is not known here"),
        (
            "dx = dy *",
            "ds_i = dy_i\n\n        dx = dy *",
            "line 8: ds_i = dy_i\n    differs from the numerical derivative",
        ),
    ],
)
def test_what_is_wrong_is_said(old, new, message):
    assert re.search(message, failure((old, new)), re.DOTALL)


def test_a_line_that_the_backward_does_not_have_is_no_code_but_an_equation():
    assert "line 8: dx = 2 * dy" in failure(("dx = dy *", "dx = 2 * dy *"))
    with pytest.raises(NotationError, match=r"line 8, column \d+: '@' has no meaning"):
        check_derivation(swish, swish_backward, X, docstring=changed(swish, ("dx = dy *", "dx = dy @")))


def test_a_wrong_gradient_shows_in_the_equation():
    def wrong(dy, cache):
        return 2 * swish_backward(dy, cache)

    with pytest.raises(DerivationError, match="line 6: dx_i"):
        check_derivation(swish, wrong, X, docstring=changed(swish, ("dx = dy * (s + x * s * (1 - s))", "")))


def test_a_sum_over_leading_axes_that_is_missing():
    args = np.ones((2, 3, 4)), np.ones((4, 5))
    check_derivation(affine, affine_backward, *args)
    message = failure(("dw_io = Σ_n x_ni dy_no", "dw_io = x_i dy_o"), op=affine, op_backward=affine_backward, args=args)
    assert "line 4: dw_io = x_i dy_o\n    is not true" in message


def test_a_derivation_without_equations():
    with pytest.raises(DerivationError, match="has no equations"):
        check_derivation(swish, swish_backward, X, docstring="y = x σ(x).")


def test_a_text_of_equations_alone_has_no_margin_below_its_first_line():
    text = "y = x σ(x).\n\n    s_i = 1/(1 + exp(−x_i))\n    y_i = x_i s_i\n    dx_i = dy_i (s_i + x_i s_i (1 − s_i))\n"
    with pytest.raises(DerivationError, match="below the first line, some text must be at the margin"):
        check_derivation(swish, swish_backward, X, docstring=text)
    assert check_derivation(swish, swish_backward, X, docstring=text + "\nThe end.\n").worst < 1e-14


def test_a_function_whose_source_is_not_at_hand(monkeypatch):
    """As in a terminal session: equations are checked, and no line counts as code."""
    source = (
        'def double(x):\n    """y = 2 x.\n\n        y_i = 2 x_i    dx_i = 2 dy_i\n\n    End."""\n    return 2 * x, ()\n'
    )
    source += "def double_backward(dy, cache):\n    return 2 * dy\n"
    monkeypatch.setattr(linecache, "cache", {})
    session = {}
    exec(source, session)
    assert check_derivation(session["double"], session["double_backward"], X).worst < 1e-15


def test_names_of_ones_own_may_be_functions_that_are_called_after_backward():
    seen = []
    check_derivation(swish, swish_backward, X, names={"z": lambda: seen.append(1) or 3.0}, docstring=swish.__doc__)
    assert seen == [1]
    with pytest.raises(TypeError, match="names: z must be a number"):
        check_derivation(swish, swish_backward, X, names={"z": "three"})


def test_nothing_is_written_to_and_tracing_ends():
    import sys

    before, traced = X.copy(), sys.gettrace()
    check_derivation(swish, swish_backward, X)
    np.testing.assert_array_equal(X, before)
    assert sys.gettrace() is traced


def test_mistakes_planted_in_swish_are_caught():
    found = list(plant_mistakes(swish, swish_backward, X))
    assert len(found) > 20
    assert [m.wrong for m in found if not m.caught] == []


def test_a_function_without_backward():
    text = "y = t/10 + t²/50.\n\n    φ_i = t_i/10        y_i = φ_i + 2 φ_i²\n\nThe end."
    report = check_derivation(lambda t: t / 10 + t**2 / 50, None, X, docstring=text)
    assert [row.kind for row in report.rows] == ["defines", "compared"]


def test_functions_of_whole_arrays_are_called_by_name_and_differentiated():
    text = """y = f(w x).

        h_no = Σ_i x_ni w_io        y := f(h)
        dh_no = dy_no (1 − y_no²)        dx_ni = Σ_o dh_no w_io        dw_io = Σ_n x_ni dh_no

    The end.
    """

    def op(x, w):
        y = np.tanh(x @ w)
        return y, (x, w, y)

    def op_backward(dy, cache):
        x, w, y = cache
        dh = dy * (1 - y * y)
        return dh @ w.T, x.T @ dh

    args = X, np.random.default_rng(1).standard_normal((4, 2))
    report = check_derivation(op, op_backward, *args, docstring=text, functions={"f": np.tanh})
    assert [row.kind for row in report.rows] == ["defines", "compared", "gradient", "gradient", "gradient"]
    with pytest.raises(DerivationError, match="dh_no"):
        check_derivation(op, op_backward, *args, docstring=text.replace("y_no²", "y_no"), functions={"f": np.tanh})


def test_equations_about_given_arrays():
    def halved():
        return 0.0

    history = 0.5 ** np.arange(5)
    text = "Halved.\n\n    u_t = u_{t−1}/2 for t ≥ 1\n    J = 5        Σ_{j, 0 ≤ j < J} u_j = 2 − u_{4}\n\nThe end."
    report = check_derivation(halved, None, names={"u": history, "J": 5}, docstring=text)
    assert report.worst < 1e-15
    assert len(report.rows) == 3
    with pytest.raises(DerivationError, match=r"halved: line 3: u_t = u_\{t−1\}/3"):
        check_derivation(halved, None, names={"u": history, "J": 5}, docstring=text.replace("/2", "/3"))
    with pytest.raises(DerivationError, match="is not true"):
        check_derivation(halved, None, names={"u": history, "J": 5}, docstring=text.replace(" for t ≥ 1", ""))


def test_the_variables_of_a_return_line_are_compared():
    def op(x):
        return 3 * x, ()

    def op_backward(dy, cache):
        dx = 3 * dy
        return dx

    text = "y = 3 x.\n\n    y_i = 3 x_i        dx_i = 3 dy_i\n\n    return dx\n\nThe end."
    rows = check_derivation(op, op_backward, X, docstring=text).rows
    assert [row.kind for row in rows] == ["compared", "gradient", "code"]


def double(x):
    return 2 * x, ()


def double_backward(dy, cache):
    unused = 7 * dy
    if unused is dy:
        return dy
    return 2 * dy


def doubled(*lines, op=double, op_backward=double_backward, args=(X,), **options):
    """Check y = 2 x with further lines."""
    text = "\n    ".join(("y = 2 x.\n", "y_i = 2 x_i        dx_i = 2 dy_i", *lines)) + "\n\nEnd."
    return check_derivation(op, op_backward, *args, docstring=text, **options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a_i = 5 x_i", "line 4: a_i = 5 x_i\n    defines a, which nothing below uses"),
        ("y_i = 17 for y_i > 100", 'the condition after "for" holds nowhere'),
        ("|x_i| = 1000", "is not true"),  # no picture, although it begins with |
        ("unused = 7 * dy", r"line of code is not checked: .* variable that it sets \(unused\)"),
        ("return dy", "this line of code did not run"),
        ("y_i = 2 x_i + w_i", r"axes without an index do not fit together: .*w_i \(7, 4\)"),
        ("y_i = 2 x_i + 0 x", r"axes without an index do not fit together: x \(3, 4\)"),
        ("y_i = Σ_{j, j < 100000000} [j = i] 2 x_i", "index j is not known"),
        ("a_i ≤ x_i", "a is not known here"),
        ("x_i < x_i + 10 < x_i + 5", r"at row \d, i = \d the left side is 1.*, the right side"),
        ("x_i² ≥ −3 ≥ −1", "is not true: .*\n    the left side is -3, the right side -1"),
        ("y_i = 2 x_i ≤ x_i² + 1 ≤ x_i²", "is not true"),
    ],
)
def test_nothing_passes_unchecked(line, message):
    assert doubled("return 2 * dy").worst == 0
    with pytest.raises(DerivationError, match=message):
        doubled(line, names={"w": np.ones((7, 4))})


@pytest.mark.parametrize("chain", ["x_i ≤ x_i + 1 = 1 + x_i", "0 ≤ x_i² = x_i x_i", "y_i = 2 x_i ≤ x_i² + 1 > 0 ≥ −1"])
def test_a_relation_is_between_its_neighbours(chain):
    assert doubled(chain).rows[-1].kind == "compared"


def test_the_output_and_every_gradient_need_an_equation():
    text = affine.__doc__
    for equation, name in ("dw_io = Σ_n x_ni dy_no", "dw"), ("dx_ni = Σ_o dy_no w_io", "dx"):
        with pytest.raises(DerivationError, match=f"affine: no equation gives {name}, so it is not checked"):
            check_derivation(affine, affine_backward, X, np.ones((4, 5)), docstring=text.replace(equation, ""))
    bounded = text.replace("dw_io = Σ_n x_ni dy_no", "dw_io ≤ dw_io + 1")
    with pytest.raises(DerivationError, match="affine: no equation gives dw, so it is not checked"):
        check_derivation(affine, affine_backward, X, np.ones((4, 5)), docstring=bounded)
    with pytest.raises(DerivationError, match="no equation is compared with anything"):
        check_derivation(swish, swish_backward, X, docstring="y.\n\n    s_i = 1/x_i\n\nEnd.")


def test_a_gradient_is_no_short_name():
    text = "y.\n\n    h_i = x_i/2        y_i = 4 h_i\n    dh := dy\n    dx_i = 2 dy_i\n\nEnd."
    with pytest.raises(DerivationError, match="line 4: dh := dy\n    differs from the numerical derivative"):
        check_derivation(double, double_backward, X, docstring=text)


def test_gradients_go_with_their_arguments_where_one_is_none():
    def masked(x, mask, w):
        return (x * mask) @ w, (x, mask, w)

    def masked_backward(dy, cache, dw_scale=1):
        x, mask, w = cache
        return dy @ w.T * mask, None, dw_scale * (x * mask).T @ dy

    text = """y = (x · mask) w.

        y_no = Σ_i x_ni mask_ni w_io
        dx_ni = mask_ni Σ_o dy_no w_io        dw_io = Σ_n x_ni mask_ni dy_no

    The end.
    """
    args = X, (X > 0).astype(float), np.random.default_rng(1).standard_normal((4, 2))
    assert check_derivation(masked, masked_backward, *args, docstring=text).worst < 1e-15
    with pytest.raises(DerivationError, match=r"dw_io = .*\n    is not true"):
        check_derivation(masked, functools.partial(masked_backward, dw_scale=2), *args, docstring=text)


class Doubler:
    def __call__(self, x):
        return double(x)


@pytest.mark.parametrize("op", [functools.partial(double), functools.wraps(double)(lambda x: double(x)), Doubler(),
                                lambda x: (2 * x, None)])  # fmt: skip
def test_whatever_can_be_called_has_a_derivation(op):
    assert doubled(op=op).worst == 0
    assert doubled(op=op, args=(), x=X.astype("f")).worst == 0


def test_the_margin_is_that_of_the_source():
    # fmt: off
    def tripled(x):
        """y = 3 x.

            y_i = 3 x_i
                = 2 x_i + x_i
            dx_i = 3 dy_i
        """
        return 3 * x, ()
    # fmt: on

    def tripled_backward(dy, cache):
        return 3 * dy

    assert inspect.getdoc(tripled).count("\ny_i") == 1  # at the margin, if the least indented line were the margin
    assert len(check_derivation(tripled, tripled_backward, X).rows) == 2


def test_what_is_no_operation_is_said():
    with pytest.raises(ValueError, match=r"x has shape \(0, 4\): equations about an empty array say nothing"):
        doubled(args=(X[:0],))
    with pytest.raises(TypeError, match="must return y and a cache, got ndarray"):
        doubled(op=lambda x: 2 * x)
    with pytest.raises(TypeError, match="must take dy and the cache"):
        doubled(op_backward=lambda dy: 2 * dy)
    with pytest.raises(TypeError, match="returned 2 gradients, expected one for each of x"):
        doubled(op_backward=lambda dy, cache: (2 * dy, dy))

    def writing(x):
        x *= 2
        return x, ()

    with pytest.raises(ValueError, match="writing or its backward writes to x"):
        doubled(op=writing)


def test_arrays_that_are_too_large_are_said():
    with pytest.raises(
        DerivationError, match="takes 100,000,000 numbers at once: check the derivation on smaller arrays"
    ):
        doubled(args=(np.ones((100, 100)),))


def of_square(*equations):
    """Check a derivation of y = x² that has these equations."""
    text = "y = x².\n\n" + "".join(f"        {equation}\n" for equation in equations) + "\n    The end.\n"
    x = np.random.default_rng(0).standard_normal(5)
    return check_derivation(lambda x: (x * x, x), lambda dy, x: 2 * dy * x, x, docstring=text)


def test_a_definition_in_parts():
    parts = "a_i = x_i for i = 0", "a_i = 7 for i ≥ 1"
    rest = "y_i = x_i²", "dx_i = 2 dy_i x_i"
    report = of_square(*parts, "a_i = x_i where i = 0, 7 elsewhere", *rest)
    assert [row.kind for row in report.rows][:3] == ["defines", "defines", "compared"]
    with pytest.raises(DerivationError, match=r"a_i = 8 for i ≥ 4\n    is not true: .*\n.*left side is 7"):
        of_square(*parts, "a_i = 8 for i ≥ 4", *rest)
    with pytest.raises(DerivationError, match="the left side is nan"):
        of_square(parts[0], "Σ_i a_i = x_{0}", *rest)


def test_a_gradient_needs_equations_for_all_its_elements():
    first, second = "dx_i = 2 dy_i x_i for i = 0", "dx_i = 2 dy_i x_i for i ≥ 1"
    assert of_square("y_i = x_i²", first, second).worst < 1e-14
    with pytest.raises(DerivationError, match="no equation gives all of dx: see the conditions"):
        of_square("y_i = x_i²", first)
