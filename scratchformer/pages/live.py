"""A live section: a derivation and small arrays, which static/live computes with."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ..catalogue import DerivationCase
from ..notation import DerivationReport, Equation
from ..notation.grammar import canonical, walk
from ..notation.page import equation_as_json
from ..notation.run import each_argument
from .mathml import pieces

VISIBLE = 0.5  # of the largest number in all gradients, so that differences show in two decimals
RANGES = {"eps": (0, 10), "p": (0, 0.9), "label_smoothing": (0, 0.9)}  # of numbers that are no arrays
STATIC = Path(__file__).parent / "static"
FILES = ("live/evaluate.js", "live/live.js")


def section(
    name: str,
    levels_data: Sequence[dict[str, Any]],
    extension: str = "",
    planted: bool = False,
) -> str:
    """A live section, as HTML that needs the files of static/live and nothing else.

    levels_data: what the page computes with at each level, see `page_data`: the plain one and the whole, or the whole
    alone. extension: what the plain level leaves out. planted: whether it begins with the first mistake.
    """
    typeset: dict[str, int] = {}  # each equation once, though several levels have it
    shown_in = ("items", "mistakes", "calls")
    for item in (item for level in levels_data for kind in shown_in for item in level.get(kind, ())):
        item["html"] = typeset.setdefault(item["html"], len(typeset))
    shown = "".join(f'<span data-typeset="{number}">{html}</span>' for html, number in typeset.items())
    whole = {"extension": extension, "levels": [*levels_data]}
    return (
        f'<section class="live" data-operation="{escape(name)}"{" data-planted" * planted}>\n'
        "<noscript><p>With JavaScript, the equations are computed here, on numbers you can change.</p></noscript>\n"
        f"<div hidden>{shown}</div>\n"
        f"{json_script(whole)}\n</section>"
    )


def json_script(data: Any) -> str:
    """Data in a page, for a script to read."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")
    return f'<script type="application/json">{text}</script>'


def mistake_data(title: str, effect: str, line: int, wrong: Equation) -> dict[str, Any]:
    """A mistake that can be planted in a live section. line: the number of the equation that it takes the place of."""
    equation = {"html": "\n".join(pieces(wrong)), "equation": equation_as_json(wrong)}
    return {"title": title, "effect": effect, "line": line, **equation}


def page_data(
    name: str,
    case: DerivationCase,
    report: DerivationReport,
    mistakes: Sequence[dict[str, Any]],
    begin_with: Mapping[str, Any],
    ranges: Sequence[tuple[Any, float, float]],
    constant: Collection[str] = (),
    calls: Sequence[Equation | None] = (),
) -> dict[str, Any]:
    """What the page computes with, see `begin`, and the mistakes that can be planted.

    begin_with: the numbers of some arrays that the page begins with. ranges: arguments, each with the lowest and the
    highest number that a reader may put into it. constant: arrays that nobody can change. calls: for each equation of a
    layer that is made of others, the call in whose place it stands; they and the weights are folded. In the data, axes
    are the letters of the arrays' axes, ranges also say whether all numbers are whole, and zero is what is 0 where
    another input is 0. The numbers are those that the page begins with.
    """
    data, arguments = begin(case, report, constant), bound(case)
    if calls:
        made = list(dict.fromkeys(call for call in calls if call))
        data["calls"] = [{"result": call.parts[0][1], "html": "\n".join(pieces(call))} for call in made]
        data["folded"] = [n for n in data["inputs"] if n not in arguments and n not in data["outputs"][0]]
        for item, call in zip(data["items"], calls, strict=True):
            item |= {"call": made.index(call)} if call else {}
    given = {**case.names, **arguments}
    drawn = {*arguments, *data["gradients"].values(), *(dy for _, dy in data["outputs"])}
    values = {n: beginning(report.values[n]) if n in drawn else report.values[n] for n in data["arrays"]}
    scale = visible_scale([report.values[gradient] for gradient in data["gradients"]])
    values |= {dy: values[dy] * scale for _, dy in data["outputs"]}
    values |= {n: np.array(value) for n, value in begin_with.items() if n in values}
    return data | {
        "name": name,
        "arrays": {n: array_json(array) for n, array in values.items()},
        "axes": axes(inspect.getdoc(case.op) or "", report.values),
        "ranges": {n: limit for n in data["inputs"] if (limit := limits(n, values[n], given.get(n), ranges))},
        "zero": {},
        "mistakes": mistakes,
    }


def visible_scale(gradients: Iterable[np.ndarray]) -> int:
    """How many times larger dy must be for the gradients to show."""
    largest = max((np.abs(gradient).max() for gradient in gradients), default=VISIBLE)
    return max(1, round(VISIBLE / largest)) if largest else 1


def begin(case: DerivationCase, report: DerivationReport, constant: Collection[str] = ()) -> dict[str, Any]:
    """A derivation, and the arrays that its equations begin with. constant: arrays that the reader cannot change.

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

    def is_number(name: str) -> bool:
        return isinstance(arguments.get(name), int | float)

    return {
        "items": [
            {"text": text, "equation": equation_as_json(equation), "html": "\n".join(pieces(equation))}
            for text, equation in equations(report)
        ],
        "arrays": {n: array_json(values[n]) for n in given},
        "shapes": {n: list(values[n].shape) for n in values if n in computed and n not in given},
        "inputs": [n for n in given if n not in constant and (values[n].ndim or n in outputs or is_number(n))],
        "outputs": [outputs] if outputs else [],
        "gradients": {f"d{n}": n for n in given if f"d{n}" in computed},
    }


def beginning(array: np.ndarray, decimals: int = 1) -> np.ndarray:
    """The numbers that the page begins with: arrays with few decimals, and without zeros, where a kink may be."""
    if array.ndim and array.dtype.kind == "f":
        array = array.round(decimals)
        return np.where(array == 0, 0.5, array)
    return array


def bound(case: DerivationCase) -> dict[str, Any]:
    """The arguments of the operation by name."""
    signature = inspect.signature(case.op)
    call = signature.bind(*case.args, **{n: value for n, value in case.options.items() if n in signature.parameters})
    call.apply_defaults()
    return {canonical(name): value for name, value in each_argument(call.arguments).items()}


def names_in(report: DerivationReport) -> tuple[set[str], set[str]]:
    """The names that the equations compute, and all that they mention; for a short name, what it stands for."""
    short: dict[str, str] = {}
    computed, mentioned = set[str](), set[str]()
    for _, equation in equations(report):
        left, right, *_ = equation.parts
        if is_short_name(equation) and right[1] in report.values:
            short |= {f"{d}{left[1]}": f"{d}{right[1]}" for d in ("", "d") if f"{d}{right[1]}" in report.values}
        elif left[0] == "name":
            computed.add(left[1])
        mentioned |= {node[1] for node in walk(tuple(equation)) if node[0] == "name"}
    return {short.get(n, n) for n in computed}, {short.get(n, n) for n in mentioned}


def equations(report: DerivationReport) -> list[tuple[str, Equation]]:
    """The equations of a derivation, each with its text."""
    return [(item.text, item.equation) for item in report.derivation.equations if item.equation]


def is_short_name(equation: Equation) -> bool:
    """Whether it only gives a short name, such as u := content_bias."""
    return equation.relations == (":=",) and is_second_name(equation)


def is_second_name(equation: Equation) -> bool:
    """Whether it only gives another name to a whole array, such as n = x."""
    return all(part[0] == "name" and not part[2] for part in equation.parts)


def array_json(array: np.ndarray) -> dict[str, Any]:
    """shape, and the numbers in row-major order; those that are not finite as text."""
    flat = np.asarray(array, dtype=float).ravel().tolist()
    return {"shape": list(array.shape), "data": [x if np.isfinite(x) else str(x) for x in flat]}


def axes(docstring: str, values: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """The letters of the axes of the arguments, from the shapes in the docstring: "q: (B, H, T, D)"."""
    return {
        name: full
        for name, letters in shapes(docstring)
        if name in values and (full := filled([letter.lower() for letter in letters], values[name].ndim))
    }


def shapes(docstring: str) -> Iterator[tuple[str, list[str]]]:
    """The names in a docstring that have a shape there, "q: (B, H, T, D)", each with its letters."""
    for names, shape in re.findall(r"(?<![\w.])(\w[\w, ]*?):\s+\(([A-Z.…, ]+)\)", docstring):
        letters = [letter.strip() for letter in shape.split(",") if letter.strip()]
        for name in re.split(r",\s*", names):
            yield canonical(name), letters


def filled(letters: list[str], rank: int) -> list[str]:
    """The letters of `rank` axes: three dots stand for all leading axes, whose last is called n."""
    if letters[:1] in (["..."], ["…"]):
        lead = rank - len(letters) + 1
        letters = [*[""] * (lead - 1), *["n"] * (lead > 0), *letters[1:]]
    return letters if len(letters) == rank else []


def limits(
    name: str, array: np.ndarray, argument: Any, ranges: Sequence[tuple[Any, float, float]]
) -> dict[str, Any] | None:
    """The lowest and highest number that the reader may put into an array, and whether they are whole; None for any."""
    for drawn, low, high in ranges:
        if argument is drawn:
            return {"low": low, "high": high, "whole": drawn.dtype.kind != "f"}
    if name in RANGES:
        return dict(zip(("low", "high"), RANGES[name], strict=True))
    if array.dtype == bool or (array.ndim and np.isin(array, (0, 1)).all()):
        return {"low": 0, "high": 1, "whole": True}
    if array.dtype.kind in "iu":
        return {"low": int(min(array.min(), 0)), "high": int(array.max()), "whole": True}
    return None
