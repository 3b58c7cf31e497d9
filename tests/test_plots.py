"""Plots of a run read its text with the vocabulary that it was trained with."""

import pytest

from scratchformer.data import Vocabulary
from scratchformer.models import Classifier
from scratchformer.plots import encode
from scratchformer.training import SnapshotError


def test_a_vocabulary_that_is_cut_short_is_refused(tmp_path):
    words, path = Vocabulary(["good", "bad"]), tmp_path / "vocabulary.txt"
    words.save(path)
    model, state = Classifier(4, 2, 8, 2, 1, 4), {"vocabulary": words.fingerprint}
    assert encode(model, "bad, good", tmp_path, state)[0] == ["bad", "<unk>", "good"]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(SnapshotError, match=r"another vocabulary than .*vocabulary\.txt"):
        encode(model, "bad, good", tmp_path, state)
