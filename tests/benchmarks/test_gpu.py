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


@pytest.mark.parametrize("kind", ["LanguageModel", "GPT2", "Classifier", "Llama"])
def test_the_model_in_pytorch_has_the_same_loss_and_gradients(gpu, kind):
    torch = pytest.importorskip("torch")
    import torch_model

    sizes, ids = dict(d_model=12, heads=2, depth=2), Key(1).generator().integers(0, 29, (3, 8))
    batch = (ids, np.roll(ids, -1, axis=1))
    if kind == "Classifier":
        model = models.Classifier(29, 2, max_length=8, **sizes)
        batch = (ids, np.array([8, 8, 8]), np.array([0, 1, 1]))
    else:
        model = getattr(models, kind)(29, context=8, dropout=0.0, **sizes)
    model = model.to(dtype=np.float64)
    loss, cache = model.loss(*batch)
    model.loss_backward(1.0, cache)
    peer = getattr(torch_model, f"Torch{kind}")(model, fused=True)
    theirs = peer.loss(*(torch.from_numpy(x) for x in batch))
    theirs.backward()
    assert float(theirs.detach()) == pytest.approx(float(loss), rel=1e-12)
    norm = sum(float((p.grad**2).sum()) for p in peer.parameters()) ** 0.5
    assert np.linalg.norm(model.flat.grad) == pytest.approx(norm, rel=1e-10)


def test_the_decoder_in_pytorch_has_the_logits_of_the_whole_text(gpu):
    torch = pytest.importorskip("torch")
    import torch_model

    model = models.GPT2(29, d_model=12, heads=2, depth=2, context=9, dropout=0.0).to(dtype=np.float64)
    peer = torch_model.TorchGPT2(model, fused=True)
    decoder, ids = torch_model.TorchDecoder(peer, 9), torch.from_numpy(Key(1).generator().integers(0, 29, (1, 9)))
    with torch.inference_mode():
        parts = [slice(0, 5), *(slice(t, t + 1) for t in range(5, 9))]
        found = [decoder.logits(ids[:, part], torch.arange(9)[part]) for part in parts]
        np.testing.assert_allclose(torch.cat(found), peer(ids)[0, 4:], atol=1e-12)


def test_a_part_that_fails_is_noted_and_the_next_begins(gpu, monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise RuntimeError("out of memory")

    def profile(results, device, small):
        results.add("profile", model="x", ms=1.5, kernels=[], small=small)

    monkeypatch.setattr(gpu, "agree", fail)
    monkeypatch.setattr(gpu.gpu_speed, "profile", profile)
    arguments = ["--device", "cpu", "--small", "--only", "check", "agree", "profile", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    gpu.main()
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["part"] for line in lines] == ["check", "failed", "profile"]
    assert lines[1]["what"] == "agree" and "out of memory" in lines[1]["why"] and lines[2]["small"]
    assert "x, bfloat16: 1.50 ms in kernels" in capsys.readouterr().out


def test_competitors_train_alike(gpu):
    """On a CPU, without compiling: two steps of each row that PyTorch has, except with dropout, and a token."""
    pytest.importorskip("torch")
    speed = gpu.gpu_speed
    for row in speed.rows(small=True).values():
        if row.peer and row.key is None:
            ours = speed.our_steps(row, gpu.CPU, "float32")
            theirs = speed.torch_steps(row, None, gpu.CPU, "float32")
            if row.generating:
                assert 0 <= ours.take(2) < 500 and 0 <= int(theirs.take(2)) < 500
            else:
                assert float(theirs.take(2)) == pytest.approx(float(ours.take(2)), rel=1e-5)


def test_competitors_take_turns(gpu, tmp_path):
    speed, results = gpu.gpu_speed, gpu.Results(tmp_path, 5)
    speed.compare(results, ["generation, GPT-2 small"], "float32", gpu.CPU, True, 300, [])
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["part"] for line in lines] == ["ready", "speed"] and lines[1]["tokens_per_second"] > 0


def test_a_competitor_that_ends_is_noted_and_the_others_go_on(gpu, tmp_path, monkeypatch):
    says = "import json; print(json.dumps(dict(last=1.0, seconds=0.5, ready=1, memory=None)), flush=True)"
    programs = {"scratchformer": f"{says}\nwhile True: input(); {says[13:]}", "eager": f"{says}\nraise SystemExit(3)"}
    speed, results = gpu.gpu_speed, gpu.Results(tmp_path, 5)
    monkeypatch.setattr(speed, "command", lambda name, precision, who, *_: [sys.executable, "-c", programs[who]])
    speed.compare(results, ["GPT-2 small"], "float32", gpu.CPU, True, 300, ["eager"])
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["part"] for line in lines] == ["ready", "ready", "failed", "speed"]
    assert lines[2]["why"] == "it ended with status 3" and lines[3]["competitor"] == "scratchformer"


def test_training_writes_its_curve(gpu, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(Key(1).generator().integers(97, 123, 50_000, dtype=np.uint8)))
    results = gpu.Results(tmp_path / "out", 5)
    gpu.gpu_training.train(results, gpu.CPU, True, 0.1, path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["part"] for line in lines][-2:] == ["training", "trained"] and lines[-1]["test_bits_per_byte"] > 0
    header, first, *_ = (tmp_path / "out" / "training.csv").read_text().splitlines()
    assert header == "step,seconds,loss,lr,validation_loss,validation_bits_per_byte" and first.startswith("1,")
    assert (tmp_path / "out" / "training.png").stat().st_size > 1000


def test_a_program_that_takes_too_long_is_stopped(gpu, tmp_path):
    results = gpu.Results(tmp_path, 5)
    results.run("slow", ["sh", "-c", "echo begun; exec sleep 600"], 3.0)
    (line,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert line["code"].startswith("stopped after ") and line["end"] == ["begun"]


def test_without_a_gpu_it_says_so(gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="CuPy is not installed"):
        gpu.main()
