"""Which steps are recorded as CUDA graphs, on a stand-in for CuPy: see tests/kernels/test_cupy.py for a real one."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from scratchformer import Key
from scratchformer.backend import is_recording, kept
from scratchformer.parallel import graphs
from scratchformer.parallel.graphs import EARLIER, MAX_GRAPHS, RECENT, Graphs


class Batch(NamedTuple):
    x: np.ndarray


def batch(size):
    return Batch(np.full(size, float(size)))


class FakeDevice:
    """Records a step as the function itself."""

    def __init__(self, free=1000):
        self.events, self.free, self.broken = [], free, False
        cuda = SimpleNamespace(
            MemoryPool=lambda: SimpleNamespace(malloc=None, total_bytes=lambda: 100),
            Stream=self.stream,
            Device=lambda: SimpleNamespace(synchronize=lambda: self.events.append("synchronize")),
            using_allocator=self.block,
            runtime=SimpleNamespace(streamCaptureModeRelaxed=2),
        )
        pool = SimpleNamespace(free_all_blocks=lambda: None)
        self.xp = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)

    @contextmanager
    def block(self, *_):
        yield

    current = block

    def stream(self):
        device = self

        class Stream:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def synchronize(self):
                pass

            def begin_capture(self, _mode):
                device.events.append("begin")

            def end_capture(self):
                device.events.append("end")
                if device.broken:
                    raise RuntimeError("the capture is invalid")
                return SimpleNamespace(launch=lambda: device.events.append("launch"))

        return Stream()


@pytest.fixture
def make(monkeypatch):
    """make(step, free): Graphs on a device with so many free bytes."""
    monkeypatch.delenv("SCRATCHFORMER_GRAPHS", raising=False)
    monkeypatch.delenv("SCRATCHFORMER_FAST", raising=False)
    monkeypatch.setattr(graphs, "free_memory", lambda device: device.free)

    def made(step=lambda batch, key: batch.x.sum(), free=1000):
        return Graphs(FakeDevice(free), step)

    return made


def steps(found, size, count=EARLIER + 1, key=None, setting=1.0):
    """Whether each of `count` steps with batches of this size ran as a graph."""
    ran = []
    for _ in range(count):
        known = found.wants(batch(size), key, setting)
        ran.append(known is not None and found.run(known, batch(size), key) is not None)
    return ran


def test_the_third_step_with_batches_of_the_same_shapes_is_recorded(make):
    found = make()
    assert steps(found, 3, 5) == [False] * EARLIER + [True] * 3
    assert found.device.events == ["synchronize", "begin", "end", "launch", "launch", "launch"]
    assert steps(found, 4, 2) == [False, False] and found.memory() == 100


@pytest.mark.parametrize("change", [dict(key=Key(1)), dict(setting=2.0)], ids=str)
def test_what_changes_the_step_is_another_one(make, change):
    found = make()
    steps(found, 3)
    assert steps(found, 3, 1, **change) == [False]


def test_the_arrays_of_a_new_batch_are_copied_to_those_of_the_first(make):
    seen = []
    found = make(lambda own, key: seen.append(own) or own.x.sum())
    first, second = batch(3), Batch(np.arange(3.0))
    for given in first, first, first, second:
        if known := found.wants(given, None, 1.0):
            found.run(known, given, None)
    (recorded,) = found.recorded.values()
    assert seen[-1] is recorded.batch and recorded.batch.x is not first.x
    np.testing.assert_array_equal(recorded.batch.x, second.x)
    np.testing.assert_array_equal(first.x, np.full(3, 3.0))


def test_a_step_that_draws_random_numbers_is_tried_once(make):
    def step(own, key):
        if key is not None:
            key.fold(1, "dropout").generator()
        return own.x.sum()

    found = make(step)
    assert steps(found, 3, 5, Key(1)) == [False] * 5 and found.device.events == ["synchronize"]
    assert steps(found, 4, 5, Key(1)) == [False] * 5 and found.device.events == ["synchronize"]
    assert steps(found, 3) == [False, False, True]  # without a key it is another step


def test_a_key_that_is_folded_but_not_used_does_not_matter(make):
    found = make(lambda own, key: key.fold(3) and own.x.sum())
    assert steps(found, 3, 3, Key(1)) == [False, False, True]


def test_a_step_that_cannot_be_recorded_runs_as_before_and_says_so_once(make):
    def step(own, key):
        if is_recording():
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return own.x.sum()

    found = make(step)
    with pytest.warns(
        UserWarning, match="not recorded as CUDA graphs: RuntimeError: operation not permitted when stre"
    ):
        assert steps(found, 3) == [False] * 3
    assert steps(found, 3, 5) == steps(found, 4, 5) == [False] * 5 and found.off


def test_why_a_recording_failed_is_said_even_if_it_cannot_be_ended(make):
    def step(own, key):
        if "begin" in found.device.events:
            found.device.broken = True
            raise RuntimeError("the cause")
        return own.x.sum()

    found = make(step)
    with pytest.warns(UserWarning, match="not recorded as CUDA graphs: RuntimeError: the cause"):
        assert steps(found, 3) == [False] * 3
    assert found.device.events == ["synchronize", "begin", "end"]


def test_a_step_that_does_not_fit_in_memory_is_not_recorded(make):
    def step(own, key):
        raise MemoryError("out of memory")

    found = make(step)
    assert steps(found, 3, 5) == [False] * 5 and found.device.events == ["synchronize"]
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
        made.append(size)
        return np.zeros(size)

    found = make(lambda own, key: (table(1), table(2), own.x.sum())[-1])
    steps(found, 3)
    (recorded,) = found.recorded.values()
    assert sorted(len(t) for t in recorded.recording.tables.values()) == [1, 2]
    assert made == [1, 2]  # while it was recorded, they were those of the step before
    table(2), table(1), table(2)
    assert made == [1, 2, 1, 2]
