"""Every exercise: its solution passes, and every known mistake in it is found."""

import inspect
import re

import pytest

from scratchformer.course.course import NAMES, exercise
from scratchformer.course.equations import blanks_left
from scratchformer.course.grading import load

MISTAKES = [
    pytest.param(name, mistake, id=f"{name}-{number}")
    for name in NAMES
    for number, mistake in enumerate(exercise(name).mistakes)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes_and_the_start_is_blank(name, verdict):
    each = exercise(name)
    solved = verdict(name, each.solution)
    assert solved.passed, solved.message
    assert blanks_left(each.start, each.kind) and not blanks_left(each.solution, each.kind)
    begun = verdict(name, each.start)
    assert not begun.passed
    assert "still blank" in begun.message
    assert len(each.hints) == len(set(each.hints)) == 3
    assert each.title and each.task and len(each.mistakes) >= 2


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_known_mistake_is_found(name, mistake, replaced):
    wrong = replaced(name, mistake.right, mistake.wrong)
    assert not wrong.passed, mistake.wrong
    assert re.search(mistake.says, wrong.message, re.DOTALL), wrong.message


def test_the_source_of_a_planted_mistake_is_not_that_of_the_file(tmp_path):
    path = tmp_path / "relu.py"
    path.write_text("def relu(x):\n    return 1\n")
    assert "return 2" in inspect.getsource(load(path, "def relu(x):\n    return 2\n").relu)
    assert "return 1" in inspect.getsource(load(path, path.read_text()).relu)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "says"),
    [
        (
            "layernorm_equations",
            "(g_k − mean_c(g_c) − x̂_k mean_c(g_c x̂_c))/σ",
            "1/sigma (g_k - 1/C sum_c g_c)",
            "when the third term, through σ, is left out.",
        ),
        (
            "linear_equations",
            "db_o = Σ_n dy_no",
            "db_o = 1/N sum_n dy_no",
            "when the mean over n is taken instead of the sum.",
        ),
        ("cross_entropy_equations", "= p_nv − t_nv\n", "= t_nv - p_nv\n", "when the sign is wrong."),
        ("softmax_equations", "y_i (δ_ik − y_k)", "- y_k y_i", "when δ_ik is left out."),
        ("rmsnorm_equations", "mean_c(g_c x̂_c))/ρ", "mean_c(g_c x̂_c))", "when the division by ρ is left out."),
        ("rotary_equations", "= R_{s−t,j,k} for", "= R_{s-t,k,j} for", "when the turn is by t − s, the wrong way."),
    ],
)
def test_a_mistake_is_recognised_however_it_is_spelled(name, right, wrong, says, replaced):
    assert says in replaced(name, right, wrong).message


def test_no_mistake_is_named_for_an_answer_that_is_not_allowed(replaced):
    found = replaced("tiles_equations", "= Σ_d dy_td y_td", "= Σ_d dy_td v_sd")
    assert found.message.endswith("are never in memory at once")


def test_the_functions_that_are_given_stay_as_they_are(verdict):
    solution = exercise("softmax").solution
    identity = solution.replace("    y = np.exp(", "    return z.copy(), z.copy()\n    y = np.exp(")
    assert "line 13: softmax is given and was changed" in verdict("softmax", identity).message
    assert "softmax_backward is gone" in verdict("softmax", solution.replace("softmax_backward", "backward")).message
    assert verdict("softmax", solution.replace("    y = np.exp(", "    len('seen')\n    y = np.exp(")).passed


def test_a_backward_uses_nothing_but_its_cache(verdict):
    solution = exercise("rmsnorm").solution
    kept = solution.replace("return y, cache", "rmsnorm.kept = cache\n    return y, cache")
    kept = kept.replace('):\n    """(dx, dgamma). dy: (..., C)."""\n', "):\n    cache = rmsnorm.kept\n")
    assert "changes after a second forward" in verdict("rmsnorm", kept).message


def test_an_added_equation_may_show_a_step_but_not_name_the_answer(verdict):
    name, solution = "softmax_equations", exercise("softmax_equations").solution
    answer = "∂y_i/∂z_k = y_i (δ_ik − y_k)"
    step = solution.replace(answer, "r_i := y_i\n        Z ∂y_i/∂z_k = exp(z_i) (δ_ik − y_k)\n        " + answer)
    assert verdict(name, step.replace("y_k (dy_k", "r_k (dy_k")).passed
    detour = solution.replace(answer, "A_ik := ∂y_i/∂z_k\n        ∂y_i/∂z_k = A_ik")
    assert "line 21: A_ik := ∂y_i/∂z_k\n    An added equation must not" in verdict(name, detour).message
    detour = solution.replace("= y_k (dy_k − Σ_i dy_i y_i)", "= a_k")
    detour = detour.replace("dz_k = Σ_i", "a_k := dz_k\n        dz_k = Σ_i")
    assert "a_k := dz_k\n    An added equation must not" in verdict(name, detour).message


@pytest.mark.parametrize(
    ("name", "right", "wrong", "says"),
    [
        (
            "softmax_equations",
            "y_i (δ_ik − y_k)",
            "y_i (1 − y_k) for i = k",
            'line 21: leave out "for i = k": the answer must hold for all indices; use δ or [...] instead',
        ),
        ("softmax_equations", "y_i (δ_ik − y_k)", "y_i (1 − y_k)\n            + 0 for i = k", 'leave out "for i = k"'),
        ("softmax_equations", "y_i (δ_ik − y_k)", "y_i (1 − y_k) with i = k", 'leave out "with i = k"'),
        ("linear_equations", "= x_ni δ_oj", "= x_ni for o = j", 'leave out "for o = j"'),
        ("rotary_equations", "R_{s−t,j,k} for s ≥ t", "R_{0,j,k} for s = t", 'line 39: the end is given: "for s ≥ t"'),
        ("softmax_equations", "= y_k (dy_k − Σ_i dy_i y_i)", "= 0\n            + dz_k", "dz_k is on both sides"),
        ("tiles_equations", "= exp(z_ts − lse_t)\n", "= 0\n            + softmax_s(z_ts)\n", "Write it without a sum"),
    ],
)
def test_an_answer_holds_for_all_indices_and_on_all_its_lines(name, right, wrong, says, replaced):
    found = replaced(name, right, wrong)
    assert not found.passed and says in found.message, found.message


def test_a_comment_is_no_part_of_an_answer(replaced):
    answer = "y_i (δ_ik − y_k)"
    assert replaced("softmax_equations", answer, answer + "   (for all i and k, with ∂y = ...)").passed


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("layernorm_equations", "∂μ/∂x_k = 1/C", "∂μ/∂x_k = 0.2"),
        ("attention_equations", "= dz_ts/√D", "= dz_ts/√3"),
        ("cross_entropy_equations", "= dloss k_n/count", "= dloss k_n/3"),
        ("cross_entropy_equations", "= dloss k_n/count", "= 0.12573022109180475 k_n/count"),
    ],
)
def test_a_number_from_a_message_is_no_answer(name, right, wrong, replaced):
    found = replaced(name, right, wrong)
    assert not found.passed and "true for arrays of one size only" in found.message, found.message


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (("de = dy", "de *= s", "ds = dy * e + de * e", "dx = ds * np.cos(x)"), "backward writes to dy"),
        (("de = dy * s", "ds = dy * e", "total = ds + de * e", "dx = total"), r"dx\[\d\]: expected .* cos, at x"),
        (("de = dy * s", "ds = dy * e", "dx = ds * np.cos(x)"), r"ds\[\d\]: expected .* used twice"),
    ],
)
def test_the_chain_rule_is_blamed_for_the_step_that_is_wrong(steps, says, replaced):
    right = "    de = dy * s\n    ds = dy * e + de * e\n    dx = ds * np.cos(x)\n"
    found = replaced("chain_rule", right, "".join(f"    {step}\n" for step in steps))
    assert re.search(says, found.message), found.message


@pytest.mark.parametrize(
    ("name", "right", "comment"),
    [
        ("relu", "dx = dy * (y > 0)", "  # why not >= ?"),
        ("chain_rule", "dx = ds * np.cos(x)", "  # cos(x) (?)"),
        ("softmax_equations", "y_i (δ_ik − y_k)", "   (really ?)"),
        ("softmax_equations", "return y, y.copy()", "  # a copy ?"),
    ],
)
def test_a_question_in_a_comment_is_no_blank(name, right, comment, replaced):
    found = replaced(name, right, right + comment)
    assert found.passed, found.message


@pytest.mark.parametrize("answer", ["?   (I do not know)", "y_i (δ_ik − ?)", "y_i (δ_ik − y_k)   dy_i = ?"])
def test_a_blank_may_be_left_in_a_part_of_an_answer(answer, replaced):
    found = replaced("softmax_equations", "y_i (δ_ik − y_k)", answer)
    assert found.message.startswith("The lines above are right; line 21 is still blank")


IN_LISTS = """
    stored.setdefault("k", []).append(k)
    stored.setdefault("v", []).append(v)
    k, v = np.concatenate(stored["k"]), np.concatenate(stored["v"])
    s = np.arange"""


def test_keys_and_values_may_be_stored_in_any_form(verdict):
    name, solution = "key_value_cache", exercise("key_value_cache").solution
    before, stored, after = re.split(r"(\n    if stored:.*?)\n    s = np.arange", solution, maxsplit=1, flags=re.DOTALL)
    assert verdict(name, before + IN_LISTS + after).passed
    assert verdict(name, solution.replace(stored, stored + '\n    stored["count"] = len(k)')).passed
    more = verdict(name, solution.replace(stored, stored + '\n    stored["x"] = [x]'))
    assert "holds more than a key and a value for each position" in more.message


@pytest.mark.parametrize("name", NAMES)
def test_no_hint_but_the_last_gives_the_formula(name):
    each = exercise(name)
    hints = " ".join(each.hints[:2])
    for variable in re.findall(r"^ *(\w+) = \.\.\.$", each.start, re.MULTILINE):
        assert not re.search(rf"\b{variable}(_\w+)? = ", hints), variable
    for line in each.answers if each.kind == "derivation" else ():
        answer = line.rpartition(" = ")[2].partition("   ")[0]
        assert len(answer) < 6 or answer in each.start or answer not in hints, answer


@pytest.mark.diagnosis
@pytest.mark.parametrize(
    ("name", "right", "wrong", "says"),
    [
        ("layernorm", "keepdims=True)) / sigma", "keepdims=True)) * sigma", "it should be times the square of sigma"),
        (
            "layernorm",
            "dgamma = (dy * xhat).sum(axis=tuple(range(dy.ndim - 1)))",
            "dgamma = dy * xhat",
            "Is a sum over",
        ),
        ("linear", "dx = dy @ w.T", "dx = dy @ w", "Is one of the two to be transposed"),
        ("chain_rule", "    ds = dy * e + de * e", "    ds = de * e + de * e", "One slip in ds gives exactly these"),
        ("attention_equations", "= dz_ts/√D", "= √D dz_ts", "at t = 3, s = 4 da is .*da is 3 times .* 3 is D"),
        ("layernorm_equations", '/σ\n    """', ' σ\n    """', "is what it should be times the square of σ"),
        (
            "layernorm_equations",
            "dγ_c = Σ_n dy_nc x̂_nc",
            "dγ_c = Σ_n dy_c x̂_c",
            "nothing in the sum over n has index n",
        ),
        ("layernorm_equations", "dβ_c = Σ_n dy_nc", "dβ_c = mean_n(dy_nc)", "The right side is 1/3 of .* 3 is N"),
    ],
)
def test_what_a_wrong_answer_is_told(name, right, wrong, says, replaced):
    given = replaced(name, right, wrong)
    assert not given.passed and re.search(says, given.message, re.DOTALL), given.message


def test_a_letter_that_is_used_twice_is_marked_in_a_true_equation(replaced):
    given = replaced("softmax_equations", "Σ_i dy_i y_i", "Σ_k dy_k y_k")
    assert not given.passed and "line 25:" in given.message
    assert "k is an index of this equation already: in the sum, write k'" in given.message


@pytest.mark.parametrize(
    ("name", "right", "other"),
    [
        (
            "softmax",
            "dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))",
            "dz = y * dy - y * np.einsum('...i,...i->...', dy, y)[..., None]",
        ),
        ("softmax", "    dz = y * (dy", "    y = softmax(np.log(y))[0]\n    dz = y * (dy"),
        (
            "chain_rule",
            "    de = dy * s\n    ds = dy * e + de * e\n    dx = ds * np.cos(x)\n",
            "    de = ...\n    dx = dy * (np.cos(x) * np.exp(np.sin(x)) * (1 + np.sin(x)))\n",
        ),
        ("relu", "dx = dy * (y > 0)", "dx = np.where(y > 0, dy, 0)"),
    ],
)
def test_other_ways_to_the_same_gradient_are_right(name, right, other, replaced):
    """Sums in another order, a forward that runs again, all in one line: rounding differs, and that is all."""
    found = replaced(name, right, other)
    assert found.passed, found.message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("dz = y * (dy - (dy * y) @ np.eye(y.shape[-1])[:, :1] * 0 - (dy * y).sum(axis=-1, keepdims=True))", "float32"),
        ("dz = y.astype(float) * (dy - (dy * y).sum(axis=-1, keepdims=True))", "float32"),
    ],
)
def test_right_values_of_a_wrong_type_are_called_right(line, says, verdict):
    message = verdict("softmax", exercise("softmax").start.replace("    dz = ...", f"    {line}")).message
    assert message.startswith("The values are right in float64. ") and says in message
    assert "rules=" not in message  # which an answer cannot choose


def test_numbers_that_differ_are_shown_with_digits_that_differ(replaced):
    message = replaced("adam", "    return w", "    w = w * (1 + 1e-8)\n    return w").message
    expected, got = re.search(r"expected (\S+), got ([^\s.]*\.\d+)", message).groups()
    assert expected != got
