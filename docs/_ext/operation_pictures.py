"""The picture of an operation: the shapes of its arguments, its output, what its cache keeps, and its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import numpy as np
from letters import Letters, LetterSizes
from measure import arrays
from tracing import TracedCall, owner, trace_operation

from scratchformer import ops
from scratchformer.catalogue import OPERATIONS, OperationCase
from scratchformer.dispatch import reference_only
from scratchformer.pages.svg import Canvas, wrapped

WIDTH, COLUMNS = 400, 3
SIDE = {  # the length of an axis in pixels
    "B": 20, "T": 34, "S": 44, "R": 62, "M": 48, "C": 60, "D": 26, "F": 64, "V": 68, "I": 46, "O": 54, "K": 26, "N": 54,
    "H": 24, "G": 18, "D/2": 18, "1": 10,
}  # fmt: skip
BEHIND = 5  # how far the next sheet of a leading axis is set off


def _attention(d: LetterSizes) -> OperationCase:
    args = (d("B H T D"), d("B G S D"), d("B G S D"))
    return OperationCase(ops.attention, ops.attention_backward, args)


CASES: dict[str, Callable[[LetterSizes], OperationCase]] = {**OPERATIONS, "attention": _attention}
WITHOUT_BACKWARD: dict[str, Callable[[LetterSizes], tuple[dict[str, np.ndarray], np.ndarray]]] = {  # inputs and output
    "sinusoidal_positions": lambda d: ({}, ops.sinusoidal_positions(d.T, d.C)),
    "rotary_frequencies": lambda d: ({}, ops.rotary_frequencies(d.D)),
}


def operation_picture(name: str) -> str:
    """The picture of the shapes of an operation of `ops`, as an SVG."""
    d = LetterSizes()
    if name in WITHOUT_BACKWARD:
        return _OperationPicture(name, *WITHOUT_BACKWARD[name](d), Letters(d.sizes)).svg()
    case = CASES[name](d)
    args = [x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in case.args]
    with reference_only():
        call = trace_operation(case.op, case.op_backward, *args, **case.options)
    return _OperationPicture(name, call.inputs(), call.output, Letters(d.sizes), call).svg()


class _OperationPicture:
    def __init__(
        self,
        name: str,
        inputs: dict[str, np.ndarray],
        output: np.ndarray,
        letters: Letters,
        call: TracedCall | None = None,
    ) -> None:
        self.name, self.inputs, self.output, self.letters, self.call = name, inputs, output, letters, call
        self.result = "y" if np.shape(output) else "loss"
        self.canvas = Canvas(WIDTH)

    def svg(self) -> str:
        y = self._row(self.inputs, 2.0) if self.inputs else 0.0
        y = self._step(
            y, f"{self.result}{', cache' if self.call else ''} = {self._call(self.name, self.inputs)}", "forward"
        )
        y = self._row({self.result: self.output}, y)
        if self.call:
            if kept := dict(self._kept()):
                new = {name: x for name, x in kept.items() if name not in {**self.inputs, self.result: None}}
                old = [name for name in kept if name not in new]
                y = self._caption(f"the cache keeps {', '.join([*old, *(['and'] if old and new else [])])}", y)
                y = self._row(new, y, dashed=True)
            y = self._row({self._dy(): self.output}, y)
            gradients = self.call.gradients()
            called = f"{self.name}_backward({self._dy()}, cache)"
            y = self._step(y, f"{', '.join(gradients)} = {called}", "backward")
            self._row(gradients, y)
        return self.canvas.svg(f"{self.name}: the shapes", self._description(), f"operation-{self.name}")

    def _dy(self) -> str:
        return next(iter(self.call.backward.arguments))

    def _call(self, name: str, inputs: dict[str, np.ndarray]) -> str:
        return f"{name}({', '.join([*inputs, *([] if self._all_given() else ['…'])])})"

    def _all_given(self) -> bool:
        return set(inspect.signature(getattr(ops, self.name)).parameters) == set(self.inputs)

    def _description(self) -> str:
        def listed(arrays: dict[str, np.ndarray]) -> str:
            return ", ".join(f"{name} {self._shape(x)}" for name, x in arrays.items())

        arguments = f"Arguments: {listed(self.inputs)}." if self.inputs else "No argument is an array."
        text = f"{arguments} Output: {self.result} {self._shape(self.output)}."
        if self.call:
            kept = listed(dict(self._kept())) or "no arrays"
            text += f" The cache keeps {kept}. Gradients: {listed(self.call.gradients())}."
        return text

    def _shape(self, x: np.ndarray) -> str:
        return self.letters.shape(np.shape(x)) if np.shape(x) else "scalar"

    def _kept(self) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of the cache with names: of the arguments where they are these, else of the fields."""
        known = {id(owner(x)): name for name, x in self.inputs.items()}
        if isinstance(self.output, np.ndarray):
            known[id(owner(self.output))] = self.result
        for name, x in arrays(self.call.cache):
            yield known.get(id(owner(x)), name.rpartition(".")[2] or "y"), x

    def _row(self, arrays: dict[str, np.ndarray], y: float, dashed: bool = False) -> float:
        """Arrays side by side, up to three in a row."""
        named = list(arrays.items())
        for start in range(0, len(named), COLUMNS):
            part = named[start : start + COLUMNS]
            height = max(self._size(x)[1] for _, x in part)
            for i, (name, x) in enumerate(part):
                self._array(name, x, WIDTH * (i + 0.5) / len(part), y, height, dashed)
            y += height + 38
        return y

    def _size(self, x: np.ndarray) -> tuple[float, float, int]:
        """The width and height of the drawing of an array, and how many sheets it shows at the back of the first."""
        sides = self._sides(x)
        behind = 2 if len(sides) > 2 else 0
        across = sides[-1][1] if sides else 12
        down = sides[-2][1] if len(sides) > 1 else 12
        return across + BEHIND * behind, down + BEHIND * behind, behind

    def _sides(self, x: np.ndarray) -> list[tuple[str, float]]:
        letters = [self.letters.shape((n,)).strip("()") for n in np.shape(x)]
        return [(letter, SIDE.get(letter, 30)) for letter in letters]

    def _array(self, name: str, x: np.ndarray, centre: float, y: float, height: float, dashed: bool) -> None:
        """An array as a sheet whose sides are its last two axes; sheets at its back stand for the other axes."""
        sides = self._sides(x)
        across, down, behind = self._size(x)
        self.canvas.text(centre, y + 12, name, "middle", bold=True)
        left, top = centre - across / 2, y + 18 + (height - down) / 2 + BEHIND * behind
        right, bottom = left + across - BEHIND * behind, top + down - BEHIND * behind
        self.canvas.box(left, top, right - left, bottom - top, fill=0.1, dashed=dashed)
        for i in range(1, behind + 1):
            x0, x1, y0, y1 = (
                side + sign * BEHIND * i for side, sign in ((left, 1), (right, 1), (top, -1), (bottom, -1))
            )
            edge = [(x0, y0 + BEHIND), (x0, y0), (x1, y0), (x1, y1), (x1 - BEHIND, y1)]
            self.canvas.line(edge, dash="3 3" if dashed else "", faint=True)
        if len(sides) > 1:
            self.canvas.text(left - 4, (top + bottom) / 2 + 4, sides[-2][0], "end", size=10)
        if sides and bottom - top > 18 and right - left > 8 * len(sides[-1][0]):
            self.canvas.text((left + right) / 2, bottom - 4, sides[-1][0], "middle", size=10)
        self.canvas.text(centre, y + height + 31, self._shape(x), "middle", size=10)

    def _step(self, y: float, text: str, colour: str) -> float:
        """An arrow with the call beside it."""
        lines = wrapped(text, WIDTH - 40)
        height = 16 * len(lines) + 10
        self.canvas.line([(14, y), (14, y + height)], colour, head=True)
        for i, line in enumerate(lines):
            self.canvas.text(26, y + 16 + 16 * i, line)
        return y + height + 6

    def _caption(self, text: str, y: float) -> float:
        for line in wrapped(text, WIDTH - 8):
            y += 15
            self.canvas.text(WIDTH / 2, y, line, "middle")
        return y + 6
