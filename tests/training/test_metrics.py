"""The metrics file."""

import json

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
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Metrics(tmp_path, resume_at=1)
    assert metrics.path.read_bytes() == before
