"""The grammar: what an equation is read as, and where a column points when it cannot be read."""

import re
from pathlib import Path

import pytest

from scratchformer.notation import NotationError, parse, read
from scratchformer.notation.spelling import spelled

EQUATIONS = [
    "a_ts = Σ_d q_td k_sd",
    "p_ts = exp(z_ts)/Σ_s' exp(z_ts')",
    "dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts')",
    "∂y_no/∂x_n'i = δ_nn' w_io",
    "g_c := ∂L/∂x̂_c = dy_c γ_c",
    "a_hts = Σ_d q_htd k_gsd with g = ⌊h G/H⌋",
    "y_bkc = x_btc with t = places_bk",
    "y_i = x_i where x_i > 0, 0 elsewhere",
    "m_{t, i} = β1 m_{t − 1, i} + (1 − β1) g_{t, i} for t ≥ 1",
    "y_i = Σ_{j, j ≤ i, j ≠ 0} |x_j| x_j",
    "y_t = softmax_s(x_ts) − max_s(x_ts) + mean_s(x_ts)",
    "y = ½ x (1 + tanh(√(2/π) x³))",
    "y_i = [0 ≤ i, i < T] x_{i mod T}",
    "a ≤ b",
]


@pytest.mark.parametrize("text", EQUATIONS)
def test_an_equation_written_out_again_is_the_same_equation(text):
    equation = parse(text)
    assert parse(spelled(equation)) == equation


@pytest.mark.parametrize(
    ("ascii", "unicode"),
    [
        ("y_i = sum_t x_t d_ti/sqrt(D)", "y_i = Σ_t x_t δ_ti/√(D)"),
        ("y_i <= gamma_i * xhat_i - 1", "y_i ≤ γ_i · x̂_i − 1"),
        ("y_t = sum_{s, s != t} x_s", "y_t = Σ_{s, s ≠ t} x_s"),
        ("y_i = x_i**n", "y_i = x_i^n"),
        ("partial y_i/partial x_j = 2 x_i d_ij", "∂y_i/∂x_j = 2 x_i δ_ij"),
    ],
)
def test_the_ascii_spelling_means_the_same(ascii, unicode):
    assert parse(ascii) == parse(unicode)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("1/C x_c", ("*", ("/", ("num", 1.0, "1"), ("name", "C", ())), ("name", "x", (("idx", "c"),)))),
        ("−a + b", ("+", ("neg", ("name", "a", ())), ("name", "b", ()))),
        ("a − b − c", ("-", ("-", ("name", "a", ()), ("name", "b", ())), ("name", "c", ()))),
        ("√2 a", ("*", ("call", "sqrt", (("num", 2.0, "2"),)), ("name", "a", ()))),
        ("Σ_i x_i/2", ("over", "sum", ("i",), ("/", ("name", "x", (("idx", "i"),)), ("num", 2.0, "2")), ())),
    ],
)
def test_precedence(text, tree):
    assert parse(f"y = {text}").parts[1] == tree


def test_a_known_name_may_have_underscores_and_dots():
    assert parse("u_hd = content_bias_hd", ["content_bias"]).parts[1][1:] == (
        "content_bias",
        (("idx", "h"), ("idx", "d")),
    )
    assert parse("W := query.w", ["query.w"]).parts[1] == ("name", "query.w", ())


def test_a_letter_on_its_own_is_an_index_where_it_is_one():
    assert parse("y_t = t x").parts[1] == ("*", ("idx", "t"), ("name", "x", ()))


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("y_i = (x_i + ) 2", 14, 'expected a number, a name, "(", "[" or Σ, got ")"'),
        ("y_i = x_i @ 3", 11, "'@' has no meaning"),
        ("y_i = x_i # why", 11, "'#' has no meaning in an equation: a comment goes in parentheses, after three spaces"),
        ("y_1 = 3", 3, "expected an index"),
        ("y_i = exp(x_i", 14, 'expected ")", got the end'),
        ("y_i = max(x_i)", 7, "max has 1 arguments"),
        ("y_i = mean(x)", 7, "mean needs the index that it runs over, as in mean_i(x_i)"),
        ("y = Σ x_i", 7, 'expected "_" and the index that it runs over, got "x"'),
        ("y_i + 1", 8, 'expected "="'),
        ("y_i = x_i where x_i > 0", 24, 'expected ",", got the end'),
        ("y_i = Σ_{2 < 3} x_i", 10, "a condition on an index letter"),
        ("∂y_i = 3", 6, 'expected "/"'),
        ("y_i = x_i with Z = 2", 16, "expected an index letter"),
        ("y = ||x||", 6, "expected a number"),
    ],
)
def test_an_error_points_at_the_column(text, column, expected):
    with pytest.raises(NotationError) as raised:
        parse(text)
    assert raised.value.column == column - 1
    assert expected in str(raised.value)
    assert str(raised.value).splitlines()[-1] == "    " + " " * (column - 1) + "^"


def test_the_layout_says_what_is_what():
    text = """First line.

    Prose goes on.

        a_i = 2 x_i        b_i = a_i + 1      (a comment)
        c_i = a_i
            = 2 x_i

        | a picture

        y = f(x)
    """
    found = read(text, code=["y = f(x)"])
    assert [(item.kind, item.line) for item in found.items] == [
        ("prose", 1),
        ("prose", 3),
        ("equation", 5),
        ("equation", 5),
        ("comment", 5),
        ("equation", 6),
        ("picture", 9),
        ("code", 11),
    ]
    assert len(found.equations[2].equation.parts) == 3


def test_an_error_in_a_continued_line_points_at_that_line():
    with pytest.raises(NotationError, match=r"line 4, column 13: expected .*\n {14}\+ \) 3\n {14}  \^"):
        read("First.\n\n    y_i = x_i    z_i = 2\n          + ) 3\n\nLast.")


def test_constants_in_ascii():
    assert parse("y_i = pi inf floor(x_i)") == parse("y_i = π ∞ ⌊x_i⌋")
    assert parse("y_i = pi_i").parts[1][0] == parse("y_i = pi", ["pi"]).parts[1][0] == "name"
    with pytest.raises(NotationError, match="too many parentheses"):
        parse("y = " + "(" * 500 + "1" + ")" * 500)


def test_what_cannot_be_read_is_an_error_with_its_line():
    with pytest.raises(NotationError, match="line 3, column 11"):
        read("First.\n\n        y_i = @\n    Last.")


def test_subscript_digits_and_a_comma_at_the_end_of_a_line():
    assert parse("t₀ = 1").parts[0] == ("name", "t0", ())
    found = read("First.\n\n        y_i = x_i where x_i > 0,\n            0 elsewhere\n    Last.")
    assert len(found.equations) == 1
    assert found.equations[0].equation.parts[1][0] == "cases"


def test_what_the_notation_page_shows_can_be_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "notation.md").read_text(encoding="utf-8")
    assert "{math}`y` is what it returns" in page and "{math}`p := probabilities`" in page
    typed = [
        text for cell in re.findall(r"^\| (`[^|]*`) \| ", page, re.MULTILINE) for text in re.findall("`(.*?)`", cell)
    ]
    assert len(typed) > 20
    for text in typed:
        try:
            parse(text, ["norm()"])
        except NotationError:  # an expression
            parse(f"y = {text}", ["norm()"])
