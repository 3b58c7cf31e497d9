import math

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.models import Classifier
from scratchformer.ops.cross_entropy import IGNORED
from scratchformer.rng import Key

V, K, T = 11, 3, 6
TEXTS = [[4, 7], [1, 2, 3, 4, 5, 6], [9, 9, 10, 1]]
LABELS = np.array([2, 0, 1])
POOLS = pytest.mark.parametrize("pool", ["mean", "max"])
POSITIONS = pytest.mark.parametrize("positions", ["learned", "relative"])
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def make(device, **options):
    return Classifier(V, K, 8, 2, 2, T, key=Key(1), **options).to(device, np.float64)


def batch(texts, device, padding=0):
    """ids (B, T), padded with one token or with random ones, and lengths (B,)."""
    lengths = np.array([len(text) for text in texts])
    rows = [text + [padding] * (lengths.max() - len(text)) for text in texts]
    return to_device(np.array(rows), device), to_device(lengths, device)


def output_and_gradient(model, device, texts, dy, **options):
    model.zero_grad()
    y, cache = model.forward(*batch(texts, device, **options))
    model.backward(to_device(dy, device), cache)
    return to_cpu(y), to_cpu(model.flat.grad).copy()


@POOLS
@NORMS
@POSITIONS
def test_a_text_alone_and_with_longer_ones(pool, norm, positions, device):
    """Its log-probabilities, and the gradients of all weights, do not depend on the rest of the batch."""
    model = make(device, pool=pool, norm=norm, positions=positions)
    dy = np.random.default_rng(0).standard_normal((3, K))
    y, grad = output_and_gradient(model, device, TEXTS, dy)
    alone = [output_and_gradient(model, device, [text], dy[[b]]) for b, text in enumerate(TEXTS)]
    np.testing.assert_allclose(y, np.concatenate([y for y, _ in alone]), rtol=1e-9)
    np.testing.assert_allclose(grad, sum(grad for _, grad in alone), rtol=1e-9, atol=1e-11)


@POOLS
@NORMS
@POSITIONS
def test_garbage_in_the_padding_does_not_matter(pool, norm, positions, device):
    """With another token in the padding the output is exactly the same, and its embedding gets no gradient."""
    model = make(device, pool=pool, norm=norm, positions=positions)
    dy = np.random.default_rng(0).standard_normal((3, K))
    y, grad = output_and_gradient(model, device, TEXTS, dy, padding=0)
    assert not to_cpu(model.body.tokens.table.grad)[0].any()
    y_other, grad_other = output_and_gradient(model, device, TEXTS, dy, padding=8)
    assert not to_cpu(model.body.tokens.table.grad)[8].any()
    assert np.array_equal(y, y_other)
    np.testing.assert_allclose(grad, grad_other, rtol=1e-9, atol=1e-12)


def test_without_lengths_everything_counts(device):
    model = make(device)
    ids, _ = batch(TEXTS[1:2], device)
    assert np.array_equal(to_cpu(model(ids)), to_cpu(model(ids, to_device(np.array([T]), device))))


def test_the_order_of_words_matters_and_every_word_is_seen(device):
    model = make(device)
    y = to_cpu(model(*batch([TEXTS[1]], device)))
    assert np.abs(to_cpu(model(*batch([TEXTS[1][::-1]], device))) - y).max() > 1e-4
    for place in range(T):
        changed = list(TEXTS[1])
        changed[place] = 10
        assert np.abs(to_cpu(model(*batch([changed], device))) - y).max() > 1e-4


def test_output_is_log_probabilities(device):
    y = to_cpu(make(device)(*batch(TEXTS, device)))
    assert y.shape == (3, K)
    np.testing.assert_allclose(np.exp(y).sum(axis=1), 1, rtol=1e-12)


def test_loss_is_the_mean_negative_log_probability(device):
    model = make(device)
    ids, lengths = batch(TEXTS, device)
    y = to_cpu(model(ids, lengths))
    loss, _ = model.loss(ids, lengths, to_device(LABELS, device))
    assert math.isclose(float(loss), -y[np.arange(3), LABELS].mean(), rel_tol=1e-12)


def test_the_loss_takes_one_softmax(device, monkeypatch):
    """The loss is computed from the logits; its gradient is the same as through the log-probabilities."""
    model, labels = make(device), to_device(LABELS, device)
    ids, lengths = batch(TEXTS, device)
    y, forward = model.forward(ids, lengths)
    expected, cross_entropy = ops.cross_entropy(y, labels)
    model.backward(ops.cross_entropy_backward(1.0, cross_entropy), forward)
    gradient = to_cpu(model.flat.grad).copy()
    for name in ("log_softmax", "log_softmax_backward"):
        monkeypatch.delattr(ops, name)
    model.zero_grad()
    loss, cache = model.loss(ids, lengths, labels)
    model.loss_backward(1.0, cache)
    assert math.isclose(float(loss), float(expected), rel_tol=1e-13)
    np.testing.assert_allclose(to_cpu(model.flat.grad), gradient, rtol=1e-10, atol=1e-15)


@NORMS
def test_gradient_of_the_loss(norm, device, check_loss_backward):
    check_loss_backward(
        make(device, norm=norm, dropout=0.2, activation="gelu"), *map(to_cpu, batch(TEXTS, device)), LABELS
    )


def test_float32_loss(device):
    model = make(device).to(dtype=np.float32)
    loss, cache = model.loss(*batch(TEXTS, device), to_device(LABELS, device))
    model.loss_backward(1.0, cache)
    assert loss.dtype == model.flat.grad.dtype == np.float32


def test_config_makes_the_same_model_again():
    model = Classifier(V, K, 8, 2, 2, T, pool="max", norm="pre", dropout=0.1, positions="sinusoidal")
    twin = Classifier(**model.config)
    twin.load_state_dict(model.state_dict())
    ids = np.array([TEXTS[1]])
    assert np.array_equal(model(ids), twin(ids))
    assert twin.config == model.config


def test_unknown_pool():
    with pytest.raises(ValueError, match="pool: expected one of mean, max, none, got 'sum'"):
        Classifier(V, K, 8, 2, 2, T, pool="sum")


def test_inputs_that_do_not_fit(device):
    model = make(device)
    ids, lengths = batch(TEXTS, device)
    with pytest.raises(ValueError, match=r"lengths: expected \(3\), got \(2,\)"):
        model(ids, lengths[:2])
    for wrong in (0, T + 1):
        with pytest.raises(ValueError, match=f"lengths: expected values from 1 to 6, got {wrong}"):
            model(ids, to_device(np.array([2, 6, wrong]), device))
    with pytest.raises(TypeError, match=r"lengths: expected an array of integers \(B,\), got list"):
        model(ids, [2, 6, 4])
    with pytest.raises(ValueError, match="with T up to 6, got 7 tokens"):
        model(to_device(np.zeros((1, 7), int), device))
    with pytest.raises(IndexError, match="targets: expected values from 0 to 2, got 3"):
        model.loss(ids, lengths, to_device(LABELS + 1, device))


# Units with a structure


UNITS = np.random.default_rng(5).standard_normal((2, T, 4))
CHAIN = np.abs(np.subtract.outer(range(T), range(T))) <= 1  # a graph: each unit and its neighbours


def make_of_units(device, depth=1, **options):
    return Classifier(None, K, 8, 2, depth, T, units=4, key=Key(1), **options).to(device, np.float64)


def test_a_unit_sees_along_the_edges_alone(device):
    """With one block, a unit's classes depend on itself and its neighbours; with two, also on their neighbours."""
    pattern = ops.Edges(to_device(CHAIN, device))
    for depth in 1, 2:
        model = make_of_units(device, depth, pool="none", positions="none")
        y = to_cpu(model(to_device(UNITS, device), pattern=pattern))
        assert y.shape == (2, T, K)
        for s in range(T):
            changed = UNITS.copy()
            changed[:, s] += 1
            moved = np.abs(to_cpu(model(to_device(changed, device), pattern=pattern)) - y).max(axis=(0, 2)) > 1e-9
            assert moved.tolist() == [abs(t - s) <= depth for t in range(T)]


def test_the_numbering_of_the_units_does_not_matter(device):
    model, order = make_of_units(device, 2, pool="none", positions="none"), np.array([3, 0, 5, 1, 4, 2])
    y = to_cpu(model(to_device(UNITS, device), pattern=ops.Edges(to_device(CHAIN, device))))
    edges = ops.Edges(to_device(CHAIN[order][:, order], device))
    found = to_cpu(model(to_device(UNITS[:, order], device), pattern=edges))
    np.testing.assert_allclose(found, y[:, order], rtol=1e-9)


def test_the_gradient_of_the_units_is_returned(device):
    """It comes only from the classes of the unit itself and, along edges, of its neighbours."""
    model = make_of_units(device, pool="none", positions="none")
    y, cache = model.forward(to_device(UNITS, device), pattern=ops.Edges(to_device(CHAIN, device)))
    dy = np.zeros(y.shape)
    dy[:, 2, 0] = 1
    du = to_cpu(model.backward(to_device(dy, device), cache))
    assert du.shape == UNITS.shape
    assert (np.abs(du).max(axis=(0, 2)) > 1e-9).tolist() == [abs(t - 2) <= 1 for t in range(T)]
    ids, lengths = batch(TEXTS, device)
    tokens = make(device)
    y, cache = tokens.forward(ids, lengths)
    assert tokens.backward(y, cache) is None


def test_a_pattern_and_padding_go_together(device):
    model = make_of_units(device)
    edges, lengths = ops.Edges(to_device(CHAIN, device)), to_device(np.array([3, T]), device)
    y = to_cpu(model(to_device(UNITS, device), lengths, pattern=edges))
    short = ops.Edges(to_device(CHAIN[:3, :3], device))
    alone = to_cpu(model(to_device(UNITS[:1, :3], device), pattern=short))
    np.testing.assert_allclose(y[:1], alone, rtol=1e-9)
    assert np.abs(to_cpu(model(to_device(UNITS, device), lengths)) - y).max() > 1e-4


def test_units_whose_class_is_unknown_do_not_count(device):
    model = make_of_units(device, pool="none")
    labels = np.full((2, T), IGNORED)
    labels[0, 1], labels[1, 4], labels[1, 5] = 2, 0, 1
    y = to_cpu(model(to_device(UNITS, device)))
    loss, _ = model.loss(to_device(UNITS, device), None, to_device(labels, device))
    assert math.isclose(float(loss), -(y[0, 1, 2] + y[1, 4, 0] + y[1, 5, 1]) / 3, rel_tol=1e-12)


def test_gradient_of_the_loss_of_units(device, check_loss_backward):
    labels = np.random.default_rng(1).integers(IGNORED, K, (2, T))
    check_loss_backward(make_of_units(device, 2, pool="none", dropout=0.2), UNITS, np.array([4, T]), labels)


def test_the_config_of_a_model_of_units_makes_it_again():
    model = Classifier(None, K, 8, 2, 1, T, pool="none", units=4, positions="none")
    twin = Classifier(**model.config)
    twin.load_state_dict(model.state_dict())
    units = UNITS.astype(np.float32)
    assert np.array_equal(model(units), twin(units))


def test_units_that_do_not_fit(device):
    with pytest.raises(ValueError, match="vocab_size, units: expected one of the two, got None and None"):
        Classifier(None, K, 8, 2, 1, T)
    with pytest.raises(ValueError, match="vocab_size, units: expected one of the two, got 11 and 4"):
        Classifier(V, K, 8, 2, 1, T, units=4)
    model = make_of_units(device)
    with pytest.raises(ValueError, match=r"units: expected \(B, T, 4\), got \(2, 6, 3\)"):
        model(to_device(UNITS[:, :, :3], device))
    with pytest.raises(ValueError, match=r"units: expected \(B, T, I\) with T up to 6, got 7 units"):
        model(to_device(np.ones((1, 7, 4)), device))
    with pytest.raises(ValueError, match=r"allowed: expected a table of the 6 keys and 6 queries, got \(5, 5\)"):
        model(to_device(UNITS, device), pattern=ops.Edges(to_device(CHAIN[:5, :5], device)))
    with pytest.raises(IndexError, match="targets: expected values from 0 to 2, got -1"):
        model.loss(to_device(UNITS, device), None, to_device(np.array([0, IGNORED]), device))
