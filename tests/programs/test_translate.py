"""examples/translate.py and the commands on its runs, end to end on a toy language."""

import io
import re
import shutil
import sys

import numpy as np
import pytest

from scratchformer.commands import cli
from scratchformer.commands.plots import attention_maps, encode
from scratchformer.training import kept_snapshots, load_model, load_snapshot
from scratchformer.training.readers import mean_snapshot
from scratchformer.training.start import run_main

pytest.importorskip("tokenizers")
BLEU = r"([0-9.]+) BLEU on the 12 test sentences, beam (\d+) \((nrefs:1\|.*tok:13a.*)\)"


@pytest.fixture
def copy(translate_run, tmp_path):
    return shutil.copytree(translate_run.folder, tmp_path / "run")


def test_it_prints_its_score_with_the_signature_and_translations(translate_run):
    found = re.findall(BLEU, translate_run.output)
    assert [beam for _, beam, _ in found] == ["1", "5"]
    assert re.findall(
        r"lower-case, tokenised BLEU on the 12 test sentences, beam (\d+) \(moses:de\|nrefs:1\|case:lc",
        translate_run.output,
    ) == ["1", "5"]
    assert translate_run.output.count("(reference: ") == 5
    assert {path.name for path in translate_run.folder.iterdir()} == {
        "average.safetensors", "best.safetensors", "last.safetensors", "step-00000001.safetensors",
        "step-00000002.safetensors", "metrics.jsonl", "settings.json", "vocabulary.json", "run.lock",
    }  # fmt: skip


def test_it_learns_and_resumes_and_the_commands_agree(call, copy):
    told = call("translate", "--resume", copy, "--steps", 60, "--device", "cpu").stdout
    assert load_snapshot(copy).state["step"] == 60
    assert len(kept_snapshots(copy)) == 10
    score = float(re.findall(BLEU, told)[-1][0])
    assert score > 60
    found = call("scratchformer", "evaluate", copy, "--device", "cpu").stdout
    assert float(re.match(r"test: BLEU ([0-9.]+), lower-case, tokenised BLEU [0-9.]+$", found)[1]) == pytest.approx(
        score, abs=0.011
    )
    (source, written) = re.search(r"^en: (.*)\nde: (.*)$", told, re.MULTILINE).groups()
    assert call("scratchformer", "translate", copy, source, "--device", "cpu").stdout == f"{written}\n"


def test_the_mean_of_the_snapshots_is_scored(call, copy):
    call("translate", "--resume", copy, "--steps", 5, "--device", "cpu")
    models = [load_model(path)[0].state_dict() for path in kept_snapshots(copy)]
    mean = load_model(copy / "average.safetensors")[0].state_dict()
    assert len(models) > 1
    for name, array in mean.items():
        expected = sum(m[name].astype(float) for m in models) / len(models)
        assert abs(array - expected).max() < 1e-6, name


def test_a_run_of_less_than_an_epoch_also_saves_what_it_scores(call, sentences_folder, tmp_path):
    """It has kept no snapshot to average."""
    options = ("--data", sentences_folder, "--out", tmp_path / "run", "--steps", 1, "--device", "cpu")
    call("translate", *options)
    assert len(kept_snapshots(tmp_path / "run")) == 1
    (tmp_path / "run" / "average.safetensors").unlink()
    for path in kept_snapshots(tmp_path / "run"):
        path.unlink()
    call("translate", "--resume", tmp_path / "run", "--device", "cpu")
    names = ("average.safetensors", "best.safetensors")
    mean, best = (load_model(tmp_path / "run" / name)[0].flat.data for name in names)
    assert (mean == best).all()


def test_a_run_that_goes_on_has_no_mean_until_it_ends(copy, example):
    """The mean of earlier snapshots is not taken for that of a run which was resumed and stopped."""
    stopped = RuntimeError("stopped")

    def stop(*_):
        raise stopped

    assert (copy / "average.safetensors").exists()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as raised:
        patch.setattr("scratchformer.parallel.replicas.Replicas.gradients", stop)
        run_main(example("translate").main, ["--resume", str(copy), "--steps", "5", "--device", "cpu"])
    assert raised.value is stopped and not (copy / "average.safetensors").exists()
    assert mean_snapshot(copy).name == "best.safetensors"


def test_bad_input(fail, copy, sentences_folder, tmp_path):
    options = ("--steps", 1, "--device", "cpu", "--out", tmp_path / "new")
    assert "no such file or folder" in fail("translate", "--data", tmp_path / "nowhere", *options)
    (tmp_path / "half").mkdir()
    shutil.copy(sentences_folder / "train.en", tmp_path / "half")
    assert "neither train.de nor train.de.gz in it" in fail("translate", "--data", tmp_path / "half", *options)
    assert not (tmp_path / "new").exists()
    assert "an empty one" in fail("scratchformer", "translate", copy, "a dog", " ")
    line = fail("scratchformer", "translate", copy, "a dog", "a red dog " * 50)
    assert re.match("error: sentence 2: expected at most 32 tokens with END, got [0-9]+$", line)
    words = copy / "vocabulary.json"
    text = words.read_text(encoding="utf-8")
    words.write_text(text[:100], encoding="utf-8")
    assert "vocabulary.json is damaged" in fail("scratchformer", "translate", copy, "a dog")


def test_a_blank_line_of_standard_input_stays_one(copy, monkeypatch, capsys):
    def translated(*argv):
        capsys.readouterr()
        cli.main(["translate", str(copy), *argv, "--device", "cpu"])
        return capsys.readouterr().out

    monkeypatch.setattr(sys, "stdin", io.StringIO("\na dog\n \n\na cat\n"))
    dog, cat = translated("a dog", "a cat").splitlines()
    assert translated() == f"\n{dog}\n\n\n{cat}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\na dog\n \n{100 * 'a dog '}\n"))
    with pytest.raises(SystemExit, match=r"^error: sentence 2: expected at most 32 tokens with END, got"):
        translated()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert translated() == ""


def test_other_models_do_not_translate(fail, imdb_run, translate_run):
    assert "holds a Classifier, which cannot translate" in fail("scratchformer", "translate", imdb_run.folder, "a")
    assert "which cannot generate text" in fail("scratchformer", "generate", translate_run.folder)


def test_plot_draws_the_curves_and_the_cross_attention(call, translate_run):
    pytest.importorskip("matplotlib")
    result = call("scratchformer", "plot", translate_run.folder)
    paths = [translate_run.folder / "plots" / f"{name}.png" for name in ("curves", "attention")]
    assert result.stdout.split() == [str(path) for path in paths]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths)


def test_attention_to_the_source(translate_run):
    """Rows are labelled with predicted tokens, columns with source tokens; every row is a distribution."""
    model, state = load_model(translate_run.folder)
    rows, columns, source, target = encode(model, "a red dog sees apples .", translate_run.folder, state)
    maps = attention_maps(model, source, target)
    assert maps.shape == (1, 4, len(rows), len(columns)) == (1, 4, target.shape[1], source.shape[1])
    np.testing.assert_allclose(maps.sum(axis=-1), 1, rtol=1e-5)
    assert columns[-1] == rows[-1] == "<eos>" and "".join(columns[:-1]).replace("▁", " ").strip().startswith("a red")
