"""The picture of a layer or model: forward goes down on the left, backward comes back up on the right.

A box is a call, with what it keeps for its backward and the products of matrices in both directions. Everything in it
is from the trace. Layers that connect other layers are frames; repeated blocks are drawn once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from traced import DEPTH, traced
from tracing import TracedCall, owner

from scratchformer.pages.svg import LINE, Canvas, wrapped

WIDTH = 400
FRAMED = {
    "EmbeddingSum", "Residual", "Block", "TransformerBlock", "LlamaBlock", "DecoderBlock", "MaskedPrediction", "Pooler",
}  # fmt: skip
FLAT = {"Body", "Stack", "Bert", "Recompute"}  # their calls are drawn where they stand
LEGEND = (
    "↓ forward, ↑ backward. FLOP: 2 m n k for each matrix product, nothing else. What several boxes keep is "
    "counted in the first; parameters are not counted as kept."
)
HEAD = 10  # the height of an arrow that only enters or leaves


def layer_picture(name: str) -> str:
    """The picture of a layer of `nn` or a model of `models`, as an SVG."""
    return _LayerPicture(name).svg()


class _LayerPicture:
    def __init__(self, name: str) -> None:
        self.name = name
        self.letters, self.root, self.twin_root = traced(name)
        self.twins = dict(_pairs(self.root, self.twin_root))
        self.canvas = Canvas(WIDTH)
        self.kept, self.kept_by_twins = self.root.kept, self.twin_root.kept
        self.parameters = {id(owner(p.data)) for p in self.root.parameters.values()}
        self.counted: set[int] = set()  # the blocks that a box has already shown as kept
        self.counted_of_twins: set[int] = set()

    def svg(self) -> str:
        y = self._head(2.0)
        if list(self._children(self.root)):
            edge = 7 if self.root.kind == "Residual" else 1  # room for the line around its branch
            y = self._flow(self.root, edge, WIDTH - edge, y)
        else:
            y = self._around(self.root, 1, WIDTH - 1, y)
        self._foot(y + 6)
        return self.canvas.svg(self._title(), self._description(), f"layer-{self.name}")

    def _title(self) -> str:
        return f"{self.name}: forward and backward, from a trace"

    def _description(self) -> str:
        steps = ", ".join(_name(call, self.root) for call, *_ in self._children(self.root)) or "none"
        there, back = (", ".join(labels(self.root)) for labels in (self._forward_in, self._backward_in))
        reverse = " and goes back through them" if self.root.backward and self.root.backward.calls else ""
        return (
            f"Forward takes {there}. The steps inside, in this order: {steps}. Backward takes a gradient, {back},"
            f"{reverse}. {' '.join(self._totals())}"
        ).replace(",.", ".")

    def _totals(self) -> Iterator[str]:
        letters, back = self.letters, _products_back(self.root)
        if params := self.root.parameters.values():
            yield f"Parameters: {letters.numbers(params)}."
        if self.root.products():
            yield f"FLOP forward: {letters.flop(self.root.products())}."
        if back:
            yield f"FLOP backward: {letters.flop(back)}."
        if runs_again(self.root):
            yield "Backward runs forward again."
        kept, by_twins = (letters.bytes(blocks.values()) for blocks in (self.kept, self.kept_by_twins))
        yield f"Kept for backward: {kept} bytes." if self.kept else "Nothing is kept for backward."
        if kept != by_twins:
            yield f"The NumPy twins keep {by_twins} bytes."

    def _head(self, y: float) -> float:
        y += 14
        self.canvas.text(4, y, self.name, bold=True, size=14)
        for line in self._totals():
            for part in wrapped(line, WIDTH - 24):
                y += LINE
                self.canvas.text(4, y, part)
        return y + 8

    def _foot(self, y: float) -> None:
        sizes = ", ".join(f"{letter}\u00a0{n}" for letter, n in self.letters.sizes.items())
        numbers = (
            f"Traced with {sizes}: {sum(p.data.size for p in self.root.parameters.values()):,} parameters, "
            f"{_count(self.root.flop)}FLOP forward, {_count(_flop(_products_back(self.root)))}FLOP backward, "
            f"{_count(sum(x.nbytes for x in self.kept.values()))}B kept."
        )
        for part in (LEGEND, numbers):
            for line in wrapped(part, WIDTH - 8, 10):
                y += 14
                self.canvas.text(4, y, line, size=10)

    def _children(self, call: TracedCall) -> Iterator[list[TracedCall]]:
        """The calls to draw inside a call; equal blocks or heads are in one list."""
        groups: list[list[TracedCall]] = []
        for child in call.calls:
            if child.layer is not None and child.cache is None and child.output is child.arguments.get("x"):
                continue  # dropout that does nothing
            for inner in self._children(child) if child.kind in FLAT else [[child]]:
                if groups and _alike(groups[-1][0], inner[0]):
                    groups[-1] += inner
                else:
                    groups.append(inner)
        yield from groups

    def _flow(self, call: TracedCall, x0: float, x1: float, y: float) -> float:
        """Draw the calls inside `call` one below the other, with the arrays that pass between them."""
        children = list(self._children(call))
        top = y
        above: TracedCall | None = None
        for child, *others in children:
            y = self._gap(call, above, child, x0, x1, y)
            framed = child.kind in FRAMED and list(self._children(child))
            if is_skipped(call, child):
                y = self._bypass(x0, x1, top, y + 8) + 8
            else:
                y = (self._frame if framed else self._box)(child, 1 + len(others), x0, x1, y)
            above = others[-1] if others else child
        return self._gap(call, above, None, x0, x1, y)

    def _around(self, call: TracedCall, x0: float, x1: float, y: float) -> float:
        """A box for `call` itself, with its arrays above and below."""
        y = self._arrows(x0, x1, y, self._forward_in(call), self._backward_out(call))
        y = self._box(call, 1, x0, x1, y)
        return self._arrows(x0, x1, y, self._forward_out(call), self._backward_in(call))

    def _gap(
        self,
        frame: TracedCall,
        above: TracedCall | None,
        below: TracedCall | None,
        x0: float,
        x1: float,
        y: float,
    ) -> float:
        """The arrays between two calls of `frame`; None stands for its beginning and its end."""
        up = self._forward_out(above) if above else self._forward_in(frame)
        down = self._forward_in(below) if below else self._forward_out(frame)
        back_down = self._backward_in(above) if above else self._backward_out(frame)
        back_up = self._backward_out(below) if below else self._backward_in(frame)
        source = above.output if above else list(frame.inputs().values())
        target = list(below.inputs().values()) if below else frame.output
        if below and is_skipped(frame, below):
            return self._arrows(x0, x1, y, up, back_down)
        if not _same(source, target):
            y = self._arrows(x0, x1, y, up, back_down) + 4
            return self._arrows(x0, x1, y, down, back_up)
        left = down if _within(up, down) else [*up, *down]
        right = back_up if _within(back_down, back_up) else [*back_down, *back_up]
        return self._arrows(x0, x1, y, left, right)

    def _bypass(self, x0: float, x1: float, top: float, y: float) -> float:
        """The line of x around a branch to the sum at y, and that of the gradient back to the sum at the top."""
        self.canvas.plus(x0 + 14, y, "forward")
        self.canvas.line([(x0 + 14, top + 3), (x0 - 5, top + 3), (x0 - 5, y), (x0 + 8, y)], "forward")
        self.canvas.text(x0 + 24, y + 4, "+ x")
        self.canvas.line([(x1 - 14, y), (x1 + 5, y), (x1 + 5, top + 3), (x1 - 20, top + 3)], "backward")
        self.canvas.text(x1 - 24, y + 4, "the gradient goes both ways", "end")
        return y

    def _arrows(self, x0: float, x1: float, y: float, left: list[str], right: list[str]) -> float:
        """An arrow down on the left and one up on the right, with the shapes beside them."""
        room = (x1 - x0) / 2 - 30
        left, right = ([part for line in lines for part in wrapped(line, room)] for lines in (left, right))
        height = max(HEAD, LINE * max(len(left), len(right)) + 4)
        if left:
            self.canvas.line([(x0 + 14, y + 1), (x0 + 14, y + height - 1)], "forward", head=True)
        if right and right != [NO_GRADIENT]:
            self.canvas.line([(x1 - 14, y + height - 1), (x1 - 14, y + 1)], "backward", head=True)
        for lines, x, anchor in ((left, x0 + 24, "start"), (right, x1 - 24, "end")):
            for i, line in enumerate(lines):
                self.canvas.text(x, y + 13 + LINE * i, line, anchor)
        return y + height

    def _box(self, call: TracedCall, count: int, x0: float, x1: float, y: float) -> float:
        lines = [line for part in self._facts(call) for line in wrapped(part, x1 - x0 - 16)]
        height = LINE * (1 + len(lines)) + 8
        self.canvas.box(x0, y, x1 - x0, height)
        self.canvas.text(x0 + 8, y + 16, _name(call, self.root), bold=True)
        if count > 1:
            self.canvas.text(x1 - 8, y + 16, self._times(count), "end")
        for i, line in enumerate(lines):
            self.canvas.text(x0 + 8, y + 16 + LINE * (i + 1), line)
        return y + height

    def _frame(self, call: TracedCall, count: int, x0: float, x1: float, y: float) -> float:
        first = len(self.canvas.elements)
        self.canvas.text(x0 + 8, y + 15, _name(call, self.root), bold=True)
        if count > 1:
            self.canvas.text(x1 - 8, y + 15, self._times(count), "end")
        end = self._flow(call, x0 + 10, x1 - 10, y + 20) + 4
        self.canvas.box(x0, y, x1 - x0, end - y, 0.03)
        self.canvas.elements.insert(first, self.canvas.elements.pop())  # drawn first, so that it frames the rest
        return end

    def _times(self, count: int) -> str:
        return f"× {'depth' if count == DEPTH else self.letters.shape((count,)).strip('()')}"

    def _facts(self, call: TracedCall) -> Iterator[str]:
        """The lines of a box: parameters, FLOP, and what is kept; of the twin, what differs."""
        letters, twin = self.letters, self.twins.get(call, call)
        if call.parameters:
            yield f"parameters {letters.numbers(call.parameters.values())}"
        flop, flop_twin = self._flop_of(call), self._flop_of(twin)
        yield from flop
        new = self._new(call, self.kept, self.counted)
        new_twin = self._new(twin, self.kept_by_twins, self.counted_of_twins)
        if new:
            yield f"keeps {letters.bytes(new)} bytes"
        elif call.kept.keys() & self.kept.keys():
            yield "keeps nothing new"
        if flop_twin != flop:
            yield from ("twin: " + line for line in flop_twin)
        if letters.bytes(new) != letters.bytes(new_twin):
            yield f"twin: keeps {letters.bytes(new_twin)} bytes"

    def _new(self, call: TracedCall, kept: dict[int, np.ndarray], counted: set[int]) -> list[np.ndarray]:
        """The blocks that a call keeps and no box above it."""
        new = {key: x for key, x in call.kept.items() if key in kept and key not in counted}
        counted |= new.keys()
        return list(new.values())

    def _flop_of(self, call: TracedCall) -> list[str]:
        parts = [f"↓ {self.letters.flop(call.products())}"] if call.products() else []
        parts += [f"↑ {self.letters.flop(back)}"] if (back := _products_back(call)) else []
        both = f"FLOP {' '.join(parts)}"
        return [both] if parts and len(both) <= 40 else [f"FLOP {part}" for part in parts]

    def _shapes(self, arrays: dict[str, np.ndarray]) -> list[str]:
        """The shapes with the names of the arrays that have them: ["q, k (B H T D)", "v (B G S D)"]."""
        by_shape: dict[str, list[str]] = {}
        for name, x in arrays.items():
            by_shape.setdefault(self.letters.shape(x.shape), []).append(name)
        return [f"{', '.join(names)} {shape}" for shape, names in by_shape.items()]

    def _forward_in(self, call: TracedCall) -> list[str]:
        return self._shapes({name: x for name, x in call.inputs().items() if id(owner(x)) not in self.parameters})

    def _forward_out(self, call: TracedCall) -> list[str]:
        return self._plain_shapes(call.output)

    def _backward_in(self, call: TracedCall) -> list[str]:
        back = call.backward
        return self._plain_shapes(next(iter(back.arguments.values()))) if back else []

    def _backward_out(self, call: TracedCall) -> list[str]:
        if call.backward is None:
            return []
        if call.layer is None:
            return self._shapes(call.gradients())
        return self._plain_shapes(call.backward.returned) or [NO_GRADIENT]

    def _plain_shapes(self, y: Any) -> list[str]:
        parts = y if isinstance(y, tuple) else (y,)
        shapes = [self.letters.shape(np.shape(x)) for x in parts if x is not None]
        return list(dict.fromkeys("scalar" if shape == "()" else shape for shape in shapes))


NO_GRADIENT = "no gradient"


def runs_again(root: TracedCall) -> bool:
    """Whether backward runs every operation of forward again, on the same arrays. Adding gradients does not count."""
    made = [call for call in root.walk() if call.layer is None]
    again = [call for call in root.backward.walk() if call.phase == "forward"] if root.backward else []
    return bool(made) and all(any(_repeats(call, first) for call in again) for first in made)


def _repeats(again: TracedCall, made: TracedCall) -> bool:
    a, b = again.inputs(), made.inputs()
    return again.kind == made.kind and a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _pairs(a: TracedCall, b: TracedCall) -> Iterator[tuple[TracedCall, TracedCall]]:
    """Each call of a reference trace with the same call of a trace with twins."""
    yield a, b
    for x, y in zip(a.calls, b.calls, strict=False):
        if x.name == y.name:
            yield from _pairs(x, y)


def _alike(a: TracedCall, b: TracedCall) -> bool:
    """Whether b is the next of several equal blocks or heads."""
    same = (a.kind, a.flop, [x.shape for x in a.inputs().values()]) == (
        b.kind, b.flop, [x.shape for x in b.inputs().values()],
    )  # fmt: skip
    return same and a.name[-1:].isdigit() and b.name[-1:].isdigit() and a.name != b.name


def _name(call: TracedCall, root: TracedCall) -> str:
    """query · Linear; blocks · TransformerBlock; ops.attention"""
    if call.layer is None:
        return f"ops.{call.kind}"
    last = [part for part in call.name.split(".") if not part.isdigit()][-1]
    return call.kind if last == call.kind or call is root else f"{last} · {call.kind}"


def _products_back(call: TracedCall) -> list:
    return call.backward.products() if call.backward else []


def _flop(products: list) -> int:
    return sum(2 * int(np.prod(shape)) * k for shape, k in products)


def _within(some: list[str], others: list[str]) -> bool:
    """Whether all shapes of some labels are among those of the others."""
    shapes = [{label[label.find("(") :] for label in labels} for labels in (some, others)]
    return shapes[0] <= shapes[1]


def _arrays(x: Any) -> list[np.ndarray]:
    return [part for part in (x if isinstance(x, tuple | list) else [x]) if isinstance(part, np.ndarray | np.generic)]


def _same(source: Any, target: Any) -> bool:
    """Whether one of the target arrays has the numbers of a source array, perhaps in another order."""
    return any(
        a is b or (a.size == b.size and np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None)))
        for a in _arrays(source)
        for b in _arrays(target)
    )


def is_skipped(frame: TracedCall, call: TracedCall) -> bool:
    """Whether a call is the sum of a residual frame, to which x goes around the branch."""
    return frame.kind == "Residual" and call.kind == "add"


def _count(n: float) -> str:
    """A number with a unit prefix: 57.7 k."""
    for unit in ("", "k", "M", "G"):
        if n < 1000:
            return f"{n:.3g}\u00a0{unit}"
        n /= 1000
    return f"{n:.3g}\u00a0T"
