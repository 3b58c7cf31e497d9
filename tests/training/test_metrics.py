"""The metrics file."""

import json
import math

import numpy as np
import pytest

from scratchformer.training import Metrics, read_metrics


def test_records_come_back_in_order(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.write(1, loss=0.1, lr=1e-4)
    metrics.write(2, loss=1 / 3)
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.1, "lr": 1e-4},
        {"step": 2, "loss": 1 / 3},
    ]


@pytest.mark.parametrize(("step", "kept"), [(0, []), (1, [1]), (2, [1, 2, 2]), (9, [1, 2, 2, 3])])
def test_resuming_keeps_records_up_to_the_step(tmp_path, step, kept):
    metrics = Metrics(tmp_path)
    for done in 1, 2, 2, 3:
        metrics.write(done, loss=1.0)
    Metrics(tmp_path, resume_at=step)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == kept
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_failure_while_the_file_is_rewritten_loses_no_record(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path)
    metrics.write(1, loss=1.0)
    before = metrics.path.read_bytes()
    monkeypatch.setattr(json, "dumps", lambda record: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Metrics(tmp_path, resume_at=1)
    monkeypatch.undo()
    monkeypatch.setattr("os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Metrics(tmp_path, resume_at=1)
    assert metrics.path.read_bytes() == before


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b'{"step": 2, "lo',
        b"3",
        b"[]",
        b"null",
        b'{"loss": 1}',
        b'{"step": "2"}',
        b"\xff",
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_damaged_line_is_refused_and_the_file_unchanged(tmp_path, bad, number):
    """Only a last line without its end is skipped."""
    lines = [b'{"step": %d}' % i for i in (1, 2, 3)]
    lines[number - 1] = bad
    path = tmp_path / "metrics.jsonl"
    if number == 3:
        path.write_bytes(b"\n".join(lines))
        assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    for read in (lambda: read_metrics(path)), (lambda: Metrics(tmp_path, resume_at=3)):
        with pytest.raises(ValueError, match=rf"metrics\.jsonl line {number} is damaged: "):
            read()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_missing_file_is_noticed_and_made_anew(tmp_path, capsys):
    Metrics(tmp_path, resume_at=7)
    assert f"{tmp_path / 'metrics.jsonl'} is missing: a new one begins at step 8" in capsys.readouterr().err
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_numpy_numbers_and_numbers_that_are_not_finite(tmp_path):
    Metrics(tmp_path).write(1, a=np.float32(0.5), b=math.nan, c=math.inf, d=np.float64("-inf"), e=7, f=np.int64(8))
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "a": 0.5, "b": null, "c": null, "d": null, "e": 7, "f": 8.0}\n'
    )


def test_tensorboard_drops_what_a_resumed_run_repeats(tmp_path):
    pytest.importorskip("tensorboardX")
    for resumed_at, steps in (0, (1, 2, 3)), (1, (2, 3)):
        metrics = Metrics(tmp_path, resumed_at, tensorboard=True)
        for step in steps:
            metrics.write(step, loss=1.0)
        metrics.close()
    last = max((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    starts = [event for event in events_of(last) if event.HasField("session_log")]
    assert [event.step for event in starts] == [2]  # TensorBoard leaves out what earlier files have from this step on


def events_of(path):
    from tensorboardX.proto.event_pb2 import Event

    data, start = path.read_bytes(), 0
    while start < len(data):
        size = int.from_bytes(data[start : start + 8], "little")
        yield Event.FromString(data[start + 12 : start + 12 + size])
        start += size + 16


def test_a_missing_extra_leaves_the_folder_empty(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="--tensorboard needs"):
        Metrics(tmp_path, tensorboard=True)
    assert not list(tmp_path.iterdir())
