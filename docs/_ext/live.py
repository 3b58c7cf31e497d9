"""The live part of an operation's page: its derivation and small arrays, which docs/_static/live computes with."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from composed import Composed, composed
from docutils import nodes
from levels import Without, case_at, checked_without, extensions, levels, mistake_at, without
from mathml import pieces
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from scratchformer.catalogue import DerivationCase, Sizes, blocks, mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.notation import DerivationReport, Equation
from scratchformer.notation.grammar import canonical, walk
from scratchformer.notation.page import equation_as_json
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
}
# Values with which mistakes show: lengths that differ, a token that occurs twice, a row that does not count.
VALUES: dict[str, dict[str, Any]] = {
    "cross_entropy": {"counted": [1, 1, 0], "targets": [0, 2, 0], "dloss": 1.0},
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
}
# The derivations on the pages of layers that are made of others: with parts whose derivations can be put together.
COMPOSED: dict[str, Callable[[Sizes], DerivationCase]] = {
    "TransformerBlock": partial(blocks.transformer_block, order="post", activation="relu"),
    "TransformerBlock, pre": partial(blocks.transformer_block, order="pre", activation="relu"),
    "Residual": partial(blocks.residual_of_linear, order="post"),
    "Residual, pre": partial(blocks.residual_of_linear, order="pre"),
}
FIXED = ("P", "theta")  # arrays of a layer that are no weights: sinusoids and frequencies
ZERO_WITHOUT = {"cross_entropy": {"targets": "counted"}}  # what is 0 where another input is 0
VISIBLE = 0.5  # of the largest number in all gradients, so that differences show in two decimals
RANGES = {"eps": (0, 10), "p": (0, 0.9), "label_smoothing": (0, 0.9)}  # of numbers that are no arrays
STATIC = Path(__file__).parents[1] / "_static"
FILES = ("live/evaluate.js", "live/live.js")


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
    """The live section of a derivation, as HTML that needs the files of docs/_static/live and nothing else.

    mistakes: as in `scratchformer.catalogue`; those whose equation is not in the derivation are left out.
    """
    mistakes = list(mistakes)
    levels_data = [live_data(name, mistakes, titles) for titles in levels(name)]
    return section(name, levels_data, [extension.title for extension in extensions(name)])


def section(name: str, levels_data: Sequence[dict[str, Any]], titles: Sequence[str] = (), planted: bool = False) -> str:
    """The live section of what the page computes with at each level, see `live_data`. titles: of the extensions.
    planted: whether it begins with the first mistake.
    """
    typeset: dict[str, int] = {}  # each equation once, though several levels have it
    for item in (item for level in levels_data for item in (*level["items"], *level["mistakes"])):
        item["html"] = typeset.setdefault(item["html"], len(typeset))
    shown = "".join(f'<span data-typeset="{number}">{html}</span>' for html, number in typeset.items())
    whole = {"extensions": [*titles], "levels": [*levels_data]}
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":")).replace("</", r"<\/")
    return (
        f'<section class="live" data-operation="{escape(name)}"{" data-planted" * planted}>\n'
        "<noscript><p>With JavaScript, the equations are computed here, on numbers you can change.</p></noscript>\n"
        f"<div hidden>{shown}</div>\n"
        f'<script type="application/json">{text}</script>\n</section>'
    )


def live_data(name: str, mistakes: Iterable[Any] = (), titles: Iterable[str] = ()) -> dict[str, Any]:
    """What the page computes with at a level, see `begin`, and the mistakes that can be planted.

    titles: of the extensions that the level leaves out. axes: the letters of the arrays' axes. ranges: the lowest and
    highest number in an array, and whether all are whole. zero: what is 0 where another input is 0. The numbers are
    those that the page begins with.
    """
    draw, left_out = PageSizes(name), without(name, [*titles])
    case, parts = page_case(name, titles, draw)
    report = checked_without(case, left_out)
    data, arguments = begin(case, report), bound(case)
    for item, part in zip(data["items"], parts, strict=bool(parts)):
        item["part"] = part
    given = {**case.names, **arguments}
    drawn = {*arguments, *data["gradients"].values(), *(dy for _, dy in data["outputs"])}
    values = {n: beginning(report.values[n]) if n in drawn else report.values[n] for n in data["arrays"]}
    scale = visible_scale([report.values[gradient] for gradient in data["gradients"]])
    values |= {dy: values[dy] * scale for _, dy in data["outputs"]}
    values |= {n: fitted(value, values[n].shape) for n, value in VALUES.get(name, {}).items() if n in values}
    zero = {n: by for n, by in ZERO_WITHOUT.get(name, {}).items() if by in data["inputs"]}
    return data | {
        "name": name,
        "arrays": {n: array_json(array) for n, array in values.items()},
        "axes": axes(inspect.getdoc(case.op) or "", report.values),
        "ranges": {n: limit for n in data["inputs"] if (limit := limits(n, values[n], given.get(n), draw))},
        "zero": zero,
        "mistakes": [change for mistake in mistakes if (change := planted(mistake, report, left_out))],
    }


def page_case(name: str, titles: Iterable[str], draw: Sizes) -> Composed:
    """The case of a derivation at a level, as a page computes with it: without calls of functions."""
    return composed(COMPOSED[name](draw) if name in COMPOSED else case_at(name, [*titles], draw))


def visible_scale(gradients: Iterable[np.ndarray]) -> int:
    """How many times larger dy must be for the gradients to show."""
    largest = max((np.abs(gradient).max() for gradient in gradients), default=VISIBLE)
    return max(1, round(VISIBLE / largest)) if largest else 1


def fitted(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A value with the shape of an array, of which it may have fewer rows."""
    array = np.asarray(value, dtype=float)
    return np.broadcast_to(array[tuple(map(slice, shape[len(shape) - array.ndim :]))], shape)


def begin(case: DerivationCase, report: DerivationReport) -> dict[str, Any]:
    """A derivation, and the arrays that its equations begin with.

    items: the equations, as text, tree and HTML. arrays: what the equations do not compute, by name. shapes: of what
    they compute. inputs: the arrays that the reader can change. outputs: pairs of an output and its gradient dy.
    gradients: the name of each gradient, and of what.
    """
    values, arguments = report.values, bound(case)
    computed, mentioned = names_in(report)
    outputs = []
    if case.op_backward is not None:
        output = canonical(next(iter(inspect.signature(case.op_backward).parameters))[1:])
        outputs = [output, f"d{output}"]
    given = [n for n in values if n in mentioned and (n in arguments or n not in {*computed, *outputs})]
    given = [*sorted(given, key=lambda n: n not in arguments), *outputs[1:]]
    constant = constants(case)

    def is_number(name: str) -> bool:
        return isinstance(arguments.get(name), int | float)

    return {
        "items": [
            {"text": item.text, "equation": equation_as_json(item.equation), "html": "\n".join(pieces(item.equation))}
            for item in report.derivation.equations
        ],
        "arrays": {n: array_json(values[n]) for n in given},
        "shapes": {n: list(values[n].shape) for n in values if n in computed and n not in given},
        "inputs": [n for n in given if n not in constant and (values[n].ndim or n in outputs or is_number(n))],
        "outputs": [outputs] if outputs else [],
        "gradients": {f"d{n}": n for n in given if f"d{n}" in computed},
    }


def constants(case: DerivationCase) -> tuple[str, ...]:
    """The arrays of a layer's derivation that no argument of its forward and no weight can change."""
    if case.docstring is None:
        return ()
    return FIXED if "pattern" in inspect.signature(case.op).parameters else (*FIXED, "m")


def beginning(array: np.ndarray) -> np.ndarray:
    """The numbers that the page begins with: arrays with one decimal, and without zeros, where a kink may be."""
    if array.ndim and array.dtype.kind == "f":
        array = array.round(1)
        return np.where(array == 0, 0.5, array)
    return array


def checked(case: DerivationCase) -> DerivationReport:
    return checked_without(case, Without({}, frozenset(), None))


def bound(case: DerivationCase) -> dict[str, Any]:
    """The arguments of the operation by name."""
    signature = inspect.signature(case.op)
    call = signature.bind(*case.args, **{n: value for n, value in case.options.items() if n in signature.parameters})
    call.apply_defaults()
    return {canonical(name): value for name, value in call.arguments.items()}


def names_in(report: DerivationReport) -> tuple[set[str], set[str]]:
    """The names that the equations compute, and all that they mention; for a short name, what it stands for."""
    short: dict[str, str] = {}
    computed, mentioned = set(), set()
    for item in report.derivation.equations:
        left, right, *_ = item.equation.parts
        if is_short_name(item.equation) and right[1] in report.values:
            short |= {f"{d}{left[1]}": f"{d}{right[1]}" for d in ("", "d") if f"{d}{right[1]}" in report.values}
        elif left[0] == "name":
            computed.add(left[1])
        mentioned |= {node[1] for node in walk(tuple(item.equation)) if node[0] == "name"}
    return {short.get(n, n) for n in computed}, {short.get(n, n) for n in mentioned}


def is_short_name(equation: Equation) -> bool:
    """Whether it only gives a short name, such as u := content_bias."""
    return equation.relations == (":=",) and all(part[0] == "name" and not part[2] for part in equation.parts)


def array_json(array: np.ndarray) -> dict[str, Any]:
    """shape, and the numbers in row-major order; those that are not finite as text."""
    flat = np.asarray(array, dtype=float).ravel().tolist()
    return {"shape": list(array.shape), "data": [x if np.isfinite(x) else str(x) for x in flat]}


def axes(docstring: str, values: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """The letters of the axes of the arguments, from the shapes in the docstring: "q: (B, H, T, D)"."""
    by_name = {}
    for names, shape in re.findall(r"(?<![\w.])(\w[\w, ]*?):\s+\(([A-Z.…, ]+)\)", docstring):
        letters = [letter.strip().lower() for letter in shape.split(",") if letter.strip()]
        for name in map(canonical, re.split(r",\s*", names)):
            if name in values and (full := filled(letters, values[name].ndim)):
                by_name[name] = full
    return by_name


def filled(letters: list[str], rank: int) -> list[str]:
    """The letters of `rank` axes: three dots stand for all leading axes, whose last is called n."""
    if letters[:1] in (["..."], ["…"]):
        lead = rank - len(letters) + 1
        letters = [*[""] * (lead - 1), *["n"] * (lead > 0), *letters[1:]]
    return letters if len(letters) == rank else []


def limits(name: str, array: np.ndarray, argument: Any, draw: PageSizes) -> dict[str, Any] | None:
    """The lowest and highest number that the reader may put into an array, and whether they are whole; None for any."""
    for drawn, low, high in draw.ranges:
        if argument is drawn:
            return {"low": low, "high": high, "whole": True}
    if name in RANGES:
        return dict(zip(("low", "high"), RANGES[name], strict=True))
    if array.dtype == bool or (array.ndim and np.isin(array, (0, 1)).all()):
        return {"low": 0, "high": 1, "whole": True}
    if array.dtype.kind in "iu":
        return {"low": int(min(array.min(), 0)), "high": int(array.max()), "whole": True}
    return None


def planted(mistake: Any, report: DerivationReport, left_out: Without) -> dict[str, Any] | None:
    """The mistake, with its equation parsed and the number of the equation that it takes the place of."""
    if (equations := mistake_at(mistake, left_out, report.values)) is None:
        return None
    right, wrong = equations
    places = [number for number, item in enumerate(report.derivation.equations) if says(item.equation, right)]
    if not places:
        return None
    text = {"title": mistake.title, "effect": mistake.effect, "html": "\n".join(pieces(wrong))}
    return text | {"line": places[0], "equation": equation_as_json(wrong)}


class Live(SphinxDirective):
    """The live section of an operation: `.. live:: attention`."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        if name not in CASES:
            return []
        return [nodes.raw("", live_html(name, mistakes_of(name.partition(",")[0])), format="html")]


def add_files(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Load the scripts on the pages that have a live part."""
    if '<section class="live"' not in context.get("body", ""):
        return
    app.add_css_file("live/live.css")
    for file in FILES:
        app.add_js_file(file, loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("live", Live)
    app.connect("html-page-context", add_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
