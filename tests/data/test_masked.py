import math

import numpy as np
import pytest

from scratchformer.data import Labelled, MaskedBatch, MaskedBatches, single_texts
from scratchformer.data.masked import places_of
from scratchformer.data.subwords import BERT_SPECIALS
from scratchformer.models import BertPretraining
from scratchformer.ops import IGNORED
from scratchformer.rng import Key
from scratchformer.training import Replicas, estimate, evaluate_pretraining

PAD, UNK, CLS, SEP, MASK = range(5)
LONGEST = 200


class Numbers:
    """A vocabulary of `size` tokens, special tokens first."""

    around = "[CLS]", "[SEP]"

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, token):
        return BERT_SPECIALS.index(token)


def make_batches(count=40, batch_size=8, max_length=60, seed=0, lengths=None, key=Key(0), **options):
    """Texts in which every token encodes its text and its position: 5 + LONGEST · text + position."""
    if lengths is None:
        lengths = np.random.default_rng(seed).integers(30, LONGEST, count)
    texts = [(5 + LONGEST * i + np.arange(length)).astype(np.int32) for i, length in enumerate(lengths)]
    return MaskedBatches(texts, Numbers(5 + LONGEST * count), batch_size, max_length, key, **options)


def unhidden(batch):
    """The ids before tokens were hidden."""
    ids = batch.ids.copy()
    np.put_along_axis(ids, batch.places, batch.targets, axis=1)
    return ids


def equal(first, second):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_row_is_two_pieces_between_special_tokens():
    """The second piece follows the first in its text, or is the second piece of another row."""
    kinds = []
    for step in range(20):
        batch = make_batches().batch(step)
        B, T = batch.ids.shape
        assert T <= 60 and batch.lengths.tolist() == [T] * B
        for ids, segments, unrelated in zip(unhidden(batch), batch.segments, batch.unrelated, strict=True):
            assert ids[0] == CLS and ids[-1] == SEP and (ids == SEP).sum() == 2 and (ids < 5).sum() == 3
            middle = int(np.argmax(ids == SEP))
            assert segments.tolist() == [0] * (middle + 1) + [1] * (T - middle - 1)
            first, second = ids[1:middle] - 5, ids[middle + 1 : -1] - 5
            assert len(first) and len(second)
            assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all()
            same_text = first[0] // LONGEST == second[0] // LONGEST
            assert same_text == (unrelated == 0)
            if same_text:
                assert second[0] == first[-1] + 1
            else:
                assert second[0] % LONGEST >= len(first)
            kinds.append(unrelated)
    assert abs(np.mean(kinds) - 0.5) < 4 * 0.5 / math.sqrt(len(kinds))


def test_rows_are_as_long_as_the_shortest_text_of_the_batch_up_to_max_length():
    batches = make_batches(lengths=np.arange(10, 50), max_length=33)
    widths = [batches.batch(step).ids.shape[1] for step in range(len(batches))]
    assert min(widths) == 10 + 3 and max(widths) == 33


def test_the_first_steps_may_have_shorter_rows():
    """After those steps batches are as usual; the change is in the middle of an epoch of 5 batches."""
    batches, whole = make_batches(short_length=20, short_steps=8), make_batches()
    assert {batches.batch(step).ids.shape[1] for step in range(8)} == {20}
    for step in range(8, 15):
        assert batches.batch(step).ids.shape[1] > 20
        assert equal(batches.batch(step), whole.batch(step))
    assert batches.batch(7).ids.shape[1] == 20
    for short_length in 4, 61:
        with pytest.raises(ValueError, match=f"short_length, max_length: .* got {short_length}, 60"):
            make_batches(short_length=short_length, short_steps=8)


def test_pieces_begin_anywhere_and_are_cut_anywhere():
    batches = make_batches(count=8, lengths=np.full(8, 100), max_length=23)
    starts, cuts = set(), set()
    for step in range(200):
        batch = batches.batch(step)
        starts |= set((unhidden(batch)[:, 1] - 5) % LONGEST)
        cuts |= set((batch.segments == 0).sum(axis=1) - 2)
    assert starts == set(range(81)) and cuts == set(range(1, 20))


def test_an_epoch_has_every_text_once():
    batches = make_batches(count=43)
    assert len(batches) == 5
    for epoch in range(2):
        steps = range(5 * epoch, 5 * epoch + 5)
        texts = np.concatenate([(unhidden(batches.batch(step))[:, 1] - 5) // LONGEST for step in steps])
        assert len(set(texts.tolist())) == len(texts) == 40


# What is hidden


def test_15_percent_of_the_tokens_are_chosen_and_never_a_special_one():
    for n in range(2, 300):
        assert places_of(n, 0.15) == max(1, round(0.15 * n))
    for step in range(10):
        batch = make_batches().batch(step)
        n = batch.ids.shape[1] - 3
        assert batch.places.shape == batch.targets.shape == (8, round(0.15 * n))
        assert (np.diff(batch.places) > 0).all()
        assert batch.targets.min() >= 5


@pytest.mark.parametrize("chosen", [0.01, 0.4, 0.99])
def test_another_share_may_be_chosen(chosen):
    batch = make_batches(chosen=chosen).batch(0)
    n = batch.ids.shape[1] - 3
    assert batch.places.shape == (8, max(1, round(chosen * n)))


def test_every_token_is_chosen_as_often_as_every_other():
    batches = make_batches(count=8, lengths=np.full(8, 20), max_length=23)
    counts, steps = np.zeros(20), 500
    for step in range(steps):
        batch = batches.batch(step)
        order = batch.places - 1 - (np.take_along_axis(batch.segments, batch.places, axis=1) == 1)  # among the tokens
        counts += np.bincount(order.ravel(), minlength=20)
    p = 3 / 20
    assert counts.sum() == steps * 8 * 3
    assert np.abs(counts - steps * 8 * p).max() < 4.5 * math.sqrt(steps * 8 * p * (1 - p))


def test_80_percent_are_masked_10_replaced_and_10_left():
    masked = replaced = left = 0
    tokens = []
    for step in range(100):
        batch = make_batches().batch(step)
        shown = np.take_along_axis(batch.ids, batch.places, axis=1)
        masked += (shown == MASK).sum()
        left += (shown == batch.targets).sum()
        other = shown[(shown != MASK) & (shown != batch.targets)]
        replaced += len(other)
        tokens.append(other)
    n = masked + replaced + left
    for found, share in (masked, 0.8), (replaced, 0.1), (left, 0.1):
        assert abs(found / n - share) < 4 * math.sqrt(share * (1 - share) / n)
    tokens = np.concatenate(tokens)
    assert tokens.min() >= 5  # no special token
    size = LONGEST * 40
    assert abs((tokens - 5).mean() / size - 0.5) < 4 * math.sqrt(1 / 12 / len(tokens))  # uniform over the vocabulary


def test_what_is_hidden_cannot_be_read_from_the_input():
    """For two corpora without a common token, and the same key, inputs agree wherever a token is hidden."""
    lengths = np.random.default_rng(0).integers(30, LONGEST, 40)
    vocabulary = Numbers(5 + 2 * LONGEST)
    corpora = [[np.full(length, token, np.int32) for length in lengths] for token in (7, 300)]
    hidden = 0
    for step in range(10):
        one, other = (MaskedBatches(texts, vocabulary, 8, 60, Key(3)).batch(step) for texts in corpora)
        assert np.array_equal(one.places, other.places) and np.array_equal(one.unrelated, other.unrelated)
        shown, shown_other = (np.take_along_axis(batch.ids, batch.places, axis=1) for batch in (one, other))
        left = (shown == 7) & (shown_other == 300)
        assert np.array_equal(shown[~left], shown_other[~left])
        assert (one.targets == 7).all() and (other.targets == 300).all()
        hidden += (~left).mean() / 10
    assert 0.85 < hidden < 0.95


# Batches


def test_a_batch_is_a_function_of_key_and_step():
    first, second = make_batches(), make_batches()
    in_order = [first.batch(step) for step in range(12)]
    for step in (11, 3, 7, 3, 0):
        assert equal(second.batch(step), in_order[step])
    assert not np.array_equal(make_batches(key=Key(1)).batch(0).ids, in_order[0].ids)
    dtypes = [x.dtype for x in in_order[0]]
    assert dtypes == [np.int32, np.int64, np.int32, np.int64, np.int32, np.int64]


def test_another_choice_at_every_step():
    batches = make_batches(count=8, lengths=np.full(8, 57))  # one batch an epoch, whole texts
    assert not np.array_equal(np.sort(batches.batch(0).targets, axis=0), np.sort(batches.batch(1).targets, axis=0))


@pytest.mark.parametrize("size", [1, 3, 8, 20])
def test_split_keeps_rows_in_order_and_weights_add_up(size):
    batch = make_batches().batch(0)
    parts = batch.split(size)
    assert all(isinstance(part, MaskedBatch) and len(part.ids) <= size for part in parts)
    assert equal([np.concatenate(field) for field in zip(*parts, strict=True)], batch)
    assert sum(part.weight for part in parts) == batch.weight == batch.targets.size
    assert sum(part.tokens for part in parts) == batch.tokens == batch.ids.size


def small_model(size, max_length=60):
    return BertPretraining(size, 8, 2, 2, max_length, dropout=0.0, key=Key(1)).to(dtype=np.float64)


def test_micro_batches_add_up_to_the_batch():
    """Loss and gradient of the whole batch, in parts of three rows on two replicas."""
    model, batch = small_model(5 + LONGEST * 40), make_batches().batch(0)
    loss = Replicas(model, 1, 8).gradients(batch, Key(0))
    whole = model.flat.grad.copy()
    assert math.isclose(Replicas(model, 2, 3).gradients(batch, Key(0)), loss, rel_tol=1e-12)
    np.testing.assert_allclose(model.flat.grad, whole, rtol=1e-9, atol=1e-12)


def test_evaluation_agrees_with_whole_batches():
    model, batches = small_model(5 + LONGEST * 40), make_batches()
    found = evaluate_pretraining(Replicas(model, 2, 3), batches, 3)
    losses = [float(model.loss(*batches.batch(step))[0]) for step in range(3)]
    right, rows = [], []
    for step in range(3):
        batch = batches.batch(step)
        masked, following = model(*batch[:4])
        right.append(masked.argmax(-1) == batch.targets)
        rows.append(following.argmax(-1) == batch.unrelated)
    assert found["masked_accuracy"] == np.mean(np.concatenate(right, axis=None))
    assert found["next_sentence_accuracy"] == np.mean(rows)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-2)  # batches of other widths have other weights


def test_the_estimate_accepts_these_batches():
    batch = make_batches().batch(0)
    long = batch.stretched(3, 60)
    assert long.ids.shape == (3, 60) and long.places.shape == (3, places_of(57, 0.15)) and long.tokens == 180
    found = estimate(Replicas(small_model(5 + LONGEST * 40), 2, 2), batch)
    assert found.length == 60 and found.rows == 2
    assert found.activations > 0


def test_invalid_arguments():
    with pytest.raises(ValueError, match="batch_size: expected at least 2, since rows exchange texts, got 1"):
        make_batches(batch_size=1)
    for chosen in (0, 1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="chosen: expected 0 < chosen < 1"):
            make_batches(chosen=chosen)
    with pytest.raises(ValueError, match="max_length: expected 5 <= short_length"):
        make_batches(max_length=4)
    with pytest.raises(ValueError, match="texts: expected at least batch_size = 41, got 40"):
        make_batches(batch_size=41)
    with pytest.raises(ValueError, match="texts: expected at least 2 tokens in each, got 1 in number 3"):
        make_batches(count=8, lengths=[5, 4, 3, 1, 9, 9, 9, 9])
    with pytest.raises(TypeError, match=r"^key: expected a Key"):
        make_batches(key=0)
    with pytest.raises(ValueError, match=r"^short_steps: expected a number >= 0, got -2$"):
        make_batches(short_steps=-2)
    texts = [np.arange(5, 9)] * 3
    for wrong, error in ((texts[0] + 0.7, TypeError), (texts[0] + 80, IndexError), (texts, ValueError)):
        with pytest.raises(error, match=r"^texts: number 3: expected "):
            MaskedBatches([*texts, np.array(wrong)], Numbers(80), 2, 9, Key(0))


def test_texts_of_any_integers_give_the_same_batches():
    texts = [np.arange(5, 30)] * 9
    narrow, wide = (
        MaskedBatches([t.astype(d) for t in texts], Numbers(80), 4, 20, Key(0)) for d in (np.int32, np.int64)
    )
    assert equal(narrow.batch(1), wide.batch(1))


def test_single_texts_for_the_classifier():
    dataset = Labelled([np.array([7, 8], np.int32), np.array([9], np.int32)], np.array([1, 0]))
    found = single_texts(dataset, Numbers(20))
    assert [ids.tolist() for ids in found.ids] == [[CLS, 7, 8, SEP], [CLS, 9, SEP]]
    assert {ids.dtype for ids in found.ids} == {np.dtype(np.int32)} and found.labels is dataset.labels


def test_a_place_that_does_not_count_is_refused():
    """If rows had different numbers of places, no single weight would serve both means of the loss."""
    model, batch = small_model(5 + LONGEST * 40), make_batches().batch(0)
    targets = batch.targets.copy()
    targets[0, 0] = IGNORED
    with pytest.raises(IndexError, match=r"targets: .* got -1 \(none is ignored\)"):
        Replicas(model, 1, 8).gradients(batch._replace(targets=targets), Key(0))
