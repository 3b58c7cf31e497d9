"""The programs in examples/records end to end on small data, and the commands on their runs."""

import json
import re
import shutil

import numpy as np
import pytest

from scratchformer.data import encode_pairs, load_enwik8, load_imdb, load_multi30k
from scratchformer.generation import bleu
from scratchformer.parallel.replicas import Replicas
from scratchformer.records import (
    predict_classes,
    recalling,
    scores_of_classes,
    stack_weights,
    stacked,
    translate_together,
    with_evidence,
    with_neighbours,
)
from scratchformer.records.ensembles import load_translators
from scratchformer.records.translators import writes_backwards
from scratchformer.training import (
    evaluate_language_model,
    load_model,
    load_snapshot,
)
from scratchformer.training.readers import mean_snapshot

NUMBER = "([0-9.]+)"
BLEU = r"([0-9.]+) BLEU on the 12 test sentences, beam (\d+) \((nrefs:1\|.*tok:13a.*)\)"


def number(pattern, text):
    return float(re.search(pattern, text, re.MULTILINE)[1])


def test_enwik8_looks_in_all_the_text_before(call, text_file, tmp_path):
    """It is scored with matches from earlier parts of the corpus, after training and by `evaluate`, and can write."""
    text_file, folder = shutil.copy(text_file, tmp_path), tmp_path / "run"
    options = ("--data", text_file, "--out", folder, "--steps", 2, "--device", "cpu")
    told = number(rf"{NUMBER} bits per byte", call("records/enwik8", *options).stdout)
    orders = load_snapshot(folder).config["embeddings"][0]["orders"]
    assert orders[:8] == [3, 3, 3, 4, 4, 4, 4, 5] and orders[-1] == 24
    options = ("--dynamic", "--lr", 0, "--stride", 8, "--device", "cpu")
    found = call("scratchformer", "evaluate", folder, *options).stdout
    assert number(rf"^test: loss [0-9.]+, bits_per_byte {NUMBER}$", found) == pytest.approx(told, abs=1.01e-4)
    words = "test, learning while reading: loss [0-9.]+, bits_per_byte"
    assert number(rf"^{words} {NUMBER}$", found) == pytest.approx(told, abs=1.01e-4)
    written = call("scratchformer", "generate", folder, "--tokens", 5)
    assert len(written.stdout) > 1 and not written.stderr
    corpus = load_enwik8(text_file)
    rows = recalling(np.concatenate(corpus[1:]), orders)[-len(corpus.test) :]
    with Replicas(load_model(folder)[0], 1) as replicas:
        before, *others = (
            evaluate_language_model(replicas, data)["bits_per_byte"]
            for data in (rows, recalling(corpus.test, orders), corpus.test)
        )
    assert before == pytest.approx(told, abs=1.01e-4)
    assert all(abs(score - before) > 1e-6 for score in others)  # matches only in the test part, or in the window
    told = call("records/enwik8", "--resume", folder, "--steps", 3, "--device", "cpu").stdout
    assert "the best of 3 steps" in told
    shutil.copy(text_file, tmp_path / "text")
    (tmp_path / "text.txt").write_bytes((tmp_path / "text").read_bytes().swapcase())
    written = call("scratchformer", "generate", folder, "--tokens", 5)
    assert len(written.stdout) > 1
    assert "only in the text that is written: " in written.stderr and "was made with other data" in written.stderr


def test_the_preset_of_an_hour_is_a_llama_with_ngrams(call, text_file, tmp_path):
    options = ("--preset", "hour", "--data", text_file, "--steps", 1, "--device", "cpu")
    call("records/enwik8", *options, "--out", tmp_path / "run")
    snapshot = load_snapshot(tmp_path / "run")
    assert snapshot.model_class == "Llama"
    assert [each["layer"]["import"].rpartition(":")[2] for each in snapshot.config["embeddings"]] == [
        "NGrams",
        "Recall",
    ]
    assert snapshot.config["embeddings"][0]["orders"] == [2, 3]


@pytest.fixture
def noisy_reviews(reviews_folder, tmp_path):
    """reviews_folder, but a fifth of the reviews use the word of the other class, so no model can be sure."""
    folder = shutil.copytree(reviews_folder, tmp_path / "noisy" / "aclImdb")
    other = {"wonderful": "awful", "awful": "wonderful"}
    for path in folder.glob("*/*/*.txt"):
        if int(path.name.split("_")[0]) % 5 == 0:
            path.write_text(" ".join(other.get(word, word) for word in path.read_text().split()))
    return folder


def test_imdb_reads_evidence(call, noisy_reviews, tmp_path):
    """A run keeps its model when it is resumed, and the command scores it as the program did."""
    options = ("--data", noisy_reviews, "--out", tmp_path / "run")
    call("records/imdb", *options, "--steps", 1, "--device", "cpu")
    result = call("records/imdb", "--resume", tmp_path / "run", "--steps", 3, "--device", "cpu")
    told = number(rf"test accuracy on 80 reviews: {NUMBER}%", result.stdout)
    found = call("scratchformer", "evaluate", tmp_path / "run", "--device", "cpu").stdout
    assert number(rf"^test: loss [0-9.]+, accuracy {NUMBER}$", found) == pytest.approx(told / 100, abs=1.01e-4)
    data, predicted = with_evidence(load_imdb(noisy_reviews, 100, 100), 2), {}
    model, _ = load_model(mean_snapshot(tmp_path / "run"))
    for part in "validation", "test":
        texts, rows = getattr(data, part), []
        for ids, evidence in zip(texts.ids, texts.evidence, strict=True):
            kept = np.arange(len(ids)) if len(ids) <= 16 else np.r_[:4, len(ids) - 12 : len(ids)]
            rows.append(np.exp(model(ids[None, kept], evidence[None, kept])[0]))
        predicted[part] = np.array(rows)
    weights = stack_weights(predicted["validation"], data.validation.logits, data.validation.labels)
    scores = scores_of_classes(stacked(predicted["test"], data.test.logits, weights), data.test.labels)
    assert number(rf"^test: loss {NUMBER}, ", found) == pytest.approx(scores["loss"], abs=1e-4)
    for longest in 0, 4:
        refused = call("records/imdb", "--evidence", longest, "--data", noisy_reviews, status=2)
        assert "invalid choice" in refused.stderr


def test_three_models_of_imdb_decide_together(call, noisy_reviews, tmp_path):
    """The mean of their probabilities is scored, with the linear model, by the program and by the command."""
    folder, options = tmp_path / "run", ("--device", "cpu")
    train = ("records/imdb", "--data", noisy_reviews, "--steps", 6, *options)
    told = call(*train, "--out", folder, "--models", 3).stdout
    names = ("model-1", "model-2", "model-3")
    assert re.findall("^(model-.) best on validation: ", told, re.MULTILINE) == [*names]
    models = [load_model(mean_snapshot(folder / name))[0] for name in names]
    assert len({model.flat.data.tobytes() for model in models}) == 3
    alone = tmp_path / "alone"
    call(*train, "--out", alone)
    assert (load_model(mean_snapshot(alone))[0].flat.data == models[0].flat.data).all()

    data = with_evidence(load_imdb(noisy_reviews, 100, 100), 2)
    asked, held_out, predicted = call("scratchformer", "evaluate", folder, *options).stdout, data.validation, []
    for model in models:
        with Replicas(model, 1) as replicas:
            predicted.append([predict_classes(replicas, texts, 16, "both") for texts in (data.test, held_out)])
    predicted.append([sum(each) / 3 for each in zip(*predicted, strict=True)])
    weights = [stack_weights(probabilities, held_out.logits, held_out.labels) for _, probabilities in predicted]
    joint = [stacked(p, data.test.logits, w) for (p, _), w in zip(predicted, weights, strict=True)]
    *each, scores = [scores_of_classes(p, data.test.labels) for p in joint]
    each_alone = ("accuracy_1", "accuracy_2", "accuracy_3")
    printed = re.search(
        "^model-3: test: " + ", ".join(f"{name} {NUMBER}" for name in ("loss", "accuracy", *each_alone)),
        asked,
        re.MULTILINE,
    )
    expected = [*scores.values(), *(one["accuracy"] for one in each)]
    assert [*map(float, printed.groups())] == pytest.approx(expected, abs=1.01e-4)
    assert f"test accuracy on 80 reviews: {100 * scores['accuracy']:.2f}%" in told
    assert f"accuracy_2: {100 * each[1]['accuracy']:.2f}%" in told
    call("records/imdb", "--resume", folder, "--steps", 7, *options)
    assert [load_snapshot(folder / name / "last.safetensors").state["step"] for name in names] == [7] * 3


def translated(models, subwords, sentences):
    return translate_together(models, subwords, sentences, beam=5, length_penalty=1.0)


def test_two_models_translate_together(call, fail, sentences_folder, tmp_path):
    """Each is trained from other weights, on other batches; only both together are scored on the test part."""
    for module in "sacrebleu", "sacremoses":
        pytest.importorskip(module)
    folder, options = tmp_path / "run", ("--device", "cpu")
    train = ("records/translate", "--data", sentences_folder, "--steps", 60, *options)
    told = call(*train, "--out", folder, "--models", 2).stdout
    assert re.findall(r"^(model-.) best on validation: ", told, re.MULTILINE) == ["model-1", "model-2"]
    assert [beam for _, beam, _ in re.findall(BLEU, told)] == ["1", "5"]
    score = float(re.findall(BLEU, told)[-1][0])
    first, second = (load_snapshot(folder / name).model for name in ("model-1", "model-2"))
    assert all((first[name] != second[name]).any() for name in first)
    alone = tmp_path / "alone"
    call(*train, "--out", alone)
    assert all((first[name] == array).all() for name, array in load_snapshot(alone).model.items())
    found = call("scratchformer", "evaluate", folder, *options).stdout
    assert number(rf"^model-2: test: BLEU {NUMBER}, ", found) == pytest.approx(score, abs=0.011)
    (source, written) = re.search(r"^en: (.*)\nde: (.*)$", told, re.MULTILINE).groups()
    assert call("scratchformer", "translate", folder, source, *options).stdout == f"{written}\n"
    models, subwords = load_translators(folder)
    test = load_multi30k(sentences_folder, "en", "de").test
    assert bleu(translated(models, subwords, test.source), test.target)[0] == pytest.approx(score, abs=0.011)
    fail("scratchformer", "generate", folder)
    call("records/translate", "--resume", folder, "--steps", 61, *options)
    states = [load_snapshot(folder / name / "last.safetensors").state["step"] for name in ("model-1", "model-2")]
    assert states == [61, 61]
    (folder / "model-1" / "average.safetensors").unlink()  # as if the run had been stopped before its end
    for command in ("translate", folder, "a dog"), ("evaluate", folder):
        expected = f"error: model-1 of 2 is not trained to its end: continue with --resume {folder}"
        assert fail("scratchformer", *command, "--device", "cpu") == expected


def test_models_of_both_directions_translate_with_neighbours(call, fail, sentences_folder, tmp_path):
    """The first writes forwards, and the second backwards; each looks up its own vectors, in `evaluate` too."""
    for module in "sacrebleu", "sacremoses":
        pytest.importorskip(module)
    folder, options = tmp_path / "run", ("--device", "cpu")
    train = ("records/translate", "--data", sentences_folder, "--steps", 60, *options)
    more = ("--models", 2, "--backwards", 1, "--neighbours", 4)
    score = float(re.findall(BLEU, call(*train, "--out", folder, *more).stdout)[-1][0])
    models, subwords = load_translators(folder)
    assert [*map(writes_backwards, models)] == [False, True]
    data = load_multi30k(sentences_folder, "en", "de")
    test, pairs = data.test, encode_pairs(subwords, data.train, 32)
    known = [with_neighbours(model, pairs, subwords, neighbours=4) for model in models]
    written = translated(known[1:], subwords, test.source)
    turned = [" ".join(reversed(text.split())) for text in written]
    assert bleu(written, test.target)[0] > 2 * bleu(turned, test.target)[0]  # the backward model is read forwards
    assert bleu(translated(known, subwords, test.source), test.target)[0] == pytest.approx(score, abs=0.011)
    found = call("scratchformer", "evaluate", folder, *options).stdout
    assert number(rf"^model-2: test: BLEU {NUMBER}, ", found) == pytest.approx(score, abs=0.011)
    for more in ("--backwards", 1), ("--preset", "hour", "--models", 1):
        line = fail(*train, "--out", tmp_path / "new", *more)
        expected = "expected fewer than --models, 1, got 1; add --backwards 0 for models that all write forwards"
        assert line == f"error: --backwards: {expected}"
    few = shutil.copytree(sentences_folder, tmp_path / "few")
    for end, words in ("en", "a dog sees a cat ."), ("de", "ein Hund sieht eine Katze ."):
        (few / f"train.{end}").write_text(f"{words}\n" * 20, encoding="utf-8")
    (few / "train.de.gz").unlink()
    line = fail("records/translate", "--data", few, "--steps", 1, *options, "--neighbours", 999)
    assert re.fullmatch(r"error: --neighbours: expected at most the \d+ tokens of the pairs, got 999", line)
    assert not (tmp_path / "new").exists()
    assert json.loads((folder / "settings.json").read_text())["backwards"] == 1
