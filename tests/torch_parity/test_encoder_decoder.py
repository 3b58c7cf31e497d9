"""The encoder-decoder compared with torch.nn.Transformer with the same weights: logits, loss, and every gradient."""

import math

import numpy as np
import pytest

from scratchformer.models import EncoderDecoder
from scratchformer.ops import sinusoidal_positions
from scratchformer.ops.cross_entropy import IGNORED
from scratchformer.rng import Key

torch = pytest.importorskip("torch")
F = torch.nn.functional

B, S, T, V, C, H, FF, DEPTH = 3, 6, 5, 13, 12, 3, 20, 2
LENGTHS = np.array([S, 2, 4])
RNG = np.random.default_rng(0)
SOURCE, TARGET = RNG.integers(0, V, (B, S)), RNG.integers(0, V, (B, T))
TARGETS = RNG.integers(0, V, (B, T))
TARGETS[1, 3:] = IGNORED


class Theirs(torch.nn.Module):
    """torch.nn.Transformer with one table for both inputs and the output."""

    def __init__(self, norm, activation):
        super().__init__()
        first = norm == "pre"
        self.table = torch.nn.Parameter(torch.empty(V, C))
        options = dict(dropout=0.0, activation=activation, batch_first=True, norm_first=first)
        encoder_layer = torch.nn.TransformerEncoderLayer(C, H, FF, **options)
        decoder_layer = torch.nn.TransformerDecoderLayer(C, H, FF, **options)
        last = [torch.nn.LayerNorm(C) if first else None for _ in range(2)]
        self.transformer = torch.nn.Transformer(
            C, H, DEPTH, DEPTH, FF, batch_first=True, norm_first=first, dropout=0.0,
            custom_encoder=torch.nn.TransformerEncoder(encoder_layer, DEPTH, last[0], enable_nested_tensor=False),
            custom_decoder=torch.nn.TransformerDecoder(decoder_layer, DEPTH, last[1]),
        )  # fmt: skip

    def embed(self, ids):
        positions = torch.from_numpy(sinusoidal_positions(ids.shape[1], C, dtype=np.float64)).to(self.table.dtype)
        return math.sqrt(C) * F.embedding(torch.from_numpy(ids), self.table) + positions

    def forward(self):
        padding = torch.from_numpy(np.arange(S) >= LENGTHS[:, None])
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        y = self.transformer(
            self.embed(SOURCE), self.embed(TARGET), tgt_mask=future,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        return y @ self.table.T


def attention_pairs(ours, theirs):
    """Our names, PyTorch's parameters as slices of rows, and whether they are transposed."""
    for i, part in enumerate((ours.query, ours.key, ours.value)):
        rows = slice(i * C, (i + 1) * C)
        yield part.w, (theirs.in_proj_weight, rows), True
        yield part.b, (theirs.in_proj_bias, rows), False
    yield ours.unify.w, (theirs.out_proj.weight, slice(None)), True
    yield ours.unify.b, (theirs.out_proj.bias, slice(None)), False


def pairs(ours, theirs):
    everything = slice(None)
    yield ours.tokens.table, (theirs.table, everything), False
    norms = []
    for block, layer in zip(ours.encoder, theirs.transformer.encoder.layers, strict=True):
        yield from attention_pairs(block.attention, layer.self_attn)
        norms += [(block.norm1, layer.norm1), (block.norm2, layer.norm2)]
    for block, layer in zip(ours.decoder, theirs.transformer.decoder.layers, strict=True):
        yield from attention_pairs(block.attention, layer.self_attn)
        yield from attention_pairs(block.cross, layer.multihead_attn)
        norms += [(block.norm1, layer.norm1), (block.norm2, layer.norm2), (block.norm3, layer.norm3)]
    both = [*zip(ours.encoder, theirs.transformer.encoder.layers, strict=True)]
    both += [*zip(ours.decoder, theirs.transformer.decoder.layers, strict=True)]
    for block, layer in both:
        for part, linear in ((block.feedforward.up, layer.linear1), (block.feedforward.down, layer.linear2)):
            yield part.w, (linear.weight, everything), True
            yield part.b, (linear.bias, everything), False
    if ours.encoder_norm is not None:
        norms += [(ours.encoder_norm, theirs.transformer.encoder.norm)]
        norms += [(ours.decoder_norm, theirs.transformer.decoder.norm)]
    for norm, layer in norms:
        yield norm.gamma, (layer.weight, everything), False
        yield norm.beta, (layer.bias, everything), False


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_forward_and_backward(norm, activation, precision):
    ours = EncoderDecoder(V, C, H, DEPTH, FF, norm, activation, dropout=0.0, key=Key(1)).to(dtype=precision.dtype)
    ours.flat.data[...] += 0.1 * precision.normal(ours.flat.data.size)  # biases and norms too
    theirs = Theirs(norm, activation).to(getattr(torch, np.dtype(precision.dtype).name))
    names = {id(p): name for name, p in ours.named_parameters().items()}
    copied = list(pairs(ours, theirs))
    assert {id(p) for p, *_ in copied} == names.keys()
    with torch.no_grad():
        for p, (parameter, rows), transposed in copied:
            parameter[rows] = torch.from_numpy(p.data.T if transposed else p.data)
    expected = theirs()
    precision.agree(ours(SOURCE, LENGTHS, TARGET), expected, "logits")
    loss, cache = ours.loss(SOURCE, LENGTHS, TARGET, TARGETS, key=Key(0))
    ours.loss_backward(1.0, cache)
    expected_loss = F.cross_entropy(
        expected.flatten(0, 1), torch.from_numpy(TARGETS).flatten(), ignore_index=IGNORED, label_smoothing=0.1
    )
    expected_loss.backward()
    precision.agree(loss, expected_loss, "loss")
    largest = max(np.abs(p.grad).max() for p, *_ in copied)
    for p, (parameter, rows), transposed in copied:
        grad = parameter.grad[rows].numpy()
        if np.abs(grad).max() > 1e-6 * largest:  # the gradient of a key bias is only rounding
            precision.agree(p.grad.T if transposed else p.grad, parameter.grad[rows], names[id(p)])
        else:
            assert np.abs(p.grad).max() <= 1e-5 * largest, names[id(p)]
