"""Layers and models reject invalid sizes, flags and numbers by name, before anything is created."""

import inspect
import math
import re

import numpy as np
import pytest

from scratchformer import models, nn, ops
from scratchformer.catalogue import LAYERS, Draw
from scratchformer.rng import Key


@pytest.mark.parametrize("size", [8.0, True, np.True_, "8", None, np.array(8)], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda size: nn.Linear(size, 3), "d_in"),
        (lambda size: nn.LayerNorm(size), "d_model"),
        (lambda size: nn.TokenEmbedding(size, 3), "vocab_size"),
        (lambda size: nn.SwiGLU(4, size), "d_ff"),
        (lambda size: nn.RotarySelfAttention(16, size), "heads"),
        (lambda size: nn.SelfAttention(size, 2), "d_model"),
        (lambda size: nn.TransformerBlock(16, size), "heads"),
        (lambda size: models.LanguageModel(5, 16, 2, size, 3), "depth"),
        (lambda size: models.TransformerXL(5, 16, 2, 1, 3, size), "memory"),
        (lambda size: models.Classifier(5, size, 4, 2, 1, 3), "num_classes"),
        (lambda size: ops.Local(size), "radius"),
        (lambda size: ops.Strided(size), "stride"),
    ],
)
def test_sizes_that_are_not_integers(make, name, size):
    with pytest.raises(TypeError, match=f"^{name}: expected an integer, got {re.escape(repr(size))}$"):
        make(size)
    make(np.int64(8))


@pytest.mark.parametrize("flag", ["no", 0, 1, None, np.array(True)], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda **flag: nn.Linear(2, 3, **flag), "bias"),
        (lambda **flag: nn.TiedOutput(nn.TokenEmbedding(3, 2), **flag), "bias"),
        (lambda **flag: nn.SingleHeadAttention(4, **flag), "causal"),
        (lambda **flag: nn.MultiHeadLoop(4, 2, **flag), "causal"),
        (lambda **flag: nn.CrossAttention(4, 2, **flag), "wide"),
        (lambda **flag: nn.CrossAttention(4, 2, **flag), "bias"),
        (lambda **flag: nn.SelfAttention(4, 2, **flag), "causal"),
        (lambda **flag: nn.RelativeSelfAttention(4, 2, **flag), "causal"),
        (lambda **flag: nn.RotarySelfAttention(4, 2, **flag), "output_bias"),
        (lambda **flag: nn.SwiGLU(4, 2, **flag), "bias"),
        (lambda **flag: nn.TransformerBlock(4, 2, **flag), "relative"),
        (lambda **flag: nn.TransformerBlock(4, 2, **flag), "wide"),
        (lambda **flag: nn.DecoderBlock(4, 2, **flag), "bias"),
        (lambda **flag: models.Body(5, 4, 2, 1, 3, **flag), "recompute"),
        (lambda **flag: models.LanguageModel(5, 4, 2, 1, 3, **flag), "bias"),
        (lambda **flag: models.Classifier(5, 2, 4, 2, 1, 3, **flag), "bias"),
        (lambda **flag: models.BertPretraining(5, 4, 2, 1, 3, **flag), "next_sentence"),
    ],
)
def test_flags_that_are_neither_true_nor_false(make, name, flag):
    """The string "no" would count as true, and None as false."""
    with pytest.raises(TypeError, match=f"^{name}: expected True or False, got {re.escape(repr(flag))}$"):
        make(**{name: flag})
    make(**{name: np.True_})
    make(**{name: False})


@pytest.mark.parametrize(
    ("make", "name", "zero"),
    [
        (lambda eps: nn.LayerNorm(4, eps), "eps", False),
        (lambda eps: nn.RMSNorm(4, eps), "eps", False),
        (lambda eps: nn.TransformerBlock(4, 2, eps=eps), "eps", False),
        (lambda eps: nn.DecoderBlock(4, 2, eps=eps), "eps", False),
        (lambda eps: models.LanguageModel(5, 4, 2, 1, 3, eps=eps), "eps", False),
        (lambda eps: models.Bert(5, 4, 2, 1, 3, eps=eps), "eps", False),
        (lambda std: nn.TokenEmbedding(5, 4, std), "std", True),
        (lambda std: nn.PositionEmbedding(5, 4, std), "std", True),
        (lambda std: nn.GridPositions(5, 4, 2, std), "std", True),
        (lambda std: models.Body(5, 4, 2, 1, 3, embedding_std=std), "embedding_std", True),
        (lambda std: models.Body(5, 4, 2, 1, 3, positions="none", embedding_std=std), "embedding_std", True),
        (lambda std: models.Bert(5, 4, 2, 1, 3, embedding_std=std), "embedding_std", True),
    ],
)
def test_numbers_out_of_range(make, name, zero):
    for wrong in (-1e-5, math.nan, math.inf, np.float32(-1)) + (() if zero else (0, 0.0)):
        with pytest.raises(ValueError, match=f"^{name}: expected a finite number {'>=' if zero else '>'} 0, got "):
            make(wrong)
    for wrong in ("1e-5", None, True, np.ones(1)):
        with pytest.raises(TypeError, match=f"^{name}: expected a number, got {re.escape(repr(wrong))}$"):
            make(wrong)
    make(1)
    make(np.float32(0.1))


SIZES = dict(d_in=4, d_out=4, d_model=8, heads=2, vocab_size=5, depth=1, context=4, max_length=4, num_classes=2)
SIZES |= dict(width=2, d_ff=4, memory=2, stride=2, embedding=nn.TokenEmbedding(5, 8), rank=2, linear=nn.Linear(4, 4))
WITH_KEY = [
    made
    for module in (nn, models)
    for made in (getattr(module, name) for name in module.__all__)
    if inspect.isclass(made) and "key" in inspect.signature(made.__init__).parameters
]


@pytest.mark.parametrize("made", WITH_KEY)
def test_what_is_not_a_key_is_refused(made):
    """Every layer and model with random initial weights refuses it."""
    needed = [p.name for p in inspect.signature(made.__init__).parameters.values() if p.default is p.empty]
    sizes = {n: SIZES[n] for n in needed if n in SIZES}
    for wrong, found in ((0, "the int 0"), (None, "None"), ("key", "str"), ((1, 2), "tuple")):
        with pytest.raises(TypeError, match=rf"^key: expected a Key, such as Key\(0\)(?: or None)?, got {found}$"):
            made(**sizes, key=wrong)


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_no_array_is_refused_by_name(name):
    """Lists, tuples and texts, as each array of forward, of loss and of a call, alone and all together."""
    case = LAYERS[name](Draw())
    arrays = [i for i, x in enumerate(case.inputs) if isinstance(x, np.ndarray)]
    calls = [case.layer, case.layer.forward]
    needed = {p for p in inspect.signature(case.layer.forward).parameters.values() if p.default is p.empty}
    if hasattr(case.layer, "loss") and len(case.inputs) >= len(needed):
        needed = [p for p in inspect.signature(case.layer.loss).parameters.values() if p.default is p.empty]
        calls += [case.layer.loss] * (len(needed) <= len(case.inputs))
    for call in calls:
        for places in [*([i] for i in arrays), arrays]:
            for convert in (np.ndarray.tolist, lambda x: tuple(x.tolist()), str):
                inputs = [convert(x) if i in places else x for i, x in enumerate(case.inputs)]
                with pytest.raises(TypeError, match=r"^\w+: expected "):
                    call(*inputs, **case.options)


@pytest.mark.parametrize("model", ["TransformerXL", "LanguageModel", "GPT2", "SparseTransformer", "Llama"])
def test_ids_in_a_list_are_refused_by_every_method_that_takes_ids(model):
    made = LAYERS[next(name for name in LAYERS if name.partition(",")[0] == model)](Draw()).layer
    for call in (
        made,
        made.forward,
        lambda ids: made.loss(ids, np.array([[1, 2]])),
        lambda ids: made.loss(ids, [[1, 2]]),
    ):
        with pytest.raises(TypeError, match=r"^ids: expected an array \(B, T\)"):
            call([[1, 2]])


@pytest.mark.parametrize("name", LAYERS)
def test_the_cache_of_another_layer_is_refused(name):
    """A dy that is not an array of real numbers is refused too. The message has the layer's own names for both."""
    case = LAYERS[name](Draw())
    y, cache = case.layer.forward(*case.inputs, **case.options)
    dy = tuple(map(np.ones_like, y)) if isinstance(y, tuple) else np.ones_like(y)
    dy_name, cache_name, *_ = inspect.signature(case.layer.backward).parameters
    _, other = ops.swiglu(np.ones(2), np.ones(2))
    if cache is not None:
        for wrong in (other, (), [cache], 3, {}):
            message = rf"^\w+: expected the \w+ that forward returned, got {type(wrong).__name__}$"
            with pytest.raises(TypeError, match=message):
                case.layer.backward(dy, wrong)
    if not isinstance(y, tuple):
        for wrong in ([1.0], 3, 1j * dy, dy > 0):
            with pytest.raises(TypeError, match=f"^{dy_name}: expected "):
                case.layer.backward(**{dy_name: wrong, cache_name: cache})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2**20, 2**30), "d_in, d_out: expected weights that fit in"),
        (lambda: nn.TokenEmbedding(2**30, 2**20), "vocab_size, d_model: expected weights that fit in"),
        (lambda: nn.LayerNorm(2**40), "d_model: expected a number <= 2147483647, got 1099511627776"),
        (lambda: nn.Linear(10**5000, 2), "d_in: expected a number <= 2147483647, got a number of 5001 digits"),
        (lambda: models.LanguageModel(5, 4, 2, 10**8, 3), "depth: expected weights that fit in"),
        (lambda: models.EncoderDecoder(5, 4, 2, 10**8), "depth: expected weights that fit in"),
        (lambda: models.Bert(5, 4, 2, 10**8, 3), "depth: expected weights that fit in"),
        (lambda: nn.FeedForward(4, 2**40), "d_ff: expected a number <= 2147483647"),
    ],
)
def test_sizes_that_no_memory_holds(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Stack([nn.Linear]), r"blocks\[0\]: expected a Layer, got the class Linear"),
        (lambda: nn.Stack(None), "blocks: expected an Iterable, got None"),
        (lambda: nn.Recompute(None), "layer: expected a Layer, got None"),
        (lambda: nn.Residual(nn.Linear(2, 2), nn.LayerNorm), "norm: expected a Layer, got the class LayerNorm"),
        (lambda: nn.TiedOutput(np.ones((3, 4))), "embedding: expected a TokenEmbedding, got array"),
        (lambda: nn.Linear(2, 3).load_state_dict([1]), r"state: expected a Mapping, got \[1\]"),
        (lambda: nn.Linear(list(range(1000)), 2), r"d_in: expected an integer, got \[0, 1, .{60,}\.\.\.$"),
    ],
)
def test_parts_that_are_not_layers(make, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("wrong", [np.matrix, np.ma.MaskedArray])
def test_arrays_that_multiply_otherwise_are_refused(wrong):
    with pytest.raises(TypeError, match=r"^x: expected a floating-point array, got .*; convert it with np.asarray"):
        nn.Linear(2, 3)(np.ones((2, 2), np.float32).view(wrong))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make",
    [
        lambda n: nn.LayerNorm(4, n(1e-5)),
        lambda n: nn.RMSNorm(4, n(1e-6)),
        lambda n: nn.Dropout(n(0.5)),
        lambda n: nn.LoRA(nn.Linear(4, 4), 2, n(3)),
        lambda n: nn.EmbeddingSum([nn.Linear(4, 4)], scale=n(2)),
        lambda n: nn.RotarySelfAttention(4, 2, base=n(100), eps=n(1e-3), query_key_norm="all"),
        lambda n: nn.RotarySelfAttention(4, 2, scaling={"rope_type": "linear", "factor": n(2)}),
        lambda n: nn.TransformerBlock(4, 2, dropout=n(0.5), eps=n(1e-3)),
        lambda n: nn.PositionEmbedding(3, 4, n(0.5)),
        lambda n: nn.GridPositions(3, 4, 2, n(0.5)),
    ],
)
def test_a_float64_of_numpy_is_a_number_like_any_other(make):
    """It would make float64 arrays of float32 ones."""
    results = []
    for kind in float, np.float64:
        layer, x = make(kind), np.random.default_rng(0).standard_normal((2, 3, 4), np.float32)
        for p in layer.parameters():
            p.data[...] += 0.25
        y, cache = layer.forward(x, **({"key": Key(1)} if "key" in inspect.signature(layer.forward).parameters else {}))
        results.append([y, layer.backward(y, cache), *(p.grad for p in layer.parameters())])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def parts(**changed):
    """A block with some of its arguments changed."""
    norms = dict(norm1=nn.LayerNorm(8), norm2=nn.LayerNorm(8))
    return nn.Block(**(dict(attention=nn.SelfAttention(8, 2), feedforward=nn.FeedForward(8), **norms) | changed))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parts(norm1=None), "norm1: expected a Layer, got None"),
        (lambda: parts(attention="Linear"), "attention: expected a Layer, got 'Linear'"),
        (lambda: parts(norm="batch"), "norm: expected one of post, pre, got 'batch'"),
        (lambda: parts(dropout=1.0), "dropout: expected 0 <= p < 1, got 1.0"),
        (lambda: nn.Residual(nn.Linear(2, 2), nn.LayerNorm(2), 3), "order: expected one of post, pre, got 3"),
        (lambda: nn.Dropout((0.1,)), r"p: expected a number, got \(0\.1,\)"),
        (lambda: models.BertClassifier(5, 2, 4, 2, 1, 3, 1.0), "output_dropout: expected 0 <= p < 1, got 1.0"),
        (lambda: ops.Heads(None, True), r"patterns\[1\]: expected None or a Pattern, .* got bool"),
        (lambda: nn.Linear(2, 2).to(dtype=[3, "a"]), r"dtype: expected a floating-point type, got \[3, 'a'\]"),
        (
            lambda: nn.RelativeSelfAttention(8, 2)(np.ones((1, 3, 8), complex)),
            "x: expected real numbers, got complex128",
        ),
        (lambda: nn.Param(np.ma.ones(3), "w"), "w: expected an array of floating-point numbers, got MaskedArray"),
    ],
)
def test_an_error_names_the_argument_that_was_passed(make, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        make()


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("shape", [(), (8,)])
def test_a_residual_refuses_a_gradient_without_positions(order, shape):
    layer = nn.Residual(nn.Linear(8, 8), nn.LayerNorm(8), order)
    _, cache = layer.forward(np.ones((2, 3, 8), np.float32))
    with pytest.raises(ValueError, match=r"^dy: expected \(B, T, C\)"):
        layer.backward(np.ones(shape, np.float32), cache)
