"""ONNX files compared with the models, in ONNX Runtime."""

import numpy as np
import pytest

from scratchformer.catalogue.tables import LLAMA3
from scratchformer.export import onnx_file
from scratchformer.export.onnx_file import write_onnx
from scratchformer.export.recording import NotRecorded, Recorder
from scratchformer.models import GPT2, LanguageModel, Llama, SparseTransformer, TransformerXL
from scratchformer.models.families import FAMILIES
from scratchformer.nn import add_lora
from scratchformer.rng import Key

runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

SIZES = dict(vocab_size=31, d_model=32, heads=4, depth=2, context=17)
MODELS = {
    "post-norm": lambda: LanguageModel(**SIZES),
    "pre-norm, wide": lambda: LanguageModel(**SIZES, norm="pre", activation="gelu", wide=True, bias=True),
    "silu": lambda: LanguageModel(**SIZES, activation="silu", positions="none"),
    "sinusoidal": lambda: LanguageModel(**SIZES, positions="sinusoidal"),
    "relative": lambda: LanguageModel(**SIZES, positions="relative"),
    "GPT2": lambda: GPT2(**SIZES),
    "GPT2, not tied": lambda: GPT2(**SIZES, tied=False, activation="gelu"),
    "grouped": lambda: Llama(**SIZES, kv_heads=2, tied=True, window=5, bias=True, scaling=LLAMA3),
    "by block": lambda: Llama(**SIZES, by_block={"window": [None, 3]}),
    "strided": lambda: SparseTransformer(**SIZES, stride=4),
    "fixed": lambda: SparseTransformer(**SIZES, stride=4, kind="fixed", width=2),
    "TransformerXL": lambda: TransformerXL(**SIZES, memory=5),
} | {f"family {family.__name__}": lambda family=family: family(**SIZES) for family in FAMILIES.values()}


def changed(model):
    """The model with random weights everywhere, also where it starts with 0 or 1."""
    for name, p in model.named_parameters().items():
        p.data += 0.1 * Key(0).fold(name).generator().standard_normal(p.data.shape, np.float32)
    return model


def session(path):
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return runtime.InferenceSession(str(path), options)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_are_those_of_the_model(name, tmp_path):
    model = changed(MODELS[name]())
    write_onnx(model, tmp_path / "model.onnx")
    run = session(tmp_path / "model.onnx")
    T, draw = model.body.max_length, Key(1).generator()
    for shape in (1, 1), (3, 2), (2, 7), (1, T):
        ids = draw.integers(0, 31, shape)
        np.testing.assert_allclose(run.run(None, {"input_ids": ids})[0], model(ids), atol=1e-5)
    ours = theirs = ids[:, :3]
    while ours.shape[1] < T:
        ours = np.append(ours, model(ours)[:, -1:].argmax(-1), axis=1)
        theirs = np.append(theirs, run.run(None, {"input_ids": theirs})[0][:, -1:].argmax(-1), axis=1)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("context", [2, 3, 16, 17])
def test_every_length_up_to_the_context(context, tmp_path):
    model = changed(LanguageModel(31, 8, 2, 1, context, positions="relative"))
    write_onnx(model, tmp_path / "model.onnx")
    run = session(tmp_path / "model.onnx")
    for T in range(1, context + 1):
        ids = Key(T).generator().integers(0, 31, (2, T))
        np.testing.assert_allclose(run.run(None, {"input_ids": ids})[0], model(ids), atol=1e-5)


def test_the_model_is_as_it_was(tmp_path):
    model = changed(GPT2(**SIZES))
    add_lora(model, 2)
    arrays = {name: p.data for name, p in model.named_parameters().items()}
    before = {name: array.copy() for name, array in arrays.items()}
    write_onnx(model, tmp_path / "model.onnx")
    for name, p in model.named_parameters().items():
        assert p.data is arrays[name] and np.array_equal(p.data, before[name])


def test_weights_that_are_too_large_for_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "IN_ONE_FILE", 1000)
    model = changed(GPT2(**SIZES))
    write_onnx(model, tmp_path / "model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    ids = np.arange(10)[None]
    np.testing.assert_allclose(session(tmp_path / "model.onnx").run(None, {"input_ids": ids})[0], model(ids), atol=1e-5)


class Uneven(LanguageModel):
    """A model that computes something else for short texts."""

    def forward(self, ids, key=None):
        logits, cache = super().forward(ids, key)
        return (logits * 2 if ids.shape[1] < 3 else logits), cache


class Counting(LanguageModel):
    """A model that uses a power of its length."""

    def forward(self, ids, key=None):
        logits, cache = super().forward(ids, key)
        return logits * float(ids.shape[1] ** 0.5), cache


class Sorting(LanguageModel):
    """A model with a function that has no counterpart here."""

    def forward(self, ids, key=None):
        logits, cache = super().forward(ids, key)
        return logits.__array_namespace__().sort(logits), cache


@pytest.mark.parametrize(
    "kind, message",
    [(Uneven, "something else for other lengths"), (Counting, "other numbers for other lengths"), (Sorting, "sort")],
)
def test_what_cannot_be_said_is_refused(kind, message, tmp_path):
    with pytest.raises(NotRecorded, match=message):
        write_onnx(kind(**SIZES), tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


def test_what_is_recorded_has_the_shapes_of_numpy():
    xp = Recorder()
    real = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    x = xp.asarray(real)
    for function in (
        lambda x: x[..., 1:, None, ::-1],
        lambda x: x[1, None, :, -1],
        lambda x: x[-1],
        lambda x: x.max(axis=(0, -1)),
        lambda x: x.sum(axis=1, keepdims=True) / 2,
        lambda x: x.swapaxes(1, 2) @ x,
        lambda x: x.reshape(-1, 2, 2)[:, :1],
        lambda x: (x > 1).any(axis=-1) | (x[..., 0] == 0),
    ):
        expected, result = function(real), function(x)
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
