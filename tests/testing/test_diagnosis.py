"""What a wrong gradient is said to look like."""

import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scratchformer import catalogue, nn, ops
from scratchformer.catalogue import LAYERS, MISTAKES, OPERATIONS, Draw, mistakes_of
from scratchformer.dispatch import twins_of
from scratchformer.testing import GradientError, check_gradients, check_layer, diagnose, diagnosis

pytestmark = pytest.mark.diagnosis

RNG = np.random.default_rng(0)
X, GAMMA, BETA = RNG.normal(size=(2, 3, 5)), RNG.normal(size=5), RNG.normal(size=5)

# Mistakes that the catalogue has as equations, as code: what is replaced in the module of the operation.
CODE = {
    "linear: the bias gets the mean over the rows": [("db = cast(xp.sum(dy", "db = cast(xp.mean(dy")],
    "linear: the weights' gradient is divided by the number of rows": [("dw = x.T @ dy\n", "dw = x.T @ dy / len(x)\n")],
    "relu: the result is compared with ≥": [("dy * cast(positive, dy.dtype)\n", "dy * (positive >= 0)\n")],
    "gelu: the product rule has two terms": [("dx = dy * (cdf + x * density)\n", "dx = dy * cdf\n")],
    "silu: the factor x is left out of the second term": [("(s * (1 + x * (1 - s)))", "(s * (1 + (1 - s)))")],
    "tanh: x is used in place of y": [("return y, y\n\n\n@backward\ndef tanh", "return y, x\n\n\n@backward\ndef tanh")],
    "swiglu: the gate gets no factor from the other branch": [("dgate = dy * up * (s", "dgate = dy * (s")],
    "softmax: only the diagonal of the Jacobian is used": [
        (
            "    dz = y * (dy - xp.sum(dy * y, axis=-1, keepdims=True))\n    dz = from_others",
            "    return y * (dy - dy * y)\n    dz = from_others",
        )
    ],
    "log_softmax: y is taken for a probability": [
        ("dtype, dy, p = dy.dtype, widen(dy), xp.exp(widen(y))", "return dy - y * xp.sum(dy, axis=-1, keepdims=True)")
    ],
    "cross_entropy: rows that do not count still pass a gradient": [(" * cast(counted[:, None], z_max.dtype)\n", "\n")],
    "cross_entropy: the mean is over all rows, not those that count": [("dloss / count *", "dloss / len(targets) *")],
    "layernorm: the third term is forgotten": [(" - xhat * xp.mean(g * xhat, axis=-1, keepdims=True))", ")")],
    "layernorm: β gets the mean over the rows": [("dbeta = xp.sum(dy", "dbeta = xp.mean(dy")],
    "gather: assigned instead of added": [
        ("    return cast(dx", "    dx[...] = 0\n    dx.reshape(-1, C)[rows] = dy\n    return cast(dx"),
    ],
    "dropout: the scale is left out of backward": [("dx = dy * keep * scale\n", "dx = dy * keep\n")],
    "mean_pool: the padding gets a gradient": [
        ("weights = cache.weights\n", "weights = cache.weights.max(axis=1, keepdims=True) + 0 * cache.weights\n")
    ],
    "max_pool: every element as large as the maximum gets the gradient": [
        ("MaxPoolCache(winner, live, x", "MaxPoolCache(x >= y[:, None], live, x"),
        ("winner.shape)\n    xp", "dy.shape)\n    xp"),
        ("(steps == winner[:, None, :]) & live[:, :, None]", "winner"),
    ],
    "attention: the second term of the softmax is left out": [
        ("(dp - xp.sum(probabilities * dp, axis=-1, keepdims=True))", "dp")
    ],
    "attention: the sum runs over the queries": [("* dp, axis=-1,", "* dp, axis=-2,")],
    "attention: the scaling is used in forward only": [("da = dz * scale\n", "da = dz\n")],
    "relative_shift: shifted the same way again": [
        ("first_columns(T, xp)\n    dx", "first_columns(T, xp)[::-1]\n    dx")
    ],
    "relative_attention: q gets only one of its two gradients": [("dq = dqu + dqw\n", "dq = dqu\n")],
    "relative_attention: the gradient of r is averaged over the sequences": [("dr = xp.sum(", "dr = xp.mean(")],
}

# The case of the operation that shows the mistake, where it is not the first.
CASE = {
    "cross_entropy: rows that do not count still pass a gradient": "cross_entropy, ignored",
    "cross_entropy: the mean is over all rows, not those that count": "cross_entropy, ignored",
    "gelu: constants are typed in decimal": "gelu, tanh",
    "mean_pool: the padding gets a gradient": "mean_pool, padding",
    "max_pool: every element as large as the maximum gets the gradient": "max_pool, padding",
    "attention: each key head gets the gradient of only one of its query heads": "attention, grouped",
    "attention.numpy: part of a group overwrites the gradient of the part before it": (
        "attention, grouped, a pattern for each head"
    ),
    "relative_attention.numpy: the last tile overwrites the gradient of r": (
        "relative_attention, a pattern for each head"
    ),
    "attention.numpy: the log-sum-exp is kept without the row's maximum": "attention, large scores",
}

# A layer that has the mistake.
LAYER = {
    "Stack: the memory gets its gradient from only one block": "Stack, shared input, post",
    "Residual: the gradient passes only through the branch": "Residual, post",
    "Residual: γ gets no gradient from the memory": "TransformerBlock, pre, relative, causal, memory, dropout",
    "EmbeddingSum: the embedding is scaled, its gradient is not": "EmbeddingSum, positions, norm, scale",
    "TiedOutput: the table gets no gradient from the output": "TiedOutput",
    "Recompute: the second forward draws a different mask": "Recompute",
    "GridPositions: the columns get the gradient of the rows": "GridPositions",
    "Pooler: the gradient of the first vector goes to all of them": "BertClassifier",
}

FACTOR = "constant factor"
# The right first diagnosis: with the catalogue, the mistake itself unless it stands here; and without the catalogue,
# None if the general forms and the derivation do not tell.
WITH = {
    "linear: the bias gets the mean over the rows": FACTOR,
    "linear: the weights' gradient is divided by the number of rows": FACTOR,
    "softmax: it is divided by the size of the batch": FACTOR,
    "cross_entropy: forward takes the mean, backward the sum": FACTOR,
    "layernorm: β gets the mean over the rows": FACTOR,
    "attention: the scaling is used in forward only": FACTOR,
    "attention.numpy: a tile leaves out the row sum of dy times y": (
        "attention: the second term of the softmax is left out"
    ),
    "relative_attention: the gradient of r is averaged over the sequences": FACTOR,
    "EmbeddingSum: the embedding is scaled, its gradient is not": FACTOR,
    "TiedOutput: the table gets no gradient from the output": "zero",
}
WITHOUT = WITH | {
    "relu: the result is compared with ≥": "dy passed on",
    "gelu: the product rule has two terms": "a term dropped: dx_i = dy_i Φ_i",
    "gelu: constants are typed in decimal": "rounded",
    "silu: the factor x is left out of the second term": "a factor lost: dx_i = dy_i s_i (1 + (1 − s_i))",
    "silu: the slope of the sigmoid is left out": "a factor lost: dx_i = dy_i s_i",
    "tanh: x is used in place of y": "another array: dx_i = dy_i (1 − x_i²)",
    "dense: the activation is skipped on the way back": "a factor lost: dh_no = dy_no",
    "swiglu: the gate gets no factor from the other branch": "factor left out",
    "swiglu: the sigmoid is taken for the slope of silu": "a factor lost: dg_i = dy_i u_i s_i",
    "softmax: only the diagonal of the Jacobian is used": "diagonal",
    "log_softmax: y is taken for a probability": "a function lost: dz_k = dy_k − y_k Σ_i dy_i",
    "cross_entropy: rows that do not count still pass a gradient": ("a factor lost: dℓ_n = dloss/count"),
    "layernorm: γ is applied outside the means": "right for uniform gamma",
    "layernorm: the third term is forgotten": "a term dropped: dx_k = rstd (g_k − mean_c(g_c))",
    "rmsnorm: the scale is treated as a constant": "a term dropped: dx_k = rrms g_k",
    "embedding: a buffered addition": "counted once",
    "gather: assigned instead of added": "counted once",
    "rotary: rotated forward once more": "Jacobian not transposed",
    "dropout: the scale is left out of backward": "a factor lost: dx_i = dy_i k_i",
    "attention: the second term of the softmax is left out": "a term dropped: dz_hts = p_hts dp_hts",
    "attention: the sum runs over the queries": (
        "a sum along another axis: dz_hts = p_hts (dp_hts − Σ_t' p_ht's dp_ht's)"
    ),
    "attention: dk is transposed, and a reshape hides it": "transpose",
    "attention: dk has a wrong factor": "unknown factor",
    "attention.numpy: a tile leaves out the row sum of dy times y": "a term dropped: dz_hts = p_hts dp_hts",
    "relative_attention: q gets only one of its two gradients": "a term dropped: dq_htd = dqu_htd",
    "relative_attention: the keys get the bias of the positions": ("another array: dk_hsd = Σ_t da_hts qw_htd"),
    "GridPositions: the columns get the gradient of the rows": "another gradient",
    # Neither a general form nor a mistake in one place of the derivation:
    "cross_entropy: the mean is over all rows, not those that count": None,
    "rotary: neighbours form a pair, not one number from each half": None,
    "mean_pool: the padding gets a gradient": None,
    "max_pool: every element as large as the maximum gets the gradient": None,
    "attention: each key head gets the gradient of only one of its query heads": None,
    "attention.numpy: the log-sum-exp is kept without the row's maximum": None,
    "attention.numpy: part of a group overwrites the gradient of the part before it": None,
    "relative_shift: shifted the same way again": None,
    "relative_attention.numpy: the last tile overwrites the gradient of r": None,
}


def planted(mistake):
    """The mistake as code."""
    if mistake.file:
        return mistake
    file = getattr(ops, mistake.operation).__module__.removeprefix("scratchformer.").replace(".", "/") + ".py"
    code = (Path(ops.__file__).parents[1] / file).read_text(encoding="utf-8")
    assert all(right in code for right, _ in CODE[mistake.name]), mistake.name
    return replace(mistake, file=file, replace=dict(CODE[mistake.name]))


def check(mistake):
    """Check the code with the mistake, on the arrays of a case."""
    if mistake.operation:
        made = OPERATIONS[CASE.get(mistake.name, mistake.operation)](Draw(1))
        check_gradients(*planted(mistake).pair(), *made.args, directions=0, **made.options)
        return
    made = LAYERS[LAYER[mistake.name]](Draw(1, largest=3))
    for p in made.layer.parameters():
        p.data[...] = np.random.default_rng(0).standard_normal(p.data.shape)
    own = mistake.names()
    for layer in diagnosis.layers_in(made.layer, {}):
        if type(layer).__module__ == own["__name__"]:
            layer.__class__ = own[type(layer).__name__]
    check_layer(made.layer, *made.inputs, max_elements=4, together=100, **made.options)


def first(mistake):
    """The name of the first diagnosis; None if it is not known."""
    with pytest.raises(GradientError, match="wrong gradient") as caught:
        check(mistake)
    return caught.value.diagnoses[0].name if caught.value.diagnoses else None


@contextmanager
def empty_catalogue():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "MISTAKES", [])
        yield


WRONG = [mistake for mistake in MISTAKES if mistake.name in WITHOUT.keys() | CODE.keys() | LAYER.keys()]


def test_known_mistakes_are_named(thorough):
    """At least nine in ten, and seven without the catalogue; the whole table if thorough."""
    sample = WRONG if thorough else WRONG[3::11]
    named = [first(mistake) == WITH.get(mistake.name, mistake.name) for mistake in sample]
    with empty_catalogue():
        alone = [first(mistake) == WITHOUT.get(mistake.name) for mistake in sample]
    assert sum(named) >= 0.9 * len(sample)
    assert sum(alone) >= 0.7 * len(sample)


def norm(x, scale, shift):
    """A layer norm of one's own."""
    centred = x - x.mean(axis=-1, keepdims=True)
    sigma = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return scale * centred / sigma + shift, (centred / sigma, sigma, scale)


def norm_backward(dy, cache):
    """Without the second term."""
    xhat, sigma, scale = cache
    g = dy * scale
    dx = (g - xhat * (g * xhat).mean(axis=-1, keepdims=True)) / sigma
    return dx, (dy * xhat).sum(axis=(0, 1)), dy.sum(axis=(0, 1))


def test_the_message_names_the_term_of_the_derivation_that_is_left_out():
    with pytest.raises(GradientError) as caught:
        check_gradients(norm, norm_backward, X, GAMMA, BETA)
    sentence = "This is what one gets when mean_c(g_c) is left out: dx_k = rstd (g_k − x̂_k mean_c(g_c x̂_c))"
    *_, explanation, repeat = str(caught.value).splitlines()
    assert (explanation, repeat[:6]) == (sentence, "Repeat")
    assert [(d.what, d.source) for d in caught.value.diagnoses] == [(sentence, "derivation")]


def test_two_mistakes_at_once_are_not_known_and_noise_is_not():
    def two(dy, cache):
        dx, dscale, dshift = norm_backward(dy, cache)
        return np.sin(dx), dscale, dshift / 7

    def noisy(dy, cache):
        dx, dscale, dshift = norm_backward(dy, cache)
        return dx + np.random.default_rng(0).normal(size=dx.shape).astype(dx.dtype), dscale, dshift

    for wrong, said in (two, r"No known mistake gives this gradient\."), (noisy, ".* does not depend on dy is added"):
        with pytest.raises(GradientError, match=rf"\n{said}\nRepeat") as caught:
            check_gradients(norm, wrong, X, GAMMA, BETA)
        assert caught.value.diagnoses == ()


@pytest.mark.parametrize("name", ["softmax", "embedding", "cross_entropy, ignored"])
def test_a_right_gradient_has_no_diagnosis(name, thorough):
    for each in OPERATIONS if thorough else [name]:
        made = OPERATIONS[each](Draw(1))
        assert diagnose(made.op, made.op_backward, *made.args, **made.options) == []


def powers(x):
    return (x**3 + x**2).sum(axis=-1), x


def powers_backward(dy, x):
    """Without the second term."""
    return 3 * dy[..., None] * x**2


@pytest.mark.parametrize("forward", ["y_n = Σ_i (x_ni³ + x_ni²)", "y_n = Σ_i x_ni³"])
def test_the_derivation_may_be_ones_own(forward):
    """One that is not true says nothing."""
    docstring = f"Powers.\n\nFor each n:\n\n    {forward}\n    dx_ni = dy_n ∂y_n/∂x_ni = dy_n (3 x_ni² + 2 x_ni)"
    found = [diagnosis.what for diagnosis in diagnose(powers, powers_backward, X[0], docstring=docstring)]
    true = ["This is what one gets when 2 x_ni is left out: dx_ni = dy_n (3 x_ni²)"]
    assert found == (true if "+" in forward else [])


def product(x, w):
    return x @ w, (x, w)


# What is done to the gradients (dx, dw) of a product, and the name and sentence of the diagnosis.
FORMS = {
    "constant factor": (
        lambda dx, dw, dy: (dx, dw / 4),
        "The gradient of w is 1/4 of what it should be: 4 is the size of axis 0 of x or the size of axis 0 of y.",
    ),
    "unknown factor": (lambda dx, dw, dy: (7 * dx, dw), "The gradient of x is 7 times what it should be."),
    "sign": (lambda dx, dw, dy: (-dx, -dw), "The gradients of x and w are right except for the sign."),
    "zero": (lambda dx, dw, dy: (0 * dx, dw), "The gradient of x is zero everywhere."),
    "transpose": (
        lambda dx, dw, dy: (dx, dw.T.reshape(dw.shape)),
        "The gradient of w is right with axes 0 and 1 exchanged, then reshaped.",
    ),
    "shifted": (lambda dx, dw, dy: (np.roll(dx, 1, 0), dw), "The gradient of x is shifted by +1 along axis 0."),
    "wrong places": (
        lambda dx, dw, dy: (np.roll(dx.ravel(), 3).reshape(dx.shape), dw),
        "The gradient of x is made of the right numbers in the wrong places.",
    ),
    "rounded": (
        lambda dx, dw, dy: (dx * (1 + 1e-4 * np.sin(dx)), dw),
        "The gradient of x is right to 4 digits: is a constant rounded, or something computed in fewer bits?",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_general_forms(name):
    change, sentence = FORMS[name]

    def product_backward(dy, cache):
        x, w = cache
        return change(dy @ w.T, x.T @ dy, dy)

    x, w = np.random.default_rng(1).normal(size=(4, 2)), np.random.default_rng(2).normal(size=(2, 3))
    with empty_catalogue():
        found = diagnose(product, product_backward, x, w)[0]
    assert (found.name, found.what) == (name, sentence)


def test_forms_that_need_the_jacobian():
    def last(dy, cache):
        x, w = cache
        only = np.zeros_like(dy)
        only[-1] = dy[-1]
        return dy @ w.T, x.T @ only

    def unused(dy, cache):
        x, w = cache
        return np.ones_like(dy) @ w.T, x.T @ dy

    x, w = np.random.default_rng(1).normal(size=(4, 2)), np.random.default_rng(2).normal(size=(2, 3))
    for wrong, name in ((last, "last alone"), (unused, "dy not used")):
        assert diagnose(product, wrong, x, w)[0].name == name


class Stale(nn.Linear):
    """It remembers its input outside of the cache."""

    def forward(self, x):
        self.x = x
        return super().forward(x)

    def backward(self, dy, cache):
        return super().backward(dy, cache._replace(x=self.x))


def test_what_is_said_of_several_gradients_is_one_explanation():
    def product(a, b):
        return a**2 * b**3, (a, b)

    a, b = RNG.normal(size=(2, 3, 4))
    factors = diagnose(product, lambda dy, c: (dy * c[0] * c[1] ** 3, dy * c[0] ** 2 * c[1] ** 2), a, b)
    assert len(factors) == 1
    assert factors[0].what.startswith(
        "The gradient of a is 1/2 of what it should be: perhaps the 2 in the derivative of a square, or √4, where 4 is"
    )
    assert "The gradient of b is 1/3 of what it should be: 3 is the size of axis 0 of a" in factors[0].what


def test_a_gradient_that_is_nearly_right_is_not_taken_for_another():
    def rounded(dy, x):
        return (1 + 2e-6 * (np.abs(x) < np.abs(x).max() / 3)).astype(x.dtype) * 2 * x * dy

    (found,) = diagnose(lambda x: (x**2, x), rounded, X[0])
    assert found.name == "rounded"


def test_a_mask_that_is_left_out():
    mask = np.random.default_rng(1).random((3, 5)) > 0.4
    (found,) = diagnose(lambda x, *, mask: (np.where(mask, 3 * x, 0 * x), mask), lambda dy, _: 3 * dy, X[0], mask=mask)
    assert found.what == "The gradient of x is not multiplied by mask, as it should be."


def test_a_norm_is_known_whatever_its_eps():
    def norm(x, gamma):
        root = np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(1e-5))
        return gamma * x / root, (x / root, root, gamma)

    def wrong(dy, cache):
        xhat, root, gamma = cache
        return dy * gamma / root, (dy * xhat).sum(axis=0)

    first = diagnose(norm, wrong, X[0], GAMMA)[0]
    assert first.name == "rmsnorm: the scale is treated as a constant"


def test_where_there_is_no_numeric_value_nothing_is_said():
    with pytest.raises(GradientError, match="Nothing is known of the right value there") as caught:
        check_gradients(lambda x: (np.where(x == 2, x, np.nan), x), lambda dy, x: dy * x, np.full(2, 2.0))
    assert not caught.value.diagnoses


def test_layers():
    class Twice(nn.Linear):
        def backward(self, dy, cache):
            dx = super().backward(dy, cache)
            self.b.grad += dy.sum(axis=(0, 1))
            return dx

    with pytest.raises(GradientError, match="The gradient of b is 2 times what it should be") as caught:
        check_layer(Twice(5, 4), X)
    assert caught.value.diagnoses[0].name == "constant factor"
    with pytest.raises(GradientError, match="used twice") as caught:
        check_layer(Stale(5, 4), X)
    assert caught.value.diagnoses[0].name == "stale after a second forward"


def test_a_failing_search_does_not_hide_the_wrong_gradient(monkeypatch):
    monkeypatch.setattr(diagnosis, "likeliest", lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match="the search .* failed"), pytest.raises(GradientError, match="at x"):
        check_gradients(norm, norm_backward, X, GAMMA, BETA)


@pytest.mark.filterwarnings("error")
def test_gradients_for_which_the_search_has_nothing_to_divide_by_or_no_derivation():
    with pytest.raises(GradientError, match="wrong gradient at x"):  # straight-through: the right gradient is 0
        check_gradients(lambda x: (np.floor(x), None), lambda dy, _: +dy, X + 0.5)
    with pytest.raises(GradientError, match="wrong gradient at x"):
        check_gradients(lambda x: ((2 * x, 3 * x), None), lambda dy, _: 2 * dy[0] + dy[1], X)


def test_the_catalogue():
    names = [mistake.name for mistake in MISTAKES]
    assert len(set(names)) == len(names) > 90
    for mistake in MISTAKES:
        assert mistake.file or (mistake.equation and mistake.wrong), mistake.name
        assert mistake.effect or not mistake.equation, mistake.name
    assert {mistake.name for mistake in mistakes_of("layernorm")} >= {"layernorm: the third term is forgotten"}
    assert twins_of(ops.attention), "running a mistake must leave the twins registered"


def test_a_factor_of_one_of_several_outputs_has_the_name_of_a_step():
    def cell(c, z):
        f = 1 / (1 + np.exp(-z))
        new = f * c
        return (new, np.tanh(new)), (c, f, np.tanh(new))

    def cell_backward(d, cache):
        c, f, t = cache
        dnew = d[0] + d[1] * (1 - t**2)
        return dnew, dnew * c * f * (1 - f)

    said = diagnose(cell, cell_backward, *RNG.normal(size=(2, 3, 4)))
    assert said[0].what == "The gradient of c is not multiplied by f, as it should be."


def test_a_clipped_gradient_is_not_right_for_a_uniform_gamma():
    """It is, but for a dy so small that nothing is clipped."""

    def clipped(dy, cache):
        x, gamma = cache
        return np.clip(dy * gamma, -3, 3), (dy * x).sum(axis=0)

    gamma = np.array([0.1, -0.1, 0.1, 5.0])
    (said,) = diagnose(lambda x, gamma: (x * gamma, (x, gamma)), clipped, RNG.normal(size=(5, 4)), gamma)
    assert said.name == "cut off"


def test_a_mask_that_is_not_the_right_one():
    x = RNG.normal(size=(4, 5))
    shift = RNG.normal(size=x.shape)
    said = {}
    for name, wrong in {"other": lambda dy, x: dy * (x + shift > 0), "opposite": lambda dy, x: dy * (x < 0)}.items():
        said[name] = diagnose(lambda x: (np.maximum(x, 0), x), wrong, x)[0].name
    assert said == {"other": "zeros in other places", "opposite": "zeros the wrong way round"}


def test_the_first_dy_for_all_others():
    said = diagnose(lambda x: (x**2, x), lambda dy, x: 2 * x * dy[:1], RNG.normal(size=(4, 5)))
    assert said[0].what == "The gradient of x is what one gets with the first dy along axis 0 in place of all others."


@pytest.mark.parametrize(("shift", "said"), [(1, r"\+1 .*first"), (-2, "−2 .*last")])
def test_shifted_numbers_with_others_in_the_free_places(shift, said):
    def wrong(dy, x):
        dx = np.roll(2 * x * dy, shift, axis=0)
        dx[: shift if shift > 0 else None][shift if shift < 0 else None :] = dy[: abs(shift)]
        return dx

    (found,) = diagnose(lambda x: (x**2, x), wrong, RNG.normal(size=(5, 4)))
    assert re.search(rf"shifted by {said} places", found.what)


def test_rows_of_another_length():
    def wrong(dy, x):
        return np.pad(2 * x * dy, [(0, 0), (0, 3)]).reshape(-1)[: x.size].reshape(x.shape)

    (found,) = diagnose(lambda x: (x**2, x), wrong, RNG.normal(size=(5, 4)))
    assert found.what == "The gradient of x is right, but in rows of 7 numbers, where there should be 4."


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((1, 0, 0), "what comes from y[1] is left out."),
        ((1, 0, 1), "dy[1] comes back through y[0] and not through y[1]."),
        ((1, 1, 1), "dy[1] comes back through y[0] too."),
    ],
)
def test_one_of_several_outputs(weights, said):
    def wrong(dy, x):
        parts = dy[0] * np.cos(x), dy[1] * 2 * x, dy[1] * np.cos(x)
        return sum(weight * part for weight, part in zip(weights, parts, strict=True))

    (found,) = diagnose(lambda x: ((np.sin(x), x**2), x), wrong, RNG.normal(size=(3, 4)))
    assert found.what == f"The gradient of x is right except that {said}"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_first_dy_again_and_again(count):
    def wrong(dy, x):
        return 2 * x * np.concatenate([dy[:count]] * (6 // count))

    (found,) = diagnose(lambda x: (x**2, x), wrong, RNG.normal(size=(6, 2)))
    first = "first dy" if count == 1 else f"first {count} dy"
    assert f"what one gets with the {first} along axis 0 in place of all others" in found.what


@pytest.mark.parametrize(
    ("rows", "said"), [(slice(2, None), "from index 2 of axis 0 on"), (slice(3), "before index 3")]
)
def test_only_the_last_or_the_first_rows(rows, said):
    def wrong(dy, x):
        dx = 2 * x * dy
        dx[rows] = np.sin(dx[rows])
        return dx

    (found,) = diagnose(lambda x: (x**2, x), wrong, RNG.normal(size=(5, 4)))
    assert f"right except {said}" in found.what


@pytest.mark.parametrize("shapes", [[(2, 2), (2, 2)], [(2, 3), (3, 2)], [(1, 3), (3, 3)], [(4, 2), (2, 1)]])
def test_noise_gets_no_name(shapes):
    """Numbers that have nothing to do with the gradient are never explained, in however small an array."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        noise = [rng.normal(size=shape) for shape in shapes]
        for wrong in (
            lambda dy, c, n=noise: (dy @ c[1].T, dy.sum() * n[1]),
            lambda dy, c, n=noise: (dy.sum() * n[0], dy.sum() * n[1]),
        ):
            with empty_catalogue():
                found = diagnose(product, wrong, *(rng.normal(size=shape) for shape in shapes))
            assert not found, found


def test_numbers_that_are_cut_off():
    said = diagnose(lambda x: (x**3, x), lambda dy, x: np.clip(3 * x**2 * dy, -0.5, 0.5), RNG.normal(size=(4, 5)))
    assert said[0].what == "The gradient of x is right except that numbers beyond −0.5 and 0.5 are cut off."


def test_the_steps_of_a_forward_are_known_where_its_backward_is_a_lambda():
    def norm(x):
        spread = np.sqrt((x**2).sum(axis=-1, keepdims=True))
        return x / spread, (x / spread, spread)

    def norm_backward(dy, cache):
        y, spread = cache
        return (dy - y * (dy * y).sum(axis=-1, keepdims=True)) / spread**2

    said = diagnose(norm, lambda dy, cache: norm_backward(dy, cache), RNG.normal(size=(4, 5)))
    assert said[0].what == "The gradient of x is not multiplied by spread, as it should be."
