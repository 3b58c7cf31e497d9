"""Plots of a run: the text that they show, and what is drawn."""

import numpy as np
import pytest

from scratchformer.commands import plots
from scratchformer.commands.plots import plot_attention, plot_comparison, plot_curves


@pytest.fixture
def figures(monkeypatch):
    """The figures, which are not written to files."""
    pytest.importorskip("matplotlib")
    saved = []
    monkeypatch.setattr(plots, "written", lambda figure, path, **options: saved.append(figure))
    return saved


@pytest.mark.parametrize("tokens", [8, 50])
def test_uniform_attention_is_pale(figures, tokens):
    plot_attention(np.full((1, 1, tokens, tokens), 1 / tokens), ["a"] * tokens, None)
    (image,) = figures[0].axes[0].images
    red, *_ = image.to_rgba(image.get_array())[0, 0]
    assert 0.2 < red < 0.95  # neither the darkest colour nor white
    assert image.norm(1.0) == 1 and image.norm(0.0) == 0


def test_one_logged_point_is_drawn(figures):
    records = [{"step": 3, "loss": 0.7, "lr": 1e-4}, {"step": 3, "validation_loss": 0.69, "validation_accuracy": 0.5}]
    plot_curves(records, dict(program="imdb", preset="small", seed=0), None)
    for axes in figures[0].axes:
        assert axes.lines and all(line.get_marker() == "o" and len(line.get_xdata()) == 1 for line in axes.lines)


def test_runs_are_drawn_together_and_named(figures):
    logged = [{"step": step, "loss": 2.0 - step / 100, "lr": 1e-4} for step in range(1, 25)]
    scored = [{"step": step, "validation_loss": 1.0, "validation_accuracy": step / 100} for step in (12, 24)]
    plot_comparison({"one": logged + scored, "new": logged[:1]}, None)  # of the new one nothing was scored yet
    left, right = figures[0].axes
    training, point = left.lines
    assert list(training.get_ydata()) == [r["loss"] for r in logged]
    assert point.get_marker() == "o" and training.get_color() != point.get_color()
    assert list(right.lines[0].get_ydata()) == [12, 24] and right.get_ylabel() == "accuracy (%)"
    names = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (left, right)]
    assert names == [["one", "new"], ["one: 24", "new"]]


def test_names_of_runs_are_shown_as_they_are(figures, tmp_path):
    """Matplotlib hides those that begin with "_", and takes what is between two $ for TeX."""
    logged = [{"step": 1, "loss": 2.0, "lr": 1e-4}]
    plot_comparison({"_a": logged, "r$a_b^$x": logged}, None)
    legend = figures[0].axes[0].get_legend()
    assert [text.get_text().strip("\u200b").replace(r"\$", "$") for text in legend.get_texts()] == ["_a", "r$a_b^$x"]
    figures[0].draw_without_rendering()  # which reads TeX


def test_runs_that_are_compared_are_smoothed_over_as_many_steps(figures):
    short, long = (
        [{"step": step, "loss": float(step)} for step in range(1, last + 1, each)] for last, each in ((48, 1), (480, 2))
    )
    plot_comparison({"short": short, "long": long}, None)
    left = figures[0].axes[0]
    assert left.get_title() == "Training, mean over 4 steps"
    assert [line.get_ydata()[0] for line in left.lines] == [2.5, 2.0]  # of steps 1 to 4, and 1 and 3


def test_runs_with_different_scores_are_compared_by_the_loss(figures):
    one, other = (
        [{"step": 1, "loss": 1.0, "validation_loss": 2.0, f"validation_{name}": 3.0}]
        for name in ("accuracy", "bits_per_byte")
    )
    plot_comparison({"one": one, "other": other}, None)
    right = figures[0].axes[1]
    assert right.get_ylabel() == "loss (nats)" and [list(line.get_ydata()) for line in right.lines] == [[2], [2]]
