"""Every model rejects unknown options by name."""

import copy
import inspect
import pickle

import numpy as np
import pytest

from scratchformer import models
from scratchformer.models import GPT2, Body, Classifier, LanguageModel
from scratchformer.models.model import Model
from scratchformer.rng import Key

SIZES = dict(vocab_size=5, d_model=4, heads=2, depth=1)
MADE_OF = {
    "Bert": SIZES | dict(max_length=4),
    "BertClassifier": SIZES | dict(max_length=4, num_classes=2),
    "BertPretraining": SIZES | dict(max_length=4),
    "Body": SIZES | dict(max_length=4),
    "Classifier": SIZES | dict(max_length=4, num_classes=2),
    "EncoderDecoder": SIZES,
    "GPT2": SIZES | dict(context=4),
    "LanguageModel": SIZES | dict(context=4),
    "Llama": SIZES | dict(context=4),
    **{name: SIZES | dict(context=4) for name in ("Gemma3", "Olmo2", "Phi3", "Pythia", "Qwen3", "SmolLM3")},
    "SparseTransformer": SIZES | dict(context=4, stride=2),
    "TransformerXL": SIZES | dict(context=4, memory=2),
}
BODY = "positions, dropout, causal, recompute, embedding_std, units, block, final_norm, by_block"
BLOCK = "norm, wide, d_ff, activation, bias, eps"
every_model = pytest.mark.parametrize("name", MADE_OF)


def test_every_model_is_tested():
    assert MADE_OF.keys() == {name for name in models.__all__ if issubclass(getattr(models, name), Model)} - {"Model"}
    parts = {"LlamaBlock", "MaskedPrediction", "Model"}  # made from layers
    assert {name for name in models.__all__ if name not in MADE_OF} == parts


@every_model
def test_a_wrong_keyword_is_named_with_the_valid_ones(name):
    model = getattr(models, name)
    for options in (MADE_OF[name] | {"droput": 0.1}, {"droput": 0.1}):
        with pytest.raises(TypeError, match=rf"^{name}: no option 'droput'; expected one of \w+(, \w+)*$") as raised:
            model(**options)
    listed = str(raised.value).partition("expected one of ")[2].split(", ")
    assert listed == list(model.options()[0]) and len(set(listed)) == len(listed)
    made = model(**MADE_OF[name])
    assert {*MADE_OF[name], "key", *getattr(made, "config", {})} <= set(listed)
    assert next(iter(inspect.signature(model).parameters)) == "vocab_size"  # as help() shows it


def test_the_list_of_the_classifier():
    beginning = r"^Classifier: no option 'n_heads'; expected one of vocab_size, num_classes, "
    with pytest.raises(TypeError, match=beginning) as e:
        Classifier(5, 2, 4, n_heads=2, depth=1, max_length=4)
    assert str(e.value).endswith(f"d_model, heads, depth, max_length, pool, key, {BODY}, {BLOCK}")


@every_model
def test_every_option_that_is_listed_is_taken(name):
    """With its default value; the sizes are already given."""
    model = getattr(models, name)
    known, _ = model.options()
    for option, parameter in known.items():
        model(**{option: parameter.default} | MADE_OF[name])


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("LanguageModel", "causal", "causal: a LanguageModel always is, and takes no such option"),
        ("LanguageModel", "units", "units: a LanguageModel reads tokens, and takes no such option"),
        ("SparseTransformer", "causal", "causal: a SparseTransformer always is, and takes no such option"),
        ("TransformerXL", "causal", "causal: a TransformerXL always is, and takes no such option"),
        ("TransformerXL", "positions", "positions: a TransformerXL has relative ones, and takes no such option"),
        ("GPT2", "causal", "causal: a GPT2 always is, and takes no such option"),
    ],
)
def test_what_a_model_sets_itself(name, option, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        getattr(models, name)(**MADE_OF[name], **{option: True})


@pytest.mark.parametrize("option", ["max_length", "vocab_size"])
def test_sizes_of_the_body_are_not_options(option):
    """A LanguageModel has a context, which becomes the body's max_length; no size can be given twice."""
    with pytest.raises(TypeError, match=option):
        LanguageModel(5, 4, 2, 1, 4, **{option: 3})


def test_models_defined_by_a_user():
    """Models that pass options on, have options of their own, or take any keyword."""

    class Named(LanguageModel):
        def __init__(self, title, *sizes, loud=False, **rest):
            super().__init__(*sizes, **rest)

    class Fixed(GPT2):
        def __init__(self, causal):
            super().__init__(**MADE_OF["GPT2"])

    class Small(GPT2):
        def __init__(self, depth=1, **rest):
            super().__init__(depth=depth, **rest)

    class Free(Model):
        def __init__(self, **anything):
            self.body = Body(**anything)

    model = Named("a", 5, 4, 2, 1, 4, loud=True, norm="pre", key=Key(1))
    sizes = dict(vocab_size=5, d_model=4, heads=2, depth=1, context=4)
    assert model.config == dict(title="a", loud=True, norm="pre", **sizes)
    with pytest.raises(TypeError, match=r"^Named: no option 'lound'; expected one of title, loud, vocab_size, "):
        Named("a", 5, 4, 2, 1, 4, lound=True)
    Fixed(causal=True)
    assert len(Small(**MADE_OF["GPT2"]).body.blocks) == 1
    assert list(Small.options()[0]) == ["depth", *(name for name in GPT2.options()[0] if name != "depth")]
    Free(**MADE_OF["Body"])
    with pytest.raises(TypeError, match=r"^Body: no option 'droput'; expected one of "):
        Free(**MADE_OF["Body"], droput=1)


def test_an_argument_without_a_name_is_refused():
    """It would be missing in `config`, and a snapshot of the model could be saved but never loaded."""

    class Only(LanguageModel):
        def __init__(self, *sizes):
            super().__init__(*sizes)

    class Widths(LanguageModel):
        def __init__(self, vocab_size, *widths):
            super().__init__(vocab_size, widths[0], 2, 1, 4)

    with pytest.raises(TypeError, match=r"^Only: argument 1 has no name, by which `config` could keep it$"):
        Only(5, 4, 2, 1, 4)
    with pytest.raises(TypeError, match=r"^Widths: argument 2 has no name"):
        Widths(5, 4)


@every_model
def test_a_copy_needs_no_options(name):
    model = getattr(models, name)(**MADE_OF[name])
    for twin in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert all(np.array_equal(a, model.state_dict()[n]) for n, a in twin.state_dict().items())
