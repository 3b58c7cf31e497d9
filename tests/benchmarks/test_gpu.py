"""benchmarks/gpu.py, as far as it can be tested without a GPU."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scratchformer import Key, models
from scratchformer.training.snapshot import load_file

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_file(FOLDER / "gpu.py")


@pytest.mark.parametrize("kind", ["LanguageModel", "GPT2", "Classifier"])
def test_the_model_in_pytorch_has_the_same_loss_and_gradients(gpu, kind):
    pytest.importorskip("torch")
    import torch
    import torch_model

    sizes, ids = dict(d_model=12, heads=2, depth=2), Key(1).generator().integers(0, 29, (3, 8))
    if kind == "Classifier":
        model = models.Classifier(29, 2, max_length=8, **sizes)
        batch = (ids, np.array([8, 8, 8]), np.array([0, 1, 1]))
    else:
        model = getattr(models, kind)(29, context=8, dropout=0.0, **sizes)
        batch = (ids, np.roll(ids, -1, axis=1))
    model = model.to(dtype=np.float64)
    loss, cache = model.loss(*batch)
    model.loss_backward(1.0, cache)
    peer = getattr(torch_model, {"GPT2": "TorchGPT2"}.get(kind, f"Torch{kind}"))(model, fused=True)
    theirs = peer.loss(*(torch.from_numpy(x) for x in batch))
    theirs.backward()
    assert float(theirs.detach()) == pytest.approx(float(loss), rel=1e-12)
    norm = sum(float((p.grad**2).sum()) for p in peer.parameters()) ** 0.5
    assert np.linalg.norm(model.flat.grad) == pytest.approx(norm, rel=1e-10)


def test_a_part_that_fails_is_noted_and_the_next_begins(gpu, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("out of memory")

    def speed(device, results, small, precisions):
        results.add("speed", model="x", small=small)

    monkeypatch.setattr(gpu, "agree", fail)
    monkeypatch.setattr(gpu, "speed", speed)
    arguments = ["--device", "cpu", "--small", "--only", "agree", "speed", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    gpu.main()
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["part"] for line in lines] == ["device", "failed", "speed"]
    assert lines[1]["what"] == "agree" and "out of memory" in lines[1]["why"] and lines[2]["small"]


def test_its_parts_run(gpu, monkeypatch, tmp_path):
    """On a CPU, without compiling, in as few steps as there can be."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda function: function)
    for name, value in dict(STEPS=1, ROUNDS=1, TURN=1).items():
        monkeypatch.setattr(gpu, name, value)
    results = gpu.Results(tmp_path)
    gpu.agree(gpu.CPU, results)
    gpu.speed(gpu.CPU, results, True, ["float32"])
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    parts = [line["part"] for line in lines]
    assert parts == 3 * ["agree"] + 3 * (3 * ["first steps"] + 3 * ["speed"])
    for line in lines[3:6], lines[9:12], lines[15:18]:
        assert [x["loss"] for x in line] == pytest.approx(3 * [line[0]["loss"]], rel=1e-5)
    assert all(line["tokens_per_second"] > 0 for line in lines if line["part"] == "speed")


def test_a_program_that_takes_too_long_is_stopped(gpu, tmp_path):
    results = gpu.Results(tmp_path)
    results.run("slow", ["sh", "-c", "echo begun; exec sleep 600"], 3.0)
    (line,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert line["code"] == "stopped after 3 s" and line["end"] == ["begun"]


def test_without_a_gpu_it_says_so(gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="CuPy is not installed"):
        gpu.main()
