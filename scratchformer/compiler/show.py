"""The loops of an operation, printed for a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from ..notation.spelling import name as spelled_name
from .derivation import Derivation
from .plan import Plan
from .trees import COLUMN, ROW, Array

PRINTERS = {"numba": ("numba_code", "#"), "cuda": ("cuda_code", "//"), "js": ("javascript_code", "//"),
            "numpy": ("numpy_code", "#")}  # fmt: skip


def loops_of(op: Callable, op_backward: Callable | None, target: str) -> Iterator[tuple[Plan, str]]:
    """The plan of a forward with its source for a target, which is a key of `PRINTERS`; then those of the backward.

    op, op_backward: functions, decorated or not. Raises CompileError for what cannot be compiled.
    """
    module = PRINTERS[target][0]
    print_plan = getattr(import_module(f".{module}", __package__), module.replace("_code", "_source"))
    references = (getattr(function, "reference", function) for function in (op, op_backward))
    pair = Derivation(*references, getattr(op, "gives", ())).compile()
    for plan in (pair.forward, pair.backward):
        if plan is not None:
            yield plan, print_plan(plan)


def shown(op: Callable, op_backward: Callable | None, target: str) -> str:
    """The source of the forward and of the backward, each with comments on what is outside the loops."""
    mark = PRINTERS[target][1]
    return "\n\n".join(
        "\n".join([*(f"{mark} {line}" for line in remarks(plan)), source.strip("\n")])
        for plan, source in loops_of(op, op_backward, target)
    )


def remarks(plan: Plan) -> Iterator[str]:
    """What a plan reads and returns, and what is computed before its loops and after them."""
    computed = {*plan.head, *plan.sums}
    yield f"{plan.name}: reads {', '.join(described(array) for array in plan.reads if array.name not in computed)}"
    for when, names in (("Before", plan.head), ("After", plan.tail)):
        texts = [plan.values[name].text or f"{name} = {in_words(plan.values[name].tree)}" for name in names]
        if texts:
            yield f"{when} the loops: {'; '.join(texts)}"
    yield f"Returns {', '.join(map(spelled_name, plan.results))}"


def described(array: Array) -> str:
    """The name of an array, with a size for each axis."""
    sizes = ["columns" if axis == COLUMN else "rows" if axis == ROW else axis.upper() for axis in array.axes]
    return f"{spelled_name(array.name)} ({', '.join(sizes)})"


def in_words(tree: Any) -> str:
    """A tree of the head or the tail, as a reader would write it."""
    kind, *parts = tree
    if kind == "num":
        return f"{parts[0]:g}"
    if kind in ("number", "value", "sum", "load"):
        return spelled_name(parts[0])
    if kind == "size":
        return {COLUMN: "columns", ROW: "rows"}.get(parts[0], parts[0].upper())
    if kind == "over":
        return f"{'Σ' if parts[0] == 'sum' else 'the mean of'} {in_words(parts[1])}"
    if kind == "call":
        return f"{parts[0]}({', '.join(map(in_words, parts[1]))})"
    if kind == "neg":
        return f"−{in_words(parts[0])}"
    if kind == "if":
        holds = " and ".join(f"{in_words(a)} {relation} {in_words(b)}" for relation, a, b in parts[0])
        return f"{in_words(parts[1])} where {holds}, {in_words(parts[2])} elsewhere"
    return f"({in_words(parts[0])} {kind} {in_words(parts[1])})"
