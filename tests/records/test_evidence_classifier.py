import numpy as np
import pytest

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.models import Classifier, Llama
from scratchformer.models.llama import LlamaBlock
from scratchformer.nn import Frozen, RMSNorm
from scratchformer.records import EvidenceBatch, EvidenceClassifier, Evident, Features, start_from
from scratchformer.rng import Key
from scratchformer.training import Replicas, evaluate_classifier, load_model, save_snapshot

V, T, I = 11, 6, 3
LENGTHS = np.array([2, 6, 4])
LABELS = np.array([1, 0, 1])
POOLS = pytest.mark.parametrize("pool", ["mean", "max"])


def make(device=CPU, dtype=np.float64, **options):
    return EvidenceClassifier(V, I, 8, 2, 2, T, key=Key(1), **options).to(device, dtype)


def batch(device, seed=0, padding=(0, 0.0)):
    """ids (B, T), evidence (B, T, I) and lengths (B,), with an id and a number in the padding."""
    draw = np.random.default_rng(seed)
    ids, evidence = draw.integers(1, V, (3, T)), draw.standard_normal((3, T, I))
    beyond = np.arange(T) >= LENGTHS[:, None]
    ids[beyond], evidence[beyond] = padding
    return [to_device(x, device) for x in (ids, evidence, LENGTHS)]


@POOLS
def test_it_is_a_classifier_with_features(device, pool):
    """In evaluation and in training."""
    model = make(device, pool=pool, dropout=0.3)
    deep = Classifier(V, 2, 8, 2, 2, T, pool, key=Key(1), embeddings=[{"layer": Features, "width": I}], dropout=0.3).to(
        device, np.float64
    )
    deep.load_state_dict(model.state_dict())
    ids, evidence, lengths = batch(device)
    for key in (None, Key(3)):
        expected = to_cpu(deep.logits(ids, lengths, key, features=evidence)[0])
        np.testing.assert_array_equal(to_cpu(model.logits(ids, evidence, lengths, key)[0]), expected)


@POOLS
def test_padding_has_no_influence(device, pool):
    """With other ids and numbers in it the output and all gradients are the same, and its own gradient is zero."""
    model, found = make(device, pool=pool), []
    dy = to_device(np.random.default_rng(0).standard_normal((3, 2)), device)
    for padding in ((0, 0.0), (8, 9.5)):
        model.zero_grad()
        y, cache = model.forward(*batch(device, padding=padding))
        devidence = to_cpu(model.backward(dy, cache))
        beyond = np.arange(T) >= LENGTHS[:, None]
        assert not devidence[beyond].any() and devidence[~beyond].all()
        found.append((to_cpu(y), devidence, to_cpu(model.flat.grad).copy()))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_every_number_is_read_by_the_transformer(device):
    """Two words with their evidence exchanged: the sum is the same, and the classifier sees the difference."""
    model = make(device)
    ids, evidence, lengths = batch(device)
    exchanged = evidence.copy()
    exchanged[:, [0, 1]] = evidence[:, [1, 0]]
    assert np.abs(to_cpu(model(ids, exchanged, lengths)) - to_cpu(model(ids, evidence, lengths))).min() > 1e-5


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_gradient_of_the_loss(norm, device, check_loss_backward):
    model = make(device, norm=norm, dropout=0.2, activation="gelu")
    check_loss_backward(model, *map(to_cpu, batch(device)), LABELS)


def test_a_snapshot_holds_all_of_it(tmp_path):
    model = make(dtype=np.float32, pool="max", norm="pre")
    save_snapshot(tmp_path / "model.safetensors", model)
    again, _ = load_model(tmp_path / "model.safetensors")
    assert type(again) is EvidenceClassifier and again.config == model.config
    ids, evidence, lengths = batch(CPU)
    np.testing.assert_array_equal(again(ids, np.float32(evidence), lengths), model(ids, np.float32(evidence), lengths))


def labelled(count=9):
    draw = np.random.default_rng(5)
    ids = [draw.integers(1, V, n).astype(np.int32) for n in draw.integers(1, T + 3, count)]
    evidence = [draw.standard_normal((len(text), I)).astype(np.float32) for text in ids]
    return Evident(ids, draw.integers(0, 2, count), evidence)


@pytest.mark.parametrize("keep", ["head", "tail"])
def test_it_is_scored_like_any_classifier(keep):
    """Each text alone, cut to the longest length with its evidence."""
    model, data = make(dtype=np.float32), labelled()
    losses, right = [], []
    for ids, evidence, label in zip(data.ids, data.evidence, data.labels, strict=True):
        part = slice(0, T) if keep == "head" else slice(max(0, len(ids) - T), None)
        y = model(ids[None, part], evidence[None, part])[0]
        losses.append(-y[label])
        right.append(y.argmax() == label)
    with Replicas(model, 2) as replicas:
        found = evaluate_classifier(replicas, data, T, keep, batch_size=4)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["accuracy"] == np.mean(right)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_gradients_in_half_precision(precision):
    """They differ from those in float64 by about one rounding, as those of other models do."""
    pytest.importorskip("ml_dtypes")
    ids, evidence, lengths = batch(CPU)
    whole = EvidenceBatch(ids.astype(np.int32), evidence.astype(np.float32), lengths, LABELS)
    exact, model = make(dtype=np.float64), make(dtype=np.float32)
    Replicas(exact, 1).gradients(whole, Key(0))
    with Replicas(model, 2, micro_batch=2, precision=precision) as replicas:
        replicas.gradients(whole, Key(0))
    error = np.linalg.norm(model.flat.grad - exact.flat.grad) / np.linalg.norm(exact.flat.grad)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[precision]
    assert 0.05 * unit < error < 4 * unit


def test_what_does_not_fit(device):
    with pytest.raises(ValueError, match="pool: expected one that gives a vector for the whole text, got 'none'"):
        make(pool="none")
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="evidence: expected a number >= 1"):
            EvidenceClassifier(V, wrong, 8, 2, 2, T)
    model = make(device)
    ids, evidence, lengths = batch(device)
    with pytest.raises(TypeError, match="evidence: expected a floating-point array, got None"):
        model(ids, None, lengths)
    for wrong in (evidence[:2], evidence[:, :5], evidence[:, :, :2], evidence[0]):
        with pytest.raises(ValueError, match=r"evidence: expected \(3, 6, 3\), got "):
            model(ids, wrong, lengths)
    with pytest.raises(TypeError, match="evidence: expected a floating-point array"):
        model(ids, to_device(np.ones((3, 6, 3), int), device), lengths)
    with pytest.raises(ValueError, match=r"lengths: expected \(3\), got \(2,\)"):
        model(ids, evidence, lengths[:2])


def test_a_frozen_body():
    model = make()
    body = model.body
    model.body = Frozen(body)
    ids, evidence, lengths = batch(CPU)
    for key in (None, Key(0)):
        model.zero_grad()
        _, cache = model.loss(ids, evidence, lengths, LABELS, key)
        model.loss_backward(1.0, cache)
        assert model.output.w.grad.any() and not any(p.grad.any() for p in body.parameters())


def test_it_starts_from_a_language_model():
    """The bodies then compute the same, since the map of the evidence is 0; it can be learned."""
    ids, evidence = np.array([[4, 7, 1], [2, 9, 9]]), np.ones((2, 3, I), np.float32)
    pretrained = Llama(V, 8, 2, 2, T, key=Key(1))
    model = EvidenceClassifier(
        V, I, 8, 2, 2, T, causal=True, positions="none", block=LlamaBlock, final_norm=RMSNorm, key=Key(2)
    )
    start_from(model, pretrained)
    y, cache = model.body.forward(ids, features=evidence)
    np.testing.assert_allclose(y, pretrained.body(ids), rtol=1e-5, atol=1e-6)
    model.zero_grad()
    model.body.backward(np.random.default_rng(0).standard_normal(y.shape, np.float32), cache)
    assert model.body.further[-1].w.grad.all()


@pytest.mark.parametrize(
    ("option", "reason"),
    [("num_classes", "has two classes"), ("units", "reads words")],
)
def test_what_it_sets_itself(option, reason):
    with pytest.raises(ValueError, match=f"^{option}: an EvidenceClassifier {reason}, and takes no such option$"):
        make(**{option: True})
