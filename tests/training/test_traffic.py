"""What makes a GPU wait, as the strict stand-in counts it: nothing in a training step, and one thing in a token."""

import signal
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import scratchformer
from scratchformer import models
from scratchformer.backend import CPU, DeviceError, get_device, to_device
from scratchformer.data import Labelled
from scratchformer.generation import generate
from scratchformer.generation.beam import beam_search
from scratchformer.optim import AdamW, Cosine, Muon, clip_by_global_norm
from scratchformer.parallel.diagnose import Diverged
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT, traffic
from scratchformer.training import Replicas, evaluate_classifier

from .visible_loop import train

PACKAGE = Path(scratchformer.__file__).parent
B, T, S, V, C, K = 3, 8, 5, 29, 12, 3
SIZES = dict(d_model=C, heads=2, depth=2)


def integers(shape, high, low=0):
    return Key(0).fold("ids", *shape, high).generator().integers(low, high, shape).astype(np.int32)


def normal(shape):
    return Key(0).fold("numbers", *shape).generator().standard_normal(shape).astype(np.float32)


IDS, TARGETS, LABELS = integers((B, T), V), integers((B, T), V, -1), integers((B,), K)
LENGTHS, SEGMENTS = np.array([T, 4, 1]), integers((B, T), 2)
TEXT = (IDS, TARGETS)
# Models, and the arrays that their `loss` takes.
CASES = {
    "LanguageModel": lambda: (models.LanguageModel(V, context=T, dropout=0.1, **SIZES), TEXT),
    "LanguageModel, sinusoidal, recompute": lambda: (
        models.LanguageModel(V, context=T, positions="sinusoidal", recompute=True, **SIZES),
        TEXT,
    ),
    "GPT2": lambda: (models.GPT2(V, context=T, dropout=0.1, **SIZES), TEXT),
    "Llama": lambda: (models.Llama(V, context=T, dropout=0.1, kv_heads=1, window=3, **SIZES), TEXT),
    "SparseTransformer": lambda: (models.SparseTransformer(V, context=T, stride=2, **SIZES), TEXT),
    "SparseTransformer, fixed": lambda: (models.SparseTransformer(V, context=T, stride=2, kind="fixed", **SIZES), TEXT),
    "TransformerXL": lambda: (
        models.TransformerXL(V, context=T, memory=4, dropout=0.1, **SIZES),
        (*TEXT, normal((B, 2, 4, C))),
    ),
    "Classifier": lambda: (models.Classifier(V, K, max_length=T, dropout=0.1, **SIZES), (IDS, LENGTHS, LABELS)),
    "Classifier, max": lambda: (models.Classifier(V, K, max_length=T, pool="max", **SIZES), (IDS, LENGTHS, LABELS)),
    "Classifier of every token": lambda: (
        models.Classifier(V, K, max_length=T, pool="none", **SIZES),
        (IDS, LENGTHS, integers((B, T), K, -1)),
    ),
    "Classifier of units": lambda: (
        models.Classifier(None, K, max_length=T, units=4, **SIZES),
        (normal((B, T, 4)), LENGTHS, LABELS),
    ),
    "BertPretraining": lambda: (
        models.BertPretraining(V, max_length=T, dropout=0.1, **SIZES),
        (IDS, LENGTHS, SEGMENTS, np.zeros((B, K), np.int64), integers((B, K), V), integers((B,), 2)),
    ),
    "BertClassifier": lambda: (
        models.BertClassifier(V, K, max_length=T, dropout=0.1, **SIZES),
        (IDS, LENGTHS, LABELS, SEGMENTS),
    ),
    "EncoderDecoder": lambda: (
        models.EncoderDecoder(V, d_ff=16, dropout=0.1, **SIZES),
        (integers((B, S), V), np.array([S, 2, 1]), IDS, TARGETS),
    ),
}


def batch_of(arrays):
    """A batch of the arrays, as `Replicas` takes it."""

    class Batch(namedtuple("Batch", [f"x{i}" for i in range(len(arrays))])):
        weight = tokens = B * T

        def split(self, size):
            assert size == B
            return [self]

    return Batch(*arrays)


@pytest.mark.parametrize("optimizer", [AdamW, Muon])
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_every_model_waits_for_nothing_and_sends_only_its_batch(name, optimizer):
    model, arrays = CASES[name]()
    model = model.to(STRICT)
    optimizer = (
        AdamW(model.parameters(), 0.01) if optimizer is AdamW else Muon(model.parameters(), 0.01, 0.01, hidden="*.w")
    )
    replicas, batch = Replicas(model, 1), batch_of(arrays)
    for step in range(2):  # tables of positions are sent once
        with traffic() as found:
            loss = replicas.gradients(batch, Key(step))
            norm = clip_by_global_norm(model.flat.grad, 1.0)
            optimizer.step()
    assert np.isfinite([float(loss), float(norm)]).all()
    assert [entry.partition(" in ")[0] for entry in found] == len(arrays) * ["to the device"]


def trained(name, device, precision, keys):
    """The losses of some steps of a model, and how many kinds of steps were recorded as CUDA graphs."""
    model, arrays = CASES[name]()
    model, batch = model.to(device), batch_of(arrays)
    optimizer, losses = AdamW(model.parameters(), 1e-3), []
    with Replicas(model, 1, B, precision=precision) as replicas:
        if replicas.loss_scale is not None:
            replicas.loss_scale.scale = 1024.0  # the first one is chosen to overflow, and these steps skip none
        for key in keys:
            losses.append(replicas.gradients(batch, key))
            clip_by_global_norm(model.flat.grad, 1.0)
            optimizer.step()
        recorded = 0 if replicas.graphs is None else len(replicas.graphs.recorded)
    return [float(loss) for loss in losses], recorded


TOLERANCES = {"float32": 2e-5, "tf32": 5e-3, "bfloat16": 3e-2, "float16": 5e-3}


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_cupy_trains_every_model_like_the_cpu(name, precision, recwarn):
    """With dropout and without it, as a CUDA graph from the third step on."""
    try:
        gpu = get_device("gpu")
    except DeviceError as error:
        pytest.skip(str(error))
    for keys in [Key(0), Key(1), Key(2), Key(3)], 6 * [None]:
        here, _ = trained(name, CPU, "float32", keys)
        there, recorded = trained(name, gpu, precision, keys)
        np.testing.assert_allclose(there, here, rtol=TOLERANCES[precision])
        assert recorded == 1
    assert not recwarn.list


def test_what_is_counted_is_named_with_its_line():
    x = to_device(IDS, STRICT)
    with traffic() as found:
        float(x.sum())
    assert found == [
        f"to the host in {__file__}:{test_what_is_counted_is_named_with_its_line.__code__.co_firstlineno + 3}"
    ]


@pytest.mark.parametrize("change", [lambda x: x.max() + 1000, lambda x: -7], ids=["large", "negative"])
@pytest.mark.parametrize("name", CASES)
def test_values_out_of_range_are_found_on_the_host(name, change):
    """With the error that `loss` raises on a CPU, for each array of integers."""
    model, arrays = CASES[name]()
    replicas, found = Replicas(CASES[name]()[0].to(STRICT), 1), 0
    for i, x in enumerate(arrays):
        if x.dtype.kind != "i":
            continue
        wrong = x.copy()
        wrong.flat[0] = change(x)
        batch = batch_of([*arrays[:i], wrong, *arrays[i + 1 :]])
        with pytest.raises((IndexError, ValueError)) as on_cpu:
            model.loss(*batch, key=Key(0))
        with traffic() as entries, pytest.raises(on_cpu.type) as found_there:
            replicas.gradients(batch, Key(0))
        assert entries == [] and str(found_there.value) == str(on_cpu.value)
        found += 1
    assert found


class OwnLoss(models.LanguageModel):
    """Its loss takes another argument, so the check of the class above does not fit."""

    def loss(self, ids, targets, weight, key=None):
        loss, cache = super().loss(ids, targets, key)
        return loss * weight, cache


def test_a_model_with_a_loss_of_its_own_is_checked_on_the_device():
    _, arrays = CASES["LanguageModel"]()
    replicas = Replicas(OwnLoss(V, context=T, **SIZES).to(STRICT), 1)
    weight = np.float32(2.0).reshape(())
    assert np.isfinite(float(replicas.gradients(batch_of([*arrays, weight]), Key(0))))
    with pytest.raises(IndexError, match="ids: expected values from 0 to 28, got 1000"):
        replicas.gradients(batch_of([np.full_like(arrays[0], 1000), arrays[1], weight]), Key(0))


def test_a_model_that_overrides_its_forward_is_checked_on_the_device():
    class Shifted(models.LanguageModel):
        def forward(self, ids, key=None):
            return super().forward(ids + 1, key)

    replicas = Replicas(Shifted(V, context=T, **SIZES).to(STRICT), 1)
    with pytest.raises(IndexError, match="ids: expected values from 0 to 28, got 29"):
        replicas.gradients(batch_of([np.full_like(IDS, V - 1), TARGETS]), Key(0))


class Batches:
    def __init__(self, arrays, bad=None):
        self.arrays, self.bad = arrays, bad

    def batch(self, step):
        return batch_of(self.arrays)


def run(tmp_path, steps, prepare=lambda replicas: None, **options):
    model, arrays = CASES["LanguageModel"]()
    model = model.to(STRICT)
    with Replicas(model, 1) as replicas, traffic() as found:
        prepare(replicas)
        optimizer = AdamW(model.parameters(), 0.01)
        settings = dict(snapshot_every=steps, **options)
        train(replicas, optimizer, Cosine(0.01, 1, steps), Batches(arrays), steps, tmp_path / "run", **settings)
    return [entry.replace(str(PACKAGE), "") for entry in found if entry.startswith("to the host")]


def test_training_reads_losses_only_where_one_is_logged(tmp_path):
    """Twice as many steps with as many records bring no more to the host."""
    once, twice = (run(tmp_path / str(steps), steps, log_every=steps // 3) for steps in (12, 24))
    assert sum("run.py" in entry for entry in once) == 3 and once == twice


def test_a_step_that_diverges_between_two_records_is_named(tmp_path):
    def prepare(replicas):
        gradients, steps = replicas.gradients, []

        def poisoned(*args, **options):
            loss = gradients(*args, **options)
            steps.append(loss)
            return loss * (np.nan if len(steps) == 6 else 1.0)

        replicas.gradients = poisoned

    with pytest.raises(Diverged, match=r"step 6: loss nan, .*this was noticed in step 8"):
        run(tmp_path, 12, prepare, log_every=4)


@pytest.mark.usefixtures("default_signals")
def test_a_step_that_diverged_is_named_when_the_run_is_stopped(tmp_path):
    """Before the step in which it would have been noticed."""

    def prepare(replicas):
        gradients, steps = replicas.gradients, []

        def poisoned(*args, **options):
            steps.append(gradients(*args, **options))
            if len(steps) == 5:
                signal.raise_signal(signal.SIGTERM)
            return steps[-1] * (np.nan if len(steps) == 3 else 1.0)

        replicas.gradients = poisoned

    with pytest.raises(Diverged, match=r"step 3: loss nan, .*noticed in step 5"):
        run(tmp_path, 12, prepare, log_every=12)


@pytest.mark.parametrize("count", [2, 4])
def test_a_classifier_is_scored_with_one_wait_for_each_batch(count):
    replicas = Replicas(CASES["Classifier"]()[0].to(STRICT), 1)
    texts = Labelled([*np.tile(IDS, (count, 1))], np.tile(LABELS, count))
    with traffic() as found:
        evaluate_classifier(replicas, texts, T, batch_size=B)
    assert sum(entry.startswith(("to the host", "waits")) for entry in found) == count


@pytest.mark.parametrize("name", ["LanguageModel", "Llama", "TransformerXL"])
def test_a_token_of_generation_waits_once(name):
    model, _ = CASES[name]()
    model = model.to(STRICT)
    tokens = generate(model, IDS[:2, :3], 30, temperature=0)
    for _ in range(12):  # until the tables of positions are long enough
        next(tokens)
    for _ in range(10):
        with traffic() as found:
            next(tokens)
        assert sorted(entry.partition(" in ")[0] for entry in found) == ["to the device", "to the host"]


def test_a_token_of_beam_search_waits_once(monkeypatch):
    model, arrays = CASES["EncoderDecoder"]()
    model = model.to(STRICT)
    counts = []
    for longer in 3, 4:
        with traffic() as found:
            beam_search(model, arrays[0], arrays[1], 0, 1, beam=1, longer=longer)
        counts.append(sum(entry.startswith(("to the host", "waits")) for entry in found))
    assert counts[1] - counts[0] == 1
