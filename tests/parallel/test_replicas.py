"""However a batch is cut and dealt, the gradient is that of the whole batch."""

import functools
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from threadpoolctl import threadpool_info

from scratchformer.backend import CPU, to_cpu
from scratchformer.data import LabelledBatch, MaskedBatch, SegmentBatch, TextBatch, TranslationBatch
from scratchformer.models import (
    GPT2,
    BertClassifier,
    BertPretraining,
    Classifier,
    EncoderDecoder,
    LanguageModel,
    Llama,
    SparseTransformer,
    TransformerXL,
)
from scratchformer.nn import LayerNorm, TransformerBlock, recompute_blocks
from scratchformer.ops import IGNORED
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.parallel.replicas import AHEAD, SHARES
from scratchformer.rng import Key
from scratchformer.training import Replicas

ROWS = 7
both_models = pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])


def gradient_of_the_whole_batch(model, batch):
    """One forward and one backward, by the same twins as in replicas, but whole."""
    with Replicas(model, 1) as replicas:
        model.flat.grad[...] = 0
        loss, cache = model.loss(*replicas.move(batch))
        model.loss_backward(1.0, cache)
    return float(loss), to_cpu(model.flat.grad).copy()


def gradient_of_replicas(model, batch, count, micro_batch, key=Key(0), precision="float32"):
    with Replicas(model, count, micro_batch, precision) as replicas:
        loss = replicas.gradients(batch, key)
    return float(loss), to_cpu(model.flat.grad).copy()


@both_models
@pytest.mark.parametrize("micro_batch", [*range(1, ROWS + 1), 100, None])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_do_not_depend_on_micro_batches_and_replicas(
    device, make_model, make_batches, kind, count, micro_batch
):
    if count > 1 and device is not CPU:
        pytest.skip("one replica on a device")
    model = make_model(kind, device, np.float64)
    batch = make_batches(kind).batch(2)
    assert len(batch.ids) == ROWS
    loss, expected = gradient_of_the_whole_batch(model, batch)
    found_loss, found = gradient_of_replicas(model, batch, count, micro_batch)
    assert found_loss == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [7]), (2, [4, 3]), (3, [3, 3, 1]), (5, [2, 2, 2, 1]), (7, [1] * 7), (100, [1] * 7)]
)
def test_a_batch_is_divided_into_about_a_given_number_of_micro_batches(make_model, make_batches, count, sizes):
    model, batch = make_model("LanguageModel"), make_batches("LanguageModel", 7).batch(0)
    replicas = Replicas(model, 1, micro_batches=count)
    assert [len(micro.ids) for micro in batch.split(replicas.rows(batch))] == sizes
    assert replicas.describe(batch) == f"1 replica(s) on cpu, micro-batches of {sizes[0]} rows"


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_texts_of_very_different_lengths_count_alike(device, make_model, micro_batch):
    """Micro-batches are cut to their longest text, and the last one has fewer texts: each text still weighs 1/B."""
    lengths = np.array([1, 10, 2, 9, 3])
    draw = Key(3).generator()
    ids = np.where(np.arange(10) < lengths[:, None], draw.integers(2, 29, (5, 10)), 0).astype(np.int32)
    batch = LabelledBatch(ids, lengths, np.array([0, 1, 2, 0, 1]))
    model = make_model("Classifier", device, np.float64)
    loss, expected = gradient_of_the_whole_batch(model, batch)
    found_loss, found = gradient_of_replicas(model, batch, 1, micro_batch)
    assert float(found_loss) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13 * np.abs(expected).max())


@both_models
def test_the_same_run_is_the_same_bit_for_bit_however_threads_are_timed(make_model, make_batches, kind):
    model, batches = make_model(kind, dropout=0.3), make_batches(kind)
    with Replicas(model, 3, micro_batch=1) as replicas:
        runs = [
            [(replicas.gradients(batches.batch(i), Key(i)), model.flat.grad.copy()) for i in range(4)] for _ in "ab"
        ]
    for (loss, gradient), (again, same_gradient) in zip(*runs, strict=True):
        assert loss == again
        np.testing.assert_array_equal(gradient, same_gradient)


@both_models
def test_micro_batch_i_drops_out_by_the_key_folded_with_i(device, make_model, make_batches, kind):
    model, batch, key = make_model(kind, device, np.float64, dropout=0.4), make_batches(kind).batch(0), Key(5)
    replicas = Replicas(model, 1, micro_batch=2)
    losses = []
    model.flat.grad[...] = 0
    for i, micro in enumerate(batch.split(2)):
        share = len(micro.ids) / len(batch.ids)
        loss, cache = model.loss(*replicas.move(micro), key=key.fold(i))
        model.loss_backward(share, cache)
        losses.append(share * float(loss))
    expected = to_cpu(model.flat.grad).copy()
    loss, found = gradient_of_replicas(model, batch, 1, 2, key)
    assert loss == pytest.approx(sum(losses), rel=1e-12)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_equal_rows_in_two_micro_batches_get_two_dropout_masks(device, make_model, make_batches):
    model = make_model("LanguageModel", device, dropout=0.4)
    row = make_batches("LanguageModel").batch(0).split(1)[0]
    batch = type(row)(*(np.repeat(a, 2, axis=0) for a in row))
    single, _ = gradient_of_replicas(model, row, 1, 1)
    doubled, _ = gradient_of_replicas(model, batch, 1, 1)
    assert doubled != pytest.approx(single, rel=1e-4)


@both_models
def test_dropout_replays_with_its_key_and_changes_with_another(device, make_model, make_batches, kind):
    model, batch = make_model(kind, device, dropout=0.4), make_batches(kind).batch(0)
    (first, gradient), (again, same), (other, _) = (gradient_of_replicas(model, batch, 1, 2, Key(i)) for i in (1, 1, 2))
    assert first == again != other
    np.testing.assert_allclose(gradient, same, rtol=1e-4, atol=1e-6)  # the order of a GPU's sums varies


@both_models
@pytest.mark.parametrize("count", [1, 3])
def test_earlier_gradients_are_cleared(make_model, make_batches, kind, count):
    model, batch = make_model(kind), make_batches(kind).batch(0)
    with Replicas(model, count, micro_batch=2) as replicas:
        replicas.gradients(batch, Key(0))
        before = model.flat.grad.copy()
        for grad in (*(replica.flat.grad for replica in replicas.models), *replicas.spare):
            grad[...] = 1e6
        replicas.gradients(batch, Key(0))
    np.testing.assert_array_equal(model.flat.grad, before)


def test_more_replicas_than_micro_batches(make_model, make_batches):
    model, batch = make_model("LanguageModel", dtype=np.float64), make_batches("LanguageModel").batch(0)
    _, expected = gradient_of_the_whole_batch(model, batch)
    _, found = gradient_of_replicas(model, batch, 3, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("change", ["cast", "a part cast", "a block more", "a layer replaced"])
def test_a_model_that_changed_after_its_replicas_were_made_is_noticed(make_model, make_batches, change):
    model = make_model("LanguageModel")
    with Replicas(model, 2) as replicas:
        if change == "a block more":
            model.body.blocks.append(TransformerBlock(model.body.d_model, 2, causal=True))
        elif change == "a layer replaced":
            model.body.blocks[0].norm1 = LayerNorm(model.body.d_model)
        else:
            (model if change == "cast" else model.output).to(dtype=np.float64)
        refused = r"after its replicas were made|several types|share the flat arrays"
        for _ in range(2):
            with pytest.raises(ValueError, match=refused):
                replicas.gradients(make_batches("LanguageModel").batch(0), Key(0))
        with pytest.raises(ValueError, match=refused):
            replicas.map_models(lambda model, item: item, range(3))


def test_replicas_share_the_parameters_and_own_their_gradients(make_model):
    replicas = Replicas(make_model("LanguageModel"), 3)
    first, *others = (m.flat for m in replicas.models)
    assert all(np.shares_memory(first.data, flat.data) for flat in others)
    assert not any(np.shares_memory(first.grad, flat.grad) for flat in others)
    first.data[...] = 7
    assert all((p.data == 7).all() for model in replicas.models for p in model.parameters())


def test_items_are_dealt_in_turn_and_results_keep_their_order(make_model):
    with Replicas(make_model("LanguageModel"), 3) as replicas:
        found = replicas.map_models(lambda model, item: (replicas.models.index(model), item), range(8))
        assert replicas.map_models(lambda model, item: item, []) == []
    assert found == [(i % 3, i) for i in range(8)]


def test_replicas_run_on_threads_inside_the_block_and_one_after_another_outside(make_model, make_batches):
    model, batch = make_model("LanguageModel"), make_batches("LanguageModel").batch(0)
    replicas = Replicas(model, 2, micro_batch=2)
    here = threading.get_ident()
    loss = replicas.gradients(batch, Key(0))
    with replicas:
        assert here not in replicas.map(lambda _: threading.get_ident(), range(4))
        assert replicas.gradients(batch, Key(0)) == loss
    assert set(replicas.map(lambda _: threading.get_ident(), range(4))) == {here}
    assert replicas.gradients(batch, Key(0)) == loss


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"count": 0}, "count: expected a number >= 1, got 0"),
        ({"count": -1}, "count: expected a number >= 1, got -1"),
        ({"count": 1_000_000}, "count: expected at most 512, each of them a thread, got 1000000"),
        ({"micro_batch": 0}, "micro_batch: expected a number >= 1, got 0"),
        ({"micro_batches": 0}, "micro_batches: expected a number >= 1, got 0"),
        (
            {"micro_batch": 2, "micro_batches": 2},
            "micro_batches: give either this or micro_batch, not both",
        ),
    ],
    ids=str,
)
def test_sizes_out_of_range_are_refused(make_model, sizes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Replicas(make_model("LanguageModel"), **sizes)


def test_several_replicas_on_a_device_are_refused(device, make_model):
    if device is CPU:
        pytest.skip("there may be several on a CPU")
    with pytest.raises(ValueError, match="replicas: expected 1 on a GPU; use micro_batch"):
        Replicas(make_model("LanguageModel", device), 2)


@pytest.mark.parametrize("config", [None, {}, {"width": 12}])
def test_a_model_without_d_model_has_four_micro_batches(make_model, make_batches, config):
    model, batch = make_model("LanguageModel"), make_batches("LanguageModel").batch(0)
    loss, expected = gradient_of_the_whole_batch(model, batch)
    if config is None:
        del model.config
    else:
        model.config = config
    assert Replicas(model, 1).rows(batch) == Replicas(model, 3).rows(batch) == 2
    found_loss, found = gradient_of_replicas(model, batch, 1, None)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "fitting", "expected"),
    [
        (32, 8, 8),  # 4 micro-batches
        (32, 5, 4),  # 8, since 5 rows would make 7
        (32, 3, 2),
        (32, 100, 8),  # more would fit, but there would be fewer than 4
        (33, 8, 7),  # 5: nothing is even, and the last one is not much smaller
        (3, 8, 1),
        (2, 1, 1),
    ],
)
def test_rows_of_a_micro_batch_depend_on_the_batch_and_not_on_the_replicas(
    make_model, monkeypatch, rows, fitting, expected
):
    model, batch = make_model("LanguageModel"), TextBatch(*np.zeros((2, rows, 8), np.int32))
    monkeypatch.setattr(Replicas, "fitting", lambda self, length: fitting)
    assert [Replicas(model, count).rows(batch) for count in (1, 2, 3, 8, 16)] == 5 * [expected]


# Targets that do not count

B, T, V, K, M = 5, 6, 11, 3, 4
SIZES = dict(d_model=8, heads=2, depth=1)
MODELS = {
    "LanguageModel": partial(LanguageModel, V, context=T, **SIZES),
    "SparseTransformer": partial(SparseTransformer, V, context=T, stride=2, **SIZES),
    "GPT2": partial(GPT2, V, context=T, dropout=0.0, **SIZES),
    "TransformerXL": partial(TransformerXL, V, context=T, memory=M, **SIZES),
    "Classifier": partial(Classifier, V, K, max_length=T, **SIZES),
    "Classifier of every token": partial(Classifier, V, K, max_length=T, pool="none", **SIZES),
    "EncoderDecoder": partial(EncoderDecoder, V, dropout=0.0, **SIZES),
    "BertPretraining": partial(BertPretraining, V, max_length=T, dropout=0.0, **SIZES),
    "BertClassifier": partial(BertClassifier, V, K, max_length=T, dropout=0.0, **SIZES),
}


@functools.cache
def model_of(kind):
    return MODELS[kind]().to(dtype=np.float64)


def batch_of(kind, ignored, seed, depth=1):
    """A batch of B rows for a model of this kind, in which targets do not count where `ignored` (B, T) is true."""
    draw = np.random.default_rng(seed)
    ids, other = draw.integers(0, V, (2, B, T))
    targets, lengths = np.where(ignored, IGNORED, other), draw.integers(1, T + 1, B)
    if kind == "EncoderDecoder":
        return TranslationBatch(ids, lengths, other[:, ::-1], targets)
    if kind == "TransformerXL":
        return SegmentBatch(ids, targets, draw.standard_normal((B, depth, M, 8)))
    if kind == "BertPretraining":
        places = draw.integers(0, lengths[:, None], (B, 2))
        return MaskedBatch(ids, lengths, ids % 2, places, other[:, :2], other[:, 0] % 2)
    if kind == "Classifier of every token":
        return LabelledBatch(ids, lengths, np.where(ignored, IGNORED, other % K))
    return LabelledBatch(ids, lengths, other[:, 0] % K) if "Classifier" in kind else TextBatch(ids, targets)


UNEQUAL = np.arange(T) < np.arange(B)[:, None] + 2  # in the first row two do not count, in the last all


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=settings.default.max_examples // 3)
@given(arrays(bool, (B, T)), st.integers(1, B), st.integers(1, 3), st.integers(0, 99))
@example(UNEQUAL, 2, 1, 0)
@example(UNEQUAL, 1, 2, 0)
@example(UNEQUAL[:, ::-1], 2, 2, 0)
@example(np.ones((B, T), bool), 2, 2, 0)
def test_micro_batches_add_up_however_many_of_their_targets_count(kind, ignored, rows, count, seed):
    model, batch = model_of(kind), batch_of(kind, ignored, seed)
    model.flat.grad[...] = 0
    loss, cache = model.loss(*batch, key=Key(0))
    model.loss_backward(1.0, cache)
    expected = model.flat.grad.copy()
    found_loss, found = gradient_of_replicas(model, batch, count, rows)
    assert found_loss == pytest.approx(float(loss), rel=1e-12)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13 * np.abs(expected).max())


# The same bits


def trained(model, batches, count, micro_batch=None, steps=3, **options):
    """The losses and the parameters after a few steps with dropout, clipping and Adam."""
    adam, losses = Adam(model.parameters(), 0.01), []
    with Replicas(model, count, micro_batch, **options) as replicas:
        for step in range(steps):
            losses.append(replicas.gradients(batches(step), Key(step)))
            clip_by_global_norm(model.flat.grad, 0.1, replicas.map)
            adam.step(replicas.map)
    return losses, model.flat.data


@pytest.mark.parametrize("kind", [*MODELS, "Llama"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_parameters_have_the_same_bits_with_any_number_of_replicas(kind, precision):
    make = MODELS.get(kind) or partial(Llama, V, context=T, **SIZES)

    def batches(step):
        batch = batch_of(kind, UNEQUAL, step)
        return batch._replace(memory=batch.memory.astype(np.float32)) if kind == "TransformerXL" else batch

    dropout = dict(SIZES, dropout=0.3)
    losses, expected = trained(make(**dropout), batches, 1, 1, precision=precision)
    for count in (2, 3, 4, 8):
        same_losses, found = trained(make(**dropout), batches, count, 1, precision=precision)
        assert losses == same_losses
        np.testing.assert_array_equal(found, expected)


def test_products_of_any_size_have_the_same_bits_with_any_number_of_replicas():
    """Large enough for a BLAS to use several threads, if it may; and more micro-batches than shares."""
    draw = Key(0).generator()
    batch = TextBatch(*draw.integers(0, 256, (2, 3 * SHARES // 2, 64), dtype=np.int32))
    make = partial(LanguageModel, 256, d_model=128, heads=2, depth=1, context=64, key=Key(1))
    losses, expected = trained(make(), lambda step: batch, 1, 1, steps=2)
    for count in (2, 3):
        same_losses, found = trained(make(), lambda step: batch, count, 1, steps=2)
        assert losses == same_losses
        np.testing.assert_array_equal(found, expected)


# Recomputed blocks


@pytest.mark.parametrize("kind", [*MODELS, "Llama"])
@pytest.mark.parametrize(("count", "rows", "precision"), [(1, B, "float32"), (2, 2, "float32"), (2, 2, "float16")])
def test_recomputed_blocks_give_the_same_bits(kind, count, rows, precision):
    """Under dropout, and once more with caches of which the first backward has taken what they kept."""
    make, depth = MODELS.get(kind) or partial(Llama, V, context=T, **SIZES), 3
    model = make(**SIZES | dict(depth=depth, dropout=0.4))
    batch = batch_of(kind, UNEQUAL, 0, depth)
    if kind == "TransformerXL":
        batch = batch._replace(memory=batch.memory.astype(np.float32))
    config = dict(model.config)
    expected = gradient_of_replicas(model, batch, count, rows, precision=precision)
    recompute_blocks(model)
    found = gradient_of_replicas(model, batch, count, rows, precision=precision)
    assert found[0] == expected[0] and np.abs(found[1]).max() > 0
    np.testing.assert_array_equal(found[1], expected[1])
    assert model.config == config

    _, cache = model.loss(*batch, key=Key(0))
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model.loss_backward(1.0, cache)
        gradients.append(model.flat.grad.copy())
    np.testing.assert_array_equal(*gradients)


# Items in a stream


@pytest.mark.parametrize("count", [1, 3])
def test_items_are_read_as_they_are_needed(make_model, count):
    """And released when done: those alive are at most those in progress, one being read and one just done."""

    class Item:
        pass

    made, most = [], 0

    def items():
        nonlocal most
        for _ in range(60):
            item = Item()
            made.append(weakref.ref(item))
            most = max(most, sum(ref() is not None for ref in made))
            yield item

    with Replicas(make_model("LanguageModel"), count) as replicas:
        found = replicas.map_models(lambda model, item: len(made), items())
    assert len(found) == 60 and (found == [*range(1, 61)] or count > 1)
    assert len(made) == 60
    assert 2 <= most <= (AHEAD * count if count > 1 else 0) + 2


def test_a_slow_replica_does_not_change_the_order_or_the_assignment(make_model):
    def work(model, item):
        time.sleep(0.002 * (item % 5 == 0 or replicas.models.index(model) == 1))
        return replicas.models.index(model), item, threading.get_ident()

    with Replicas(make_model("LanguageModel"), 3) as replicas:
        found = replicas.map_models(work, range(40))
    assert [item[:2] for item in found] == [(i % 3, i) for i in range(40)]
    assert len({(replica, thread) for replica, _, thread in found}) == 3


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("source", ["function", "items"])
def test_an_exception_stops_all_replicas_and_closes_the_generator(make_model, count, source):
    started, ended, closed = [], [], []

    def items():
        try:
            for i in range(1000):
                if source == "items" and i == 7:
                    raise KeyError(i)
                yield i
        finally:
            closed.append(i)

    def work(model, item):
        started.append(item)
        time.sleep(0.001)
        try:
            if source == "function" and item == 7:
                raise KeyError(item)
        finally:
            ended.append(item)

    with Replicas(make_model("LanguageModel"), count) as replicas:
        with pytest.raises(KeyError, match="7"):
            replicas.map_models(work, items())
        assert sorted(started) == sorted(ended)
        assert len(closed) == 1 and closed[0] <= 7 + AHEAD * count
        assert replicas.map_models(lambda model, item: item, range(4)) == [0, 1, 2, 3]


def test_each_thread_that_trains_holds_the_blas_to_one_thread():
    """The bits of a product may depend on the number; since threadpoolctl 3.8 one Python thread at a time may
    set it, until it leaves its block.
    """
    model, seen = LanguageModel(29, d_model=8, heads=2, depth=1, context=8), []

    def train():
        with Replicas(model, 1):
            seen.append({each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"})

    train()
    for _ in range(2):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert seen == [{1}] * 3
