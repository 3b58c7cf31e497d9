"""The path of twelve steps: small derivations with live numbers, and questions that the page checks by their equations.

A page in docs/path has the equations of its step, which are checked when it is built against the code of the operation,
and a question. The answer is an expression in the names of the equations, so it follows the numbers on the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar, NamedTuple

import numpy as np
from docutils import nodes
from live import checked
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from static_files import load_files

from scratchformer import ops
from scratchformer.catalogue import DerivationCase
from scratchformer.notation import parse
from scratchformer.notation.page import equation_as_json
from scratchformer.optim.adam import adam_step
from scratchformer.pages.live import array_json, begin, json_script, section

PAGES = sorted(path.stem for path in (Path(__file__).parents[1] / "path").glob("*.md"))
LIVING = ("loss", "guess", "steps")  # what a question may ask about the living model: path.js knows their values
HERE = ' aria-current="step"'
WRONG = re.compile(r"^- (.+?): (.+(?:\n  .+)*)", re.MULTILINE)


class Step(NamedTuple):
    """The code that a step derives, with the numbers that its page begins with. ranges: of what may be typed, whole
    numbers if the limits are.
    """

    op: Callable
    op_backward: Callable | None
    args: tuple
    dy: Any = None
    ranges: Mapping[str, tuple[float, float]] = {}


def product(x, w):
    return w * x, (x, w)


def product_backward(dy, cache):
    x, w = cache
    return dy * w, dy * x


def two_uses(x, u, v):
    return (u * x) * (x + v), (x, u, v)


def two_uses_backward(dy, cache):
    x, u, v = cache
    return dy * (x + v) * u + dy * (u * x)


def one_row(z, t):
    return ops.cross_entropy(z, np.array(t))


def one_row_backward(dloss, cache):
    return ops.cross_entropy_backward(dloss, cache)


def normalise(x):
    return ops.layernorm(x, np.ones(x.shape), np.zeros(x.shape), 0.0)


def normalise_backward(dy, cache):
    return ops.layernorm_backward(dy, cache)[0]


def one_head(q, k, v):
    y, cache = ops.attention(q[None, None], k[None, None], v[None, None])
    return y[0, 0], cache


def one_head_backward(dy, cache):
    return tuple(gradient[0, 0] for gradient in ops.attention_backward(dy[None, None], cache))


def heads(q, k, v):
    y, cache = ops.attention(q[None], k[None], v[None])
    return y[0], cache


def heads_backward(dy, cache):
    return tuple(gradient[0] for gradient in ops.attention_backward(dy[None], cache))


def skip(x, w):
    branch, cache = ops.linear(x, w)
    return ops.add(x, branch)[0], cache


def skip_backward(dy, cache):
    dx, dw = ops.linear_backward(dy, cache)[:2]
    return dy + dx, dw


def adam(w, g, m0, v0, lr, t):
    moved = [np.array(array) for array in (w, m0, v0)]
    adam_step(moved[0], g, *moved[1:], lr, 0.9, 0.999, 1e-8, t)
    return moved[0]


A = np.array
STEPS = {
    "product": Step(product, product_backward, (A(7.0), A(3.0)), 5.0),
    "two_uses": Step(two_uses, two_uses_backward, (A(2.0), 3.0, 0.5), 3.5),
    "linear": Step(
        ops.linear,
        ops.linear_backward,
        (A([1.0, -2.0, 0.5]), A([[0.5, 1.0], [-1.8, 0.9], [2.0, -0.6]]), A([0.1, 0.2])),
        [0.8, -0.5],
    ),
    "softmax": Step(ops.softmax, ops.softmax_backward, (A([1.0, 2.0, 0.5]),), [1.0, -1.0, 0.5]),
    "cross_entropy": Step(one_row, one_row_backward, (A([1.0, 2.0, 0.5]), 0), 2.0, {"t": (0, 2)}),
    "normalise": Step(normalise, normalise_backward, (A([1.0, 4.0, -2.0, 0.6]),), [1.0, 0.5, -1.0, 0.2]),
    "embedding": Step(
        ops.embedding,
        ops.embedding_backward,
        (A([3, 4, 3, 0]), A([[0.5, -1.0], [1.0, 0.2], [-0.4, 0.8], [1.5, -0.6], [0.3, 0.7]])),
        [[1.0, 0.5], [-0.5, 0.2], [0.3, -1.0], [0.4, 0.6]],
        {"ids": (0, 4)},
    ),
    "one_head": Step(
        one_head,
        one_head_backward,
        (
            A([[1.0, 0.5], [-1.0, 2.0], [2.0, 1.0]]),
            A([[1.0, 1.0], [0.5, -1.0], [-1.0, 0.5]]),
            A([[2.6, -1.0], [-2.0, 3.0], [-1.5, 1.2]]),
        ),
        [[1.0, 0.5], [-0.5, 1.0], [0.5, -1.0]],
    ),
    "heads": Step(
        heads,
        heads_backward,
        (
            A([[[1.0, 0.5], [-1.0, 2.0]], [[2.0, 1.0], [0.3, 0.2]]]),
            A([[[1.0, 1.0], [0.5, -1.0]], [[-1.0, 0.5], [2.0, 1.0]]]),
            A([[[2.0, -1.0], [0.5, 3.0]], [[-1.0, 1.0], [1.0, 0.5]]]),
        ),
        [[[1.0, 0.5], [-0.5, 1.0]], [[0.5, -1.0], [1.0, 1.0]]],
    ),
    "skip": Step(skip, skip_backward, (A([1.5, -2.0]), A([[0.5, 0.3], [-0.2, 0.4]])), [0.7, 0.5]),
    "adam": Step(
        adam,
        None,
        (A([1.0, -0.5]), A([0.2, -3.0]), A([0.0, 0.0]), A([0.0, 0.0]), 0.05, 1),
        ranges={"t": (1, 1000), "v0": (0.0, 9.0), "lr": (0.0, 1.0)},
    ),
}


def step_data(name: str, equations: str) -> dict[str, Any]:
    """What the page computes with, see `live.live_data`; the equations are checked on the numbers of the step."""
    step = STEPS[name]
    docstring = f"{name}\n\nForward and backward:\n\n{indent(equations, '    ')}\n"
    case = DerivationCase(step.op, step.op_backward, step.args, docstring=docstring)
    data = begin(case, checked(case))
    if data["outputs"]:
        data["arrays"][data["outputs"][0][1]] = array_json(A(step.dy))
    limits = step.ranges.items()
    ranges = {key: {"low": low, "high": high, "whole": isinstance(low, int)} for key, (low, high) in limits}
    return data | {"name": name, "inputs": list(data["arrays"]), "axes": {}, "ranges": ranges, "mistakes": []}


class StepNumbers(SphinxDirective):
    """The equations of a step, with live numbers: `.. step:: linear`."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        data = step_data(name, "\n".join(self.content))
        self.env.temp_data["step names"] = [*data["arrays"], *data["shapes"]]
        return [nodes.raw("", section(name, [data]), format="html")]


class Question(SphinxDirective):
    """A question about the numbers on the page, `.. question:: EXPRESSION`, where the expression gives the answer.

    The content is the question and a list of wrong answers, `- EXPRESSION: what is wrong with it`. choices: separated
    by |, of which the answer gives the number. A question about the living model has no step above it.
    """

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar = {"choices": str}

    def run(self) -> list[nodes.Node]:
        text = "\n".join(self.content)
        names = self.env.temp_data.get("step names", LIVING)
        data = {
            "answer": equation_as_json(parse(f"answer = {self.arguments[0]}", names)),
            "wrong": [
                {"equation": equation_as_json(parse(f"answer = {wrong}", names)), "reason": " ".join(reason.split())}
                for wrong, reason in WRONG.findall(text)
            ],
            "choices": [choice.strip() for choice in self.options.get("choices", "").split("|") if choice.strip()],
        }
        box = nodes.container(classes=["question"])
        box += [
            *self.parse_text_to_nodes(WRONG.sub("", text)),
            nodes.raw("", json_script(data), format="html"),
        ]
        return [box]


def progress(page: str, titles: dict[str, str]) -> str:
    """The line of all steps above a page of the path."""
    links = ""
    for number, name in enumerate(PAGES, 1):
        title, here = escape(titles[f"path/{name}"]), HERE if page == f"path/{name}" else ""
        label = f'title="{title}" aria-label="Step {number}: {title}"'
        links += f'<li><a href="{name}.html" data-step="{number}" {label}{here}>{number}</a></li>'
    return f'<nav class="path-line" aria-label="The twelve steps"><ol>{links}</ol></nav>'


def add_line(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Put the line of all steps above a page of the path."""
    if not page.startswith("path/"):
        return
    titles = {name: title.astext() for name, title in app.env.titles.items()}
    context["body"] = progress(page, titles) + context["body"]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("step", StepNumbers)
    app.add_directive("question", Question)
    app.connect("html-page-context", add_line)
    load_files(app, '<nav class="path-line"', "path/path.css", "path/path.js")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
