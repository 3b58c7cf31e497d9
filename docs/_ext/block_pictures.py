"""The picture of a layer that is made of others: what skips a part, and the gradients that add up there.

It is drawn from the equations of the layer's own derivation, in which the parts are calls, with a row for each skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from composed import top_level

from scratchformer.catalogue import DerivationCase
from scratchformer.notation import Equation
from scratchformer.notation.grammar import walk
from scratchformer.pages.live import is_second_name
from scratchformer.pages.svg import Canvas, width

EDGE, PAD, HALF = 38, 7, 16  # the length of an edge, the room around a name in a box, and half the height of a box
TOP, MIDDLE = 18, 56  # the heights of the skip and of the row


class Box(NamedTuple):
    """A step of the forward. part: its name, or "+". reads: the array that it is given. gives: its result."""

    part: str
    reads: str
    gives: str


def block_picture(case: DerivationCase, name: str) -> str:
    """The rows of a layer, each an SVG. name: tells the picture from the other pictures of a page."""
    second: dict[str, str] = {}
    boxes = list(forward(top_level(case), second))
    skipped = {box.reads for box in boxes if box.part == "+"}
    starts = [i for i, box in enumerate(boxes) if box.part != "+" and second.get(box.reads, box.reads) in skipped]
    pictures = []
    for number, (begin, end) in enumerate(pairwise([*starts, len(boxes)])):
        start = second.get(boxes[begin].reads, boxes[begin].reads)
        pictures.append(row_picture(boxes[begin:end], start, f"{name}-{number}"))
    return f'<div class="block-picture">{"".join(pictures)}</div>'


def forward(equations: list[Equation], second: dict[str, str]) -> Iterator[Box]:
    """The steps of the forward in their order. second: gets the names of what has a name already."""
    for equation in equations:
        left, right, *_ = equation.parts
        names = [node[1] for node in walk(right) if node[0] == "name"]
        if is_second_name(equation):
            second[left[1]] = names[0]
        elif right[0] == "call" and right[1].endswith("_backward"):
            return
        else:
            yield Box("+" if right[0] == "+" else right[1], names[0], left[1])


def row_picture(row: list[Box], start: str, name: str) -> str:
    """start: the array that the row begins with."""
    foot = row[-1].gives
    widths = [2 * PAD + width(box.part) if box.part != "+" else 12 for box in row]
    canvas = Canvas(2 * EDGE + sum(widths) + EDGE * len(row))
    edge(canvas, 0, start, f"d{start}")
    x = fork = float(EDGE)
    for number, (box, size) in enumerate(zip(row, widths, strict=True)):
        into_sum = box.part == "+"
        given = row[number - 1].gives if number else "" if box.reads == start else box.reads
        edge(canvas, x, given, f"d{box.gives if into_sum else box.reads}")
        x += EDGE
        if into_sum:
            for shift, colour, towards in ((3, "forward", 1), (-3, "backward", -1)):
                path = [(fork + shift, MIDDLE), (fork + shift, TOP + shift), (x + 6 - shift, TOP + shift)]
                path.append((x + 6 - shift, MIDDLE - 7))
                canvas.line(path[::towards], colour, head=True)
            canvas.text((fork + x) / 2, TOP - 7, f"d{box.gives}", "middle")
            canvas.plus(x + 6, MIDDLE, "plain")
        else:
            canvas.box(x, MIDDLE - HALF, size, 2 * HALF)
            canvas.text(x + PAD, MIDDLE + 4, box.part)
        x += size
    edge(canvas, x, foot, f"d{foot}")
    steps = ", ".join(box.part for box in row)
    terms = [row[0].reads, *(box.gives for box in row if box.part == "+")]
    described = (
        f"Forward from {start}: {steps}. {start} also goes straight to the +. "
        f"Backward, {' and '.join(f'd{term}' for term in terms)} add up to d{start}."
    )
    return canvas.svg(f"From {start} to {foot}, and back", described, name)


def edge(canvas: Canvas, x: float, array: str, gradient: str) -> None:
    """An array on its way to the right, and its gradient on its way back."""
    canvas.line([(x + 2, MIDDLE - 3), (x + EDGE - 2, MIDDLE - 3)], "forward", head=True)
    canvas.line([(x + EDGE - 2, MIDDLE + 4), (x + 2, MIDDLE + 4)], "backward", head=True)
    canvas.text(x + EDGE / 2, MIDDLE - 9, array, "middle")
    canvas.text(x + EDGE / 2, MIDDLE + 19, gradient, "middle")
