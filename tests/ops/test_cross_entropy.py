import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.testing.strategies import arrays, ids


def loss_and_gradient(device, logits, targets, dloss=1.0, **options):
    loss, cache = ops.cross_entropy(to_device(logits, device), to_device(targets, device), **options)
    assert loss.shape == ()
    return float(loss), to_cpu(ops.cross_entropy_backward(dloss, cache))


@st.composite
def predictions(draw):
    """Logits (B, T, V) and targets (B, T)."""
    logits = draw(arrays("B T V", scales=(0.1, 1.0, 10.0)))
    B, T, V = logits.shape
    return logits, draw(ids("B T", high=V, fixed=dict(B=B, T=T)))


def test_gradients(case, check_gradients):
    check_gradients(case)


@given(predictions(), st.sampled_from([None, 0, -1]), st.sampled_from([0.0, 0.1, 0.7]))
def test_equation(device, drawn, ignore_index, label_smoothing):
    """The result agrees with a loop over the rows that count, with the target distribution written out."""
    logits, targets = drawn
    V = logits.shape[-1]
    if ignore_index == -1:
        targets = np.where(np.arange(targets.size).reshape(targets.shape) % 2, targets, -1)
    losses, gradient = [], np.zeros_like(logits)
    for row in np.ndindex(targets.shape):
        if targets[row] == ignore_index:
            continue
        distribution = np.full(V, label_smoothing / V)
        distribution[targets[row]] += 1 - label_smoothing
        p = np.exp(logits[row]) / np.exp(logits[row]).sum()
        losses.append(-(distribution * np.log(p)).sum())
        gradient[row] = p - distribution
    n = max(1, len(losses))
    options = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
    loss, dlogits = loss_and_gradient(device, logits, targets, **options)
    assert math.isclose(loss, sum(losses) / n, rel_tol=1e-10, abs_tol=1e-12)
    np.testing.assert_allclose(dlogits, gradient / n, rtol=1e-9, atol=1e-12)


def test_uniform_logits_cost_log_v(device):
    loss, dlogits = loss_and_gradient(device, np.zeros((2, 3, 8)), np.zeros((2, 3), int))
    assert math.isclose(loss, math.log(8), rel_tol=1e-14)
    np.testing.assert_allclose(dlogits[0, 0], (1 / 8 - np.eye(8)[0]) / 6, rtol=1e-12)


def test_dloss_scales_the_gradient(device):
    logits, targets = np.random.default_rng(0).standard_normal((4, 3)), np.array([0, 1, 2, 0])
    _, one = loss_and_gradient(device, logits, targets)
    _, scaled = loss_and_gradient(device, logits, targets, dloss=-2.5)
    _, from_array = loss_and_gradient(device, logits, targets, dloss=to_device(np.array(-2.5), device))
    np.testing.assert_allclose(scaled, -2.5 * one, rtol=1e-14)
    assert np.array_equal(scaled, from_array)


def test_repeating_the_batch_changes_neither_the_loss_nor_the_summed_gradient(device):
    """Both forward and backward contain the 1/N of the mean."""
    logits, targets = np.random.default_rng(0).standard_normal((4, 3)), np.array([0, 1, 2, 0])
    loss, dlogits = loss_and_gradient(device, logits, targets)
    repeated, drepeated = loss_and_gradient(device, np.tile(logits, (5, 1)), np.tile(targets, 5))
    assert math.isclose(loss, repeated, rel_tol=1e-12)
    np.testing.assert_allclose(drepeated.reshape(5, 4, 3).sum(axis=0), dlogits, rtol=1e-12)


def test_if_no_target_counts_loss_and_gradient_are_zero(device):
    loss, dlogits = loss_and_gradient(device, np.ones((2, 3)), np.array([-1, -1]), ignore_index=-1)
    assert loss == 0
    assert not dlogits.any()


def test_an_ignored_row_has_no_influence(device):
    logits, targets = np.random.default_rng(0).standard_normal((3, 4)), np.array([1, 9, 2])
    loss, dlogits = loss_and_gradient(device, logits, targets, ignore_index=9, label_smoothing=0.2)
    rest, drest = loss_and_gradient(device, logits[[0, 2]], targets[[0, 2]], label_smoothing=0.2)
    assert math.isclose(loss, rest, rel_tol=1e-14)
    np.testing.assert_allclose(dlogits, [drest[0], np.zeros(4), drest[1]], rtol=1e-12)


def test_mean_of_many_rows_runs_in_float32_for_float16(device):
    """The sum over 200,000 rows overflows float16; the mean does not."""
    logits, targets = np.zeros((200_000, 2), np.float16), np.zeros(200_000, np.int64)
    loss, _ = loss_and_gradient(device, logits, targets)
    assert math.isclose(loss, math.log(2), rel_tol=1e-3)


@pytest.mark.parametrize("wrong", [3, -1])
def test_targets_out_of_range(wrong, device):
    with pytest.raises(IndexError, match=f"targets: expected values from 0 to 2, got {wrong}"):
        loss_and_gradient(device, np.zeros((2, 3)), np.array([0, wrong]))


def test_the_error_for_pytorchs_ignore_index_names_the_one_used_here(device):
    logits, targets = np.zeros((2, 3)), np.array([0, -100])
    with pytest.raises(IndexError, match=r"^targets: .* got -100 \(-1 is ignored, which is -100 in PyTorch\)$"):
        loss_and_gradient(device, logits, targets, ignore_index=ops.IGNORED)
    with pytest.raises(IndexError, match=r"^targets: .* got -100 \(none is ignored\)$"):
        loss_and_gradient(device, logits, targets)
    assert loss_and_gradient(device, logits, targets, ignore_index=-100)[0] == pytest.approx(math.log(3))


def test_targets_of_another_shape():
    with pytest.raises(ValueError, match=r"targets: expected \(2, 5\), got \(2, 4\)"):
        ops.cross_entropy(np.zeros((2, 5, 3)), np.zeros((2, 4), int))


@pytest.mark.parametrize("wrong", [-0.1, 1.0, 2.0])
def test_label_smoothing_out_of_range(wrong):
    with pytest.raises(ValueError, match=f"label_smoothing: expected 0 <= label_smoothing < 1, got {wrong}"):
        ops.cross_entropy(np.zeros((2, 3)), np.zeros(2, int), label_smoothing=wrong)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_large_common_offset_costs_no_digits(label_smoothing, device):
    """All logits are near 10,000, where float32 has three decimals, but differ by whole numbers."""
    logits, targets = np.array([[0, 3, 1], [2, 0, 5]], np.float32), np.array([0, 1])
    options = dict(label_smoothing=label_smoothing)
    loss, dlogits = loss_and_gradient(device, logits, targets, **options)
    offset_loss, offset_dlogits = loss_and_gradient(device, logits + np.float32(1e4), targets, **options)
    assert math.isclose(loss, offset_loss, rel_tol=1e-6)
    np.testing.assert_allclose(offset_dlogits, dlogits, rtol=1e-6, atol=1e-8)


def test_dloss_is_a_number_or_a_zero_dimensional_array(device):
    logits, targets = to_device(np.eye(3), device), to_device(np.arange(3), device)
    _, cache = ops.cross_entropy(logits, targets)
    expected = to_cpu(ops.cross_entropy_backward(2.0, cache))
    for dloss in (2, np.float32(2), to_device(np.array(2.0), device)):
        np.testing.assert_allclose(to_cpu(ops.cross_entropy_backward(dloss, cache)), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"dloss: expected \(\), got \(3,\)"):
        ops.cross_entropy_backward(to_device(np.ones(3), device), cache)
    with pytest.raises(TypeError, match="dloss: expected a floating-point array, got bool"):
        ops.cross_entropy_backward(True, cache)


def test_label_smoothing_that_is_not_a_number():
    for cross_entropy in (ops.cross_entropy, ops.cross_entropy.reference):
        with pytest.raises(TypeError, match=r"^label_smoothing: expected a number, got '0\.1'$"):
            cross_entropy(np.eye(3), np.arange(3), label_smoothing="0.1")


@pytest.mark.parametrize("dloss", [math.nan, -math.inf, np.float64("inf")])
@pytest.mark.parametrize("cross_entropy", [ops.cross_entropy, ops.cross_entropy.reference])
def test_a_gradient_of_the_loss_that_is_not_finite(cross_entropy, dloss):
    _, cache = cross_entropy(np.eye(3), np.arange(3))
    with pytest.raises(ValueError, match=r"^dloss: expected a finite number, got -?(nan|inf)$"):
        ops.cross_entropy_backward(dloss, cache)


@pytest.mark.parametrize("wrong", [-(2**31), 2**31])
def test_an_ignored_target_that_no_array_of_ids_holds(wrong):
    with pytest.raises(ValueError, match="ignore_index: expected a number"):
        ops.cross_entropy(np.ones((2, 3)), np.array([0, 1]), ignore_index=wrong)


def test_what_is_left_of_a_probability_of_nearly_1_keeps_its_digits(device):
    tail = math.exp(-37.43)
    loss, dlogits = loss_and_gradient(device, np.array([[37.43, 0.0], [0.0, 37.43]]), np.array([0, 1]))
    np.testing.assert_allclose(loss, tail, rtol=1e-13)
    np.testing.assert_allclose(dlogits, [[-tail / 2, tail / 2], [tail / 2, -tail / 2]], rtol=1e-13)
