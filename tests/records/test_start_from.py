import numpy as np
import pytest

from scratchformer.models import Classifier, LanguageModel, Llama, LlamaBlock, SparseTransformer
from scratchformer.nn import RMSNorm
from scratchformer.records import NGrams, start_from
from scratchformer.rng import Key

V, K, T = 11, 3, 6
NGRAMS = [{"layer": NGrams, "orders": [2], "buckets": 64}]
LLAMA = dict(causal=True, positions="none", block=LlamaBlock, final_norm=RMSNorm)


@pytest.mark.parametrize(
    ("pretrained", "options"),
    [
        (Llama(V, 8, 2, 2, T, key=Key(1)), LLAMA),
        (LanguageModel(V, 8, 2, 2, T, norm="pre", embeddings=NGRAMS), dict(norm="pre", embeddings=NGRAMS)),
    ],
)
def test_it_starts_from_a_language_model(pretrained, options):
    """The bodies then compute the same; the rest of the model stays."""
    ids = np.array([[4, 7, 1], [2, 9, 9]])
    options = {"causal": True} | options
    model = Classifier(V, K, 8, 2, 2, T, key=Key(2), **options)
    output = model.output.w.data.copy()
    start_from(model, pretrained)
    np.testing.assert_array_equal(model.body(ids), pretrained.body(ids))
    np.testing.assert_array_equal(model.output.w.data, output)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(causal=False), "pretrained: expected a body with causal False, got True"),
        (dict(positions="learned"), "pretrained: expected a body with positions learned, got none"),
        (dict(d_ff=16), r"blocks\.0\.feedforward\.down\.w: expected \(16, 8\), got \(22, 8\)"),
        (dict(final_norm=None), "weights of another model: missing: final_norm.beta"),
    ],
)
def test_a_language_model_with_another_body_is_refused(changed, message):
    model = Classifier(V, K, 8, 2, 2, T, **LLAMA | changed)
    before = model.flat.data.copy()
    with pytest.raises(ValueError, match=message):
        start_from(model, Llama(V, 8, 2, 2, T))
    np.testing.assert_array_equal(model.flat.data, before)


def test_it_starts_only_from_a_language_model():
    model = Classifier(V, K, 8, 2, 2, T, **LLAMA)
    with pytest.raises(TypeError, match=r"pretrained: expected a LanguageModel, got <.*Classifier object"):
        start_from(model, Classifier(V, K, 8, 2, 2, T, **LLAMA))


def test_defaults_and_their_values_are_the_same():
    language, sizes = LanguageModel(V, 8, 2, 1, T), (8, 2, 1, T)
    start_from(Classifier(V, K, *sizes, causal=True, norm="post", d_ff=32), language)
    sparse = SparseTransformer(V, *sizes, 3, positions="learned")
    with pytest.raises(ValueError, match="pretrained: expected full causal attention, got Heads"):
        start_from(Classifier(V, K, *sizes, causal=True, norm="pre", activation="gelu"), sparse)
