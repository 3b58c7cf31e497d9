"""The trace of forward and backward: which calls there are, what they multiply, and what they keep."""

import inspect
import sys

import numpy as np
import pytest
from letters import SIZES, LetterSizes
from traced import CASES, DEPTH, traced
from tracing import owner, trace, trace_operation

from scratchformer import nn, ops
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.data.batching import LabelledBatch, SegmentBatch, TextBatch
from scratchformer.dispatch import reference_only
from scratchformer.rng import Key
from scratchformer.training import Replicas, estimate


def test_a_linear_layer():
    call = trace(nn.Linear(7, 3), np.ones((2, 5, 7), np.float32))
    (op,) = call.calls
    assert (call.name, call.kind, op.name) == ("Linear", "Linear", "linear")
    assert {name: x.shape for name, x in op.inputs().items()} == {"x": (2, 5, 7), "w": (7, 3), "b": (3,)}
    assert {name: x.shape for name, x in op.gradients().items()} == {"dx": (2, 5, 7), "dw": (7, 3), "db": (3,)}
    assert call.flop == 2 * 10 * 7 * 3 and call.backward.flop == 2 * call.flop
    assert [x.shape for x in call.kept.values()] == [(2, 5, 7)]  # w is kept too, but it is a parameter


class Counted(np.ndarray):
    """An array that counts the multiplications of its matrix products."""

    flop = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        inputs = [np.asarray(x) for x in inputs]
        plain = {"out": tuple(np.asarray(x) for x in out)} if out else {}
        y = getattr(ufunc, method)(*inputs, **plain, **options)
        if ufunc is np.matmul and inputs[0].ndim > 1 and inputs[1].ndim > 1:
            Counted.flop += 2 * y.size * inputs[0].shape[-1]
        return out[0] if out else y.view(Counted) if isinstance(y, np.ndarray) else y

    def __array_function__(self, function, types, args, kwargs):
        y = super().__array_function__(function, types, args, kwargs)
        return y.view(Counted) if isinstance(y, np.ndarray) else y


@pytest.mark.parametrize("name", ["attention, grouped", "relative_attention", "dense, gelu", "linear", "layernorm"])
def test_flop_of_references_as_an_array_counts_them(name):
    """The trace rewrites products in the code; an array with its own __array_ufunc__ sees them from the other side."""
    case = OPERATIONS[name](Draw(0))
    with reference_only():
        call = trace_operation(case.op, case.op_backward, *case.args, dy=(dy := np.ones(case.op(*case.args)[0].shape)))
        Counted.flop = 0
        args = [x.view(Counted) if isinstance(x, np.ndarray) else x for x in case.args]
        _, cache = case.op(*args)
        assert call.flop == Counted.flop
        case.op_backward(dy.view(Counted), cache)
    assert call.flop + call.backward.flop == Counted.flop


def test_flop_of_a_model_by_the_rule_of_thumb():
    """Forward: two for each weight in a product and token, and attention's two products; backward: twice that."""
    letters, call, _ = traced("LanguageModel")
    B, T, C = (letters.sizes[letter] for letter in "BTC")
    weights = sum(p.data.size for name, p in call.parameters.items() if name.endswith(".w"))
    assert call.flop == 2 * B * T * weights + DEPTH * 4 * B * T * T * C
    assert call.backward.flop == 2 * call.flop


def test_twins_are_named_and_keep_what_they_keep():
    _, reference, twins = traced("SelfAttention")
    (op,), (twin,) = ([call for call in root.walk() if call.kind == "attention"] for root in (reference, twins))
    assert not op.twin and twin.twin
    B, T, H = (SIZES[letter] for letter in "BTH")
    assert (B, H, T, T) in [x.shape for x in op.kept.values()]
    assert (B, H, T, T) not in [x.shape for x in twin.kept.values()]
    assert twin.backward.flop > op.backward.flop  # the scores are computed again


def test_recomputing_runs_forward_twice_and_keeps_the_input():
    _, plain, _ = traced("TransformerBlock")
    _, call, _ = traced("Recompute")
    assert (call.flop, call.backward.flop) == (plain.flop, plain.flop + plain.backward.flop)
    assert [id(owner(x)) for x in call.kept.values()] == [id(owner(call.arguments["inputs"][0]))]


@pytest.mark.parametrize("name", ["LanguageModel", "EncoderDecoder", "BertPretraining", "Llama"])
def test_every_forward_has_its_backward(name):
    """Also where a layer without a cache is used twice, such as the positions of encoder and decoder."""
    for root in traced(name)[1:]:
        layers = [call for call in root.walk() if call.layer is not None]
        assert all(call.backward is not None for call in layers)
        assert len({id(call.backward) for call in layers}) == len(layers)


BATCHES = {
    "GPT2": TextBatch,
    "TransformerXL": SegmentBatch,
    "Classifier": LabelledBatch,
}


@pytest.mark.parametrize("name", BATCHES)
def test_bytes_kept_as_the_estimate_of_memory_has_them(name):
    """The batch itself is not in the estimate."""
    model, inputs, _ = CASES[name](LetterSizes())
    config, B = model.config, SIZES["B"]
    batch = BATCHES[name](*inputs)
    longest = batch.stretched(B, config.get("context") or config["max_length"])
    with Replicas(model, 1, B) as replicas:
        estimated = estimate(replicas, batch).activations
        kept = trace(model, *longest, loss=True, key=Key(0)).kept
    given = {id(owner(x)) for x in longest}
    assert sum(x.nbytes for key, x in kept.items() if key not in given) == estimated


def test_nothing_of_a_trace_remains(monkeypatch):
    """Afterwards, even if the layer raised, code and profile are what they were."""
    before = ops.linear.reference.__code__
    monkeypatch.setattr(nn.FeedForward, "backward", lambda self, dy, cache: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace(nn.TransformerBlock(4, 2), np.ones((1, 3, 4), np.float32))
    assert ops.linear.reference.__code__ is before and sys.getprofile() is None
    assert not any("_counted_product" in vars(module) for module in map(inspect.getmodule, (nn.LoRA, ops.attention)))
