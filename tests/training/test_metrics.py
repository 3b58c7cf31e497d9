"""The metrics file."""

import json
import math

import numpy as np
import pytest

from scratchformer.training import Metrics, read_metrics
from scratchformer.training.metrics import kept_records


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


def test_a_line_cut_anywhere_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first, second = (json.dumps({"step": i, "loss": 0.25}) for i in (1, 2))
    for end in range(len(second)):
        path.write_text(first + "\n" + second[:end])
        assert [r["step"] for r in read_metrics(path)] == [1]


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
        b'{"step": 2, "lr": "1"}',
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_damaged_line_of_an_earlier_version_is_refused(tmp_path, bad, number):
    """Its lines have no checksums. Only a last line that was cut short is skipped."""
    lines = [b'{"step": %d}' % i for i in (1, 2, 3)]
    lines[number - 1] = bad
    path = tmp_path / "metrics.jsonl"
    if number == 3:
        path.write_bytes(b"\n".join(lines))
        assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    for read in (lambda: read_metrics(path)), (lambda: Metrics(tmp_path, resume_at=3)):
        with pytest.raises(ValueError, match=rf"metrics\.jsonl line {number} is damaged$"):
            read()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_any_byte_changed_is_noticed(tmp_path):
    """If the line is not yet covered by a snapshot, resuming leaves it out."""
    metrics = Metrics(tmp_path)
    for step in 1, 2, 3:
        second = metrics.summary
        metrics.write(step, loss=0.25)
    whole = metrics.path.read_bytes()
    for place in range(len(whole)):
        for change in 1, 2, 32, 128:
            metrics.path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            line = 1 + whole[:place].count(b"\n")
            with pytest.raises(ValueError, match=rf"metrics\.jsonl line {line} is damaged"):
                read_metrics(metrics.path)
            with pytest.raises(ValueError, match="damaged"):
                kept_records(metrics.path, 3, metrics.summary)
            if line == 3:
                assert len(kept_records(metrics.path, 2, second)[0]) == 2


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([0, 1], "expected 3 records up to step 3, got 2"),
        ([0, 1, 2, 2], "metrics.jsonl line 4 is damaged"),
        ([0, 2, 1], "line 2 is damaged"),
        ([1, 2], "line 1 is damaged"),
    ],
)
def test_lines_that_are_missing_swapped_or_doubled_are_noticed(tmp_path, kept, message):
    metrics = Metrics(tmp_path)
    for step in 1, 2, 3:
        metrics.write(step, loss=0.25)
    lines = metrics.path.read_bytes().splitlines(keepends=True)
    metrics.path.write_bytes(b"".join(lines[i] for i in kept))
    with pytest.raises(ValueError, match=message):
        read_metrics(metrics.path)
        kept_records(metrics.path, 3, metrics.summary)


def test_metrics_of_another_run_are_noticed_whatever_its_speed(tmp_path):
    for name, loss, speed in ("one", 0.5, 10), ("same", 0.5, 20), ("other", 0.25, 10):
        (tmp_path / name).mkdir()
        metrics = Metrics(tmp_path / name)
        metrics.write(1, loss=loss, tokens_per_second=speed)
        if name == "one":
            expected = metrics.summary
    Metrics(tmp_path / "same", resume_at=1, expected=expected)
    with pytest.raises(ValueError, match="snapshot are not from the same run: the records up to step"):
        Metrics(tmp_path / "other", resume_at=1, expected=expected)


def test_what_a_power_cut_leaves_after_the_last_snapshot_is_left_out(tmp_path, capsys):
    metrics = Metrics(tmp_path)
    metrics.write(1, loss=0.25)
    before = metrics.path.read_bytes()
    metrics.path.write_bytes(before + bytes(50) + b"\n" + before)
    metrics = Metrics(tmp_path, resume_at=1, expected=metrics.summary)
    assert metrics.summary.lines == 1 and metrics.path.read_bytes() == before
    assert "line 2 is damaged: it is left out, since it comes after the last snapshot" in capsys.readouterr().err


def test_numpy_numbers_and_numbers_that_are_not_finite(tmp_path):
    Metrics(tmp_path).write(1, a=np.float32(0.5), b=math.nan, c=math.inf, d=np.float64("-inf"), e=7, f=np.int64(8))
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "a": 0.5, "b": null, "c": null, "d": null, "e": 7, "f": 8.0, "crc32": "ac7131da"}\n'
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
