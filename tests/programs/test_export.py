"""`scratchformer export` of runs, as a user calls it."""

import json
import sys

import numpy as np
import pytest

from scratchformer.export import export_model
from scratchformer.training import load_model


def test_a_run_of_gpt2_in_every_format(call, fail, gpt2_run, tmp_path):
    for library in "onnx", "gguf":
        pytest.importorskip(library)
    for name in "folder", "model.gguf", "model.onnx":
        out = tmp_path / name
        assert call("scratchformer", "export", gpt2_run.folder, out).stdout == f"{out}\n"
        assert f"{out}: expected a new file" in fail("scratchformer", "export", gpt2_run.folder, out)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "model.gguf", "model.onnx"}
    assert json.loads((tmp_path / "folder/config.json").read_text())["eos_token_id"] == 0
    options = ("--prompt", "the film", "--tokens", 9, "--temperature", 0, "--device", "cpu")
    texts = [call("scratchformer", "generate", run, *options).stdout for run in (gpt2_run.folder, tmp_path / "folder")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("run", ["enwik8_run", "xl_run"])
def test_a_model_of_bytes(run, request, call, fail, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    folder = request.getfixturevalue(run).folder
    call("scratchformer", "export", folder, tmp_path / "model.onnx")
    ids = np.frombuffer(b"the film ", np.uint8).astype(np.int64)[None]
    (logits,) = runtime.InferenceSession(tmp_path / "model.onnx").run(None, {"input_ids": ids})
    np.testing.assert_allclose(logits, load_model(folder)[0](ids), atol=1e-5)
    assert "has no counterpart in transformers" in fail("scratchformer", "export", folder, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("name", ["gguf", "onnx"])
def test_a_library_that_is_not_installed(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"need the library {name}: pip install 'scratchformer\[export\]'"):
        export_model(tmp_path, tmp_path / f"model.{name}")


def test_what_is_no_language_model(fail, imdb_run, tmp_path):
    line = fail("scratchformer", "export", imdb_run.folder, tmp_path / "model.onnx")
    assert line.endswith("holds a Classifier, and only language models are exported")
    assert "in an existing folder" in fail("scratchformer", "export", imdb_run.folder, tmp_path / "no/model.onnx")
