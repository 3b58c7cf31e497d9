import math

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.models import EncoderDecoder
from scratchformer.ops.cross_entropy import IGNORED
from scratchformer.rng import Key

V, C, S, T = 9, 8, 5, 4
SOURCE = np.array([[1, 4, 2, 8, 3], [3, 5, 7, 0, 0]])
LENGTHS = np.array([5, 3])
TARGET = np.array([[2, 6, 1, 8], [2, 3, 3, 0]])
TARGETS = np.array([[6, 1, 8, 4], [3, 4, IGNORED, IGNORED]])
BATCH = (SOURCE, LENGTHS, TARGET, TARGETS)
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def make(device, **options):
    return EncoderDecoder(V, C, 2, 2, 12, key=Key(1), **options).to(device, np.float64)


def run(model, source=SOURCE, target=TARGET, lengths=LENGTHS):
    return to_cpu(model(*(to_device(x, model.device) for x in (source, lengths, target))))


def gradient(model, batch, key=None):
    """The loss, and the gradient of all parameters."""
    model.zero_grad()
    loss, cache = model.loss(*(to_device(x, model.device) for x in batch), key=key)
    model.loss_backward(1.0, cache)
    return float(loss), to_cpu(model.flat.grad).copy()


@NORMS
def test_later_targets_have_no_influence_but_the_whole_source_has(norm, device):
    model = make(device, norm=norm)
    y = run(model)
    for t in range(T - 1):
        changed = TARGET.copy()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % V
        y_changed = run(model, target=changed)
        np.testing.assert_allclose(y_changed[:, : t + 1], y[:, : t + 1], rtol=1e-9, atol=1e-12)
        assert np.abs(y_changed[:, t + 1] - y[:, t + 1]).max() > 1e-3
    for s in range(S):
        changed = SOURCE.copy()
        changed[0, s] = (changed[0, s] + 1) % V
        assert (np.abs(run(model, source=changed)[0] - y[0]).max(axis=-1) > 1e-5).all()


@NORMS
def test_padding_changes_nothing(norm, device):
    """Padding of the source changes neither logits nor gradients; of the target, nothing before it and no gradient."""
    model = make(device, norm=norm)
    y, (loss, grad) = run(model), gradient(model, BATCH)
    source, target = SOURCE.copy(), TARGET.copy()
    source[1, 3:], target[1, 2:] = 6, 7
    np.testing.assert_allclose(run(model, source=source), y, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(run(model, target=target)[1, :2], y[1, :2], rtol=1e-9, atol=1e-12)
    found, found_grad = gradient(model, (source, LENGTHS, target, TARGETS))
    assert math.isclose(found, loss, rel_tol=1e-12)
    np.testing.assert_allclose(found_grad, grad, rtol=1e-9, atol=1e-12)


@NORMS
def test_a_pair_is_translated_the_same_alone_and_in_a_batch(norm, device):
    model = make(device, norm=norm)
    y = run(model)
    alone = run(model, SOURCE[1:, :3], TARGET[1:, :2], LENGTHS[1:])
    np.testing.assert_allclose(alone[0], y[1, :2], rtol=1e-9, atol=1e-12)


@NORMS
def test_parts_of_a_batch_add_up_to_the_whole(norm, device):
    model = make(device, norm=norm)
    loss, grad = gradient(model, BATCH)
    parts = [gradient(model, [x[b : b + 1] for x in BATCH]) for b in range(2)]
    shares = (4 / 6, 2 / 6)
    assert math.isclose(sum(a * part for a, (part, _) in zip(shares, parts, strict=True)), loss, rel_tol=1e-12)
    total = sum(a * part for a, (_, part) in zip(shares, parts, strict=True))
    np.testing.assert_allclose(total, grad, rtol=1e-9, atol=1e-12)


@NORMS
def test_gradient_of_the_loss(norm, device, check_loss_backward):
    check_loss_backward(make(device, norm=norm, dropout=0.2, label_smoothing=0.2), *BATCH)


def test_labels_are_smoothed_only_while_training(device):
    model = make(device, dropout=0.0, label_smoothing=0.3)
    log_p, _ = ops.log_softmax(to_device(run(model), device))
    log_p, counted = to_cpu(log_p)[TARGETS != IGNORED], TARGETS[TARGETS != IGNORED]
    own = -log_p[np.arange(6), counted].mean()
    plain, _ = gradient(model, BATCH)
    smoothed, _ = gradient(model, BATCH, Key(0))
    assert math.isclose(plain, own, rel_tol=1e-12)
    assert math.isclose(smoothed, 0.7 * own + 0.3 * -log_p.mean(), rel_tol=1e-12)


def test_one_table_embeds_both_sides_and_is_the_output(device):
    """It is one parameter, scaled by √C at both inputs; its gradient is the sum over the three uses."""
    model = make(device, dropout=0.0)
    assert [name for name in model.named_parameters() if "table" in name] == ["tokens.table"]
    x = model.embedding(to_device(SOURCE, device))
    table = to_cpu(model.tokens.table.data)
    expected = math.sqrt(C) * table[SOURCE] + ops.sinusoidal_positions(S, C, dtype=np.float64)
    np.testing.assert_allclose(to_cpu(x), expected, rtol=1e-12)
    *_, cache = model.forward(*(to_device(x, device) for x in BATCH[:3]))
    model.zero_grad()
    model.backward(to_device(np.zeros((2, T, V)), device), cache)
    assert not to_cpu(model.flat.grad).any()
    gradient(model, BATCH)
    rows = np.abs(to_cpu(model.tokens.table.grad)).max(axis=1)
    assert (rows > 1e-9).all()  # also of tokens that do not occur: the output scores every token at every position


def test_dropout_needs_a_key_and_replays(device):
    model = make(device, dropout=0.5)
    assert np.array_equal(run(model), run(model))
    (first, g1), (again, g2), (other, _) = (gradient(model, BATCH, Key(k)) for k in (1, 1, 2))
    assert first == again != other
    assert np.array_equal(g1, g2)


def test_config_makes_the_same_model_again():
    model = EncoderDecoder(V, C, 2, 2, norm="pre", activation="gelu", d_ff=5, bias=False, label_smoothing=0.0)
    twin = EncoderDecoder(**model.config)
    twin.load_state_dict(model.state_dict())
    assert np.array_equal(run(model), run(twin))
    assert twin.config == model.config


def test_inputs_that_do_not_fit(device):
    model = make(device)
    with pytest.raises(ValueError, match=r"target: expected \(2, T\), got \(1, 4\)"):
        run(model, target=TARGET[:1])
    with pytest.raises(ValueError, match=r"source: expected \(B, T\) with T >= 1, got \(2, 0\)"):
        run(model, source=SOURCE[:, :0])
    with pytest.raises(ValueError, match="lengths: expected values from 1 to 5, got 6"):
        run(model, lengths=np.array([6, 1]))
    with pytest.raises(ValueError, match="lengths: expected values from 1 to 5, got 0"):
        run(model, lengths=np.array([0, 1]))
    with pytest.raises(IndexError, match="ids: expected values from 0 to 8, got 9"):
        run(model, target=TARGET + 1)
    with pytest.raises(ValueError, match="label_smoothing: expected 0 <= label_smoothing < 1, got 1"):
        EncoderDecoder(V, C, 2, 2, label_smoothing=1)
