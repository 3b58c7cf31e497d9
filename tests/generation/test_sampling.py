"""From logits to a token: which tokens are allowed, how likely they are, and that samples follow this."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from scratchformer.generation import penalised, probabilities, sample
from scratchformer.generation.sampling import choose
from scratchformer.rng import Key

Z = np.array([[1.0, 3.0, -2.0, 2.5, 0.0, 2.5], [0.0, 0.0, 0.0, 0.0, 0.0, 1e-9]])

logits = hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.floats(-30, 30))


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@given(logits, st.floats(0.05, 20))
def test_temperature_divides_the_logits(z, temperature):
    np.testing.assert_allclose(probabilities(z, temperature), softmax(z / temperature), rtol=1e-9, atol=1e-300)


@given(logits)
def test_temperature_zero_is_greedy(z):
    p = probabilities(z, temperature=0)
    np.testing.assert_array_equal(p, np.eye(z.shape[1])[z.argmax(axis=-1)])
    np.testing.assert_array_equal(sample(p, Key(0)), z.argmax(axis=-1))


@given(logits, st.integers(1, 15))
def test_top_k_keeps_exactly_the_k_likeliest_also_among_equals(z, k):
    p = probabilities(z, top_k=k)
    for row, logit in zip(p, z, strict=True):
        kept = sorted(range(len(logit)), key=lambda i: (-logit[i], i))[:k]
        expected = np.zeros_like(row)
        expected[kept] = softmax(logit[kept])
        np.testing.assert_allclose(row, expected, rtol=1e-9, atol=1e-300)
        assert not row[[i for i in range(len(row)) if i not in kept]].any()


@given(logits, st.floats(0.01, 1.0))
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_p(z, p):
    whole = softmax(z)
    for row, before in zip(probabilities(z, top_p=p), whole, strict=True):
        kept = row > 0
        assert before[kept].sum() >= p - 1e-9
        assert before[kept].sum() - before[kept].min() < p + 1e-9  # too little without the least likely one
        assert not (~kept).any() or before[kept].min() >= before[~kept].max()
        np.testing.assert_allclose(row[kept], before[kept] / before[kept].sum(), rtol=1e-9)


def test_top_p_by_hand():
    z = np.log([[0.5, 0.1, 0.3, 0.1]])
    np.testing.assert_allclose(probabilities(z, top_p=0.4), [[1, 0, 0, 0]])
    np.testing.assert_allclose(probabilities(z, top_p=0.7), [[5 / 8, 0, 3 / 8, 0]])
    np.testing.assert_allclose(probabilities(z, top_p=0.85), [[5 / 9, 1 / 9, 3 / 9, 0]])
    np.testing.assert_allclose(probabilities(z, top_p=1.0), [[0.5, 0.1, 0.3, 0.1]])


def test_top_k_and_temperature_come_before_top_p():
    z = np.log([[0.4, 0.3, 0.2, 0.1]])
    np.testing.assert_allclose(probabilities(z, top_k=2, top_p=0.5), [[1, 0, 0, 0]])  # 4/7 is enough
    np.testing.assert_allclose(probabilities(z, top_p=0.5), [[4 / 7, 3 / 7, 0, 0]])
    np.testing.assert_allclose(probabilities(z, temperature=0.5, top_p=0.5), [[1, 0, 0, 0]])  # 16/30 is enough


@given(logits, st.floats(0, 5), st.integers(1, 15) | st.none(), st.floats(0.01, 1) | st.none())
def test_every_setting_gives_a_distribution(z, temperature, top_k, top_p):
    p = probabilities(z, max(temperature, 0.01) if temperature else 0, top_k, top_p)
    assert p.dtype == np.float64
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(axis=-1), 1, rtol=1e-12)
    assert (p[np.arange(len(z)), z.argmax(axis=-1)] > 0).all()


@given(logits, st.floats(0, 5), st.integers(1, 15) | st.none(), st.floats(0.01, 1) | st.none(), st.data())
def test_with_some_tokens_allowed_it_is_the_distribution_of_them_alone(z, temperature, top_k, top_p, data):
    allowed = data.draw(hnp.arrays(bool, z.shape[1]).filter(np.any))
    options = (max(temperature, 0.01) if temperature else 0, top_k, top_p)
    p = probabilities(z, *options, allowed)
    assert not p[:, ~allowed].any()
    np.testing.assert_array_equal(p[:, allowed] > 0, probabilities(z[:, allowed], *options) > 0)
    np.testing.assert_allclose(p[:, allowed], probabilities(z[:, allowed], *options), rtol=1e-12)


@pytest.mark.parametrize("allowed", [[True] * 5, [False] * 6, [1] * 6, [[True] * 6]], ids=str)
def test_invalid_values_of_allowed(allowed):
    with pytest.raises(ValueError, match=r"^allowed: expected booleans \(6,\) of which at least one is true$"):
        probabilities(Z, allowed=np.array(allowed))


def test_large_logits_do_not_overflow():
    np.testing.assert_array_equal(probabilities(np.array([[1e4, -1e4, 0.0]]).astype(np.float32)), [[1, 0, 0]])


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0}, {"temperature": 0.5, "top_k": 3}, {"top_p": 0.8}], ids=str
)
def test_tokens_are_drawn_in_proportion_to_their_probabilities(options):
    """Pearson's chi-square, over one large batch and over many keys; the keys are fixed, so the test is not flaky."""
    p = probabilities(Z[:1], **options)
    batch = sample(np.repeat(p, 20_000, axis=0), Key(1))
    keys = np.array([sample(p, Key(2, i))[0] for i in range(5_000)])
    allowed = p[0] > 0
    for drawn in batch, keys:
        counts = np.bincount(drawn, minlength=p.shape[1])
        assert not counts[~allowed].any()
        assert stats.chisquare(counts[allowed], len(drawn) * p[0, allowed]).pvalue > 1e-3


def test_rows_of_a_batch_are_drawn_independently():
    p = np.repeat(probabilities(np.zeros((1, 4))), 2, axis=0)
    pairs = np.array([sample(p, Key(3, i)) for i in range(4_000)])
    table = np.histogram2d(*pairs.T, bins=4)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_the_same_key_draws_the_same():
    p = np.repeat(probabilities(Z[:1]), 50, axis=0)
    np.testing.assert_array_equal(sample(p, Key(4)), sample(p, Key(4)))
    assert (sample(p, Key(4)) != sample(p, Key(5))).any()


def test_an_impossible_token_is_never_drawn():
    p = np.array([[0.0, 0.5, 0.0, 0.5, 0.0]])
    assert {int(sample(p, Key(i))[0]) for i in range(200)} == {1, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature: expected a finite number >= 0, got -0.1"),
        ({"temperature": math.nan}, "temperature: expected a finite number >= 0, got nan"),
        ({"top_k": 0}, "top_k: expected a number >= 1, got 0"),
        ({"top_k": 2.5}, "top_k: expected an integer, got 2.5"),
        ({"top_p": 0.0}, "top_p: expected 0 < top_p <= 1, got 0.0"),
        ({"top_p": 1.5}, "top_p: expected 0 < top_p <= 1, got 1.5"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}$"):
        probabilities(Z, **options)


@pytest.mark.parametrize("row", [[math.nan, 0.5], [0.0, 0.0], [math.inf, 0.5], [-1.0, -2.0]], ids=str)
def test_invalid_probabilities_are_refused(row):
    with pytest.raises(ValueError, match=r"^p: expected probabilities with a positive sum in each row$"):
        sample(np.array([[0.5, 0.5], row]), Key(0))


def test_probabilities_and_samples_are_of_a_batch():
    for function, name in ((probabilities, "logits"), (lambda p: sample(p, Key(0)), "p")):
        with pytest.raises(ValueError, match=rf"^{name}: expected \(B, V\), got \(6,\)$"):
            function(Z[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="logits: expected finite numbers"):
        probabilities(np.array([[0.0, bad]]))


def test_the_penalty_of_tokens_that_have_occurred():
    """z/θ for a positive logit and z θ for another, of those tokens only."""
    logits = np.array([[2.0, -2.0, 3.0, -3.0, 0.0]])
    occurred = np.array([[True, True, False, False, True]])
    np.testing.assert_array_equal(penalised(logits, occurred, 4), [[0.5, -8, 3, -3, 0]])
    assert logits[0, 0] == 2
    assert (
        np.isfinite(penalised(logits, occurred, 1e-320)).all() and np.isfinite(penalised(logits, occurred, 1e308)).all()
    )
    for penalty in 0, -1, np.inf, np.nan:
        with pytest.raises(ValueError, match="penalty: expected"):
            penalised(logits, occurred, penalty)


@given(
    logits, st.sampled_from([0, 0.5, 1.0]), st.none() | st.integers(1, 15), st.sampled_from([None, 0.1, 0.9]),
    st.integers(0, 99), st.data(),
)  # fmt: skip
def test_a_token_is_chosen_as_by_a_sample_of_the_probabilities(z, temperature, top_k, top_p, seed, data):
    allowed = data.draw(st.none() | hnp.arrays(bool, z.shape[1:]).filter(np.any))
    for numbers in (z, z.astype(np.float32)):
        options = temperature, top_k, top_p, allowed
        expected = sample(probabilities(numbers, *options), Key(seed))
        np.testing.assert_array_equal(choose(numbers, *options, Key(seed)), expected)
