import numpy as np
import pytest

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.models import LanguageModel
from scratchformer.models.llama import LlamaBlock
from scratchformer.nn import Frozen, RMSNorm
from scratchformer.ops import IGNORED
from scratchformer.records import BidirectionalClassifier, BidirectionalLanguageModel, Recall
from scratchformer.rng import Key
from scratchformer.training import load_model, save_snapshot

V, T, K = 11, 6, 3
SIZES = dict(d_model=8, heads=2, depth=2)
LENGTHS, LABELS = np.array([2, 6, 4]), np.array([1, 0, 2])
LLAMA = dict(causal=True, positions="none", block=LlamaBlock, final_norm=RMSNorm)


def language_model(device=CPU, **options):
    return BidirectionalLanguageModel(V, context=T, key=Key(1), **SIZES | options).to(device, np.float64)


def classifier(device=CPU, **options):
    made = BidirectionalClassifier(V, K, max_length=T, key=Key(1), **SIZES | LLAMA | options)
    return made.to(device, np.float64)


def text(device=CPU):
    row = np.random.default_rng(0).integers(0, V, (3, T + 1))
    return to_device(row[:, :-1], device), to_device(row[:, 1:], device)


def reviews(device=CPU, padding=0):
    ids = np.random.default_rng(0).integers(0, V, (3, T))
    ids[np.arange(T) >= LENGTHS[:, None]] = padding
    return [to_device(x, device) for x in (ids, LENGTHS)]


def reversed_within(x, lengths):
    return np.stack([np.concatenate([row[:n][::-1], row[n:]]) for row, n in zip(x, lengths, strict=True)])


@pytest.mark.parametrize("options", [{}, dict(model=LanguageModel, norm="pre")])
def test_gradients_of_the_language_models(options, device, check_loss_backward):
    check_loss_backward(language_model(device, **options), *text(device))


def test_gradients_of_the_classifiers(device, check_loss_backward):
    check_loss_backward(classifier(device, dropout=0.3), *reviews(device), to_device(LABELS, device))


def test_each_direction_predicts_what_is_on_one_side(device):
    """At each position, changing the tokens that a direction has not read yet does not change its prediction."""
    model, (ids, _) = language_model(device), text(device)
    following, preceding = map(to_cpu, model(ids))
    changed = to_cpu(ids).copy()
    changed[:, 3] = (changed[:, 3] + 1) % V
    after, before = map(to_cpu, model(to_device(changed, device)))
    same = [np.isclose(a, b, rtol=1e-9).all(axis=(0, 2)) for a, b in ((following, after), (preceding, before))]
    assert same[0].tolist() == [True, True, True, False, False, False]
    assert same[1].tolist() == [False, False, False, False, True, True]


def test_the_loss_is_that_of_two_models(device):
    model, (ids, targets) = language_model(device), text(device)
    following, _ = model.rightward.loss(ids, targets)
    preceding, _ = model.leftward.loss(targets[:, ::-1], ids[:, ::-1])
    loss, _ = model.loss(ids, targets)
    np.testing.assert_allclose(to_cpu(loss), (to_cpu(following) + to_cpu(preceding)) / 2, rtol=1e-12)
    assert to_cpu(following) != to_cpu(preceding)
    y = to_cpu(model(targets)[1])  # the last T tokens: what precedes each
    own = np.take_along_axis(y - np.log(np.exp(y).sum(-1, keepdims=True)), to_cpu(ids)[:, :, None], axis=2)
    np.testing.assert_allclose(to_cpu(preceding), -own.mean(), rtol=1e-9)


def test_backward_of_the_logits(device):
    """That of the sum of both sets of logits, weighted, by numerical differences."""
    model, (ids, _) = language_model(device), text(device)
    dy = [np.random.default_rng(i).standard_normal((3, T, V)) for i in range(2)]
    model.zero_grad()
    _, cache = model.forward(ids)
    model.backward(tuple(to_device(d, device) for d in dy), cache)
    grad, start = to_cpu(model.flat.grad).copy(), to_cpu(model.flat.data).copy()
    direction, h, sums = np.random.default_rng(3).standard_normal(start.size), 1e-6, []
    for step in (h, -h):
        model.flat.data[...] = to_device(start + step * direction, device)
        sums.append(sum((to_cpu(y) * d).sum() for y, d in zip(model(ids), dy, strict=True)))
    np.testing.assert_allclose((sums[0] - sums[1]) / (2 * h), grad @ direction, rtol=1e-6)


def test_the_classifier_is_the_mean_of_two(device):
    """In evaluation; in training the loss is the mean of two losses."""
    model, (ids, lengths) = classifier(device), reviews(device)
    other = to_device(reversed_within(to_cpu(ids), LENGTHS), device)
    z = to_cpu(model.rightward.logits(ids, lengths)[0])
    w = to_cpu(model.leftward.logits(other, lengths)[0])
    np.testing.assert_allclose(to_cpu(model.logits(ids, lengths)[0]), (z + w) / 2, rtol=1e-12)
    labels, key = to_device(LABELS, device), Key(5)
    first, _ = model.rightward.loss(ids, lengths, labels, key)
    second, _ = model.leftward.loss(other, lengths, labels, key)
    loss, _ = model.loss(ids, lengths, labels, key)
    np.testing.assert_allclose(to_cpu(loss), (to_cpu(first) + to_cpu(second)) / 2, rtol=1e-12)


def test_a_palindrome_is_the_same_for_both(device):
    """With the same weights, both directions then give the same logits, whatever is in the padding."""
    model = classifier(device)
    model.leftward.load_state_dict(model.rightward.state_dict())
    arrays = [to_device(x, device) for x in (np.array([[1, 2, 3, 2, 1, 0]]), np.array([5]))]
    alone = to_cpu(model.rightward.logits(*arrays)[0])
    np.testing.assert_allclose(to_cpu(model.logits(*arrays)[0]), alone, rtol=1e-12)
    found = [to_cpu(model(*reviews(device, padding))) for padding in (0, 8)]
    np.testing.assert_array_equal(*found)


def test_it_starts_from_two_language_models():
    pretrained, model = language_model(), classifier()
    model.start_from(pretrained)
    ids, _ = text()
    for name in ("rightward", "leftward"):
        own, other = getattr(model, name).body, getattr(pretrained, name).body
        np.testing.assert_array_equal(own(ids), other(ids))
    with pytest.raises(TypeError, match="pretrained: expected a BidirectionalLanguageModel, got <"):
        model.start_from(LanguageModel(V, context=T, **SIZES))


@pytest.mark.parametrize("make", [language_model, classifier])
def test_it_is_saved_and_loaded(make, tmp_path):
    model = make()
    save_snapshot(tmp_path / "model.safetensors", model)
    found, _ = load_model(tmp_path / "model.safetensors", type(model))
    np.testing.assert_array_equal(found.flat.data, model.flat.data.astype(found.flat.data.dtype))


def test_labels_that_are_probabilities(device):
    """In training and in evaluation, those of one class each give what its number gives."""
    model, arrays = classifier(device, dropout=0.3), reviews(device)
    for key in (None, Key(5)):
        found = []
        for labels in (LABELS, np.eye(K)[LABELS]):
            model.zero_grad()
            loss, cache = model.loss(*arrays, to_device(labels, device), key)
            model.loss_backward(2.0, cache)
            found.append(np.append(to_cpu(model.flat.grad), to_cpu(loss)))
        np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("frozen", ["rightward", "leftward"])
def test_a_frozen_body(frozen):
    """The other direction still learns."""
    model = classifier()
    one = getattr(model, frozen)
    body, one.body = one.body, Frozen(one.body)
    for key in (None, Key(0)):
        model.zero_grad()
        _, cache = model.loss(*reviews(), LABELS, key)
        model.loss_backward(1.0, cache)
        assert not any(p.grad.any() for p in body.parameters())
        assert model.rightward.output.w.grad.any() and model.leftward.output.w.grad.any()
        other = model.leftward if frozen == "rightward" else model.rightward
        assert all(p.grad.any() for p in other.body.blocks[0].parameters())


def test_wrong_arguments():
    model, (ids, targets) = language_model(), text()
    ignored, large = targets.copy(), targets.copy()
    ignored[0, 0], large[0, 0] = IGNORED, 99
    for wrong, value in ((ignored, -1), (large, 99)):
        for call in (model.loss, model.check_batch):
            with pytest.raises(IndexError, match=f"^targets: expected values from 0 to 10, got {value}$"):
                call(ids, wrong)
    with pytest.raises(ValueError, match=r"targets: expected \(3, 6\), got \(3, 5\)"):
        model.loss(ids, targets[:, :5])
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\), got \(6,\)"):
        model(ids[0])
    with pytest.raises(TypeError, match="cache: expected a BothCache, got None"):
        model.loss_backward(1.0, None)
    with pytest.raises(TypeError, match="model: expected a LanguageModel or a class derived from it"):
        language_model(model=lambda *sizes, **options: LanguageModel(*sizes, **options))
    for make in (language_model, classifier):
        with pytest.raises(ValueError, match="embeddings: expected none that recalls"):
            make(embeddings=[{"layer": Recall, "orders": [2, 3]}])
    for wrong in {"units": 3}, {"pool": "none"}:
        with pytest.raises(ValueError, match=f"{min(wrong)}: expected "):
            classifier(**wrong)
    model, (ids, lengths) = classifier(), reviews()
    with pytest.raises(ValueError, match=r"lengths: expected \(3\), got \(2,\)"):
        model(ids, lengths[:2])
    with pytest.raises(ValueError, match="lengths: expected values from 1 to 6, got 7"):
        model.check_batch(ids, np.array([7, 1, 1]), LABELS)
    with pytest.raises(TypeError, match="no option 'colour'"):
        classifier(colour=1)


def test_lengths_of_any_integer_type():
    model, (ids, lengths) = classifier(), reviews()
    np.testing.assert_array_equal(model(ids, lengths.astype(np.uint64)), model(ids, lengths))
