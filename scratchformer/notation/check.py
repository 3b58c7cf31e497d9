"""Derivations checked: every equation of a docstring evaluated on the arrays of a real forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .layout import DerivationText, normal, read
from .run import Execution, docstring_of, run
from .walk import TOLERANCE, DerivationError, DerivationRow, Walk


class DerivationReport(NamedTuple):
    """The result of `check_derivation`.

    values: every array by its name, those that equations define included. unreached: the cases of equations, as they
    are written, that no element of these arrays reaches, so that nothing is known of them.
    """

    derivation: DerivationText
    rows: list[DerivationRow]
    values: dict[str, np.ndarray]
    unreached: tuple[str, ...]

    @property
    def worst(self) -> float:
        return max((row.error for row in self.rows if row.error is not None), default=0.0)

    def __str__(self) -> str:
        lines = [f"{self.derivation.name}: {len(self.rows)} equations and lines of code, worst error {self.worst:.0e}"]
        for row in self.rows:
            result = f"{row.error:8.0e}" if row.error is not None else " " * 8
            lines.append(f"  {row.line:4} {result} {row.kind:9} {normal(row.text)}")
        return "\n".join(lines)


def check_derivation(
    op: Callable,
    op_backward: Callable | None,
    *args: Any,
    names: Mapping[str, Any] | None = None,
    docstring: str | None = None,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    functions: Mapping[str, Callable] | None = None,
    **options: Any,
) -> DerivationReport:
    """Check the derivation in the docstring of an operation, equation by equation, on the arrays of a real run.

    op, op_backward: a pair as in `scratchformer.ops`; a layer's `forward` and `backward` are one too. If op_backward is
    None, `op` returns y alone, and nothing is differentiated. args, options: arguments of `op`; floating-point arrays
    are converted to float64. names: further names that equations use, with their values, or with functions that are
    called after backward. functions: of whole arrays, such as the parts of a layer, which equations call by name, as in
    y = norm(s); for derivatives they must take complex arrays. docstring: the text, by default that of `op`; below its
    first line, the least indented line is the margin, from which equations are indented. tolerance: the largest
    relative error. seed: of dy.

    An equation whose left side is known is compared; any other defines its left side. A partial derivative is compared
    with a numerical one, and so is every dx, which means ∂L/∂x. The lines of code are compared with what they gave in
    the run. Nothing may be left over: the output and every gradient need an equation, and what an equation defines must
    be used below it. The arrays should be small, and their sizes different and larger than 1; otherwise a wrong index
    may not show.

        def cube(x):
            \"""Each number to the third power.

                y_i = x_i³
                ∂y_i/∂x_i = 3 x_i²        dx_i = dy_i ∂y_i/∂x_i = 3 dy_i x_i²
            \"""
            return x**3, x

        def cube_backward(dy, x):
            return 3 * dy * x**2

        print(check_derivation(cube, cube_backward, np.random.default_rng(0).normal(size=(2, 3))))

    Raises DerivationError, which names the line, the equation and the values, for an equation that is not true or
    cannot be evaluated, and for what is left over; NotationError for an equation that cannot be read; ValueError for
    empty arrays or an argument that is written to; TypeError for an op or op_backward that is not of this form.
    Returns a DerivationReport.
    """
    options |= {"names": names, "functions": functions, "docstring": docstring, "seed": seed}
    ran, derivation = read_and_run(op, op_backward, *args, **options)
    return walk_through(derivation, ran, tolerance)


def walk_through(derivation: DerivationText, ran: Execution, tolerance: float) -> DerivationReport:
    """Check all items of a derivation."""
    walk = Walk(ran, tolerance)
    walk.prepare(derivation)
    walk.items(ran.name, derivation.items)
    walk.expect_complete()
    return DerivationReport(derivation, walk.rows, walk.scope.values, tuple(sorted(walk.scope.unreached)))


METHOD_CALL = re.compile(r"[\w)\]]\.[a-z]\w*\(")  # as in x.sum(): no equation has this


def read_and_run(
    op: Callable,
    op_backward: Callable | None,
    *args: Any,
    docstring: str | None = None,
    may_differ: bool = False,
    **options: Any,
) -> tuple[Execution, DerivationText]:
    """Run a pair and read its derivation. The arguments are those of `check_derivation`.

    may_differ: whether the backward may be another than the derivation says. Then a line that calls a method is code,
    though the backward does not contain it.
    """
    ran = run(op, op_backward, *args, **options)
    text, margin = docstring_of(op) if docstring is None else (docstring, None)
    calls = {normal(line) for line in text.splitlines() if METHOD_CALL.search(line)} if may_differ else frozenset()
    derivation = read(text, ran.names, ran.code | calls, ran.name, margin)
    if not derivation.equations:
        more = "" if docstring is None else "; below the first line, some text must be at the margin"
        raise DerivationError(
            f"{ran.name}: its docstring has no equations (they are indented deeper than its text{more})"
        )
    return ran, derivation
