"""Hugging Face folders: what is written is what is read. tests/torch_parity/test_export.py has the library itself."""

import json

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.export.huggingface import NotPublished, write_folder
from scratchformer.models import GPT2, LanguageModel, Llama, SparseTransformer, TransformerXL
from scratchformer.models.families import FAMILIES, from_pretrained
from scratchformer.nn import Linear, add_lora
from scratchformer.rng import Key

pytest.importorskip("tokenizers")
SIZES = dict(vocab_size=256, d_model=32, heads=4, depth=2, context=9)
PRE = dict(norm="pre", activation="gelu_tanh")


def without_bias(model):
    """A `LanguageModel` with an output like GPT-2's."""
    model.output = Linear(32, 256, bias=False)
    return model


@pytest.mark.parametrize("family", sorted({*FAMILIES.values()}, key=lambda family: family.__name__))
def test_every_family_comes_back(family, tmp_path):
    model = family(**SIZES, key=Key(1))
    write_folder(model, tmp_path / "folder")
    again = from_pretrained(tmp_path / "folder", dropout=0.0)
    assert type(again) is family
    for name, p in model.named_parameters().items():
        assert np.array_equal(p.data, again.named_parameters()[name].data), name
    ids = np.arange(9)[None]
    np.testing.assert_array_equal(model(ids), again(ids))


@pytest.mark.parametrize("bias", [False, True])
def test_a_language_model_that_is_a_gpt2(bias, tmp_path):
    model = without_bias(LanguageModel(**SIZES, **PRE, bias=bias, d_ff=40, eps=1e-3))
    write_folder(model, tmp_path / "folder")
    ids = np.arange(9)[None]
    np.testing.assert_allclose(from_pretrained(tmp_path / "folder")(ids), model(ids), atol=1e-5)


def patterned():
    model = without_bias(LanguageModel(**SIZES, **PRE))
    model.pattern = ops.Local(2)
    return model


def adapted():
    model = GPT2(**SIZES)
    add_lora(model, 2)
    return model


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: LanguageModel(**SIZES, norm="pre"), "activation: expected 'gelu_tanh', got 'relu'"),
        (lambda: LanguageModel(**SIZES, **PRE), r"output.b: expected None, got \(256,\)"),
        (
            lambda: without_bias(LanguageModel(**SIZES, **PRE | {"norm": "post"})),
            "final_norm: expected 'LayerNorm'",
        ),
        (lambda: without_bias(LanguageModel(**SIZES, **PRE, wide=True)), "head_width: expected 8, got 32"),
        (lambda: without_bias(LanguageModel(**SIZES, **PRE, positions="sinusoidal")), "SinusoidalPositions"),
        (patterned, "pattern: expected None, got Local"),
        (lambda: SparseTransformer(**SIZES, stride=3), "a SparseTransformer has no counterpart"),
        (lambda: TransformerXL(**SIZES, memory=3), "a TransformerXL has no counterpart"),
        (lambda: Llama(**SIZES, bias=True, feedforward_bias=True), "a Llama like this has no counterpart"),
        (adapted, "merge_lora"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_reason(make, reason, tmp_path):
    with pytest.raises(NotPublished, match=reason):
        write_folder(make(), tmp_path / "folder")
    assert not [*tmp_path.iterdir()]


def test_the_ends_of_a_text_are_those_of_the_folder(tmp_path):
    model = GPT2(**SIZES)
    write_folder(model, tmp_path / "first")
    config = json.loads((tmp_path / "first/config.json").read_text())
    (tmp_path / "first/config.json").write_text(json.dumps(config | {"bos_token_id": 7, "eos_token_id": [7, 9]}))
    (tmp_path / "first/generation_config.json").write_text("{}")
    write_folder(model, tmp_path / "second", source=tmp_path / "first")
    config = json.loads((tmp_path / "second/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (7, [7, 9])
    assert (tmp_path / "second/generation_config.json").read_text() == "{}"
