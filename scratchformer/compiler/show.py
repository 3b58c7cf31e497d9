"""The loops of an operation, printed for a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..notation.grammar import walk
from ..notation.spelling import name as spelled_name
from .cuda_code import cuda_source
from .derivation import Derivation
from .errors import CompileError
from .javascript_code import javascript_source
from .numba_code import numba_source
from .plan import Plan
from .trees import COLUMN, ROW, Array

PRINTERS: dict[str, tuple[Callable[[Plan], str], str]] = {
    "numba": (numba_source, "#"),
    "cuda": (cuda_source, "//"),
    "js": (javascript_source, "//"),
}


def loops_of(op: Callable, op_backward: Callable | None, target: str) -> Iterator[tuple[Plan, str]]:
    """The plan of a forward with its source for a target, which is a key of `PRINTERS`; then those of the backward.

    op, op_backward: functions, decorated or not. Raises CompileError for what cannot be compiled.
    """
    print_plan, _ = PRINTERS[target]
    backward = getattr(op_backward, "reference", op_backward)
    pair = Derivation(getattr(op, "reference", op), backward, getattr(op, "gives", ())).compile()
    for plan in (pair.forward, pair.backward):
        if plan is not None:
            if not plan.axes and target != "js":
                raise CompileError(f"{plan.name}: no equation is left for a loop: each gives a number or a vector")
            yield plan, print_plan(plan)


def shown(op: Callable, op_backward: Callable | None, target: str) -> str:
    """The source of the forward and of the backward, each with comments on what is outside the loops."""
    _, mark = PRINTERS[target]
    return "\n\n".join(
        "\n".join([*(f"{mark} {line}" for line in remarks(plan, op_backward is None)), source.strip("\n")])
        for plan, source in loops_of(op, op_backward, target)
    )


def remarks(plan: Plan, in_place: bool) -> Iterator[str]:
    """What a plan reads, what is computed before its loops and after them, and what it returns or changes in place."""
    computed = {*plan.head, *plan.sums}
    read = {array.name: described(array) for array in plan.reads}
    for name in plan.head:
        read |= {leaf[1]: leaf[1] for leaf in walk(plan.values[name].tree) if leaf[0] in ("load", "number")} | read
    read |= {name: name for name in plan.numbers}
    yield f"{plan.name}: reads {', '.join(text for name, text in read.items() if name not in computed)}"
    for when, names in (("Before", plan.head), ("After", plan.tail)):
        texts = [plan.values[name].text for name in names]
        texts = [text if " = " in text else f"{name} = {text}" for name, text in zip(names, texts, strict=True)]
        if texts:
            yield f"{when} the loops: {'; '.join(texts)}"
    yield f"{'Changes' if in_place else 'Returns'} {', '.join(map(spelled_name, plan.results))}"


def described(array: Array) -> str:
    """The name of an array, with a size for each axis."""
    sizes = ["columns" if axis == COLUMN else "rows" if axis == ROW else axis.upper() for axis in array.axes]
    return f"{spelled_name(array.name)} ({', '.join(sizes)})"
