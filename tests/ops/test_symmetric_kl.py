import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import arrays

Z, W = np.array([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]]), np.array([[1.0, 1.0, 0.0], [0.0, 5.0, 0.0]])
BOTH, IDS = np.array([True, True]), np.array([0, 2])


def run(device, z, w, counted, dloss=1.0):
    """The loss, dz and dw, if only the rows count where `counted` is true."""
    targets = np.where(counted, 1, -1)
    loss, cache = ops.symmetric_kl(*(to_device(x, device) for x in (z, w, targets)), ignore_index=-1)
    assert loss.shape == ()
    return float(loss), *map(to_cpu, ops.symmetric_kl_backward(dloss, cache))


def softmax(z):
    return np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


@st.composite
def two_predictions(draw):
    z = draw(arrays("B T V", scales=(0.1, 1.0, 10.0)))
    B, T, V = z.shape
    w = draw(arrays("B T V", scales=(0.1, 1.0, 10.0), fixed=dict(B=B, T=T, V=V)))
    return z, w, np.array(draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T))).reshape(B, T)


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(two_predictions())
def test_equation(device, drawn):
    """The mean over the rows that count of the mean of two divergences, with both written out."""
    z, w, counted = drawn
    p, q = softmax(z[counted]), softmax(w[counted])
    found, *_ = run(device, z, w, counted)
    expected = ((p * np.log(p / q)).sum() + (q * np.log(q / p)).sum()) / 2 / max(1, counted.sum())
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@given(two_predictions())
def test_it_is_symmetric_and_never_negative(device, drawn):
    z, w, counted = drawn
    loss, dz, dw = run(device, z, w, counted)
    other, dz_other, dw_other = run(device, w, z, counted)
    np.testing.assert_allclose(loss, other, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose([dz, dw], [dw_other, dz_other], rtol=1e-9, atol=1e-12)
    assert loss >= -1e-15


def test_equal_predictions_cost_nothing(device):
    """Logits that differ by a constant in each row predict the same."""
    loss, dz, dw = run(device, Z, Z + np.array([[5.0], [-3.0]]), BOTH)
    np.testing.assert_allclose(loss, 0, atol=1e-14)
    np.testing.assert_allclose([dz, dw], 0, atol=1e-14)


def test_rows_that_do_not_count(device):
    """They have no gradient, and the others are those of a batch without them."""
    loss, dz, dw = run(device, Z, W, np.array([True, False]))
    alone = run(device, Z[:1], W[:1], BOTH[:1])
    np.testing.assert_allclose(loss, alone[0], rtol=1e-12)
    np.testing.assert_allclose([dz[:1], dw[:1]], alone[1:], rtol=1e-12)
    assert not dz[1].any() and not dw[1].any()
    loss, dz, dw = run(device, Z, W, ~BOTH)
    assert loss == 0 and not dz.any() and not dw.any()


def test_dloss_scales_the_gradients(device):
    _, dz, dw = run(device, Z, W, BOTH)
    _, dz_2, dw_2 = run(device, Z, W, BOTH, dloss=-2.5)
    np.testing.assert_allclose([dz_2, dw_2], [-2.5 * dz, -2.5 * dw], rtol=1e-12)


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_predictions_far_apart_are_finite(device, scale):
    loss, dz, dw = run(device, scale * Z, scale * W, BOTH)
    assert np.isfinite(loss) and np.isfinite(dz).all() and np.isfinite(dw).all()


def test_without_an_ignored_target_all_rows_count(device):
    loss, _ = ops.symmetric_kl(*(to_device(x, device) for x in (Z, W, np.array([0, 2]))))
    assert float(loss) == run(device, Z, W, BOTH)[0]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((Z, W[:1], IDS), ValueError, r"w: expected \(2, 3\), got \(1, 3\)"),
        ((Z, W, IDS[:1]), ValueError, r"targets: expected \(2,\), got \(1,\)"),
        ((Z, W, IDS == 1), TypeError, "targets: expected integers, got bool"),
        ((Z, W, IDS + 3), IndexError, "targets: "),
        ((Z.astype(int), W, IDS), TypeError, "z: expected a floating-point array"),
        ((Z, W.astype(int), IDS), TypeError, "w: expected a floating-point array"),
    ],
)
def test_bad_arguments(args, error, message):
    with pytest.raises(error, match=message):
        ops.symmetric_kl(*args)
