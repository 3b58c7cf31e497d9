"""The live part of an operation's page: its derivation and small arrays, at both its levels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from composed import Composed, composed
from docutils import nodes
from levels import WHOLE, Without, case_at, checked_without, extension, levels, mistake_at
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from static_files import load_files

from scratchformer.catalogue import DerivationCase, Sizes, blocks, layers, mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.notation import DerivationReport
from scratchformer.pages.live import FILES, equations, mistake_data, page_data, section
from scratchformer.testing.diagnosis import says

SIZES = dict(B=1, T=3, S=4, H=2, G=1, D=2, C=4, I=3, O=2, F=4, V=4, K=2)  # small enough to see every number
SIZES_OF = {
    "gather": {"B": 2},
    "mean_pool": {"B": 2},
    "max_pool": {"B": 2},
    "rotary": {"D": 4, "H": 1},
    "relative_shift": {"H": 1},
    "relative_attention": {"B": 2, "H": 1, "S": 3},
    "RelativeSelfAttention": {"T": 2, "S": 3},
    **{key: {"M": 3} for key in ("DecoderBlock", "DecoderBlock, pre")},  # a letter has one size on a page
}
# Values with which mistakes show: lengths that differ, a token that occurs twice, a row that does not count.
VALUES: dict[str, dict[str, Any]] = {
    "cross_entropy": {"counted": [1, 1, 0], "targets": [0, 2, 0], "dloss": 1.0, "label_smoothing": 0.2},
    "embedding": {"ids": [[1, 3, 1]]},
    "attention": {"m": np.tri(3, 4, 1)},
    "relative_attention": {"m": np.tri(3, 3)},
    "gather": {"places": [[2, 2], [0, 1]]},
    "mean_pool": {"lengths": [2, 3]},
    "max_pool": {"lengths": [2, 3]},
    **{
        f"{name}{order}": {"m": np.tri(3)}
        for name in ("SelfAttention", "RotarySelfAttention", "LlamaBlock", "TransformerBlock")
        for order in ("", ", pre")
    },
    "RelativeSelfAttention": {"m": np.tri(3)[1:]},
    "CrossAttention": {"m": [3]},
    **{key: {"m": [2]} for key in ("DecoderBlock", "DecoderBlock, pre")},
}
# The derivations on the pages of layers that are made of others: with parts whose derivations can be put together.
COMPOSED: dict[str, Callable[[Sizes], DerivationCase]] = {
    "TransformerBlock": partial(blocks.transformer_block, order="post", activation="relu"),
    "TransformerBlock, pre": partial(blocks.transformer_block, order="pre", activation="relu"),
    "DecoderBlock": partial(blocks.decoder_block, order="post", activation="relu"),
    "DecoderBlock, pre": partial(blocks.decoder_block, order="pre", activation="relu"),
    "EmbeddingSum": partial(layers.embedding_sum, training=False),
    "Residual": partial(blocks.residual_of_linear, order="post"),
    "Residual, pre": partial(blocks.residual_of_linear, order="pre"),
}
FIXED = ("P", "theta", "attention.m")  # arrays of a layer that are no weights: sinusoids, frequencies, a causal mask
ZERO_WITHOUT = {"cross_entropy": {"targets": "counted"}}  # what is 0 where another input is 0


class PageSizes(Sizes):
    """A draw of the sizes above, with one decimal in each number. ranges: integer arrays, and what they may hold."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.__dict__ |= SIZES | SIZES_OF.get(name, {})
        self.ranges: list[tuple[np.ndarray, int, int]] = []

    def __call__(self, letters: str) -> np.ndarray:
        return super().__call__(letters).round(1)

    def integers(self, letters: str, high: int, low: int = 0) -> np.ndarray:
        drawn = super().integers(letters, high, low)
        self.ranges.append((drawn, low, high - 1))
        return drawn

    def lengths(self, letter: str = "T") -> np.ndarray:
        drawn = super().lengths(letter)
        self.ranges.append((drawn, 1, getattr(self, letter)))
        return drawn


def live_html(name: str, mistakes: Iterable[Any] = ()) -> str:
    """The live section of a derivation, at both its levels.

    mistakes: as in `scratchformer.catalogue`; those whose equation is not in the derivation are left out.
    """
    mistakes, extended = list(mistakes), extension(name)
    each = [live_data(name, mistakes, left_out) for left_out in levels(name)]
    return section(name, each, extended.title if extended else "")


def live_data(name: str, mistakes: Iterable[Any] = (), left_out: Without = WHOLE) -> dict[str, Any]:
    """What the page computes with at a level, see `page_data`."""
    draw = PageSizes(name)
    case, calls = page_case(name, left_out, draw)
    report = checked_without(case, left_out)
    begin_with = {n: fitted(x, report.values[n].shape) for n, x in VALUES.get(name, {}).items() if n in report.values}
    shown = [change for mistake in mistakes if (change := planted(mistake, report, left_out))]
    data = page_data(name, case, report, shown, begin_with, draw.ranges, constants(case), calls)
    same = {name: value[1] for name, value in left_out.values.items() if value[0] == "idx"}
    data["axes"] = {name: [same.get(letter, letter) for letter in each] for name, each in data["axes"].items()}
    return data | {"zero": {n: by for n, by in ZERO_WITHOUT.get(name, {}).items() if by in data["inputs"]}}


def page_case(name: str, left_out: Without, draw: Sizes) -> Composed:
    """The case of a derivation at a level, as a page computes with it: without calls of functions."""
    return composed(COMPOSED[name](draw) if name in COMPOSED else case_at(name, left_out, draw))


def constants(case: DerivationCase) -> tuple[str, ...]:
    """The arrays of a layer's derivation that no argument of its forward and no weight can change."""
    if case.docstring is None:
        return ()
    arguments = inspect.signature(case.op).parameters
    fixed = (*FIXED, *(name for name in case.names if name in arguments))
    return fixed if "pattern" in arguments else (*fixed, "m")


def fitted(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A value with the shape of an array, of which it may have fewer rows."""
    array = np.asarray(value, dtype=float)
    return np.broadcast_to(array[tuple(map(slice, shape[len(shape) - array.ndim :]))], shape)


def checked(case: DerivationCase) -> DerivationReport:
    return checked_without(case, WHOLE)


def planted(mistake: Any, report: DerivationReport, left_out: Without) -> dict[str, Any] | None:
    """The mistake, with its equation parsed and the number of the equation that it takes the place of."""
    if (both := mistake_at(mistake, left_out, report.values)) is None:
        return None
    right, wrong = both
    places = [number for number, (_, equation) in enumerate(equations(report)) if says(equation, right)]
    if not places:
        return None
    return mistake_data(mistake.title, mistake.effect, places[0], wrong)


class Live(SphinxDirective):
    """The live section of an operation: `.. live:: attention`."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        if name not in CASES:
            return []
        return [nodes.raw("", live_html(name, mistakes_of(name.partition(",")[0])), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("live", Live)
    load_files(app, '<section class="live"', "live/live.css", *FILES)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
