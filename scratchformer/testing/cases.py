"""Every operation, layer and model of the package as a case for the gradient checks, with sizes drawn from a seed.

The tests and `scratchformer check` use the same tables. A case is a function of a `Draw`: `draw("B T C")` gives a
normal array of that shape, and a letter has the same size throughout a case.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from textwrap import indent
from typing import Any, NamedTuple

import numpy as np

from .. import models, nn, ops
from ..backend import CPU, Array, Device, to_device
from ..dispatch import Twin, reference_only
from ..rng import Key
from ..shell.progress import on_terminal, progress_bar
from .gradcheck import Report, Row, check_gradients, check_layer
from .precision import as_type, check_precision


class Draw:
    """Sizes and arrays drawn from `seed`: each letter is between 2 and `largest`, except C = H D; arrays are standard
    normal, times `scale`.

    All parameters of a layer, gamma and beta included, are drawn too, with the scale `parameter_scale`.
    """

    def __init__(
        self,
        seed: int = 0,
        scale: float = 1.0,
        device: Device = CPU,
        parameter_scale: float = 1.0,
        largest: int = 5,
    ) -> None:
        self.seed, self.scale, self.device, self.parameter_scale = seed, scale, device, parameter_scale
        self.largest = largest
        self.generator = Key(seed).fold("case").generator()
        self.sizes: dict[str, int] = {}

    def __getattr__(self, letter: str) -> int:
        """The size of a letter: `draw.B`."""
        if len(letter) != 1:
            raise AttributeError(letter)
        if letter not in self.sizes:
            self.sizes[letter] = (
                self.H * self.D if letter == "C" else int(self.generator.integers(2, self.largest, endpoint=True))
            )
        return self.sizes[letter]

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(getattr(self, letter) for letter in letters.split())

    def __call__(self, letters: str) -> np.ndarray:
        """A standard normal float64 array, times the scale."""
        return self.scale * self.generator.standard_normal(self.shape(letters))

    def integers(self, letters: str, high: int, low: int = 0) -> Array:
        """Integers from low to high − 1, on the device."""
        return to_device(self.generator.integers(low, high, self.shape(letters)), self.device)

    def lengths(self, letter: str = "T") -> Array:
        """(B,), integers from 1 to T, or to the size of `letter`; at least one is the maximum."""
        longest = getattr(self, letter)
        lengths = self.generator.integers(1, longest, self.B, endpoint=True)
        lengths[-1] = longest
        return to_device(lengths, self.device)

    @property
    def key(self) -> Key:
        return Key(self.seed).fold("dropout")


class OperationCase(NamedTuple):
    op: Callable
    op_backward: Callable
    args: tuple
    options: dict[str, Any] = {}  # noqa: RUF012
    analytic: bool = False  # the code also takes complex numbers, so that the complex step can be used


class LayerCase(NamedTuple):
    layer: nn.Layer
    inputs: tuple
    options: dict[str, Any] = {}  # noqa: RUF012


def _attention(d: Draw, pattern: Callable[[Draw], ops.Pattern | None], keys: str = "S") -> OperationCase:
    args = (d("B H T D"), d(f"B H {keys} D"), d(f"B H {keys} D"), pattern(d))
    return OperationCase(ops.attention, ops.attention_backward, args)


def _grouped_attention(
    d: Draw, pattern: Callable[[Draw], ops.Pattern | None], keys: str = "S", shared: int = 2
) -> OperationCase:
    """Two key heads, each shared by `shared` query heads."""
    d.sizes["G"], d.sizes["H"] = 2, 2 * shared
    args = (d("B H T D"), d(f"B G {keys} D"), d(f"B G {keys} D"), pattern(d))
    return OperationCase(ops.attention, ops.attention_backward, args)


def _rotary(d: Draw, **options: Any) -> OperationCase:
    d.sizes["D"] = 2 * d.D
    return OperationCase(ops.rotary, ops.rotary_backward, (d("B H T D"),), options, analytic=True)


# Chosen so that a head of three pairs has one that keeps its frequency, one that is slowed down, and one in between.
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 0.05,
    "high_freq_factor": 0.5,
    "original_max_position_embeddings": 4,
}


def _relative_shift(d: Draw) -> OperationCase:
    d.sizes["R"] = d.S + d.T - 1
    return OperationCase(ops.relative_shift, ops.relative_shift_backward, (d("B H T R"),), analytic=True)


def _relative_attention(d: Draw, pattern: Callable[[Draw], ops.Pattern | None], keys: str = "S") -> OperationCase:
    q, k, v, biases = d("B H T D"), d(f"B H {keys} D"), d(f"B H {keys} D"), (d("H D"), d("H D"))
    d.sizes["R"] = k.shape[2] + d.T - 1
    args = (q, k, v, d("H R D"), *biases, pattern(d))
    return OperationCase(ops.relative_attention, ops.relative_attention_backward, args)


def _attention_of_halves(d: Draw) -> OperationCase:
    d.sizes["H"] = 4
    halves = ops.Heads(ops.SameBlock(3), ops.Strided(2) | ops.BlockEnds(3))
    return _attention(d, lambda d: ops.Causal() & halves & ops.Padding(d.lengths()), keys="T")


def _of_large_scores(case: OperationCase) -> OperationCase:
    """Queries 40 times larger: a kernel must subtract each row's maximum, or exponentials overflow."""
    q, *rest = case.args
    return case._replace(args=(40 * q, *rest))


def _edges(d: Draw) -> ops.Edges:
    """A random table, in which a few queries may see no key."""
    return ops.Edges(d.integers("T T", 3) == 0)


def _dense(d: Draw, activation: str) -> OperationCase:
    args = (d("B T I"), d("I O"), d("O"), activation)
    return OperationCase(ops.dense, ops.dense_backward, args)


def _cross_entropy(d: Draw, **options: Any) -> OperationCase:
    args = (d("B T V"), d.integers("B T", d.V))
    return OperationCase(ops.cross_entropy, ops.cross_entropy_backward, args, options)


def _soft_cross_entropy(d: Draw) -> OperationCase:
    args = (d("B T V"), d("B T V"))
    return OperationCase(ops.soft_cross_entropy, ops.soft_cross_entropy_backward, args)


OPERATIONS: dict[str, Callable[[Draw], OperationCase]] = {
    "add": lambda d: OperationCase(ops.add, ops.add_backward, (d("B T C"), d("B T C")), analytic=True),
    "linear": lambda d: OperationCase(ops.linear, ops.linear_backward, (d("B T I"), d("I O"), d("O")), analytic=True),
    "linear, no bias": lambda d: OperationCase(ops.linear, ops.linear_backward, (d("B T I"), d("I O")), analytic=True),
    "dense": lambda d: _dense(d, "relu"),
    "dense, gelu": lambda d: _dense(d, "gelu"),
    "dense, gelu_tanh": lambda d: _dense(d, "gelu_tanh"),
    "dense, silu": lambda d: _dense(d, "silu"),
    "relu": lambda d: OperationCase(ops.relu, ops.relu_backward, (d("B T F"),)),
    "squared_relu": lambda d: OperationCase(ops.squared_relu, ops.squared_relu_backward, (d("B T F"),)),
    "gelu": lambda d: OperationCase(ops.gelu, ops.gelu_backward, (d("B T F"),)),
    "gelu, tanh": lambda d: OperationCase(ops.gelu, ops.gelu_backward, (d("B T F"),), {"approximate": "tanh"}),
    "silu": lambda d: OperationCase(ops.silu, ops.silu_backward, (d("B T F"),)),
    "swiglu": lambda d: OperationCase(ops.swiglu, ops.swiglu_backward, (d("B T F"), d("B T F"))),
    "tanh": lambda d: OperationCase(ops.tanh, ops.tanh_backward, (d("B T F"),), analytic=True),
    "softmax": lambda d: OperationCase(ops.softmax, ops.softmax_backward, (d("B T V"),), analytic=True),
    "log_softmax": lambda d: OperationCase(ops.log_softmax, ops.log_softmax_backward, (d("B T V"),), analytic=True),
    "layernorm": lambda d: OperationCase(
        ops.layernorm, ops.layernorm_backward, (d("B T C"), d("C"), d("C")), analytic=True
    ),
    "rmsnorm": lambda d: OperationCase(ops.rmsnorm, ops.rmsnorm_backward, (d("B T C"), d("C")), analytic=True),
    "rotary": _rotary,
    "rotary, later, linear": partial(_rotary, start=7, base=50.0, scaling={"rope_type": "linear", "factor": 3.0}),
    "rotary, llama3": partial(_rotary, start=2, base=100.0, scaling=_LLAMA3),
    "embedding": lambda d: OperationCase(
        ops.embedding, ops.embedding_backward, (d.integers("B T", d.V), d("V C")), analytic=True
    ),
    "gather": lambda d: OperationCase(
        ops.gather, ops.gather_backward, (d("B T C"), d.integers("B K", d.T)), analytic=True
    ),
    "gather, one place again and again": lambda d: OperationCase(
        ops.gather, ops.gather_backward, (d("B T C"), d.integers("B K", 1)), analytic=True
    ),
    "dropout": lambda d: OperationCase(ops.dropout, ops.dropout_backward, (d("B T C"), 0.4, d.key), analytic=True),
    "dropout_add": lambda d: OperationCase(
        ops.dropout_add, ops.dropout_add_backward, (d("B T C"), 0.4, d.key, d("B T C")), analytic=True
    ),
    "mean_pool": lambda d: OperationCase(ops.mean_pool, ops.mean_pool_backward, (d("B T C"),), analytic=True),
    "mean_pool, padding": lambda d: OperationCase(
        ops.mean_pool, ops.mean_pool_backward, (d("B T C"), d.lengths()), analytic=True
    ),
    "max_pool": lambda d: OperationCase(ops.max_pool, ops.max_pool_backward, (d("B T C"),)),
    "max_pool, padding": lambda d: OperationCase(ops.max_pool, ops.max_pool_backward, (d("B T C"), d.lengths())),
    "attention": lambda d: _attention(d, lambda d: None),
    "attention, large scores": lambda d: _of_large_scores(_attention(d, lambda d: ops.Causal(), keys="T")),
    "attention, full": lambda d: _attention(d, lambda d: ops.Full()),
    "attention, causal": lambda d: _attention(d, lambda d: ops.Causal(), keys="T"),
    "attention, causal, more keys or queries": lambda d: _attention(d, lambda d: ops.Causal()),
    "attention, padding": lambda d: _attention(d, lambda d: ops.Padding(d.lengths()), keys="T"),
    "attention, causal and padding": lambda d: _attention(
        d, lambda d: ops.Causal() & ops.Padding(d.lengths()), keys="T"
    ),
    "attention, local": lambda d: _attention(d, lambda d: ops.Local(1)),
    "attention, strided": lambda d: _attention(d, lambda d: ops.Strided(2)),
    "attention, causal, local or strided": lambda d: _attention(
        d, lambda d: ops.Causal() & (ops.Local(1) | ops.Strided(2)), keys="T"
    ),
    "attention, causal, same block or block ends": lambda d: _attention(
        d, lambda d: ops.Causal() & (ops.SameBlock(3) | ops.BlockEnds(3, 2)), keys="T"
    ),
    "attention, same block, more keys or queries": lambda d: _attention(d, lambda d: ops.SameBlock(2)),
    "attention, a pattern for each head": lambda d: _attention(
        d, lambda d: ops.Heads(*([ops.Causal(), ops.Strided(2), None, ops.Local(1), ops.SameBlock(2)] * d.H)[: d.H])
    ),
    "attention, causal, a pattern for each half of the heads": _attention_of_halves,
    "attention, edges": lambda d: _attention(d, _edges, keys="T"),
    "attention, empty rows": lambda d: _attention(d, lambda d: ops.Padding(d.integers("B", 2)), keys="T"),
    "attention, grouped": lambda d: _grouped_attention(d, lambda d: None, shared=3),
    "attention, grouped, large scores": lambda d: _of_large_scores(_grouped_attention(d, lambda d: ops.Causal())),
    "attention, grouped, causal window and padding": lambda d: _grouped_attention(
        d, lambda d: ops.Causal() & ops.Local(2) & ops.Padding(d.lengths()), keys="T"
    ),
    "attention, grouped, a pattern for each head": lambda d: _grouped_attention(
        d, lambda d: ops.Heads(*([ops.Causal(), ops.Padding(d.lengths("S")), None, ops.Local(1)] * d.H)[: d.H])
    ),
    "relative_shift": _relative_shift,
    "relative_attention": lambda d: _relative_attention(d, lambda d: None),
    "relative_attention, large scores": lambda d: _of_large_scores(
        _relative_attention(d, lambda d: ops.Causal(), keys="T")
    ),
    "relative_attention, causal": lambda d: _relative_attention(d, lambda d: ops.Causal(), keys="T"),
    "relative_attention, causal, more keys or queries": lambda d: _relative_attention(d, lambda d: ops.Causal()),
    "relative_attention, padding": lambda d: _relative_attention(d, lambda d: ops.Padding(d.lengths()), keys="T"),
    "relative_attention, strided": lambda d: _relative_attention(d, lambda d: ops.Strided(2)),
    "relative_attention, causal, local or strided": lambda d: _relative_attention(
        d, lambda d: ops.Causal() & (ops.Local(1) | ops.Strided(2)), keys="T"
    ),
    "relative_attention, a pattern for each head": lambda d: _relative_attention(
        d, lambda d: ops.Heads(*([ops.Causal(), ops.Strided(2), ops.Padding(d.lengths("S"))] * d.H)[: d.H])
    ),
    "relative_attention, empty rows": lambda d: _relative_attention(
        d, lambda d: ops.Padding(d.integers("B", 2)), keys="T"
    ),
    "cross_entropy": _cross_entropy,
    "cross_entropy, smoothing": partial(_cross_entropy, label_smoothing=0.1),
    "cross_entropy, ignored": partial(_cross_entropy, ignore_index=0),
    "cross_entropy, smoothing, ignored": partial(_cross_entropy, label_smoothing=0.1, ignore_index=0),
    "soft_cross_entropy": _soft_cross_entropy,
}


def _rotary_attention(d: Draw, padding: bool = False, **options: Any) -> LayerCase:
    d.sizes.setdefault("C", 4 * d.H)
    layer = nn.RotarySelfAttention(d.C, d.H, key=Key(d.seed), **options)
    return LayerCase(layer, (d("B T C"),), {"pattern": ops.Padding(d.lengths())} if padding else {})


def _grouped_rotary_attention(d: Draw, **options: Any) -> LayerCase:
    """Four query heads and two key heads, with a width that does not depend on C."""
    d.sizes["H"], d.sizes["C"] = 4, d.K
    return _rotary_attention(d, kv_heads=2, head_width=4, **options)


def _block(d: Draw, **options: Any) -> LayerCase:
    block = nn.TransformerBlock(d.C, d.H, key=Key(d.seed), **options)
    pattern = ops.Padding(d.lengths())
    return LayerCase(block, (d("B T C"),), {"pattern": pattern, "key": d.key if options.get("dropout") else None})


def _memory(d: Draw, letters: str) -> Array:
    """A memory, on the device: a constant, so it is no input of the check and gets no gradient."""
    return to_device(d(letters).astype(np.float32), d.device)


def _block_with_memory(d: Draw, **options: Any) -> LayerCase:
    block = nn.TransformerBlock(d.C, d.H, causal=True, relative=True, key=Key(d.seed), **options)
    key = d.key if options.get("dropout") else None
    return LayerCase(block, (d("B T C"),), {"memory": _memory(d, "B M C"), "key": key})


def _residual(d: Draw, order: str) -> LayerCase:
    branch = nn.FeedForward(d.C, d.F, "gelu", Key(d.seed))
    return LayerCase(nn.Residual(branch, nn.LayerNorm(d.C), order, nn.Dropout(0.3)), (d("B T C"),), {"key": d.key})


def _stack(d: Draw, order: str) -> LayerCase:
    """Two blocks that look at another sequence, and a norm."""
    block = nn.DecoderBlock(d.C, d.H, order, dropout=0.3, key=Key(d.seed))
    stack = nn.Stack([block, nn.DecoderBlock(d.C, d.H, order, key=Key(d.seed, 1))], nn.LayerNorm(d.C))
    return LayerCase(stack, (d("B T C"), d("B M C")), {"key": d.key})


def _embedding_sum(d: Draw, **options: Any) -> LayerCase:
    embeddings = [nn.Linear(d.I, d.C, key=Key(d.seed)), nn.TokenEmbedding(d.V, d.C)]
    embedding = nn.EmbeddingSum(embeddings, dropout=nn.Dropout(0.3), **options)
    return LayerCase(embedding, (d("B T I"), d.integers("B T", d.V)), {"key": d.key})


def _transformer_xl(d: Draw, **options: Any) -> LayerCase:
    d.sizes["L"] = 2
    model = models.TransformerXL(d.V, d.C, d.H, d.L, d.T + 1, d.M, key=Key(d.seed), **options)
    return LayerCase(model, (d.integers("B T", d.V),), {"memory": _memory(d, "B L M C"), "key": d.key})


def _language_model(d: Draw, **options: Any) -> LayerCase:
    model = models.LanguageModel(d.V, d.C, d.H, 2, d.T + 1, key=Key(d.seed), **options)
    return LayerCase(model, (d.integers("B T", d.V),), {"key": d.key})


def _recalling_model(d: Draw, **options: Any) -> LayerCase:
    model = models.LanguageModel(d.V, d.C, d.H, 1, d.T + 1, recall=[1, 2], key=Key(d.seed), **options)
    d.sizes["J"] = 3
    ids = d.integers("B T J", d.V)  # each is valid in any column, since the checks exchange them
    return LayerCase(model, (ids,), {"key": d.key})


def _gpt2(d: Draw, **options: Any) -> LayerCase:
    model = models.GPT2(d.V, d.C, d.H, 2, d.T + 1, key=Key(d.seed), **options)
    return LayerCase(model, (d.integers("B T", d.V),), {"key": d.key})


def _llama(d: Draw, **options: Any) -> LayerCase:
    """Four heads of queries, two of keys and values, of a width of their own."""
    d.sizes["H"] = 4
    model = models.Llama(d.V, d.C, d.H, 2, d.T + 1, kv_heads=2, head_width=2, key=Key(d.seed), **options)
    return LayerCase(model, (d.integers("B T", d.V),), {"key": d.key})


def _classifier(d: Draw, **options: Any) -> LayerCase:
    model = models.Classifier(d.V, d.K, d.C, d.H, 2, d.T + 1, key=Key(d.seed), **options)
    return LayerCase(model, (d.integers("B T", d.V), d.lengths()), {"key": d.key})


def _bert(d: Draw, model: Callable[..., nn.Layer], *sizes: int, depth: int, places: bool = False) -> LayerCase:
    """Rows of two texts, with padding and dropout; with `places`, positions to predict."""
    bert = model(d.V, *sizes, d.C, d.H, depth, d.T + 1, dropout=0.2, key=Key(d.seed))
    inputs = (d.integers("B T", d.V), d.lengths(), d.integers("B T", 2))
    return LayerCase(bert, (*inputs, d.integers("B K", d.T)) if places else inputs, {"key": d.key})


def _decoder_block(d: Draw, **options: Any) -> LayerCase:
    block = nn.DecoderBlock(d.C, d.H, key=Key(d.seed), **options)
    return LayerCase(block, (d("B T C"), d("B M C")), {"pattern": ops.Padding(d.lengths("M")), "key": d.key})


def _encoder_decoder(d: Draw, **options: Any) -> LayerCase:
    model = models.EncoderDecoder(d.V, d.C, d.H, 2, d.F, key=Key(d.seed), **options)
    return LayerCase(model, (d.integers("B S", d.V), d.lengths("S"), d.integers("B T", d.V)), {"key": d.key})


def _classifier_of_units(d: Draw, **options: Any) -> LayerCase:
    model = models.Classifier(None, d.K, d.C, d.H, 2, d.T + 1, units=d.I, key=Key(d.seed), **options)
    pattern = ops.Edges(d.integers("T T", 3) > 0)
    return LayerCase(model, (d("B T I"), d.lengths()), {"key": d.key, "pattern": pattern})


def _evidence_classifier(d: Draw, **options: Any) -> LayerCase:
    model = models.EvidenceClassifier(d.V, d.I, d.C, d.H, 2, d.T + 1, key=Key(d.seed), **options)
    return LayerCase(model, (d.integers("B T", d.V), d("B T I"), d.lengths()), {"key": d.key})


def _bidirectional_classifier(d: Draw, **options: Any) -> LayerCase:
    model = models.BidirectionalClassifier(d.V, d.K, d.C, d.H, 1, d.T + 1, key=Key(d.seed), causal=True, **options)
    return LayerCase(model, (d.integers("B T", d.V), d.lengths()))


def _sparse_transformer(d: Draw, heads: int, **options: Any) -> LayerCase:
    d.sizes["H"] = heads
    model = models.SparseTransformer(d.V, d.C, d.H, 2, d.T + 1, 2, key=Key(d.seed), **options)
    return LayerCase(model, (d.integers("B T", d.V),), {"key": d.key})


LAYERS: dict[str, Callable[[Draw], LayerCase]] = {
    "Linear": lambda d: LayerCase(nn.Linear(d.I, d.O, key=Key(d.seed)), (d("B T I"),)),
    "LoRA": lambda d: LayerCase(nn.LoRA(nn.Linear(d.I, d.O, key=Key(d.seed)), 2, alpha=3.0), (d("B T I"),)),
    "LoRA, no bias": lambda d: LayerCase(nn.LoRA(nn.Linear(d.I, d.O, bias=False), 2), (d("B T I"),)),
    "LayerNorm": lambda d: LayerCase(nn.LayerNorm(d.C), (d("B T C"),)),
    "TokenEmbedding": lambda d: LayerCase(nn.TokenEmbedding(d.V, d.C), (d.integers("B T", d.V),)),
    "EmbeddingBag": lambda d: LayerCase(nn.EmbeddingBag(d.V, d.C), (d.integers("B T I", d.V),)),
    "TiedOutput": lambda d: LayerCase(nn.TiedOutput(nn.TokenEmbedding(d.V, d.C)), (d("B T C"),)),
    "TiedOutput, bias": lambda d: LayerCase(nn.TiedOutput(nn.TokenEmbedding(d.V, d.C), bias=True), (d("B T C"),)),
    "PositionEmbedding": lambda d: LayerCase(nn.PositionEmbedding(d.T + 1, d.C), (d("B T C"),)),
    "GridPositions": lambda d: LayerCase(nn.GridPositions(d.T + 1, d.C, 2), (d("B T C"),)),
    "SinusoidalPositions": lambda d: LayerCase(nn.SinusoidalPositions(), (d("B T C"),)),
    "Dropout": lambda d: LayerCase(nn.Dropout(0.4), (d("B T C"),), {"key": d.key}),
    "FeedForward": lambda d: LayerCase(nn.FeedForward(d.C, d.F), (d("B T C"),)),
    "FeedForward, gelu": lambda d: LayerCase(nn.FeedForward(d.C, d.F, "gelu"), (d("B T C"),)),
    "FeedForward, gelu_tanh": lambda d: LayerCase(nn.FeedForward(d.C, d.F, "gelu_tanh"), (d("B T C"),)),
    "FeedForward, a pair": lambda d: LayerCase(nn.FeedForward(d.C, d.F, (ops.silu, ops.silu_backward)), (d("B T C"),)),
    "RMSNorm": lambda d: LayerCase(nn.RMSNorm(d.C), (d("B T C"),)),
    "SwiGLU": lambda d: LayerCase(nn.SwiGLU(d.C, d.F, key=Key(d.seed)), (d("B T C"),)),
    "SwiGLU, bias": lambda d: LayerCase(nn.SwiGLU(d.C, d.F, bias=True, key=Key(d.seed)), (d("B T C"),)),
    "RotarySelfAttention": _rotary_attention,
    "RotarySelfAttention, grouped, causal, padding, bias": partial(
        _grouped_rotary_attention, padding=True, causal=True, bias=True
    ),
    "RotarySelfAttention, grouped, causal, window, scaling, output bias": partial(
        _grouped_rotary_attention, causal=True, window=2, base=100.0, scaling=_LLAMA3, output_bias=True
    ),
    "BasicSelfAttention": lambda d: LayerCase(nn.BasicSelfAttention(), (d("B T C"),)),
    "SingleHeadAttention": lambda d: LayerCase(nn.SingleHeadAttention(d.C, d.D), (d("B T C"),)),
    "SingleHeadAttention, causal": lambda d: LayerCase(nn.SingleHeadAttention(d.C, causal=True), (d("B T C"),)),
    "MultiHeadLoop": lambda d: LayerCase(nn.MultiHeadLoop(d.C, d.H), (d("B T C"),)),
    "MultiHeadLoop, causal": lambda d: LayerCase(nn.MultiHeadLoop(d.C, d.H, causal=True), (d("B T C"),)),
    "SelfAttention": lambda d: LayerCase(nn.SelfAttention(d.C, d.H), (d("B T C"),)),
    "SelfAttention, causal": lambda d: LayerCase(nn.SelfAttention(d.C, d.H, causal=True), (d("B T C"),)),
    "SelfAttention, wide, bias": lambda d: LayerCase(nn.SelfAttention(d.C, d.H, wide=True, bias=True), (d("B T C"),)),
    "SelfAttention, causal, padding": lambda d: LayerCase(
        nn.SelfAttention(d.C, d.H, causal=True), (d("B T C"),), {"pattern": ops.Padding(d.lengths())}
    ),
    "CrossAttention": lambda d: LayerCase(nn.CrossAttention(d.C, d.H), (d("B T C"), d("B M C"))),
    "CrossAttention, wide": lambda d: LayerCase(nn.CrossAttention(d.C, d.H, wide=True), (d("B T C"), d("B M C"))),
    "RelativeSelfAttention": lambda d: LayerCase(nn.RelativeSelfAttention(d.C, d.H), (d("B T C"),)),
    "RelativeSelfAttention, causal, wide, bias": lambda d: LayerCase(
        nn.RelativeSelfAttention(d.C, d.H, causal=True, wide=True, bias=True), (d("B T C"),)
    ),
    "RelativeSelfAttention, causal, padding": lambda d: LayerCase(
        nn.RelativeSelfAttention(d.C, d.H, causal=True), (d("B T C"),), {"pattern": ops.Padding(d.lengths())}
    ),
    "RelativeSelfAttention, causal, memory": lambda d: LayerCase(
        nn.RelativeSelfAttention(d.C, d.H, causal=True), (d("B T C"),), {"queries": d.T - 1}
    ),
    "TransformerBlock, post": partial(_block, norm="post"),
    "TransformerBlock, pre": partial(_block, norm="pre"),
    "TransformerBlock, post, causal, wide, dropout": partial(
        _block, norm="post", causal=True, wide=True, dropout=0.3, activation="gelu"
    ),
    "TransformerBlock, pre, causal, bias, dropout": partial(
        _block, norm="pre", causal=True, bias=True, dropout=0.3, d_ff=3
    ),
    "DecoderBlock, post, dropout": partial(_decoder_block, dropout=0.3),
    "DecoderBlock, pre, bias": partial(_decoder_block, norm="pre", bias=True, activation="gelu"),
    "TransformerBlock, post, relative, dropout": partial(_block, norm="post", relative=True, dropout=0.3),
    "TransformerBlock, post, relative, causal, memory": partial(_block_with_memory, norm="post"),
    "TransformerBlock, pre, relative, causal, memory, dropout": partial(_block_with_memory, norm="pre", dropout=0.3),
    "Residual, post": partial(_residual, order="post"),
    "Residual, pre": partial(_residual, order="pre"),
    "Stack, shared input, post": partial(_stack, order="post"),
    "Stack, shared input, pre": partial(_stack, order="pre"),
    "EmbeddingSum": _embedding_sum,
    "EmbeddingSum, positions, norm, scale": lambda d: _embedding_sum(
        d, positions=nn.PositionEmbedding(d.T + 1, d.C), norm=nn.LayerNorm(d.C), scale=3.0
    ),
    "Block of other parts": lambda d: LayerCase(
        nn.Block(
            nn.RotarySelfAttention(d.C, d.H, head_width=4, key=Key(d.seed)),
            nn.SwiGLU(d.C, d.F, key=Key(d.seed, 1)),
            nn.RMSNorm(d.C),
            nn.LayerNorm(d.C),
            norm="pre",
            dropout=0.3,
        ),
        (d("B T C"),),
        {"key": d.key, "pattern": ops.Padding(d.lengths())},
    ),
    "Recompute": lambda d: LayerCase(
        nn.Recompute(nn.TransformerBlock(d.C, d.H, dropout=0.3)), (d("B T C"),), {"key": d.key}
    ),
    "LanguageModel, post": partial(_language_model, dropout=0.2),
    "LanguageModel, pre, sinusoidal, recompute": partial(
        _language_model, norm="pre", positions="sinusoidal", recompute=True, activation="gelu_tanh"
    ),
    "LanguageModel, post, relative": partial(_language_model, positions="relative", dropout=0.2),
    "LanguageModel, pre, recall": partial(_recalling_model, norm="pre", dropout=0.2),
    "EncoderDecoder, post": partial(_encoder_decoder, dropout=0.2),
    "EncoderDecoder, pre": partial(_encoder_decoder, norm="pre", dropout=0.2, bias=False, activation="gelu"),
    "GPT2": partial(_gpt2, dropout=0.2),
    "GPT2, recompute": partial(_gpt2, dropout=0.2, d_ff=3, recompute=True),
    "Llama": partial(_llama, dropout=0.2),
    "Llama, tied, window, scaling, biases, recompute": partial(
        _llama,
        tied=True,
        window=2,
        base=100.0,
        scaling=_LLAMA3,
        bias=True,
        output_bias=True,
        feedforward_bias=True,
        d_ff=3,
        eps=0.1,
        recompute=True,
    ),
    "TransformerXL, post": partial(_transformer_xl, dropout=0.2),
    "TransformerXL, pre, recompute": partial(_transformer_xl, norm="pre", recompute=True, dropout=0.2),
    "Classifier, mean": partial(_classifier, dropout=0.2),
    "SparseTransformer, strided": partial(_sparse_transformer, heads=2, dropout=0.2),
    "SparseTransformer, strided, window": partial(_sparse_transformer, heads=2, window=1),
    "SparseTransformer, fixed": partial(_sparse_transformer, heads=4, kind="fixed", bias=True, recompute=True),
    "SparseTransformer, fixed, merged, learned positions": partial(
        _sparse_transformer, heads=3, kind="fixed", width=2, merged=True, positions="learned", norm="post"
    ),
    "Classifier, units, mean": partial(_classifier_of_units, dropout=0.2),
    "Classifier, units, each, pre": partial(_classifier_of_units, pool="none", norm="pre", positions="none"),
    "Classifier, max, pre, no positions": partial(_classifier, pool="max", norm="pre", positions="none"),
    "Classifier, max, pre, relative": partial(_classifier, pool="max", norm="pre", positions="relative", dropout=0.2),
    "EvidenceClassifier, mean": partial(_evidence_classifier, dropout=0.2),
    "EvidenceClassifier, max, pre": partial(_evidence_classifier, pool="max", norm="pre", ngrams=[2], buckets=3),
    "BidirectionalLanguageModel": lambda d: LayerCase(
        models.BidirectionalLanguageModel(d.V, d.C, d.H, 1, d.T + 1, models.LanguageModel, Key(d.seed)),
        (d.integers("B T", d.V),),
        {"key": d.key},
    ),
    "BidirectionalClassifier": _bidirectional_classifier,
    "BertPretraining": lambda d: _bert(d, models.BertPretraining, depth=2, places=True),
    "BertClassifier": lambda d: _bert(d, models.BertClassifier, d.K, depth=1),
}


def check_operation(name: str, draw: Draw, **options: Any) -> Report:
    """Run check_gradients on the operation case `name`."""
    case = OPERATIONS[name](draw)
    return check_gradients(
        case.op,
        case.op_backward,
        *case.args,
        seed=draw.seed,
        complex_step=case.analytic and draw.device is CPU,
        device=draw.device,
        **options,
        **case.options,
    )


def check_operation_in(dtype: Any, name: str, draw: Draw) -> Report:
    """Run check_precision on the operation case `name`; the Report has the worst error as a fraction of its bound."""
    case = OPERATIONS[name](draw)
    rows = check_precision(
        case.op, case.op_backward, *case.args, dtype=dtype, seed=draw.seed, device=draw.device, **case.options
    )
    return Report(Row(row.tensor, row.shape, math.prod(row.shape), row.ratio) for row in rows)


def check_layer_case(name: str, draw: Draw, **options: Any) -> Report:
    """Run check_layer on the layer case `name`, with normal parameters of the draw's `parameter_scale`."""
    case = LAYERS[name](draw)
    for p in case.layer.parameters():
        p.data[...] = draw.parameter_scale * draw.generator.standard_normal(p.data.shape)
    return check_layer(case.layer, *case.inputs, seed=draw.seed, device=draw.device, **options, **case.options)


IMPLEMENTATIONS = ("reference", "twin")


def check_cases(
    names: Sequence[str],
    device: Device,
    seed: int = 0,
    details: bool = False,
    only: str | None = None,
    dtype: Any = None,
) -> list[str]:
    """Check the cases `names` (all if empty), print a table, and return what is wrong: ["attention (reference)"].

    A name is the name of a case ("attention, causal"), or the part before its comma for all cases that begin with it
    ("attention"). Each case is checked twice, with the references (inside `reference_only`) and with the twins; `only`
    restricts this to "reference" or "twin". The twins' column shows "-" if none ran: the operation has no twin for the
    arrays of this device, or no operation in the layer has one. With a `dtype`, the precision of operations in that
    type is checked instead, and the table shows the worst error as a fraction of its bound. Raises ValueError for an
    unknown name or `only`, before anything is checked, and if there was nothing to check.
    """
    cases = select_cases(names, dtype)
    if only not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"only: expected one of {', '.join(IMPLEMENTATIONS)}, got {only!r}")
    columns = [only] if only else IMPLEMENTATIONS
    width = max(map(len, cases))
    print(f"{'case':<{width}}{'tensors':>9}{'elements':>10}" + "".join(f"{column:>12}" for column in columns))
    checked, wrong = False, dict[str, None]()
    # Without a terminal, the rows that are printed show the progress.
    with progress_bar("checking", len(cases), "cases", disable=not on_terminal()) as bar:
        for name, check in cases.items():
            results = [_check_with(column, check, name, Draw(seed, device=device)) for column in columns]
            checked |= any(result is not None for result in results)
            with bar.external_write_mode():  # above the bar
                _print_results(name, results, width, details)
                for column, result in zip(columns, results, strict=True):
                    if isinstance(result, str):
                        print(f"{name} ({column}):\n{indent(result.strip(), '    ')}", flush=True)
                        wrong[f"{name.partition(',')[0]} ({column})"] = None
            bar.update()
    if not checked:
        raise ValueError(f"nothing to check: on {device} no twin runs for {', '.join(names) or 'any case'}")
    return list(wrong)


def select_cases(names: Sequence[str], dtype: Any = None) -> dict[str, Callable]:
    """The cases `names` (all if empty), see `check_cases`, each with the function that checks it."""
    cases = {name: check_operation for name in OPERATIONS} | {name: _check_some_elements for name in LAYERS}
    if dtype is not None:
        cases = {name: partial(check_operation_in, as_type("dtype", dtype)) for name in OPERATIONS}
    known = {name.partition(",")[0] for name in cases}
    if unknown := set(names) - known - cases.keys():
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    return {name: check for name, check in cases.items() if not names or {name, name.partition(",")[0]} & set(names)}


def _check_some_elements(name: str, draw: Draw) -> Report:
    """Check a layer case on about 100 elements in all, and one random direction for each tensor."""
    parameters = len(LAYERS[name](Draw(draw.seed)).layer.parameters())
    return check_layer_case(name, draw, max_elements=max(1, 100 // (parameters + 1)), directions=1)


def _check_with(implementation: str, check: Callable, name: str, draw: Draw) -> Report | str | None:
    """The report of a case, or a message if it is wrong, or None if the twins were to be checked but none ran."""
    ran: set[str] = set()
    with reference_only() if implementation == "reference" else _twins_noted(ran):
        try:
            result = check(name, draw)
        except AssertionError as error:
            result = str(error)
        except Exception:  # a bug in the code under test: go on with the other cases
            result = traceback.format_exc(limit=-2)
    twins = ran & {OPERATIONS[name](Draw()).op.__name__} if name in OPERATIONS else ran
    return result if twins or implementation == "reference" else None


@contextmanager
def _twins_noted(ran: set[str]) -> Iterator[None]:
    """Collect in `ran` the names of the operations whose twin runs without falling back to the reference."""

    def noting(twin: Twin) -> Twin:
        def call(*args: Any, **kwargs: Any) -> Any:
            ran.add(twin.operation)
            return twin.forward(*args, **kwargs)

        return twin._replace(forward=call)

    names = [name.removesuffix("_backward") for name in ops.__all__ if name.endswith("_backward")]
    lists = [twins for name in names for table in getattr(ops, name).chosen for twins in table.values()]
    kept = [list(twins) for twins in lists]
    for each in lists:
        each[:] = map(noting, each)
    try:
        yield
    finally:
        for each, right in zip(lists, kept, strict=True):
            each[:] = right


def _print_results(name: str, results: list[Report | str | None], width: int, details: bool) -> None:
    """Print a case's row of the table, and with `details` a row for each tensor."""
    reports = [result for result in results if isinstance(result, Report)]
    tensors, elements = (len(reports[0]), sum(row.elements for row in reports[0])) if reports else ("", "")
    print(f"{name:<{width}}{tensors:>9}{elements:>10}" + "".join(map(_cell, results)), flush=True)
    for i, row in enumerate(reports[0] if details and reports else []):
        cells = (_cell(Report(result[i : i + 1]) if isinstance(result, Report) else None) for result in results)
        print(f"{f'  {row.tensor} {row.shape}':<{width + 9}}{row.elements:>10}" + "".join(cells))


def _cell(result: Report | str | None) -> str:
    """The worst relative error of a report, twelve characters wide."""
    if isinstance(result, Report):
        return f"{max(row.worst_relative_error for row in result):>12.1e}"
    return f"{'-' if result is None else 'WRONG':>12}"
