"""Training and evaluating a model with a memory over a text in order."""

import math

import numpy as np
import pytest

from scratchformer.backend import CPU, array_module, to_cpu, to_device
from scratchformer.data import DataError, SegmentBatches
from scratchformer.models import TransformerXL
from scratchformer.optim import Adam, Cosine
from scratchformer.rng import Key
from scratchformer.training import (
    Replicas,
    SnapshotError,
    estimate,
    evaluate_language_model,
    evaluate_transformer_xl,
    load_model,
    load_snapshot,
    read_metrics,
    save_snapshot,
)
from scratchformer.training.evaluate import GROUPS
from scratchformer.training.snapshot import restore

from .visible_loop import train

V, T, M, ROWS = 29, 8, 8, 7


def make(device=CPU, dtype=np.float32, seed=0, memory=M, **options):
    sizes = {"d_model": 12, "heads": 3, "depth": 2, "norm": "pre", "key": Key(seed), **options}
    return TransformerXL(V, context=T, memory=memory, **sizes).to(device, dtype)


def make_batches(text, rows=ROWS):
    return SegmentBatches(text[:600], rows, T, Key(0).fold("batches"), depth=2, d_model=12)


class Stop(Exception):
    """Ends a run like a crash."""


class Crashing:
    """Batches that end the run when the batch of step `at` is requested."""

    def __init__(self, batches, at):
        self.batches, self.at = batches, at

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step):
        if step == self.at:
            raise Stop
        return self.batches.batch(step)


def run(text, out, steps, at=None, count=2, seed=0, **options):
    """Run `train`; returns the final state, model, optimizer and batches."""
    model = make(seed=seed, dropout=0.2)
    optimizer, batches = Adam(model.parameters(), 0.01), Crashing(make_batches(text), at)
    with Replicas(model, count, micro_batch=3) as replicas:
        state = train(
            replicas,
            optimizer,
            Cosine(0.01, 4, 20),
            batches,
            steps,
            out,
            evaluate=lambda: evaluate_transformer_xl(replicas, text[600:]),
            evaluate_every=4,
            select=("bits_per_byte", "min"),
            snapshot_every=3,
            log_every=1,
            **options,
        )
    return state, model, optimizer, batches.batches


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name, strict=True)


# Replicas


@pytest.mark.parametrize("micro_batch", [1, 3, 100, None])
@pytest.mark.parametrize("count", [1, 3])
def test_replicas_give_gradients_and_memory_of_the_whole_batch(device, text, count, micro_batch):
    if count > 1 and device is not CPU:
        pytest.skip("one replica on a device")
    model, batches, kept = make(device, np.float64), make_batches(text), None
    for step in range(3):
        batch = batches.batch(step)
        ids, targets = (to_device(a, device) for a in batch[:2])
        model.zero_grad()
        loss, cache = model.loss(ids, targets, kept)
        model.loss_backward(1.0, cache)
        expected, kept = to_cpu(model.flat.grad).copy(), model.remember(cache[0])
        with Replicas(model, count, micro_batch) as replicas:
            found = replicas.gradients(batch, Key(0), lambda memories, step=step: batches.remember(step, memories))
        assert float(found) == pytest.approx(float(loss), rel=1e-12)
        np.testing.assert_allclose(to_cpu(model.flat.grad), expected, rtol=1e-9, atol=1e-13 * np.abs(expected).max())
        assert array_module(batches.memory) is device.xp  # it stays where the model is
        np.testing.assert_allclose(to_cpu(batches.memory), to_cpu(kept), rtol=1e-12, atol=1e-14)
        assert isinstance(batches.state_dict()["memory"], np.ndarray)


def test_a_model_without_a_memory_is_not_asked_for_one(make_model, text):
    """A memory is computed only if the batches can keep it."""
    model, batches = make(), make_batches(text)
    model.remember = None
    assert Replicas(model, 1).gradients(batches.batch(0), Key(0)) > 0


# Training


def test_the_loss_falls_and_the_memory_moves_on(tmp_path, text):
    _, _, _, batches = run(text, tmp_path, 60)
    losses = [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert batches.step == 60 and batches.memory.shape == (ROWS, 2, M, 12)


@pytest.mark.parametrize("crash_step", [3, 5, 9, 13])
def test_a_resumed_run_ends_as_the_uninterrupted_one_bit_for_bit(tmp_path, text, crash_step):
    """A pass has nine segments, so this includes a memory in the middle of a pass and the start of the second."""
    assert len(make_batches(text)) == 9
    state, model, optimizer, batches = run(text, tmp_path / "straight", 14)
    with pytest.raises(Stop):
        run(text, tmp_path / "run", 14, at=crash_step)
    again, *resumed, resumed_batches = run(text, tmp_path / "run", 14, seed=9, resume=True)
    assert_same(resumed[0].state_dict(), model.state_dict())
    assert_same(resumed[1].state_dict(), optimizer.state_dict())
    assert_same(resumed_batches.state_dict(), batches.state_dict())
    assert again == state
    for name in "last", "best":
        first, second = (load_snapshot(tmp_path / folder / f"{name}.safetensors") for folder in ("run", "straight"))
        assert_same(first.model, second.model)
        assert_same(first.batches, second.batches)
    assert set(load_snapshot(tmp_path / "run").batches) == {"step", "memory"}
    assert not load_snapshot(tmp_path / "run" / "best.safetensors").batches


def test_a_memory_of_other_sizes_is_refused_and_changes_nothing(tmp_path, text):
    _, model, optimizer, _ = run(text, tmp_path, 3)
    snapshot = load_snapshot(tmp_path)
    other, fresh = make(seed=1, dropout=0.2), make_batches(text, ROWS - 1)
    before = other.state_dict()
    adam = Adam(other.parameters(), 0.01)
    with pytest.raises(
        SnapshotError, match=r"snapshot does not fit: memory: expected .* \(6, 2, M, 12\), got float32 \(7, 2, 8, 12\)"
    ):
        restore(snapshot, other, adam, fresh)
    assert_same(other.state_dict(), before)
    assert adam.steps == 0
    save_snapshot(tmp_path / "without.safetensors", model, optimizer)
    with pytest.raises(SnapshotError, match="expected step and memory, got nothing"):
        restore(load_snapshot(tmp_path / "without.safetensors"), other, adam, make_batches(text))


def test_a_snapshot_makes_the_model_again(tmp_path, text):
    _, model, *_ = run(text, tmp_path, 2)
    loaded, _ = load_model(tmp_path)
    assert type(loaded) is TransformerXL
    assert_same(loaded.state_dict(), model.state_dict())


def test_a_loss_that_is_not_finite_is_traced_to_its_layer(tmp_path, text):
    """In the second step, with the memory from the first."""
    model, batches = make(), make_batches(text)
    batch = batches.batch

    def poisoned(step):
        if step == 1:
            model.body.blocks[1].norm1.gamma.data[0] = math.nan
        return batch(step)

    batches.batch = poisoned
    with Replicas(model, 1, 3) as replicas, pytest.raises(RuntimeError, match=r"the output of body\.blocks\.1\.norm1"):
        train(replicas, Adam(model.parameters(), 0.01), Cosine(0.01, 4, 20), batches, 3, tmp_path)


# Evaluation


def bits_in_order(model, text, memory, first, count):
    """The nats of the last `count` predictions of text[first:], read on its own, segment by segment."""
    kept, nats = None, []
    ids, targets = text[None, first:-1].astype(np.int32), text[first + 1 :]
    for start in range(0, ids.shape[1], T):
        y, cache = model.forward(to_device(ids[:, start : start + T], model.device), kept)
        kept = model.remember(cache, memory)
        z = to_cpu(y)[0]
        z = z - z.max(axis=-1, keepdims=True)
        log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
        nats += [-row[t] for row, t in zip(log_p, targets[start : start + T], strict=False)]
    return nats[len(nats) - count :]


@pytest.mark.parametrize("memory", [None, 0, 3, 20])
@pytest.mark.parametrize("length", [2, 9, 10, 50])
def test_a_text_read_as_one(device, text, length, memory):
    model, text = make(device, np.float64), text[:length]
    nats = bits_in_order(model, text, M if memory is None else memory, 0, length - 1)
    with Replicas(model, 1) as replicas:
        found = evaluate_transformer_xl(replicas, text, memory, streams=1)
    assert found["loss"] == pytest.approx(np.mean(nats), rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(np.mean(nats) / math.log(2), rel=1e-12)


@pytest.mark.parametrize(("count", "streams"), [(1, 2), (1, 5), (2, 3), (3, 7), (2, 49)])
@pytest.mark.parametrize("memory", [0, 5, 8])
def test_streams_begin_a_memory_early_and_count_every_byte_once(text, memory, count, streams):
    model, text = make(CPU, np.float64), text[:50]
    own = math.ceil((49 - memory) / streams)
    nats = bits_in_order(model, text[: memory + own + 1], memory, 0, memory + own)
    for first in range(own, 49, own):
        part = text[first : first + memory + own + 1]
        nats += bits_in_order(model, part, memory, 0, max(0, len(part) - 1 - memory))
    assert len(nats) == 49
    with Replicas(model, count) as replicas:
        found = evaluate_transformer_xl(replicas, text, memory, streams)
    assert found["loss"] == pytest.approx(np.mean(nats), rel=1e-12)


def test_scores_do_not_depend_on_the_number_of_replicas(text):
    model, found = make(), []
    for count in (1, 2, 3):
        with Replicas(model, count, micro_batch=2) as replicas:
            found.append(evaluate_transformer_xl(replicas, np.resize(text, 701)))
    assert found[0] == found[1] == found[2]


def test_streams_are_chosen_so_that_each_has_enough_of_its_own(text, monkeypatch):
    model, rows = make(), []
    remember = model.remember
    model.remember = lambda cache, length: (rows.append(len(cache.memory)), remember(cache, length))[1]
    for length, streams in (60, 1), (200, 3), (701, 10), (4000, 16):
        rows.clear()
        with Replicas(model, 1, micro_batch=2) as replicas:
            evaluate_transformer_xl(replicas, np.resize(text, length))
        assert sum(rows) / len(rows) == streams / min(GROUPS, streams)  # rows of a group


def test_without_a_memory_it_is_evaluated_as_a_language_model_without_overlap(text):
    model = make(CPU, np.float64, memory=0)
    with Replicas(model, 1) as replicas:
        expected = evaluate_language_model(replicas, text[: 6 * T + 1], stride=T)
        found = evaluate_transformer_xl(replicas, text[: 6 * T + 1], streams=1)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)


def test_evaluation_neither_drops_out_nor_learns(device, text):
    plain, dropping = make(device), make(device, dropout=0.5)
    before = to_cpu(dropping.flat.data).copy()
    results = []
    for model in plain, dropping, dropping:
        with Replicas(model, 1) as replicas:
            results.append(evaluate_transformer_xl(replicas, text[:50]))
    assert results[0] == results[1] == results[2]
    np.testing.assert_array_equal(to_cpu(dropping.flat.data), before)
    assert not to_cpu(dropping.flat.grad).any()


def test_bits_are_counted_per_byte_of_each_token(text):
    sizes = np.arange(1, 30)
    plain = evaluate_transformer_xl(Replicas(make(), 1), text[:50])
    found = evaluate_transformer_xl(Replicas(make(), 1), text[:50], sizes=sizes)
    assert found["loss"] == plain["loss"]
    expected = plain["bits_per_byte"] * 49 / int(sizes[text[1:50]].sum())
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-12)


def test_invalid_arguments_of_evaluation(text):
    replicas = Replicas(make(), 1)
    with pytest.raises(DataError, match=r"corpus: 1 token\(s\), but there is nothing to predict"):
        evaluate_transformer_xl(replicas, text[:1])
    for memory, streams, message in (
        (-1, 1, "memory: expected a number >= 0, got -1"),
        (8, -1, "streams: expected a number >= 0, got -1"),
        (8, 0, "streams: expected a number from 1 to 49, got 0"),
        (8, 50, "streams: expected a number from 1 to 49, got 50"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            evaluate_transformer_xl(replicas, text[:50], memory, streams)


# The machine's memory


def test_the_estimate_counts_a_full_memory(text):
    """Though the first step has none, it is kept for the whole batch, and twice during a step."""
    model, batches = make(), make_batches(text)
    found, without = (
        estimate(Replicas(model, 1, 2), batches.batch(0)),
        estimate(Replicas(make(memory=0), 1, 2), batches.batch(0)),
    )
    assert found.memory == ROWS * 2 * M * 12 * 4 and without.memory == 0
    step = found.activations + found.transient + found.memory
    assert found.peak == found.code + 6 * found.weights + found.memory + max(step, 3 * found.weights)
    assert found.activations > 1.2 * without.activations
    assert "memory of two segments" in str(found) and "memory of two segments" not in str(without)
