"""Which steps of training are recorded, of every model, and that a recorded step is the same step.

`FakeGPU` does again what a step did while it was recorded, on the strict stand-in for a GPU's arrays.
../kernels/test_cupy.py has the real one.
"""

from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from scratchformer import models
from scratchformer.backend import to_cpu
from scratchformer.data import SegmentBatch, SegmentBatches, TextBatch
from scratchformer.nn import Dropout
from scratchformer.ops import IGNORED
from scratchformer.optim import AdamW
from scratchformer.parallel import graphs
from scratchformer.parallel.graphs import EARLIER
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT
from scratchformer.training import Replicas

from ..parallel.fake_gpu import FakeGPU
from .test_traffic import CASES, SIZES, B, T, V, integers


def batch_of(arrays):
    """A batch of the arrays, which can be divided."""

    class Rows(namedtuple("Rows", [f"x{i}" for i in range(len(arrays))])):
        tokens = weight = property(lambda self: len(self[0]) * T)

        def split(self, size):
            return [Rows(*(x[i : i + size] for x in self)) for i in range(0, len(self[0]), size)]

    return Rows(*arrays)


def recorder(replicas, monkeypatch):
    """Let replicas on the strict stand-in record their steps. Returns the fake GPU."""
    monkeypatch.setattr(graphs, "free_memory", lambda device: device.free)
    gpu = FakeGPU(STRICT.xp)
    replicas.graphs = gpu.graphs(replicas.step_on_device, replicas.models[0].flat.grad)
    return gpu


def trained(model, batches, steps, monkeypatch, recording, **options):
    """The losses and weights after some steps, and the fake GPU."""
    model = model.to(STRICT)
    optimizer, losses, gpu = AdamW(model.parameters(), 1e-2), [], None
    with Replicas(model, 1, **options) as replicas:
        if recording:
            gpu = recorder(replicas, monkeypatch)
        for step in range(steps):
            remember = partial(batches.remember, step) if hasattr(batches, "remember") else None
            losses.append(float(replicas.gradients(batches.batch(step), Key(1, step), remember)))
            replicas.clip(optimizer, 1.0)
            replicas.step(optimizer)
        if recording:
            gpu.keys = [len(each.starts.places) for each in replicas.graphs.recorded.values()]
    return losses, to_cpu(model.flat.data), gpu


def same(make, batches, steps, monkeypatch, **options):
    """Assert that recording changes no bit. Returns the fake GPU.

    make: a function that makes the model; batches: one that makes the batches.
    """
    *found, gpu = trained(make(), batches(), steps, monkeypatch, True, **options)
    *right, _ = trained(make(), batches(), steps, monkeypatch, False, **options)
    assert found[0] == right[0]
    np.testing.assert_array_equal(found[1], right[1])
    return gpu


@pytest.mark.parametrize("p", [0.0, 0.2], ids=["", "dropout"])
@pytest.mark.parametrize("micro_batch", [None, 1], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("name", CASES)
def test_every_model_is_recorded_and_its_step_is_the_same(name, micro_batch, p, monkeypatch):
    """To the last bit, with dropout and without, for a whole batch and for 3 micro-batches."""

    def make():
        model, _ = CASES[name]()
        for _, layer in model.named_layers():
            if isinstance(layer, Dropout):
                layer.p = p
        return model

    batch, steps = batch_of(CASES[name]()[1]), 4
    gpu = same(make, lambda: SimpleNamespace(batch=lambda step: batch), steps, monkeypatch, micro_batch=micro_batch)
    count = steps if micro_batch is None else steps * B
    assert gpu.events.count("launch") == count - EARLIER
    (keys,) = gpu.keys
    assert (keys > 0) == (p > 0)
    assert gpu.traffic == []


@pytest.mark.parametrize("micro_batch", [None, 1], ids=["whole", "micro-batches"])
def test_a_model_with_a_memory_is_recorded(micro_batch, monkeypatch):
    """The memory of each step reaches the next, and a new pass through the text begins without one."""
    make = partial(models.TransformerXL, V, context=T, memory=2 * T, dropout=0.1, **SIZES)
    text = integers((B * (7 * T + 1),), V)
    batches = partial(SegmentBatches, text, B, T, Key(2), SIZES["depth"], SIZES["d_model"])
    steps = 14
    assert len(batches()) < steps // 2
    gpu = same(make, batches, steps, monkeypatch, micro_batch=micro_batch)
    assert gpu.events.count("launch") > 0 and gpu.keys == [5] * len(gpu.keys)


@pytest.mark.parametrize("name", ["LanguageModel", "TransformerXL"])
def test_a_batch_whose_micro_batches_weigh_differently(name, monkeypatch):
    """Also one in which nothing counts."""
    make, (ids, targets, *memory) = (lambda: CASES[name]()[0]), CASES[name]()[1]

    def batch(step):
        counted = targets.copy()
        counted[0, : step + 1] = IGNORED
        counted[1:, 3:] = IGNORED
        return (SegmentBatch if memory else TextBatch)(ids, counted if step != 3 else counted * 0 + IGNORED, *memory)

    gpu = same(make, lambda: SimpleNamespace(batch=batch), 5, monkeypatch, micro_batch=1)
    assert gpu.events.count("launch") == 5 * B - EARLIER


def test_a_setting_that_is_changed_reaches_the_next_step(monkeypatch):
    """The step is then recorded anew."""
    made, text = [], batch_of(CASES["LanguageModel"]()[1])

    def make():
        made.append(CASES["LanguageModel"]()[0])
        return made[-1]

    def batch(step):
        if step == 4:
            made[-1].body.dropout.p = 0.5
        return text

    gpu = same(make, lambda: SimpleNamespace(batch=batch), 8, monkeypatch)
    assert gpu.events.count("begin") == 2 and gpu.events.count("launch") == 8 - 2 * EARLIER
