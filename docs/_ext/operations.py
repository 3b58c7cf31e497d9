"""A page for each operation, written into docs/operations/ before the build."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

from docstrings import block, derivation, directive, heading, pieces, prose, rendered, signature, table, typeset
from measure import Cost, TwinComparison, compare
from operation_pictures import operation_picture
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from reports import consequences, items
from sphinx.application import Sphinx

from scratchformer import catalogue, models, nn, ops
from scratchformer.catalogue import Draw, Mistake, mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.course.course import NAMES, exercise
from scratchformer.dispatch import twins_of
from scratchformer.pages.loops import loops
from scratchformer.pages.passages import before_derivation, source_without_docstring
from scratchformer.pages.step_curves import step_curve

WITHOUT_BACKWARD = ("sinusoidal_positions", "rotary_frequencies")
COMMON = ("Layer", "Param", "FlatParameters", "Model")  # what layers and models share: in the API reference alone
OPERATIONS = (*(name for name in ops.__all__ if f"{name}_backward" in ops.__all__), *WITHOUT_BACKWARD)


def page(name: str) -> str:
    """The page of an operation."""
    op, backward = getattr(ops, name), getattr(ops, f"{name}_backward", None)
    summary, *passages = pieces(inspect.getdoc(op), name)
    start = before_derivation(passages)
    functions = {name: op} if backward is None else {name: op, f"{name}_backward": backward}
    described_as = described(functions, rendered(passages[:start], name))
    arguments = [heading("Arguments"), picture(operation_picture(name)), described_as]
    parts = [heading(name, "="), ".. py:currentmodule:: scratchformer.ops", rendered([summary], name), *live(name)]
    if backward is None:
        return joined([*parts, *arguments, heading("The code"), code(op)])
    parts += [heading("Derivation"), LEGEND, derivation(name), made_loops(name)]
    parts += arguments
    comparison = compare(name)
    parts += [heading("The code"), *sources(op, backward, comparison)]
    parts += [heading("What the cache keeps"), *kept(comparison)]
    curve, words = step_curve(catalogue.OPERATIONS[name](Draw(1)))
    parts += [heading("How small should h be?"), picture(curve), words]
    if name in CASES and (known := mistakes_of(name)):
        parts += [heading("Common mistakes"), PLANT, *(mistake(name, wrong) for wrong in known)]
    parts += second_order(f"{name}_backward")
    parts += [heading("Write it yourself"), exercises(name), CHECK.format(name=name), used(name)]
    return joined(parts)


LEGEND = """\
To the right of each equation is its :ref:`measured error <errors>`."""

PLANT = """\
Choose one in `Try it`_ above to see which numbers it makes wrong."""

EXERCISES = """\
In :doc:`../learn` you derive or write this gradient, and the check says what is wrong::

{commands}"""

SECOND = """\
The backward is an operation too, of dy and the arguments. Its own backward gives products of the Hessian with vectors,
see :ref:`Second derivatives <second-derivatives>`. Here dy is called gy, and the gradients begin with a g."""

CHECK = """\
Change a line of the derivation's code in ``scratchformer/ops``, and see what these commands report::

    scratchformer check {name}                  # the gradients, against numerical differences
    scratchformer check --derivations {name}    # every equation of the derivation

:doc:`../checking` explains the reports, and checks an operation of your own."""


def second_order(name: str) -> list[str]:
    """The derivation of the backward of a backward, if there is one."""
    function = getattr(ops.second_order, f"{name}_backward", None)
    if function is None:
        return []
    derived = rendered(pieces(inspect.getdoc(function), name), name)
    where = ".. py:currentmodule:: scratchformer.ops.second_order"
    text = described({f"{name}_backward": function}, derived)
    return [heading("Second derivatives"), where, SECOND, text, code(function)]


def live(name: str) -> list[str]:
    return [heading("Try it"), directive("live", name)] if name in CASES else []


def made_loops(name: str) -> str:
    """The loops that are made from the derivation of an operation, in colours."""

    def highlighted(source: str, language: str) -> str:
        return highlight(source, get_lexer_by_name(language), HtmlFormatter(nowrap=True))

    html = loops(getattr(ops, name), getattr(ops, f"{name}_backward"), items(name), highlighted)
    return html and directive("raw", "html", html)


def exercises(name: str) -> str:
    """How to start the exercises whose solution is the derivation of this operation."""
    names = [each for each in NAMES if exercise(each).library is getattr(ops, name)]
    if not names:
        return ""
    return EXERCISES.format(commands="\n".join(f"    scratchformer learn start {each}" for each in names))


def used(name: str) -> str:
    """The layers and models whose code calls an operation."""
    users = [
        f":doc:`../layers/{layer}`"
        for module in (nn, models)
        for layer in layers(module)
        if name in calls(module, layer)
    ]
    return f"It is used in {', '.join(users)}." if users else ""


def layers(module: Any) -> list[str]:
    """The names of a module's layers or models that have pages of their own."""
    return [name for name in module.__all__ if inspect.isclass(getattr(module, name)) and name not in COMMON]


@cache
def calls(module: Any, layer: str) -> list[str]:
    """The operations in the code of a layer or model, and of the classes that it extends."""
    bases = [part for part in getattr(module, layer).__mro__ if part.__name__ not in (*COMMON, "object")]
    text = "".join(inspect.getsource(part) for part in bases if part.__module__.startswith("scratchformer"))
    return [name for name in OPERATIONS if re.search(rf"\bops\.{name}\(", text)]


def joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def picture(svg: str) -> str:
    return directive("raw", "html", svg)


def described(functions: dict[str, Callable], text: str) -> str:
    """The signatures, and what the docstring says before its derivation."""
    lines = [f"{name}{signature(function)}" for name, function in functions.items()]
    return f".. py:function:: {f'{chr(10)}                 '.join(lines)}\n\n{indent(text, '   ')}"


def code(function: Any) -> str:
    """The source of a function, without the docstring, which the page has already."""
    return block("python", source_without_docstring(getattr(function, "reference", function)))


def sources(op: Any, backward: Any, comparison: TwinComparison) -> list[str]:
    """The reference, and beside it the fast twin, with its derivation and what it gains."""
    by_hand = [twin for twin in twins_of(op) if not twin.forward.__module__.endswith(".numpy_half")]
    if comparison.twin is None or not by_hand:
        return [code(op), code(backward)]
    twin, module = by_hand[0].forward, sys.modules[by_hand[0].forward.__module__]
    twin_backward = getattr(module, f"{op.__name__}_backward")
    cells = [cell("The reference", op), cell("Its twin for NumPy", twin), cell("", backward), cell("", twin_backward)]
    return [
        directive("container", "pair", joined(cells)),
        heading("The fast twin", "~"),
        typeset(module.__doc__),
        typeset(inspect.getdoc(twin), f"{op.__name__}.numpy"),
        gain(comparison.reference, comparison.twin, comparison.difference),
        f"The whole module is ``scratchformer/kernels/{Path(module.__file__).name}``.",
    ]


def cell(title: str, function: Any) -> str:
    return directive("container", "", joined([title and f".. rubric:: {title}", code(function)]))


def gain(reference: Cost, twin: Cost, difference: float) -> str:
    return (
        f"Measured on one core at the sizes below while this page was built: forward and backward take "
        f"{milliseconds(twin)} instead of {milliseconds(reference)}, "
        f"**{twin.seconds / reference.seconds:.2f}** of the time, and the "
        f"cache has {size(twin.nbytes)} instead of {size(reference.nbytes)}. Results and gradients differ by at most "
        f"{difference:.0e} of their largest number, in float32."
    )


def milliseconds(measured: Cost) -> str:
    return f"{1000 * measured.seconds:.3g} ms"


def size(nbytes: int) -> str:
    for unit, power in (("MB", 6), ("kB", 3)):
        if nbytes >= 10**power:
            return f"{nbytes / 10**power:.3g} {unit}"
    return f"{nbytes} bytes"


def kept(comparison: TwinComparison) -> list[str]:
    sizes = ", ".join(f"{letter} = {value}" for letter, value in comparison.sizes.items())
    parts = [f"With {sizes}, in float32:", arrays(comparison.reference, "reference")]
    if comparison.twin is not None:
        parts.append(arrays(comparison.twin, "twin"))
    return parts


def arrays(measured: Cost, who: str) -> str:
    rows = [
        (
            f"``{kept.name or 'cache'}``",
            f"{kept.array.shape}",
            f"{kept.array.dtype}",
            f"{kept.array.nbytes:,}",
            {"": "", "y": "the result itself"}.get(kept.origin, f"the argument ``{kept.origin}`` itself"),
        )
        for kept in measured.kept
    ]
    rows.append((f"**all of the {who}'s**", "", "", f"**{measured.nbytes:,}**", ""))
    return table([f"the {who} keeps", "shape", "type", "bytes", ""], rows)


def mistake(name: str, wrong: Mistake) -> str:
    """A mistake with the equation as it should be, as it was written, and what this does to the gradient."""
    parts = [f".. rubric:: {prose(wrong.title)}"]
    parts += [directive("checked", "equation", wrong.equation, label="right", of=name)]
    parts += [directive("checked", "equation", wrong.wrong, label="wrong", of=name)]
    off = [
        f"{f':math:`{left}`' if left else 'the left side'} by {percent(error)}"
        for left, error in consequences(name, wrong).items()
    ]
    effect = (
        f"{prose(wrong.effect)} On the arrays of the check, this changes {' and '.join(off)} of its largest number."
    )
    return joined([*parts, wrong.code and block("python", wrong.code), effect])


def percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1 if share >= 0.01 else 2}f}%"


def write(app: Sphinx) -> None:
    for name in OPERATIONS:
        write_page(Path(app.srcdir) / "operations" / f"{name}.rst", page(name))


def write_page(path: Path, text: str) -> None:
    """Write a page, unless it is there already, so that Sphinx need not read it again."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
