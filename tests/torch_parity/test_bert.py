"""BERT, RoBERTa and DistilBERT compared with transformers' models, which save random weights that we load."""

import json

import numpy as np
import pytest

from scratchformer.models import Bert, BertClassifier, BertPretraining, bert_weights
from scratchformer.models.pretrained import PretrainedError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
F = torch.nn.functional

B, T, V, C, H, DEPTH, K = 3, 9, 23, 12, 3, 2, 4
LENGTHS = np.array([9, 4, 7])
PLACES = np.array([[1, 5, 8], [2, 3, 3], [0, 4, 6]])  # one is predicted twice
TARGETS = np.random.default_rng(1).integers(0, V, PLACES.shape)
UNRELATED, LABELS = np.array([1, 0, 1]), np.array([2, 0, 3])


@pytest.fixture
def theirs(tmp_path):
    """A function that creates and saves a model of the library with random weights; returns it and its folder."""

    def make(name, **options):
        sizes = dict(
            vocab_size=V,
            hidden_size=C,
            num_hidden_layers=DEPTH,
            num_attention_heads=H,
            intermediate_size=20,
            max_position_embeddings=T + 1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=K,
        )
        prefix = next(prefix for prefix in ("DistilBert", "Roberta", "Bert") if name.startswith(prefix))
        if prefix == "DistilBert":
            sizes |= dict(hidden_dim=20, dropout=0.0, attention_dropout=0.0)
        config = getattr(transformers, f"{prefix}Config")(**sizes | options)
        model = getattr(transformers, name)(config).eval()
        draw = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.data[...] = 0.3 * torch.randn(p.shape, generator=draw)
        model.save_pretrained(tmp_path)
        return model, tmp_path

    return make


def inputs():
    """Without token 0, the padding: the library never gives its embedding a gradient."""
    draw = np.random.default_rng(0)
    return draw.integers(1, V, (B, T)), LENGTHS, draw.integers(0, 2, (B, T))


def their_inputs():
    ids, lengths, segments = map(torch.from_numpy, inputs())
    return dict(input_ids=ids, attention_mask=(torch.arange(T) < lengths[:, None]).long(), token_type_ids=segments)


def agree(ours, expected, tolerance, what=""):
    """Within `tolerance`, and within `tolerance` of the largest element."""
    expected = expected.detach().numpy()
    assert ours.dtype == expected.dtype == np.float32
    assert ours.shape == expected.shape, what
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * min(1, np.abs(expected).max()), err_msg=what)


def agree_on_gradients(ours, theirs):
    """For each of our parameters; and the total size is the same."""
    kind = bert_weights.PUBLISHED[theirs.config.model_type]
    their_parameters = {name.removeprefix(kind.prefix): p for name, p in theirs.named_parameters()}
    assert sum(p.numel() for p in theirs.parameters() if p.grad is not None) == ours.flat.data.size
    for name, p in ours.named_parameters().items():
        tensor = bert_weights.stored_as(name, kind)
        gradient = their_parameters[tensor.name].grad
        if name.endswith("key.b"):  # 0 up to rounding: a bias of the keys adds the same to all scores of a query
            assert np.abs(p.grad).max() < 1e-5 * np.abs(ours.flat.grad).max()
        else:
            agree(p.grad, gradient.T if tensor.transposed else gradient, 1e-4, name)


def test_the_encoder(theirs):
    model, folder = theirs("BertModel")
    expected = model(**their_inputs()).last_hidden_state
    within = np.arange(T) < LENGTHS[:, None]
    agree(Bert.from_pretrained(folder)(*inputs())[within], expected[torch.from_numpy(within)], 1e-5)


def test_pretraining(theirs):
    """Both logits, the loss, and the gradient of every parameter."""
    model, folder = theirs("BertForPreTraining")
    ours = BertPretraining.from_pretrained(folder)
    assert ours.config["dropout"] == 0 and ours.config["d_ff"] == 20 and ours.body.norm.eps == 1e-12
    y, _ = ours.forward(*inputs(), PLACES)
    expected = model(**their_inputs())
    rows = torch.arange(B)[:, None]
    agree(y[0], expected.prediction_logits[rows, torch.from_numpy(PLACES)], 1e-5)
    agree(y[1], expected.seq_relationship_logits, 1e-5)

    loss, cache = ours.loss(*inputs(), PLACES, TARGETS, UNRELATED)
    ours.loss_backward(1.0, cache)
    chosen = expected.prediction_logits[rows, torch.from_numpy(PLACES)].flatten(0, 1)
    their_loss = F.cross_entropy(chosen, torch.from_numpy(TARGETS).flatten())
    their_loss = their_loss + F.cross_entropy(expected.seq_relationship_logits, torch.from_numpy(UNRELATED))
    their_loss.backward()
    agree(np.asarray(loss), their_loss, 1e-5)
    agree_on_gradients(ours, model)


def test_their_own_loss(theirs):
    """With the library's labels: -100 where nothing is predicted, and 0 for a text that follows."""
    model, folder = theirs("BertForPreTraining")
    places = np.array([[1, 5, 8], [0, 2, 3], [0, 4, 6]])
    labels = np.full((B, T), -100)
    np.put_along_axis(labels, places, TARGETS, axis=1)
    expected = model(
        **their_inputs(), labels=torch.from_numpy(labels), next_sentence_label=torch.from_numpy(UNRELATED)
    ).loss
    loss, _ = BertPretraining.from_pretrained(folder).loss(*inputs(), places, TARGETS, UNRELATED)
    agree(np.asarray(loss), expected, 1e-5)


def test_masked_prediction_alone(theirs):
    model, folder = theirs("BertForMaskedLM")
    ours = BertPretraining.from_pretrained(folder)
    assert ours.config["next_sentence"] is False
    (y,), _ = ours.forward(*inputs(), PLACES)
    expected = model(**their_inputs()).logits[torch.arange(B)[:, None], torch.from_numpy(PLACES)]
    agree(y, expected, 1e-5)
    _, cache = ours.loss(*inputs(), PLACES, TARGETS, UNRELATED)
    ours.loss_backward(1.0, cache)
    F.cross_entropy(expected.flatten(0, 1), torch.from_numpy(TARGETS).flatten()).backward()
    agree_on_gradients(ours, model)


def test_the_classifier(theirs):
    """Log-probabilities for pairs of texts; loss and gradients for single texts."""
    model, folder = theirs("BertForSequenceClassification")
    ours = BertClassifier.from_pretrained(folder)
    assert ours.config["num_classes"] == K
    agree(ours(*inputs()), F.log_softmax(model(**their_inputs()).logits, -1), 1e-5)
    ids, lengths, _ = inputs()
    loss, cache = ours.loss(ids, lengths, LABELS)
    ours.loss_backward(1.0, cache)
    expected = model(**their_inputs() | {"token_type_ids": None}, labels=torch.from_numpy(LABELS)).loss
    expected.backward()
    agree(np.asarray(loss), expected, 1e-5)
    agree_on_gradients(ours, model)


ROBERTA = dict(pad_token_id=2, max_position_embeddings=T + 3, type_vocab_size=1, layer_norm_eps=1e-5)
DISTILBERT = dict(seq_classif_dropout=0.0)
VARIANTS = {"Roberta": ROBERTA, "DistilBert": DISTILBERT}


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_variants(theirs, kind):
    """Logits of classes and of hidden tokens, and the gradients of the loss."""
    model, folder = theirs(f"{kind}ForSequenceClassification", **VARIANTS[kind])
    ids, lengths, _ = inputs()
    ids[ids == 2] = 3  # the padding token of this RoBERTa
    batch = their_inputs() | {"input_ids": torch.from_numpy(ids), "token_type_ids": None}
    batch = {name: value for name, value in batch.items() if value is not None}
    ours = BertClassifier.from_pretrained(folder)
    assert ours.config["max_length"] == T + (kind == "DistilBert")
    loss, cache = ours.loss(ids, lengths, LABELS)
    ours.loss_backward(1.0, cache)
    expected = model(**batch, labels=torch.from_numpy(LABELS)).loss
    expected.backward()
    agree(np.asarray(loss), expected, 1e-5)
    agree_on_gradients(ours, model)

    model, folder = theirs(f"{kind}ForMaskedLM", **VARIANTS[kind])
    (y,), _ = BertPretraining.from_pretrained(folder).forward(ids, lengths, None, PLACES)
    agree(y, model(**batch).logits[torch.arange(B)[:, None], torch.from_numpy(PLACES)], 1e-5)


@pytest.mark.parametrize("pad", [-1, T + 2, None, 1.0])
def test_a_padding_token_that_leaves_no_position(theirs, pad):
    _, folder = theirs("RobertaModel", **ROBERTA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    with pytest.raises(PretrainedError, match="pad_token_id: expected a whole number below max_position_embeddings"):
        Bert.from_pretrained(folder)


def test_padding_within_a_text_is_refused(theirs):
    """Their positions do not count it, and ours would."""
    _, folder = theirs("RobertaModel", **ROBERTA)
    ids, lengths, _ = inputs()
    ids[ids == 2] = 3
    ids[1, 2:] = 2
    model = Bert.from_pretrained(folder)
    with pytest.raises(ValueError, match="ids: row 1: expected the padding token, 2, only after the end of the text"):
        model(ids, lengths)
    model(ids, np.array([9, 2, 7]))


def test_a_model_without_segments_takes_none(theirs):
    _, folder = theirs("DistilBertModel")
    with pytest.raises(ValueError, match="segments: expected None, since this model does not embed them"):
        Bert.from_pretrained(folder)(*inputs())


def test_a_classifier_of_pairs(theirs):
    """Loss and gradients with segments, including the gradient of the segment table."""
    model, folder = theirs("BertForSequenceClassification")
    ours = BertClassifier.from_pretrained(folder, K)
    ids, lengths, segments = inputs()
    loss, cache = ours.loss(ids, lengths, LABELS, segments)
    ours.loss_backward(1.0, cache)
    expected = model(**their_inputs(), labels=torch.from_numpy(LABELS)).loss
    expected.backward()
    agree(np.asarray(loss), expected, 1e-5)
    agree_on_gradients(ours, model)
    assert np.abs(ours.body.segments.table.grad).max(axis=1).min() > 1e-3


@pytest.mark.parametrize("activation", ["relu", "gelu_new", "gelu_pytorch_tanh"])
def test_other_activations(theirs, activation):
    """In the blocks and in the prediction head."""
    model, folder = theirs("BertForPreTraining", hidden_act=activation)
    y, following = BertPretraining.from_pretrained(folder)(*inputs(), PLACES)
    expected = model(**their_inputs())
    agree(y, expected.prediction_logits[torch.arange(B)[:, None], torch.from_numpy(PLACES)], 1e-5)
    agree(following, expected.seq_relationship_logits, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_several_files(theirs, dtype):
    """Weights saved in half precision and computed with in float32, as the library does on request."""
    model, folder = theirs("BertForSequenceClassification")
    expected = model.to(dtype).float()(**their_inputs()).logits
    (folder / "model.safetensors").unlink()
    model.to(dtype).save_pretrained(folder, max_shard_size="2KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    agree(BertClassifier.from_pretrained(folder)(*inputs()), F.log_softmax(expected, -1), 1e-5)


def test_a_regression_is_not_a_classifier(theirs):
    _, folder = theirs("BertForSequenceClassification", num_labels=1)
    for classes in (None, 2):
        with pytest.raises(
            PretrainedError, match=r"classifier\.weight: expected a row for each of two or more classes"
        ):
            BertClassifier.from_pretrained(folder, classes)
    assert BertClassifier.from_pretrained(folder, 2, new_head=True).config["num_classes"] == 2


def test_the_dropout_of_the_output(theirs):
    model, folder = theirs("BertForSequenceClassification", hidden_dropout_prob=0.2, classifier_dropout=0.4)
    ours = BertClassifier.from_pretrained(folder)
    assert (ours.body.dropout.p, ours.dropout.p) == (model.bert.embeddings.dropout.p, model.dropout.p) == (0.2, 0.4)
    model, folder = theirs("BertForSequenceClassification", hidden_dropout_prob=0.2)
    assert BertClassifier.from_pretrained(folder).dropout.p == model.dropout.p == 0.2


@pytest.mark.parametrize("name", ["BertForTokenClassification", "BertForMultipleChoice", "BertForQuestionAnswering"])
def test_a_head_of_another_task_is_not_a_text_classifier(theirs, name):
    """Its body can get a new output, and with it a pooler if it had none."""
    model, folder = theirs(name)
    with pytest.raises(PretrainedError, match=rf"no output for classes of texts \(\['{name}'\]\)"):
        BertClassifier.from_pretrained(folder)
    if name != "BertForQuestionAnswering":
        with pytest.raises(PretrainedError, match=rf"no output for classes of texts \(\['{name}'\]\)"):
            BertClassifier.from_pretrained(folder, 2)
        ours = BertClassifier.from_pretrained(folder, 2, new_head=True)
        agree(ours.body.tokens.table.data, model.bert.embeddings.word_embeddings.weight, 1e-7)
        assert np.abs(ours.pooler.dense.w.data).max() > 0


def test_a_classifier_of_several_labels_at_once_is_another_computation(theirs):
    _, folder = theirs("BertForSequenceClassification", problem_type="multi_label_classification")
    with pytest.raises(PretrainedError, match=r"problem_type: expected None or .*, got 'multi_label_"):
        BertClassifier.from_pretrained(folder)
