import json
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scratchformer import ops
from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.models import Bert, BertClassifier, BertPretraining, bert_weights
from scratchformer.models.pretrained import PretrainedError
from scratchformer.rng import Key
from scratchformer.training import Replicas, SnapshotError, load_model, save_snapshot
from scratchformer.training.snapshot import load_snapshot, restore

V, K, C, H, DEPTH, T = 11, 3, 8, 2, 2, 7
SIZES = (V, C, H, DEPTH, T)
MASK = 4
IDS = np.array([[2, 7, 4, 9, 3, 5, 3], [2, 8, 3, 4, 3, 0, 0], [2, 4, 10, 3, 6, 3, 0]])
LENGTHS = np.array([7, 5, 6])
SEGMENTS = np.array([[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0]])
PLACES = np.array([[2, 3], [1, 3], [1, 4]])
TARGETS = np.array([[6, 9], [8, 5], [7, 10]])
UNRELATED = np.array([1, 0, 1])
BATCH = (IDS, LENGTHS, SEGMENTS, PLACES, TARGETS, UNRELATED)
LABELS = np.array([2, 0, 1])


def pretraining(device, **options):
    return BertPretraining(*SIZES, key=Key(1), **options).to(device, np.float64)


def classifier(device, **options):
    return BertClassifier(V, K, *SIZES[1:], key=Key(1), **options).to(device, np.float64)


def moved(batch, device):
    return [to_device(x, device) for x in batch]


def loss_and_gradient(model, device, batch, **options):
    model.zero_grad()
    loss, cache = model.loss(*moved(batch, device), **options)
    model.loss_backward(1.0, cache)
    return float(loss), to_cpu(model.flat.grad).copy()


def rows(batch, chosen):
    """Some rows of a batch, cut to the length of the longest of them."""
    width = LENGTHS[chosen].max()
    return [x[chosen][:, :width] if x.shape == IDS.shape else x[chosen] for x in batch]


# What it computes


def test_loss_is_the_mean_over_chosen_places_plus_the_mean_over_rows(device):
    model = pretraining(device)
    (masked, following), _ = model.forward(*moved(BATCH[:4], device))
    assert masked.shape == (3, 2, V) and following.shape == (3, 2)
    log_p = [z - np.log(np.exp(z).sum(axis=-1, keepdims=True)) for z in map(to_cpu, (masked, following))]
    places = [log_p[0][b, k, TARGETS[b, k]] for b in range(3) for k in range(2)]
    pairs = [log_p[1][b, UNRELATED[b]] for b in range(3)]
    loss, _ = loss_and_gradient(model, device, BATCH)
    assert math.isclose(loss, -np.mean(places) - np.mean(pairs), rel_tol=1e-12)


def test_the_logits_of_chosen_places_agree_with_those_of_all_places(device):
    """Choosing positions before the head gives the same as choosing after the head has run on all positions."""
    model = pretraining(device)
    everywhere = np.tile(np.arange(T), (3, 1))
    (every, _), _ = model.forward(*moved((*BATCH[:3], everywhere), device))
    (chosen, _), _ = model.forward(*moved(BATCH[:4], device))
    np.testing.assert_allclose(
        to_cpu(chosen), np.take_along_axis(to_cpu(every), PLACES[:, :, None], axis=1), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("next_sentence", [True, False])
def test_gradient_of_the_loss(next_sentence, device, check_loss_backward):
    model = pretraining(device, next_sentence=next_sentence)
    if not next_sentence:
        assert not any(name.startswith(("pooler", "following")) for name in model.named_parameters())
    check_loss_backward(model, *BATCH)


def test_the_classifiers_loss_of_pairs(device):
    """Segments are the fourth field of a batch, after those of single texts; they change loss and gradients."""
    model = classifier(device)
    pairs = (IDS, LENGTHS, LABELS, SEGMENTS)
    ids, lengths, segments = moved((IDS, LENGTHS, SEGMENTS), device)
    log_p = to_cpu(model(ids, lengths, segments))
    loss, gradient = loss_and_gradient(model, device, pairs)
    assert math.isclose(loss, -log_p[np.arange(3), LABELS].mean(), rel_tol=1e-12)
    rows_of = to_cpu(model.body.segments.table.grad)
    assert np.abs(rows_of).min() > 0
    alone, gradient_alone = loss_and_gradient(model, device, pairs[:3])
    assert loss != alone and np.abs(gradient - gradient_alone).max() > 1e-6
    assert not to_cpu(model.body.segments.table.grad)[1].any()
    assert loss_and_gradient(model, device, (*pairs[:3], 0 * SEGMENTS))[0] == alone
    with pytest.raises(ValueError, match=r"^segments: expected \(3, 7\), got \(3, 6\)$"):
        model.loss(*moved((*pairs[:3], SEGMENTS[:, 1:]), device))
    with pytest.raises(TypeError, match=r"^segments: expected an array \(B, T\), got Key$"):
        model.loss(*moved(pairs[:3], device), Key(1))


class PairBatch(NamedTuple):
    """A user's own batch for `Replicas` and `train`: its fields are the arguments of the model's loss."""

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    segments: np.ndarray

    @property
    def weight(self):
        return len(self.labels)

    def split(self, size):
        return [PairBatch(*(x[i : i + size] for x in self)) for i in range(0, len(self.ids), size)]


def test_batches_of_pairs_go_through_replicas(device):
    """In micro-batches on two replicas; each row keeps its segments."""
    model, batch = classifier(device, dropout=0.0), PairBatch(IDS, LENGTHS, LABELS, SEGMENTS)
    loss, gradient = loss_and_gradient(model, device, batch)
    with Replicas(classifier(device, dropout=0.0), 2 if device is CPU else 1, micro_batch=1) as replicas:
        assert math.isclose(replicas.gradients(batch, Key(0)), loss, rel_tol=1e-12)
        np.testing.assert_allclose(to_cpu(replicas.model.flat.grad), gradient, rtol=1e-9, atol=1e-12)


def test_without_next_sentence_rows_have_no_logits(device):
    """Without the task the loss ignores `unrelated`; with it, the loss requires `unrelated`."""
    model = pretraining(device, next_sentence=False)
    assert loss_and_gradient(model, device, BATCH[:5])[0] == loss_and_gradient(model, device, BATCH)[0]
    with pytest.raises(TypeError, match=r"^unrelated: expected an array \(B\), got None$"):
        pretraining(device).loss(*moved(BATCH[:5], device))


@pytest.mark.parametrize("next_sentence", [True, False])
def test_places_in_the_padding_are_refused(next_sentence, device):
    """The error names the first such row. The last position of a text is accepted, and any position without lengths."""
    model = pretraining(device, next_sentence=next_sentence)
    last = np.stack([LENGTHS - 1, LENGTHS - 2], axis=1)
    loss_and_gradient(model, device, (*BATCH[:3], last, *BATCH[4:]))
    for row, wrong in ((1, np.array([[6, 0], [0, 5], [6, 0]])), (2, np.array([[6, 0], [4, 0], [0, 6]]))):
        message = f"^places: row {row}: expected values from 0 to {LENGTHS[row] - 1}, where its text ends, got "
        with pytest.raises(IndexError, match=f"{message}{wrong[row].max()}$"):
            loss_and_gradient(model, device, (*BATCH[:3], wrong, *BATCH[4:]))
        ids, segments, places, targets, unrelated = moved((IDS, SEGMENTS, wrong, TARGETS, UNRELATED), device)
        model.loss(ids, None, segments, places, targets, unrelated)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_another_activation_applies_to_blocks_and_head(activation, device):
    model = pretraining(device, activation=activation)
    names = {layer.activation for _, layer in model.named_layers() if getattr(layer, "activation", None)}
    assert names == {activation}
    with pytest.raises(ValueError, match=f"pretrained: expected a model with activation gelu, got {activation}"):
        classifier(device).start_from(model)


def test_dropout_before_the_output():
    model = BertClassifier(V, K, *SIZES[1:], dropout=0.1, output_dropout=0.4)
    assert (model.dropout.p, model.body.dropout.p, model.config["output_dropout"]) == (0.4, 0.1, 0.4)
    same = BertClassifier(V, K, *SIZES[1:], dropout=0.3)
    assert same.dropout.p == 0.3 and same.config["output_dropout"] is None
    assert BertClassifier(**model.config).dropout.p == 0.4


def test_both_uses_of_the_table_add_to_its_gradient(device):
    """A token that does not occur gets a gradient only from the output, one that occurs from both uses."""
    model = pretraining(device)
    _, _ = loss_and_gradient(model, device, BATCH)
    both = to_cpu(model.body.tokens.table.grad).copy()
    assert np.abs(both).max(axis=1).min() > 1e-6
    unused = 1
    assert not (IDS == unused).any() and not (TARGETS == unused).any()
    _, cache = model.forward(*moved(BATCH[:4], device))
    model.zero_grad()
    model.body.backward(device.xp.ones((3, T, C)), cache.body)  # without the output
    assert not to_cpu(model.body.tokens.table.grad)[unused].any()


def test_the_classifier_reads_only_the_first_vector(device):
    model = classifier(device)
    x, _ = model.body.forward(to_device(IDS, device))
    y, cache = model.pooler.forward(x)
    w, b = (to_cpu(p.data) for p in model.pooler.parameters())
    np.testing.assert_allclose(to_cpu(y), np.tanh(to_cpu(x)[:, 0] @ w + b), rtol=1e-12)
    dx = to_cpu(model.pooler.backward(device.xp.ones_like(y), cache))
    assert np.abs(dx[:, 0]).min() > 0 and not dx[:, 1:].any()


def test_the_order_of_tokens_and_their_segments_matter(device):
    model = classifier(device)
    y = to_cpu(model(to_device(IDS[:1], device)))
    other_order = IDS[:1, [0, 2, 1, 3, 4, 5, 6]]
    assert np.abs(to_cpu(model(to_device(other_order, device))) - y).max() > 1e-4
    other = to_cpu(model(to_device(IDS[:1], device), segments=to_device(SEGMENTS[:1], device)))
    assert np.abs(other - y).max() > 1e-4
    zeros = to_cpu(model(to_device(IDS[:1], device), segments=to_device(0 * SEGMENTS[:1], device)))
    assert np.array_equal(zeros, y)


def test_every_token_of_both_sides_is_seen_at_a_chosen_place(device):
    """Changing a token anywhere, before or after, changes the logits at the position in the middle."""
    model = pretraining(device)
    ids, lengths, place = IDS[:1], LENGTHS[:1], np.array([[3]])
    forward = lambda ids: to_cpu(model(*moved((ids, lengths, SEGMENTS[:1], place), device))[0])  # noqa: E731
    y = forward(ids)
    for t in range(T):
        changed = ids.copy()
        changed[0, t] = 1
        assert np.abs(forward(changed) - y).max() > 1e-4


def test_every_dropout_has_a_mask_of_its_own(monkeypatch):
    keys = []
    monkeypatch.setattr(ops, "dropout", lambda x, p, key: (keys.append(key) or x, ()))
    model = BertClassifier(V, K, *SIZES[1:])
    for step in range(2):
        model(IDS, key=Key(0, step))
    assert len(keys) == len(set(keys)) == 2 * (1 + 2 * DEPTH + 1)


# Padding


@pytest.mark.parametrize("make", [pretraining, classifier])
def test_garbage_in_the_padding_does_not_matter(make, device):
    """Other tokens and segments in the padding: exactly the same loss and gradients, and none for these tokens."""
    model = make(device)
    garbage, ids, segments = 1, IDS.copy(), SEGMENTS.copy()
    padding = np.arange(T) >= LENGTHS[:, None]
    ids[padding], segments[padding] = garbage, 1
    if make is pretraining:
        batch, other = BATCH, (ids, LENGTHS, segments, *BATCH[3:])
    else:
        batch, other = (IDS, LENGTHS, LABELS), (ids, LENGTHS, LABELS)
    loss, gradient = loss_and_gradient(model, device, batch)
    loss_other, gradient_other = loss_and_gradient(model, device, other)
    assert loss == loss_other
    np.testing.assert_allclose(gradient, gradient_other, rtol=1e-9, atol=1e-12)
    if make is classifier:
        assert not to_cpu(model.body.tokens.table.grad)[garbage].any()


def test_a_row_alone_and_with_longer_ones(device):
    """Its logits, and its share of every gradient, do not depend on the rest of the batch, padded or not."""
    model = pretraining(device)
    logits = [to_cpu(z) for z in model(*moved(BATCH[:4], device))]
    whole_loss, whole = loss_and_gradient(model, device, BATCH)
    losses, gradients = [], []
    for b in range(3):
        alone = rows(BATCH, [b])
        for z, z_alone in zip(logits, model(*moved(alone[:4], device)), strict=True):
            np.testing.assert_allclose(to_cpu(z_alone), z[[b]], rtol=1e-9)
        loss, gradient = loss_and_gradient(model, device, alone)
        losses.append(loss)
        gradients.append(gradient)
    assert math.isclose(whole_loss, np.mean(losses), rel_tol=1e-12)
    np.testing.assert_allclose(whole, np.mean(gradients, axis=0), rtol=1e-9, atol=1e-12)


def test_without_lengths_everything_counts(device):
    model = classifier(device)
    ids = to_device(IDS, device)
    assert np.array_equal(to_cpu(model(ids)), to_cpu(model(ids, to_device(np.full(3, T), device))))


# From one model to another


def test_config_makes_the_same_model_again():
    for model in (BertPretraining(*SIZES, d_ff=5, next_sentence=False), BertClassifier(V, K, *SIZES[1:], dropout=0.3)):
        assert json.loads(json.dumps(model.config)) == model.config
        twin = type(model)(**model.config)
        twin.load_state_dict(model.state_dict())
        inputs = BATCH[:4] if isinstance(model, BertPretraining) else BATCH[:1]
        for a, b in zip(model(*inputs), twin(*inputs), strict=True):
            assert np.array_equal(a, b)


def test_a_snapshot_of_the_encoder_alone(tmp_path):
    model = Bert(*SIZES, d_ff=5, eps=1e-6, key=Key(3))
    save_snapshot(tmp_path / "encoder.safetensors", model, step=3)
    snapshot = load_snapshot(tmp_path / "encoder.safetensors")
    assert snapshot.model_class == "Bert" and snapshot.config == model.config
    twin = Bert(**snapshot.config)
    assert twin.config == model.config and not np.array_equal(twin(IDS), model(IDS))
    restore(snapshot, twin)
    assert np.array_equal(twin(IDS), model(IDS))
    loaded, _ = load_model(tmp_path / "encoder.safetensors")
    assert np.array_equal(loaded(IDS), model(IDS))
    with pytest.raises(SnapshotError, match="'eps': '1e-06 in the snapshot, 1e-12 here'"):
        restore(snapshot, Bert(*SIZES, d_ff=5))


def test_fine_tuning_starts_from_body_and_pooler():
    pretrained, model = BertPretraining(*SIZES, key=Key(5)), BertClassifier(V, K, *SIZES[1:], key=Key(6))
    output = model.output.w.data.copy()
    model.start_from(pretrained)
    state = pretrained.state_dict()
    for name, array in model.state_dict().items():
        if not name.startswith("output"):
            assert np.array_equal(array, state[name]), name
    assert np.array_equal(model.output.w.data, output)
    assert not np.shares_memory(model.body.tokens.table.data, pretrained.body.tokens.table.data)
    with pytest.raises(ValueError, match="pretrained: expected a model with vocab_size 11, got 12"):
        model.start_from(BertPretraining(V + 1, *SIZES[1:]))


DEFAULTS = dict(d_ff=4 * C, segments=2, eps=1e-12)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_is_the_same_model_as_its_value(name):
    """In both directions; a different value is a different model."""
    for given, left_out in ((DEFAULTS, {}), ({}, DEFAULTS)):
        pretrained, model = BertPretraining(*SIZES, **given), BertClassifier(V, K, *SIZES[1:], **left_out, key=Key(6))
        model.start_from(pretrained)
        assert np.array_equal(model.body(IDS), pretrained.body(IDS))
    other = 2 * DEFAULTS[name]
    with pytest.raises(ValueError, match=f"pretrained: expected a model with {name} {DEFAULTS[name]}, got {other}"):
        model.start_from(BertPretraining(*SIZES, **{name: other}))


def test_a_number_that_is_not_finite_is_found_in_a_model_of_two_outputs():
    from scratchformer.parallel.diagnose import first_nonfinite

    model = BertPretraining(*SIZES)
    model.following.b.data[1] = np.nan
    batch = SimpleNamespace(split=lambda size: [BATCH])
    plain = dict(rows=lambda batch: 3, move=lambda batch: batch, refresh=lambda: None)
    replicas = SimpleNamespace(model=model, models=[model], errors={}, **plain)
    assert first_nonfinite(replicas, batch, Key(0)) == "the output of following (Linear)"


def test_inputs_that_do_not_fit(device):
    model = pretraining(device)
    ids, lengths, segments, places = moved(BATCH[:4], device)
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T from 1 to 7, got \(3, 8\)"):
        model(device.xp.concatenate([ids, ids[:, :1]], axis=1), lengths, segments, places)
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T from 1 to 7, got \(3, 0\)"):
        model(ids[:, :0], None, None, places)
    with pytest.raises(IndexError, match="ids: expected values from 0 to 10, got 11"):
        model(ids + 1, lengths, segments, places)
    with pytest.raises(ValueError, match="lengths: expected values from 1 to 7, got 0"):
        model(ids, lengths - 5, segments, places)
    with pytest.raises(ValueError, match=r"segments: expected \(3, 7\), got \(3, 6\)"):
        model(ids, lengths, segments[:, 1:], places)
    with pytest.raises(IndexError, match="segments: expected values from 0 to 1, got 2"):
        model(ids, lengths, segments + 1, places)
    with pytest.raises(IndexError, match="places: expected values from 0 to 6, got 7"):
        model(ids, lengths, segments, places + 3)
    with pytest.raises(ValueError, match=r"targets: expected \(3, 2\), got \(3, 1\)"):
        model.loss(ids, lengths, segments, places, *moved((TARGETS[:, 1:], UNRELATED), device))
    with pytest.raises(IndexError, match="targets: expected values from 0 to 1, got 2"):
        model.loss(ids, lengths, segments, places, *moved((TARGETS, UNRELATED + 1), device))
    with pytest.raises(ValueError, match="heads: 3 does not divide d_model 8"):
        Bert(V, C, 3, 1, T)


# Published weights


def write_folder(folder, model, old=False, **changes):
    """Write `model` as a Hugging Face folder."""
    config = {theirs: model.config.get(ours) for theirs, ours in bert_weights.BERT.settings.items()}
    config |= {"model_type": "bert", "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1}
    config |= {"intermediate_size": 4 * C, "hidden_act": "gelu", "position_embedding_type": "absolute", **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, p in model.named_parameters().items():
        tensor = bert_weights.stored_as(name, old=old)
        prefix = "" if tensor.name.startswith(("cls", "classifier")) else "bert."
        tensors[prefix + tensor.name] = np.ascontiguousarray(p.data.T if tensor.transposed else p.data)
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def scrambled(model):
    model.flat.data[...] = np.random.default_rng(0).standard_normal(model.flat.data.size)
    return model


@pytest.mark.parametrize("old", [False, True], ids=["weight and bias", "gamma and beta"])
def test_what_is_written_is_read(tmp_path, old):
    """With body and heads; the weights of norms under their present and their former names."""
    model = scrambled(BertPretraining(*SIZES))
    folder = write_folder(tmp_path, model, old)
    assert any(name.endswith("LayerNorm.gamma") for name in load_file(folder / "model.safetensors")) == old
    read = BertPretraining.from_pretrained(folder)
    assert all(np.array_equal(x, model.state_dict()[name]) for name, x in read.state_dict().items())
    assert np.array_equal(Bert.from_pretrained(folder)(IDS), model.body(IDS))
    tuned = BertClassifier.from_pretrained(folder, 3, dropout=0.0, key=Key(4))
    assert tuned.config["num_classes"] == 3 and tuned.config["dropout"] == 0
    BertClassifier(V, K, *SIZES[1:]).start_from(read)
    assert np.array_equal(tuned.pooler(tuned.body(IDS)), model.pooler(model.body(IDS)))
    assert np.array_equal(tuned.output.w.data, BertClassifier(V, 3, *SIZES[1:], d_ff=4 * C, key=Key(4)).output.w.data)


def test_files_with_fewer_or_other_heads(tmp_path):
    """Without the next-sentence head; without any; with a classifier's."""
    model = scrambled(BertPretraining(*SIZES, next_sentence=False))
    folder = write_folder(tmp_path / "masked", model)
    assert BertPretraining.from_pretrained(folder).config["next_sentence"] is False
    tuned = BertClassifier.from_pretrained(folder, 2, key=Key(4))
    assert np.array_equal(tuned.body(IDS), model.body(IDS))
    model = scrambled(BertClassifier(V, K, *SIZES[1:]))
    folder = write_folder(tmp_path / "classifier", model)
    assert np.array_equal(BertClassifier.from_pretrained(folder)(IDS), model(IDS))
    other = BertClassifier.from_pretrained(folder, 5, new_head=True)
    assert other(IDS).shape == (3, 5) and np.array_equal(other.body(IDS), model.body(IDS))
    with pytest.raises(PretrainedError, match=r"missing: cls\.predictions\.bias"):
        BertPretraining.from_pretrained(folder)
    edit(folder, lambda tensors: [tensors.pop(f"classifier.{leaf}") for leaf in ("weight", "bias")])
    with pytest.raises(
        PretrainedError,
        match=r"has no output for classes of texts \(\['BertForSequenceClassification'\]\): pass num_classes",
    ):
        BertClassifier.from_pretrained(folder)


NAME = "encoder.layer.1.attention.self.query.weight"
DAMAGES = {
    "missing": (lambda t: t.pop("bert." + NAME), rf"model\.safetensors: weights of another model: missing: {NAME}"),
    "unknown": (lambda t: t.update(adapter=np.ones(2, np.float32)), "unknown: adapter"),
    "shape": (
        lambda t: t.update({"bert." + NAME: np.ones((C, C + 1), np.float32)}),
        rf"{NAME}: expected \(8, 8\), got \(8, 9\)",
    ),
    "half a pooler": (lambda t: t.pop("bert.pooler.dense.bias"), "missing: pooler.dense.bias"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_do_not_fit_are_named(tmp_path, damage):
    change, message = DAMAGES[damage]
    folder = write_folder(tmp_path, BertPretraining(*SIZES))
    edit(folder, change)
    with pytest.raises(PretrainedError, match=message):
        BertClassifier.from_pretrained(folder, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_act": "silu"},
            "hidden_act: expected 'gelu' or 'relu' or 'gelu_new' or 'gelu_pytorch_tanh', got 'silu'",
        ),
        (
            {"position_embedding_type": "relative_key"},
            "expected 'absolute', got 'relative_key'",
        ),
        ({"is_decoder": True}, "is_decoder: expected False, got True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: expected True, got False"),
        ({"model_type": "albert"}, "expected model_type 'bert' or 'roberta' or 'distilbert', got 'albert'"),
        ({"num_hidden_layers": 3}, r"missing: encoder\.layer\.2\."),
        ({"num_hidden_layers": 1}, r"unknown: encoder\.layer\.1\."),
        ({"vocab_size": 12}, r"word_embeddings\.weight: expected \(12, 8\), got \(11, 8\)"),
    ],
    ids=str,
)
def test_settings_that_would_compute_something_else(tmp_path, changes, message):
    folder = write_folder(tmp_path, BertPretraining(*SIZES), **changes)
    with pytest.raises(PretrainedError, match=message):
        BertPretraining.from_pretrained(folder)


def test_the_kind_of_problem_matters_only_to_the_output_of_the_file(tmp_path):
    model = scrambled(BertClassifier(V, K, *SIZES[1:]))
    folder = write_folder(tmp_path / "classifier", model, problem_type="multi_label_classification")
    for classes in (None, K):
        with pytest.raises(PretrainedError, match=r"problem_type: expected None or .*, got 'multi_label_classif"):
            BertClassifier.from_pretrained(folder, classes)
    for read in (Bert.from_pretrained(folder), BertClassifier.from_pretrained(folder, K, new_head=True).body):
        assert np.array_equal(read(IDS), model.body(IDS))
    model = scrambled(BertPretraining(*SIZES))
    folder = write_folder(tmp_path / "pretraining", model, problem_type="regression")
    assert np.array_equal(BertPretraining.from_pretrained(folder).body(IDS), model.body(IDS))


def test_a_trained_output_is_kept_or_its_loss_is_said(tmp_path):
    model = scrambled(BertClassifier(V, K, *SIZES[1:]))
    folder = write_folder(tmp_path, model)
    for classes in (None, K):
        assert np.array_equal(BertClassifier.from_pretrained(folder, classes)(IDS), model(IDS))
    message = f"has an output for {K} classes, and num_classes is 2: pass new_head=True to replace it"
    with pytest.raises(PretrainedError, match=message):
        BertClassifier.from_pretrained(folder, 2)
    for classes in (2, K):
        new = BertClassifier.from_pretrained(folder, classes, key=Key(4), new_head=True)
        drawn = BertClassifier(V, classes, *SIZES[1:], key=Key(4)).output
        assert np.array_equal(new.output.w.data, drawn.w.data) and np.array_equal(new.output.b.data, drawn.b.data)
        assert np.array_equal(new.pooler(new.body(IDS)), model.pooler(model.body(IDS)))
    with pytest.raises(ValueError, match=r"^num_classes: expected the number of classes of the new head, got None$"):
        BertClassifier.from_pretrained(folder, new_head=True)


@pytest.mark.parametrize("changes", [{}, {"architectures": ["BertForSequenceClassification"]}], ids=str)
@pytest.mark.parametrize("classes", [None, 1, 2])
def test_an_output_of_one_number_is_not_a_classifier(tmp_path, changes, classes):
    """Such as for regression, or for multiple choice in a folder that does not say so. A new head can replace it."""
    model = scrambled(BertClassifier(V, 1, *SIZES[1:]))
    folder = write_folder(tmp_path, model, **changes)
    message = r"classifier\.weight: expected a row for each of two or more classes, got shape \(1, 8\)"
    with pytest.raises(PretrainedError, match=message):
        BertClassifier.from_pretrained(folder, classes)
    assert np.array_equal(BertClassifier.from_pretrained(folder, 2, new_head=True).body(IDS), model.body(IDS))
    assert np.array_equal(Bert.from_pretrained(folder)(IDS), model.body(IDS))


@pytest.mark.parametrize("kind", ["BertForMultipleChoice", "BertForTokenClassification"])
@pytest.mark.parametrize("classes", [None, K])
def test_an_output_of_another_task_is_refused_by_name(tmp_path, kind, classes):
    folder = write_folder(tmp_path, BertClassifier(V, K, *SIZES[1:]), architectures=[kind])
    with pytest.raises(PretrainedError, match=rf"has no output for classes of texts \(\['{kind}'\]\): pass"):
        BertClassifier.from_pretrained(folder, classes)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("relu", "relu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh")]
)
def test_other_activations_are_read(tmp_path, theirs, ours):
    model = scrambled(BertPretraining(*SIZES, activation=ours))
    read = BertPretraining.from_pretrained(write_folder(tmp_path, model, hidden_act=theirs))
    assert read.config["activation"] == read.masked.dense.activation == ours
    assert all(np.array_equal(a, b) for a, b in zip(read(*BATCH[:4]), model(*BATCH[:4]), strict=True))


def test_the_dropout_of_the_output_is_read(tmp_path):
    model = BertClassifier(V, K, *SIZES[1:])
    folder = write_folder(tmp_path, model, classifier_dropout=0.4, hidden_dropout_prob=0.2)
    for options in ({}, {"num_classes": 2, "new_head": True}):
        read = BertClassifier.from_pretrained(folder, **options)
        assert (read.dropout.p, read.body.dropout.p) == (0.4, 0.2)
    assert BertClassifier.from_pretrained(folder, dropout=0.3).dropout.p == 0.3
    write_folder(tmp_path, model, classifier_dropout=None, hidden_dropout_prob=0.2)
    assert BertClassifier.from_pretrained(folder).dropout.p == 0.2
    for wrong in ("x", -1, True):
        write_folder(tmp_path, model, classifier_dropout=wrong)
        with pytest.raises(PretrainedError, match=f"classifier_dropout: expected a number >= 0, got {wrong!r}"):
            BertClassifier.from_pretrained(folder)
    write_folder(tmp_path, model, classifier_dropout=1.5)
    with pytest.raises(PretrainedError, match=r"config\.json: cannot create this model: .*, got 1\.5"):
        BertClassifier.from_pretrained(folder)


def test_a_wrong_argument_is_not_blamed_on_the_folder(tmp_path):
    folder = write_folder(tmp_path, BertPretraining(*SIZES))
    for model, classes in ((Bert, ()), (BertPretraining, ()), (BertClassifier, (2,))):
        for dropout in (2.0, 1, -0.1):
            with pytest.raises(ValueError, match=f"^dropout: expected 0 <= p < 1, got {dropout}$") as raised:
                model.from_pretrained(folder, *classes, dropout=dropout)
            assert raised.type is ValueError
    for classes in (0, -1):
        with pytest.raises(ValueError, match=f"^num_classes: expected a number >= 1, got {classes!r}$") as raised:
            BertClassifier.from_pretrained(folder, classes)
        assert raised.type is ValueError
    for classes in (2.5, "3", True):
        with pytest.raises(TypeError, match=f"^num_classes: expected an integer, got {classes!r}$"):
            BertClassifier.from_pretrained(folder, classes)
    with pytest.raises(TypeError, match=r"^new_head: expected True or False, got 'no'$"):
        BertClassifier.from_pretrained(folder, 2, new_head="no")
    with pytest.raises(TypeError, match=r"^key: expected a Key"):
        BertClassifier.from_pretrained(folder, 2, key=0)
    assert BertClassifier.from_pretrained(folder, np.int64(3)).config["num_classes"] == 3
    write_folder(tmp_path, BertPretraining(*SIZES), hidden_dropout_prob=1.5)
    with pytest.raises(PretrainedError, match=r"config\.json: cannot create this model: dropout: .*, got 1\.5"):
        BertClassifier.from_pretrained(folder, 2)
