"""examples/bert.py end to end on small data: its three stages, alone and together, and published weights."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from scratchformer.data.subwords import _BYTES as BYTES_AS_SYMBOLS
from scratchformer.data.subwords import BERT_SPECIALS, ROBERTA_SPECIALS
from scratchformer.models import BertClassifier, bert_weights
from scratchformer.training import load_snapshot, read_metrics

pytest.importorskip("tokenizers")
WORDS = "a the film story acting plot was is not very good bad dull bright long short wonderful awful it i".split()


@pytest.fixture
def copy(bert_run, tmp_path):
    return shutil.copytree(bert_run.folder, tmp_path / "run")


@pytest.fixture
def published(tmp_path):
    """A folder in Hugging Face's format: a BERT with random weights and a vocabulary of a few words."""
    folder = tmp_path / "published"
    folder.mkdir()
    words = [*BERT_SPECIALS, *WORDS]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    model = BertClassifier(len(words), 2, 8, 2, 1, 40, d_ff=8)
    config = {theirs: model.config.get(ours) for theirs, ours in bert_weights.BERT.settings.items()}
    config |= {"model_type": "bert", "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: bert_weights.stored_as(name) for name in model.named_parameters()}
    arrays = {name: p.data.T if tensors[name].transposed else p.data for name, p in model.named_parameters().items()}
    save_file(
        {tensors[name].name: np.ascontiguousarray(array) for name, array in arrays.items()},
        folder / "model.safetensors",
    )
    return folder


def accuracies(text):
    return {
        stage: float(a) for stage, a in re.findall(r"^([\w-]+): test accuracy on 80 reviews: ([0-9.]+)%$", text, re.M)
    }


def test_it_reports_the_accuracy_with_and_without_pre_training(bert_run):
    assert "the data has no unlabelled reviews (train/unsup)" in bert_run.output
    assert "100 reviews of " in bert_run.output  # 200 less 100 for validation
    assert "starts from the pre-trained model of step 2 of 2" in bert_run.output
    assert accuracies(bert_run.output).keys() == {"finetune", "scratch"}
    assert re.findall(r"^(\w+): [0-9.]+ minutes$", bert_run.output, re.M) == ["bert"]
    assert {path.name for path in bert_run.folder.iterdir()} == {
        "pretrain", "finetune", "scratch", "settings.json", "vocabulary.json", "run.lock",
    }  # fmt: skip
    kinds = {stage: load_snapshot(bert_run.folder / stage).model_class for stage in ("pretrain", "finetune", "scratch")}
    assert kinds == {"pretrain": "BertPretraining", "finetune": "BertClassifier", "scratch": "BertClassifier"}
    best = load_snapshot(bert_run.folder / "pretrain").state["best"]
    assert best.keys() == {"step", "loss", "masked_accuracy", "next_sentence_accuracy"}


def test_it_resumes_where_it_stopped(call, fail, copy):
    """Every stage continues, with more steps; but not pre-training, if a classifier has started from its model."""
    line = fail("bert", "--resume", copy, "--steps", 3, "--device", "cpu")
    expected = f"the models in {copy / 'finetune'} have started from its step 2: remove them, add --steps 2, or"
    assert line.startswith(f"error: --steps: pretrain would go on to step 3, but {expected}")
    shutil.rmtree(copy / "finetune")
    result = call("bert", "--resume", copy, "--steps", 3, "--device", "cpu")
    stages = ("pretrain", "finetune", "scratch")
    assert "starts from the pre-trained model of step 3 of 3" in result.stdout
    assert [int(load_snapshot(copy / stage).optimizer["steps"]) for stage in stages] == [3, 3, 3]
    assert [r["step"] for r in read_metrics(copy / "pretrain" / "metrics.jsonl") if "lr" in r] == [2, 3]
    assert accuracies(result.stdout).keys() == {"finetune", "scratch"}


def test_stages_run_one_at_a_time(call, fail, copy, reviews_folder, tmp_path):
    shutil.rmtree(copy / "finetune")
    shutil.rmtree(copy / "scratch")
    result = call("bert", "--resume", copy, "--stage", "finetune", "--device", "cpu")
    assert accuracies(result.stdout).keys() == {"finetune"} and not (copy / "scratch").exists()
    told = call("bert", "--resume", copy, "--device", "cpu").stdout
    assert "as before: --stage finetune; to change this, give the option again" in told
    assert "peak while training" in call("bert", "--resume", copy, "--estimate", "--device", "cpu").stdout
    assert accuracies(call("bert", "--resume", copy, "--stage", "all", "--device", "cpu").stdout).keys() == {
        "finetune",
        "scratch",
    }
    options = ("--data", reviews_folder, "--out", tmp_path / "new", "--device", "cpu")
    line = fail("bert", "--stage", "finetune", *options)
    assert line.endswith("holds no pre-trained model: run --stage pretrain first")
    line = fail("bert", "--stage", "scratch", "--tune", "lora", *options)
    assert line == "error: --pretrained, --tune: these apply only to fine-tuning, so leave out --stage scratch"
    assert not (tmp_path / "new").exists()


def test_a_held_out_review_of_one_word(call, reviews_folder, tmp_path):
    """Pre-training cuts each in two, so it is left out there."""
    folder = shutil.copytree(reviews_folder, tmp_path / "reviews")
    for path in sorted((folder / "train").glob("*/*.txt"))[::10]:
        path.write_text("a")
    run = tmp_path / "run"
    call("bert", "--data", folder, "--out", run, "--steps", 2, "--stage", "pretrain", "--device", "cpu")
    assert load_snapshot(run / "pretrain").state["step"] == 2


@pytest.mark.parametrize("tune", ["head", "lora"])
def test_head_and_lora_tuning_leave_the_rest_unchanged(call, copy, tune):
    """Each starts from the same pre-trained model, in its own folder, and leaves the frozen weights as they were."""
    folder, before = copy / f"finetune-{tune}", load_snapshot(copy / "finetune")
    result = call("bert", "--resume", copy, "--stage", "finetune", "--tune", tune, "--device", "cpu")
    accuracy = accuracies(result.stdout)[folder.name]
    trained, total = map(int, re.search(r"trains (\d+) of (\d+) param", result.stdout.replace(",", "")).groups())
    snapshot, pretrained = load_snapshot(folder), load_snapshot(copy / "pretrain").model
    assert snapshot.optimizer["m"].size == trained < total == sum(a.size for a in snapshot.model.values())
    for name, array in snapshot.model.items():
        if name.startswith("body.") and ".lora_" not in name:
            np.testing.assert_array_equal(array, pretrained[name], err_msg=name)
    assert any(".lora_b" in name and array.any() for name, array in snapshot.model.items()) == (tune == "lora")
    again = call("bert", "--resume", copy, "--stage", "finetune", "--tune", tune, "--device", "cpu", "--steps", 3)
    assert int(load_snapshot(folder).optimizer["steps"]) == 3 and folder.name in accuracies(again.stdout)
    found = call("scratchformer", "evaluate", copy, "--device", "cpu").stdout
    assert re.findall(r"^([\w-]+): test", found, re.M) == ["finetune", folder.name, "pretrain", "scratch"]
    assert 0 <= accuracy <= 100
    assert load_snapshot(copy / "finetune").state == before.state


def test_published_weights_are_fine_tuned(call, fail, published, reviews_folder, tmp_path):
    options = ("--data", reviews_folder, "--device", "cpu", "--pretrained", published)
    result = call("bert", *options, "--out", tmp_path / "run")
    assert accuracies(result.stdout).keys() == {"finetune"}
    assert load_snapshot(tmp_path / "run" / "finetune").config["d_model"] == 8
    shutil.move(published, tmp_path / "elsewhere")  # the run has all it needs
    resumed = call("bert", "--resume", tmp_path / "run", "--device", "cpu")
    assert accuracies(resumed.stdout) == accuracies(result.stdout)
    shutil.move(tmp_path / "elsewhere", published)

    new = ("--out", tmp_path / "new")
    assert "so leave out --stage scratch" in fail("bert", *options, *new, "--stage", "scratch")
    with open(published / "vocab.txt", "a") as file:
        file.write("toomuch\n")
    assert fail("bert", *options, *new).endswith("vocab.txt has 26 tokens, but the model of config.json has 25")
    (published / "vocab.txt").unlink()
    assert fail("bert", *options, *new).endswith("vocab.txt: No such file or directory")
    (published / "model.safetensors").unlink()
    assert "model.safetensors: no such file" in fail("bert", *options, *new)
    (published / "config.json").unlink()
    assert "config.json: No such file" in fail("bert", *options, *new)
    assert not (tmp_path / "new").exists()


def write_variant(folder, kind):
    """The same of a RoBERTa, whose tokens are bytes, or of a DistilBERT."""
    folder.mkdir()
    if kind == "roberta":
        words = [*ROBERTA_SPECIALS, *BYTES_AS_SYMBOLS, "th"]
        (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
        (folder / "merges.txt").write_text("#version: 0.2\nt h\n")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"}))
        model = BertClassifier(len(words), 2, 8, 2, 1, 40, d_ff=8, segments=1, first_position=2)
    else:
        words = [*BERT_SPECIALS, *WORDS]
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        model = BertClassifier(len(words), 2, 8, 2, 1, 40, d_ff=8, segments=0, pooling="relu")
    names = bert_weights.PUBLISHED[kind]
    config = {theirs: model.config.get(ours) for theirs, ours in names.settings.items()} | {"model_type": kind}
    config |= {"max_position_embeddings": 40 + model.body.first_position, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config | dict.fromkeys(("dropout", "hidden_dropout_prob"), 0.1)))
    tensors = {name: bert_weights.stored_as(name, names) for name in model.named_parameters()}
    arrays = {t.name: np.ascontiguousarray(p.data.T if t.transposed else p.data)
              for t, p in zip(tensors.values(), model.parameters(), strict=True)}  # fmt: skip
    save_file(arrays, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
def test_the_variants_are_fine_tuned_and_evaluated(call, kind, reviews_folder, tmp_path):
    write_variant(tmp_path / kind, kind)
    run = tmp_path / "run"
    options = ("--data", reviews_folder, "--device", "cpu", "--pretrained", tmp_path / kind, "--out", run)
    expected = accuracies(call("bert", *options).stdout)["finetune"]
    result = call("scratchformer", "evaluate", run, "--device", "cpu").stdout
    assert 100 * float(re.search(r"finetune: test: .*accuracy ([0-9.]+)", result)[1]) == pytest.approx(
        expected, abs=0.01
    )


def test_evaluate_reproduces_the_scores_of_the_program(call, fail, bert_run, copy):
    shutil.rmtree(copy / "scratch")
    result = call("scratchformer", "evaluate", copy, "--device", "cpu").stdout
    expected = accuracies(bert_run.output)["finetune"]
    found = re.fullmatch(r"finetune: test: .*accuracy ([0-9.]+)\npretrain: test: .*masked_accuracy.*\n", result)
    assert 100 * float(found[1]) == pytest.approx(expected, abs=0.01)
    shutil.rmtree(copy / "finetune")
    shutil.rmtree(copy / "pretrain")
    assert fail("scratchformer", "evaluate", copy).endswith("holds no model yet")


def test_plot_draws_the_curves_of_every_stage(call, bert_run):
    pytest.importorskip("matplotlib")
    result = call("scratchformer", "plot", bert_run.folder)
    names = ("curves_finetune", "curves_pretrain", "curves_scratch")
    assert result.stdout.split() == [str(bert_run.folder / "plots" / f"{name}.png") for name in names]
