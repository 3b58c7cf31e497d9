"""Which steps are recorded as CUDA graphs, on a stand-in for CuPy: see tests/kernels/test_cupy.py for a real one."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer import Key
from scratchformer.backend import is_recording, kept
from scratchformer.parallel import graphs
from scratchformer.parallel.graphs import EARLIER, MAX_GRAPHS, RECENT
from scratchformer.rng import random_uint16

from .fake_gpu import FakeGPU


class Batch(NamedTuple):
    x: np.ndarray


def batch(size):
    return Batch(np.full(size, float(size)))


TOTAL = 10.0


def plain(batch, key, factor, setting):
    """A step: it adds factor · Σ x to the total, and returns Σ x."""
    return batch.x.sum(keepdims=True)[0, ...], None


@pytest.fixture
def make(monkeypatch):
    """make(step, free): Graphs on a device with so many free bytes, with a total () that is TOTAL at first."""
    monkeypatch.delenv("SCRATCHFORMER_GRAPHS", raising=False)
    monkeypatch.delenv("SCRATCHFORMER_FAST", raising=False)
    monkeypatch.setattr(graphs, "free_memory", lambda device: device.free)

    def made(step=plain, free=1000):
        total = np.array(TOTAL)

        def adding(batch, key, factor, setting):
            total[...] += factor * batch.x.sum()
            return step(batch, key, factor, setting)

        return FakeGPU(free=free).graphs(adding, total)

    return made


def steps(found, size, count=EARLIER + 1, key=None, setting=False):
    """Whether each of `count` steps with batches of this size ran as a graph."""
    ran = []
    for _ in range(count):
        known = found.wants(batch(size), key, setting)
        ran.append(known is not None and found.run(known, batch(size), key, 1.0) is not None)
    return ran


def test_the_third_step_with_batches_of_the_same_shapes_is_recorded(make):
    found = make()
    assert steps(found, 3, 5) == [False] * EARLIER + [True] * 3
    assert found.device.events == ["synchronize", "begin", "end", "launch", "launch", "launch"]
    assert steps(found, 4, 2) == [False, False] and found.memory() == 100


@pytest.mark.parametrize("change", [dict(key=Key(1)), dict(setting=True)], ids=str)
def test_what_changes_the_step_is_another_one(make, change):
    found = make()
    steps(found, 3)
    assert steps(found, 3, 1, **change) == [False]


def test_the_arrays_of_a_new_batch_are_copied_to_those_of_the_first(make):
    seen = []
    found = make(lambda own, *rest: seen.append(own) or plain(own, *rest))
    first, second = batch(3), Batch(np.arange(3.0))
    for each in first, first, first, second:
        if known := found.wants(each, None, False):
            found.run(known, each, None, 1.0)
    (recorded,) = found.recorded.values()
    assert seen[-1] is recorded.batch and recorded.batch.x is not first.x
    np.testing.assert_array_equal(recorded.batch.x, second.x)
    np.testing.assert_array_equal(first.x, np.full(3, 3.0))


def test_a_recorded_step_adds_to_the_total_with_its_factor(make):
    """Also when it is recorded, although it has then run once before."""
    found = make()
    known = [found.wants(batch(3), None, False) for _ in range(EARLIER + 1)][-1]
    for i, factor in enumerate((0.5, 2.0), start=1):
        loss, memory = found.run(known, batch(3), None, factor)
        assert (loss, memory, found.total) == (9.0, None, TOTAL + (4.5, 22.5)[i - 1])


def draws(*words):
    """A step that draws 5 numbers from each of the keys that these words give."""

    def step(own, key, *_):
        keys = [key.fold("block").fold(word, 3) for word in words]
        return np.concatenate([random_uint16(each, 5) for each in keys]).astype(np.float64), None

    return step


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_a_recorded_step_draws_the_numbers_of_its_key(words, seeds):
    """Each of its keys, also one that it uses twice, draws what it draws in a step that is not recorded."""
    step = draws(*words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "free_memory", lambda device: device.free)
        found = FakeGPU().graphs(step, np.zeros(()))
        known = [found.wants(batch(3), Key(0), False) for _ in range(EARLIER + 1)][-1]
        for seed in seeds:
            drawn, _ = found.run(known, batch(3), Key(7, seed), 1.0)
            np.testing.assert_array_equal(drawn, step(None, Key(7, seed))[0])


def test_a_step_that_draws_from_too_many_keys_is_tried_once(make, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_STARTS", 3)
    assert steps(make(draws(1, 2, 3)), 3, 3, Key(1)) == [False, False, True]
    found = make(draws(1, 2, 3, 4))
    assert steps(found, 3, 5, Key(1)) == [False] * 5 and found.device.events == ["synchronize"]


def test_a_step_that_draws_on_the_host_is_tried_once(make):
    def step(own, key, *rest):
        if key is not None:
            key.fold(1, "noise").generator()
        return plain(own, key, *rest)

    found = make(step)
    assert steps(found, 3, 5, Key(1)) == [False] * 5 and found.device.events == ["synchronize"]
    assert steps(found, 4, 5, Key(1)) == [False] * 5 and found.device.events == ["synchronize"]
    assert found.total == TOTAL
    assert steps(found, 3) == [False, False, True]  # without a key it is another step


def test_a_step_that_cannot_be_recorded_runs_as_before_and_says_so_once(make):
    def step(*arguments):
        if is_recording():
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return plain(*arguments)

    found = make(step)
    with pytest.warns(
        UserWarning, match="not recorded as CUDA graphs: RuntimeError: operation not permitted when stre"
    ):
        assert steps(found, 3) == [False] * 3
    assert steps(found, 3, 5) == steps(found, 4, 5) == [False] * 5 and found.off and found.total == TOTAL


def test_why_a_recording_failed_is_said_even_if_it_cannot_be_ended(make):
    def step(*arguments):
        if "begin" in found.device.events:
            found.device.broken = True
            raise RuntimeError("the cause")
        return plain(*arguments)

    found = make(step)
    with pytest.warns(UserWarning, match="not recorded as CUDA graphs: RuntimeError: the cause"):
        assert steps(found, 3) == [False] * 3
    assert found.device.events == ["synchronize", "begin", "end"]


def test_a_step_that_does_not_fit_in_memory_is_not_recorded(make):
    def step(*_):
        raise MemoryError("out of memory")

    found = make(step)
    assert steps(found, 3, 5) == [False] * 5 and found.device.events == ["synchronize"] and found.total == TOTAL
    crowded = make(free=99)  # a graph holds 100 bytes, and as many are needed beside it
    assert steps(crowded, 3, 5) == [False] * 5 and not crowded.recorded and crowded.memory() == 0


def test_a_graph_that_is_in_use_does_not_make_room_for_another(make):
    found = make()
    for size in range(1, MAX_GRAPHS + 1):
        assert steps(found, size)[-1]
    assert steps(found, MAX_GRAPHS + 1, 10) == [False] * 10
    assert steps(found, 1, RECENT) == [True] * RECENT  # meanwhile the others are not used
    assert steps(found, MAX_GRAPHS + 1, 1) == [True]
    sizes = [len(recorded.batch.x) for recorded in found.recorded.values()]
    assert sizes == [*range(3, MAX_GRAPHS + 1), 1, MAX_GRAPHS + 1]


def test_what_is_cleared_is_recorded_anew(make):
    found = make()
    steps(found, 3)
    found.clear()
    assert found.memory() == 0 and steps(found, 3) == [False, False, True]


@pytest.mark.parametrize("name", ["SCRATCHFORMER_GRAPHS", "SCRATCHFORMER_FAST"])
def test_the_environment_turns_it_off(make, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    assert steps(make(), 3, 5) == [False] * 5


def test_a_recorded_step_keeps_its_tables(make):
    """Also when others have taken their place among those that are kept for the next call."""
    made = []

    @kept(1)
    def table(size):
        made.append((size, is_recording()))
        return np.zeros(size)

    found = make(lambda *arguments: (table(1), table(2), plain(*arguments))[-1])
    steps(found, 3)
    (kept_step,) = found.recorded.values()
    assert sorted(len(t) for t in kept_step.recording.tables.values()) == [1, 2]
    # While it was recorded, they were those of the step before.
    assert [size for size, recorded in made if recorded] == [1, 2]
    made.clear()
    table(2), table(1), table(2)
    assert [size for size, _ in made] == [1, 2]
