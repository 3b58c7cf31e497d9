"""Progress bars: what they count, when they appear, and what they leave on standard error."""

import io
import sys

import numpy as np
import pytest

from scratchformer.data import Labelled, Subwords
from scratchformer.models import Classifier
from scratchformer.shell import progress
from scratchformer.shell.progress import counted, progress_bar
from scratchformer.training import Replicas, evaluate_classifier


@pytest.fixture
def at_once(monkeypatch):
    """Bars appear without delay and are drawn at every update."""
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    monkeypatch.setattr(progress, "QUIET", 0)


def test_it_counts_what_is_done_and_what_remains(at_once, capsys):
    assert list(counted(["ab", "c", "def"], "reading", "letters", total=6, size=len)) == ["ab", "c", "def"]
    shown = capsys.readouterr().err
    assert all(f"reading:{part}" in shown for part in ("  33%", "  50%", " 100%")) and "6/6" in shown
    assert shown.endswith("\r") and "\n" not in shown  # cleared, on a line of its own


def test_what_is_soon_done_shows_nothing(monkeypatch, capsys):
    assert list(counted(range(1000), "reading", "numbers")) == list(range(1000))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    assert list(counted(range(3), "reading", "numbers")) == [0, 1, 2]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_a_second_bar_on_the_next_line(at_once, monkeypatch, terminal):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", shown)
    with progress_bar("training", 2, "steps", mininterval=0) as outer:
        outer.update()
        with progress_bar("scoring", 2, "texts", mininterval=0) as inner:
            inner.update()
    assert ("\n\rscoring:  50%" in shown.getvalue()) is terminal
    assert ("\rtraining:  50%" in shown.getvalue()) and "\rscoring:  50%" in shown.getvalue()


@pytest.mark.parametrize("count", [1, 2])
def test_scoring_counts_texts(at_once, capsys, count):
    texts = Labelled([np.full(n, 2, np.int32) for n in (3, 1, 4, 1, 5)], np.array([0, 1, 0, 1, 0]))
    with Replicas(Classifier(4, 2, 8, 2, 1, 8), count) as replicas:
        evaluate_classifier(replicas, texts, 8, batch_size=2)
    assert "scoring: 100%" in (shown := capsys.readouterr().err) and "5/5" in shown


def test_learning_and_encoding_count_texts(at_once, capsys):
    pytest.importorskip("tokenizers")
    texts = ["the film", "the plot", "a film"]
    Subwords.wordpiece(texts, 40).encode_all(texts)
    shown = capsys.readouterr().err
    assert "learning sub-words: 100%" in shown and "encoding: 100%" in shown
