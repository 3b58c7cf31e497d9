"""A gradient check on arrays that it draws itself, of several kinds.

    check_drawn(attention, attention_backward, "B H T D", "B H S D", "B H S D")

A gradient that is right at normal numbers can be wrong where two numbers are equal, where one is exactly zero, where a
few channels are much larger than the rest, or where two sizes happen to be the same. So the pair is checked on four
draws (`KINDS`). Elements are compared in groups, so that all four take about the time of one `check_gradients`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from .contracts import Diagnosis, GradientError, as_tuple, is_floating, repeatable
from .diagnosis import UNKNOWN, without_diagnosis
from .draw import Draw, Sizes, some_exact
from .gradcheck import Report, check_gradients, check_in_groups
from .offset import check_offset
from .runs import argument_names, name_of


class Equal(Draw):
    """All sizes are equal. Some numbers are whole, some are repeated, also in the next array, and in every second row
    the first and the last are its maximum.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: dict[tuple[int, ...], np.ndarray] = {}

    def __getattr__(self, letter: str) -> int:
        if len(letter) == 1:
            self.sizes[letter] = 3
        return super().__getattr__(letter)

    def values(self, shape: tuple[int, ...]) -> np.ndarray:
        x = some_exact(super().values(shape), self.generator)
        if shape in self.drawn:
            x = np.where(self.generator.random(shape) < 0.3, self.drawn[shape], x)
        self.drawn[shape] = x
        if len(shape) > 1:
            rows = x.reshape(-1, shape[-1])[1::2]
            rows[:, 0] = rows[:, -1] = rows.max(axis=-1)
        return x


class Spread(Sizes):
    """Numbers from around 1 to around 1000, and one of more than 10,000 in each row."""

    def values(self, shape: tuple[int, ...]) -> np.ndarray:
        x = np.asarray(super().values(shape) * 10 ** self.generator.uniform(0, 3, shape))
        if shape:
            rows = x.reshape(-1, shape[-1])
            largest = self.generator.integers(shape[-1], size=len(rows))
            rows[np.arange(len(rows)), largest] = 1e4 * (1 + self.generator.random(len(rows)))
        return x


class Recorded(Sizes):
    """Logits of a small language model in training, at consecutive positions: some are much larger than others. What
    was the smallest size of `Sizes` is the largest.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.left = [8 - size for size in self.left]

    def values(self, shape: tuple[int, ...]) -> np.ndarray:
        with files(__package__).joinpath("activations.npy").open("rb") as file:
            table = np.lib.format.read_array(file, allow_pickle=False).astype(np.float64)
        width = shape[-1] if shape else 1
        count = int(np.prod(shape[:-1]))
        row, column = self.generator.integers(len(table)), self.generator.integers(table.shape[1])
        rows, columns = (row + np.arange(count)) % len(table), (column + np.arange(width)) % table.shape[1]
        # Consecutive positions repeat after 32 rows; a little noise keeps equal numbers apart.
        return (table[rows][:, columns] * (1 + 0.01 * self.generator.standard_normal((count, width)))).reshape(shape)


KINDS: dict[str, type[Draw]] = {
    "normal numbers and sizes that all differ": Sizes,
    "whole and repeated numbers and equal sizes": Equal,
    "recorded activations": Recorded,
    "numbers of very different sizes": Spread,
}


@repeatable
def check_drawn(op: Callable, op_backward: Callable, *args: Any, seed: int = 0, **options: Any) -> list[Report]:
    """`check_gradients` on arrays of several kinds, which are drawn from `seed`.

    args: a string of letters such as "B T C" stands for a floating-point array of that shape; a word of several letters
    is one axis, whose size is their product ("B GR T D"). A function of one argument is called with the `Draw`, and
    gives what must be drawn in another way: `lambda draw: draw.integers("B T", draw.V)`. Anything else is passed on.
    options: those of `check_gradients`, and keyword arguments of `op`. With `order=2` op_backward_backward comes before
    the arrays, as in `check_gradients`.

    The arrays are standard normal, of sizes that all differ; then there are whole numbers, zeros and repeats, and all
    sizes are equal; then they are activations recorded in a short training run; then numbers from 1 to more than
    10,000. Such a draw is left out where `op` refuses it or gives something that is not finite, or where nothing can be
    compared. The rules are checked with the normal numbers. Last, `offset.check_offset` adds a large number to all
    elements of an argument, in float32.

    Returns the Reports. Raises GradientError, which says for which kind of numbers, and ValueError as
    `check_gradients` does, for normal numbers.
    """
    first = options.get("order", 1) - 1
    args = (*(lambda draw, function=x: function for x in args[:first]), *args[first:])  # functions are not drawn
    pair = _DrawnPair(op, op_backward, args, {**options, "seed": seed})
    reports, right = [], Sizes(seed)
    for kind, draws in KINDS.items():
        draw = right if draws is Sizes else draws(seed)
        drawn, others = arguments(args, draw), draw is not right
        if others and not pair.is_defined(drawn[first:]):
            continue
        try:
            with np.errstate(all="ignore") if others else nullcontext():  # exp(10,000) overflows in right code too
                check = check_gradients if first else check_in_groups
                reports.append(check(op, op_backward, *drawn, **pair.options | ({"rules": False} if others else {})))
        except GradientError as error:
            message, _, _ = str(error).partition("\nRepeat with")
            causes = [pair.what_matters(draw, right)] if others else []
            if UNKNOWN in message and all(cause.name == "sizes matter" for cause in causes):
                causes += pair.right_sizes(draw)
            message = message.replace(f"\n{UNKNOWN}", "") if causes else message
            lines = [f"for {kind}: {message}", *(cause.what for cause in causes)]
            lines.append(f"Repeat: check_drawn({name_of(op)}, {name_of(op_backward)}, ..., seed={seed})")
            raise GradientError("\n".join(lines), (*error.diagnoses, *causes)) from None
        except ValueError:
            if not others:
                raise
    drawn = arguments(args[first:], Sizes(seed))
    check_offset(op, op_backward, argument_names(op, drawn), drawn, pair.options_of_op(), seed)
    return reports


class _DrawnPair(NamedTuple):
    """A pair with the arguments and options of `check_drawn`."""

    op: Callable
    op_backward: Callable
    args: tuple
    options: dict[str, Any]

    def what_matters(self, wrong: Draw, right: Draw) -> Diagnosis:
        """Whether the sizes of a draw make a gradient wrong, or its numbers; for those of `right` it is right."""
        normal = type(wrong)(self.options["seed"])
        normal.values = normal.generator.standard_normal  # type: ignore[method-assign, assignment]
        if wrong.sizes != right.sizes and self.is_right(normal) is False:
            before, now = (", ".join(f"{letter} = {n}" for letter, n in draw.sizes.items()) for draw in (right, wrong))
            what = f"The sizes make it wrong: it is right with {before}, and wrong with {now}, for normal numbers too."
            return Diagnosis(what, "form", "sizes matter")
        return Diagnosis("With normal numbers it is right, so the numbers make it wrong.", "form", "numbers matter")

    def right_sizes(self, wrong: Draw) -> list[Diagnosis]:
        """The sizes with which a wrong gradient is right: one of them is 1, or two are equal."""
        tried = [f"{letter} = 1" for letter in wrong.sizes]
        tried += [f"{a} = {b}" for a, b in itertools.combinations(wrong.sizes, 2)]
        where = []
        for text in tried:
            changed, other = text.split(" = ")
            draw = type(wrong)(self.options["seed"])
            draw.sizes |= {**wrong.sizes, changed: wrong.sizes.get(other, 1)}
            if draw.sizes != wrong.sizes and self.is_right(draw):
                where.append(text)
        what = f"The sizes matter: it is right where {', and where '.join(where)}."
        return [Diagnosis(what, "form", "sizes matter")] if where else []

    def is_right(self, draw: Draw) -> bool | None:
        """Whether the gradients are right; None if nothing can be compared."""
        args = arguments(self.args, draw)
        try:
            with without_diagnosis():
                check_gradients(self.op, self.op_backward, *args, **self.options | {"rules": False})
        except GradientError:
            return False
        except Exception:  # such sizes are not in its domain
            return None
        return True

    def is_defined(self, args: tuple) -> bool:
        try:
            with np.errstate(all="ignore"):
                y, _ = self.op(*args, **self.options_of_op())
        except Exception:  # such numbers or sizes are not in its domain
            return False
        return all(np.isfinite(part).all() for part in as_tuple(y) if is_floating(part))

    def options_of_op(self) -> dict[str, Any]:
        """The keyword arguments that are not those of the check."""
        known = inspect.signature(check_gradients).parameters
        return {name: value for name, value in self.options.items() if name not in known}


def arguments(args: tuple, draw: Draw) -> tuple:
    """What `args` of `check_drawn` stand for. Raises ValueError for a string that is not words of letters."""
    for i, x in enumerate(args):
        if isinstance(x, str) and not (x.replace(" ", "") + "B").isalpha():
            raise ValueError(f"argument {i}: expected a shape in letters such as 'B T C', got {x!r}")
    return tuple(draw(x) if isinstance(x, str) else x(draw) if callable(x) else x for x in args)
