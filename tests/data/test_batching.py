import math
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.data import (
    DataError,
    DrawnBatches,
    Labelled,
    LabelledBatch,
    LabelledBatches,
    SegmentBatch,
    SegmentBatches,
    TextBatch,
    TextBatches,
    in_order,
    windows,
)
from scratchformer.data.vocabulary import UNKNOWN
from scratchformer.ops import IGNORED
from scratchformer.rng import Key

COUNTING = np.arange(10_000)


def make_dataset(count, longest=40, seed=0):
    """Texts in which every word is the text's index + 1, so that a batch shows where its rows come from."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, size=count)
    ids = [np.full(length, 1 + i, dtype=np.int32) for i, length in enumerate(lengths)]
    return Labelled(ids, generator.integers(0, 2, size=count))


def equal(first, second):
    return all(
        a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b) for a, b in zip(first, second, strict=True)
    )


def check_padding(batch):
    assert batch.ids.dtype == np.int32
    assert batch.labels.dtype == np.int64
    assert batch.ids.shape == (len(batch.lengths), batch.lengths.max())
    inside = np.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    assert np.array_equal(batch.ids != 0, inside)


# Long texts


def test_text_batch_is_consecutive_pieces():
    batch = TextBatches(COUNTING, 6, 32, Key(0)).batch(5)
    assert batch.ids.shape == batch.targets.shape == (6, 32)
    assert batch.ids.dtype == batch.targets.dtype == np.int32
    assert np.array_equal(batch.ids[:, 1:], batch.targets[:, :-1])
    assert np.array_equal(batch.ids + 1, batch.targets)
    assert (np.diff(batch.ids) == 1).all()
    assert batch.weight == batch.tokens == 6 * 32
    assert not np.shares_memory(batch.ids, batch.targets)


def test_bytes_become_int32():
    data = np.array([255, 0, 255], dtype=np.uint8)
    batch = TextBatches(data, 1, 2, Key(0)).batch(0)
    assert batch.ids.tolist() == [[255, 0]] and batch.targets.tolist() == [[0, 255]]
    assert batch.ids.dtype == np.int32


def test_text_batches_are_a_function_of_key_and_step():
    key = Key(3).fold("data")
    batches = TextBatches(COUNTING, 4, 16, key)
    in_sequence = [batches.batch(step) for step in range(6)]
    resumed = TextBatches(COUNTING, 4, 16, key)
    for step in (5, 0, 3):
        assert equal(resumed.batch(step), in_sequence[step])
    assert not equal(in_sequence[0], in_sequence[1])
    assert not equal(in_sequence[0], TextBatches(COUNTING, 4, 16, Key(4).fold("data")).batch(0))


def test_every_start_is_drawn_the_first_and_the_last_too():
    batches = TextBatches(np.arange(8), 64, 3, Key(0))
    starts = np.concatenate([batches.batch(step).ids[:, 0] for step in range(10)])
    assert set(starts.tolist()) == {0, 1, 2, 3, 4}
    assert TextBatches(np.arange(4), 2, 3, Key(0)).batch(0).targets.tolist() == [[1, 2, 3]] * 2


def test_drawn_batches_are_whole_rows_drawn_by_key_and_step():
    ids = np.arange(20).reshape(10, 2).astype(np.int32)
    batches = [DrawnBatches(TextBatch(ids, ids + 100), 6, Key(seed)) for seed in (1, 1, 2)]
    first, again, other = ([batch.batch(step) for step in range(20)] for batch in batches)
    for batch, same in zip(first, again, strict=True):
        assert equal(batch, same) and batch.ids.shape == (6, 2) and type(batch) is TextBatch
        np.testing.assert_array_equal(batch.targets, batch.ids + 100)
    assert {tuple(row) for batch in first for row in batch.ids} == {tuple(row) for row in ids}
    assert not equal(first[0], first[1]) and not equal(first[0], other[0])


def test_a_corpus_shorter_than_the_context():
    with pytest.raises(DataError, match=r"corpus: 256 tokens .* context \+ 1 = 257; use a .*smaller context"):
        TextBatches(COUNTING[:256], 4, 256, Key(0))
    TextBatches(COUNTING[:257], 4, 256, Key(0))


# A text in order


def make_segments(n=103, batch_size=3, context=4, seed=0):
    return SegmentBatches(np.arange(n), batch_size, context, Key(seed).fold("data"), depth=2, d_model=5)


def memory_of(step, rows=3, length=4):
    return np.full((rows, 2, length, 5), step, np.float32)


def one_pass(batches, first=0):
    """The batches of a pass; the memory after step i is full of i."""
    for step in range(first, first + len(batches)):
        yield batches.batch(step)
        batches.remember(step, [memory_of(step)])


def test_segments_are_consecutive_in_every_stream():
    batches = make_segments()  # three streams of 34 tokens, of which 7 segments of 4 are taken
    assert len(batches) == 7
    for number in range(3):
        ids, targets, memories = zip(*one_pass(batches, 7 * number), strict=True)
        assert all(a.dtype == np.int32 and a.shape == (3, 4) for a in (*ids, *targets))
        ids, targets = np.concatenate(ids, axis=1), np.concatenate(targets, axis=1)
        assert (np.diff(ids) == 1).all() and np.array_equal(ids + 1, targets)
        assert (np.diff(ids[:, 0]) == 34).all()  # each stream begins where the one before it ends
        assert 0 <= ids[0, 0] <= 3 and targets.max() <= 101
        assert memories[0].shape == (3, 2, 0, 5)
        assert [int(m[0, 0, 0, 0]) for m in memories[1:]] == [*range(7 * number, 7 * number + 6)]


def test_passes_begin_at_offsets_drawn_by_the_key():
    batches = make_segments()
    starts = [int(batches.batch(7 * number).ids[0, 0]) for number in range(40)]
    assert set(starts) == {0, 1, 2, 3}
    assert starts == [int(make_segments().batch(7 * number).ids[0, 0]) for number in range(40)]
    assert starts != [int(make_segments(seed=1).batch(7 * number).ids[0, 0]) for number in range(40)]


@pytest.mark.parametrize(("n", "segments"), [(15, 1), (26, 1), (27, 1), (36, 2), (39, 2)])
def test_short_streams(n, segments):
    """From one segment and one more token in a stream upwards."""
    batches = make_segments(n)
    assert len(batches) == segments
    for number in range(30):
        *_, last = one_pass(batches, segments * number)
        assert (last.targets[:, -1] < np.arange(1, 4) * (n // 3)).all()


def test_the_memory_of_another_step_is_refused():
    batches = make_segments()
    batches.batch(0)
    batches.remember(0, [memory_of(0, 2), memory_of(0, 1)])
    assert equal(batches.batch(1), batches.batch(1))
    for step in 2, 6, 8:
        with pytest.raises(ValueError, match=f"step: the memory is for step 1, not for step {step}"):
            batches.batch(step)
    assert batches.batch(7).memory.size == 0  # a new pass begins without a memory


def test_the_memory_comes_back_from_a_state():
    batches = make_segments()
    batches.remember(2, [memory_of(2)])
    resumed = make_segments()
    resumed.load_state_dict(batches.state_dict())
    assert equal(resumed.batch(3), batches.batch(3)) and resumed.batch(3).memory.all()
    with pytest.raises(ValueError, match=r"memory: expected .* \(3, 2, M, 5\), got float64 \(3, 1, 4, 5\)"):
        resumed.load_state_dict({"step": np.array(4), "memory": np.zeros((3, 1, 4, 5))})
    with pytest.raises(ValueError, match=r"^memories: expected 3 rows together, got 6$"):
        resumed.remember(4, [memory_of(2), memory_of(2)])
    with pytest.raises(ValueError, match="expected step and memory, got nothing"):
        resumed.load_state_dict({})
    assert resumed.step == 3


def test_the_memory_of_a_state_keeps_its_type():
    """It is the dtype of the model that made the memory."""
    batches = make_segments()
    batches.load_state_dict({"step": np.array(3), "memory": memory_of(2).astype(np.float64)})
    assert batches.batch(3).memory.dtype == np.float64
    assert np.array_equal(batches.batch(3).memory, memory_of(2))
    with pytest.raises(ValueError, match=r"memory: expected floating-point numbers .*, got int64"):
        batches.load_state_dict({"step": np.array(3), "memory": memory_of(2).astype(np.int64)})


def test_a_text_too_short_for_its_streams():
    with pytest.raises(DataError, match=r"14 tokens make 3 streams of 4, fewer than context \+ 1 = 5; use a longer"):
        make_segments(14)
    make_segments(15)


@pytest.mark.parametrize("sizes", [{"batch_size": 0, "context": 4}, {"batch_size": 4, "context": 0}])
def test_sizes_below_one(sizes):
    with pytest.raises(ValueError, match="expected a number >= 1, got 0"):
        TextBatches(COUNTING, **sizes, key=Key(0))


def test_text_batch_split():
    batch = TextBatches(COUNTING, 7, 5, Key(0)).batch(0)
    parts = batch.split(3)
    assert [type(part) for part in parts] == [TextBatch] * 3
    assert [len(part.ids) for part in parts] == [3, 3, 1]
    assert np.array_equal(np.concatenate([part.ids for part in parts]), batch.ids)
    assert np.array_equal(np.concatenate([part.targets for part in parts]), batch.targets)
    assert sum(part.weight for part in parts) == batch.weight
    assert equal(batch.split(100)[0], batch)
    with pytest.raises(ValueError, match="size"):
        batch.split(0)


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 40), st.integers(1, 7))
def test_windows_count_every_position_once(n, context, stride, batch_size):
    stride = min(stride, context)
    data = np.arange(n) + 1000
    seen = np.zeros(n, dtype=int)
    first = True
    total = 0
    for batch, counted in windows(data, context, stride, batch_size):
        width = min(context, n - 1)
        assert batch.ids.shape == batch.targets.shape == counted.shape
        assert batch.ids.shape[1] == width and 1 <= len(batch.ids) <= batch_size
        assert counted.dtype == bool
        assert np.array_equal(batch.ids + 1, batch.targets)
        positions = batch.targets - 1000
        np.add.at(seen, positions[counted], 1)
        total += len(batch.ids)
        # Only the last `stride` predictions of a window count, and all of the first window.
        late = counted.copy()
        late[:, width - stride :] = False
        if first:
            assert counted[0].all()
            late[0] = False
        assert not late.any()
        first = False
    assert seen[0] == 0
    assert (seen[1:] == 1).all()
    assert total == math.ceil(max(n - 1 - context, 0) / stride) + 1


def test_windows_by_hand():
    (batch, counted), *more = windows(np.arange(8), context=4, stride=2, batch_size=8)
    assert not more
    assert batch.ids.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert counted.astype(int).tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]


def test_windows_refuse_invalid_arguments():
    with pytest.raises(ValueError, match="stride: expected at most the context, 4, got 5"):
        windows(COUNTING, 4, 5, 1)
    with pytest.raises(DataError, match="1 token"):
        windows(COUNTING[:1], 4, 4, 1)
    with pytest.raises(ValueError, match="stride: expected a number >= 1, got 0"):
        windows(COUNTING, 4, 0, 1)


# Labelled texts


def test_labels_of_tokens_count_unless_they_are_ignored_and_are_cut_with_their_texts():
    """Labels after a text's end should not count; if one does, the batch is wide enough to keep it."""
    labels = np.full((3, 6), IGNORED)
    labels[0, :2], labels[1, 3] = 1, 0
    batch = LabelledBatch(np.zeros((3, 6), np.int32), np.array([4, 2, 3]), labels)
    assert batch.weight == 3
    parts = batch.split(1)
    assert [part.weight for part in parts] == [2, 1, 0]
    assert [part.ids.shape for part in parts] == [part.labels.shape for part in parts] == [(1, 4), (1, 4), (1, 3)]
    stretched = batch.stretched(5, 8)
    assert stretched.ids.shape == stretched.labels.shape == (5, 8)


@pytest.mark.parametrize("kind", [TextBatch, SegmentBatch])
def test_ignored_targets_have_no_weight(kind):
    targets = np.array([[3, IGNORED, IGNORED], [IGNORED] * 3, [0, 1, 2]])
    batch = kind(np.zeros((3, 3), np.int32), targets, *([np.zeros((3, 1, 0, 2))] if kind is SegmentBatch else []))
    assert batch.weight == 4 and batch.tokens == 9
    assert [part.weight for part in batch.split(1)] == [1, 0, 3]


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 50), st.integers(0, 3))
def test_every_text_once_an_epoch(count, batch_size, max_length, epoch):
    dataset = make_dataset(count)
    batches = LabelledBatches(dataset, batch_size, max_length, Key(1))
    assert len(batches) == math.ceil(count / batch_size)
    seen, sizes = [], []
    for step in range(epoch * len(batches), (epoch + 1) * len(batches)):
        batch = batches.batch(step)
        check_padding(batch)
        index = batch.ids[:, 0] - 1
        assert np.array_equal(batch.labels, dataset.labels[index])
        assert batch.lengths.tolist() == [min(len(dataset.ids[i]), max_length) for i in index]
        assert batch.weight == len(index)
        assert batch.tokens == batch.lengths.sum()
        seen += index.tolist()
        sizes.append(len(index))
    assert sorted(seen) == list(range(count))
    assert sorted(sizes, reverse=True)[:-1] == [batch_size] * (len(batches) - 1)


def test_labelled_batches_are_a_function_of_key_and_step():
    dataset = make_dataset(100)
    batches = LabelledBatches(dataset, 8, 30, Key(5))
    steps = 3 * len(batches)
    in_sequence = [batches.batch(step) for step in range(steps)]
    for step in (0, steps - 1, 14, 7, 30, 13):
        assert equal(LabelledBatches(dataset, 8, 30, Key(5)).batch(step), in_sequence[step])
        assert equal(batches.batch(step), in_sequence[step])  # in any order, over epochs


def first_words(batches, epoch):
    steps = range(epoch * len(batches), (epoch + 1) * len(batches))
    return [tuple(batches.batch(step).ids[:, 0].tolist()) for step in steps]


def test_epochs_and_keys_differ_in_order_and_in_batches():
    dataset = make_dataset(200)
    batches = LabelledBatches(dataset, 4, 40, Key(0))
    orders = [first_words(batches, 0), first_words(batches, 1)]
    orders.append(first_words(LabelledBatches(dataset, 4, 40, Key(1)), 0))
    for i in range(3):
        for j in range(i):
            assert orders[i] != orders[j]
            assert set(map(frozenset, orders[i])) != set(map(frozenset, orders[j]))


def test_batches_have_little_padding_yet_come_in_random_order():
    dataset = make_dataset(4000, longest=400)
    batches = LabelledBatches(dataset, 16, 400, Key(0))
    epoch = [batches.batch(step) for step in range(len(batches))]
    padded, tokens = sum(batch.ids.size for batch in epoch), sum(batch.tokens for batch in epoch)
    assert tokens / padded > 0.97
    widths = np.array([batch.ids.shape[1] for batch in epoch])
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.25
    assert abs(np.corrcoef(widths[1:], widths[:-1])[0, 1]) < 0.25


@pytest.mark.parametrize(("count", "one_chunk"), [(640, True), (1280, False)])
def test_batches_are_sorted_in_chunks_of_64(count, one_chunk):
    lengths = np.random.default_rng(0).permutation(count) + 1
    dataset = Labelled([np.ones(length, dtype=np.int32) for length in lengths], np.zeros(count, int))
    batches = LabelledBatches(dataset, 10, count, Key(0))
    spans = [int(np.ptp(batches.batch(step).lengths)) for step in range(len(batches))]
    assert (max(spans) == 9) is one_chunk
    assert max(spans) < 60


def test_texts_that_are_cut_to_one_length_are_not_sorted():
    dataset = Labelled([np.full(5 + i, 1 + i, dtype=np.int32) for i in range(64)], np.zeros(64, int))
    batches = LabelledBatches(dataset, 8, 5, Key(0))
    assert all(np.ptp(batches.batch(step).ids[:, 0]) > 7 for step in range(8))


def test_threads_may_ask_for_different_epochs_at_once():
    dataset = make_dataset(60)
    expected = [LabelledBatches(dataset, 4, 30, Key(0)).batch(step) for step in range(60)]
    shared = LabelledBatches(dataset, 4, 30, Key(0))
    wrong = []

    def ask(offset):
        for i in range(300):
            step = (offset + 17 * i) % 60
            if not equal(shared.batch(step), expected[step]):
                wrong.append(step)

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in (0, 31)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("keep", "length", "expected"),
    [
        ("head", 8, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("both", 8, [1, 2, 15, 16, 17, 18, 19, 20]),
        ("both", 7, [1, 15, 16, 17, 18, 19, 20]),
        ("both", 1, [20]),
        ("head", 19, list(range(1, 20))),
        ("both", 20, list(range(1, 21))),
        ("head", 50, list(range(1, 21))),
    ],
)
def test_what_is_kept_of_a_long_text(keep, length, expected):
    dataset = Labelled([np.arange(1, 21, dtype=np.int32), np.array([99], dtype=np.int32)], np.array([1, 0]))
    batch = LabelledBatches(dataset, 2, length, Key(0), keep).batch(0)
    row = batch.ids[batch.labels == 1][0]
    assert row.tolist() == expected
    for evaluated in in_order(dataset, 1, length, keep):
        if evaluated.labels[0] == 1:
            assert evaluated.ids[0].tolist() == expected


def test_labelled_batch_split_trims_each_part():
    lengths = np.array([2, 3, 9, 1, 5])
    ids = np.zeros((5, 9), dtype=np.int32)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = length
    batch = LabelledBatch(ids, lengths, np.array([0, 1, 0, 1, 1]))
    parts = batch.split(2)
    assert [part.ids.shape for part in parts] == [(2, 3), (2, 9), (1, 5)]
    for part in parts:
        assert isinstance(part, LabelledBatch)
        check_padding(part)
    assert np.concatenate([part.labels for part in parts]).tolist() == [0, 1, 0, 1, 1]
    assert np.concatenate([part.lengths for part in parts]).tolist() == lengths.tolist()
    assert [part.weight for part in parts] == [2, 2, 1]
    assert [part.tokens for part in parts] == [5, 10, 5]


@given(st.integers(1, 100), st.integers(1, 9), st.integers(1, 50))
def test_in_order_gives_every_text_once_shortest_first(count, batch_size, max_length):
    dataset = make_dataset(count)
    seen, lengths = [], []
    for batch in in_order(dataset, batch_size, max_length):
        check_padding(batch)
        assert len(batch.labels) <= batch_size
        index = batch.ids[:, 0] - 1
        assert np.array_equal(batch.labels, dataset.labels[index])
        seen += index.tolist()
        lengths += batch.lengths.tolist()
    assert sorted(seen) == list(range(count))
    assert lengths == sorted(lengths)


def test_the_dataset_is_not_written_to_and_not_shared():
    dataset = make_dataset(5)
    before = [ids.copy() for ids in dataset.ids]
    batch = LabelledBatches(dataset, 5, 40, Key(0)).batch(0)
    batch.ids[:] = -7
    batch.labels[:] = -7
    assert all(np.array_equal(a, b) for a, b in zip(dataset.ids, before, strict=True))
    assert dataset.labels.min() >= 0


def make_bad(kind):
    dataset = make_dataset(6)
    if kind == "empty text":
        dataset.ids[4] = np.array([], dtype=np.int32)
        return dataset
    return Labelled([], np.array([])) if kind == "no text" else Labelled(dataset.ids, dataset.labels[:5])


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("empty text", "text number 4 is empty"),
        ("no text", "expected texts, got none"),
        ("labels", "6 texts but 5 labels"),
    ],
)
def test_datasets_that_cannot_be_cut_into_batches(kind, word):
    with pytest.raises(ValueError, match=word):
        LabelledBatches(make_bad(kind), 2, 10, Key(0))
    with pytest.raises(ValueError, match=word):
        in_order(make_bad(kind), 2, 10)


def test_arguments_out_of_range():
    dataset = make_dataset(6)
    with pytest.raises(ValueError, match="keep: expected one of head, both, got 'middle'"):
        LabelledBatches(dataset, 2, 10, Key(0), keep="middle")
    with pytest.raises(ValueError, match="max_length: expected a number >= 1, got 0"):
        LabelledBatches(dataset, 2, 0, Key(0))
    with pytest.raises(ValueError, match="batch_size"):
        in_order(dataset, 0, 10)
    with pytest.raises(ValueError):
        LabelledBatches(dataset, 2, 10, Key(0)).batch(-1)


def test_word_dropout_replaces_that_share_of_the_words_by_unknown_and_replays():
    dataset = Labelled([np.full(200, 7, np.int32) for _ in range(40)] + [np.full(3, 7, np.int32)], np.zeros(41, int))
    plain = LabelledBatches(dataset, 41, 200, Key(1))
    dropping = LabelledBatches(dataset, 41, 200, Key(1), word_dropout=0.25)
    a, b = plain.batch(0), dropping.batch(0)
    unknown = b.ids == UNKNOWN
    assert abs(unknown.sum() / a.lengths.sum() - 0.25) < 0.02
    np.testing.assert_array_equal(b.ids[~unknown], a.ids[~unknown])  # the rest, and all padding, is unchanged
    np.testing.assert_array_equal(dropping.batch(0).ids, b.ids)
    assert (dropping.batch(1).ids != b.ids).any()
    with pytest.raises(ValueError, match="word_dropout"):
        LabelledBatches(dataset, 4, 200, Key(1), word_dropout=1.0)


@pytest.mark.parametrize("make", [lambda d: LabelledBatches(d, 2, 5, Key(0)), lambda d: in_order(d, 2, 5)])
def test_labels_and_texts_that_would_be_truncated_are_refused(make):
    ids = [np.array([2, 3]), np.array([4, 2, 3])]
    for labels in [0.7, 0.9], [np.nan, 1], ["0", "1"]:
        with pytest.raises(TypeError, match=r"^dataset: "):
            make(Labelled(ids, np.array(labels)))
    for text, error in (
        (np.full((2, 3), 2), ValueError),
        (np.array([0.5, 1.5]), TypeError),
        ([2, 3], TypeError),
    ):
        with pytest.raises(error, match=r"^dataset: text number 1: expected "):
            make(Labelled([ids[0], text], np.array([0, 1])))


def test_rows_are_drawn_from_arrays_of_one_length():
    whole = np.arange(5), np.arange(10).reshape(5, 2)
    a, b = DrawnBatches(whole, 3, Key(0)).batch(0)
    np.testing.assert_array_equal(b, whole[1][a])
    for wrong in (), (np.empty(0),), (np.arange(5), np.arange(4)):
        with pytest.raises(ValueError, match="whole: expected arrays with the same number of rows, at least one, got"):
            DrawnBatches(wrong, 3, Key(0))


def test_evenly_spaced_texts_are_some_of_them():
    dataset = Labelled([np.array([i]) for i in range(4)], [0, 1, 0, 1])
    assert dataset.evenly(2).labels.tolist() == [0, 0] and dataset.evenly(4).ids == dataset.ids
    assert Labelled([], np.empty(0, int)).evenly(0).ids == []
    for count in -1, 5:
        with pytest.raises(ValueError, match=r"^count: expected "):
            dataset.evenly(count)


def test_integer_labels_of_every_token_stay_integers():
    ids = [np.array([1, 2, 3]), np.array([4, 5, 6])]
    (batch,) = in_order(Labelled(ids, np.stack(ids) % 2), 3, 6)
    assert batch.labels.dtype == np.int64 and batch.labels.tolist() == [[1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("batch_size", [10**9, 10**7])
def test_a_batch_of_more_than_the_memory_is_refused(batch_size):
    """As a number in a file can ask for; a batch may have more rows than the data."""
    text, whole = np.arange(100), (np.zeros((100, 8), int), np.zeros(100))
    for batches, row in (partial(TextBatches, text, context=8), 8), (partial(DrawnBatches, whole), 8):
        most = (1 << 24) // row
        with pytest.raises(
            ValueError, match=rf"^batch_size: expected at most {most:,} rows of {row}, got {batch_size:,}$"
        ):
            batches(batch_size=batch_size, key=Key(0))
        assert batches(batch_size=1000, key=Key(0)).batch(0)[0].shape == (1000, 8)
