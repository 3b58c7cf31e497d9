"""Layers and models reject invalid sizes, flags and numbers by name, before anything is created."""

import math
import re

import numpy as np
import pytest

from scratchformer import models, nn, ops


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
        (lambda **flag: models.SparseTransformer(5, 4, 2, 1, 3, 2, **flag), "merged"),
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
