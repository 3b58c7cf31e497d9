"""Models that write, and their vocabularies: from runs, snapshots and published folders."""

import pytest

from scratchformer.data import DataError, Subwords, Vocabulary
from scratchformer.models import GPT2, Classifier, LanguageModel
from scratchformer.rng import Key
from scratchformer.training import SnapshotError, save_snapshot
from scratchformer.training.readers import load_vocabulary, load_writer

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def vocabulary():
    return Subwords.byte_bpe(["the low, the lowest"] * 3, 270)


def test_a_model_of_bytes_has_no_vocabulary(tmp_path):
    save_snapshot(tmp_path / "last.safetensors", LanguageModel(256, 8, 2, 1, 4, key=Key(1)), step=1)
    model, subwords = load_writer(tmp_path)
    assert type(model) is LanguageModel and subwords is None


def test_a_run_or_one_of_its_snapshots(vocabulary, tmp_path):
    model = GPT2(len(vocabulary), 8, 2, 1, 4, key=Key(1))
    save_snapshot(tmp_path / "best.safetensors", model, subwords=vocabulary.fingerprint)
    vocabulary.save(tmp_path / "vocabulary.json")
    for path in tmp_path, tmp_path / "best.safetensors":
        found, subwords = load_writer(path)
        assert type(found) is GPT2 and subwords.fingerprint == vocabulary.fingerprint
    with pytest.raises(SnapshotError, match=r"made with another vocabulary than .*vocabulary\.json"):
        load_vocabulary(tmp_path, {"subwords": "0"})
    (tmp_path / "vocabulary.json").unlink()
    with pytest.raises(DataError, match=r"vocabulary\.json: No such file"):
        load_writer(tmp_path)


def test_a_model_that_does_not_write(tmp_path):
    save_snapshot(tmp_path / "last.safetensors", Classifier(9, 2, 8, 2, 1, 4), step=1)
    with pytest.raises(ValueError, match="holds a Classifier, which cannot generate text"):
        load_writer(tmp_path)
    words = Vocabulary(["the", "low"])
    words.save(tmp_path / "vocabulary.txt")
    model = LanguageModel(len(words), 8, 2, 1, 4)
    save_snapshot(tmp_path / "last.safetensors", model, step=1, vocabulary=words.fingerprint)
    with pytest.raises(ValueError, match="holds a word-level model, whose text cannot be streamed"):
        load_writer(tmp_path)
