"""Wrong plans: whether the comparison of loops with the reference finds what a mistake in the compiler would do.

A plan is changed in one place, as a mistake in the compiler could change it, and its loops are run by Python itself. A
change is killed if a result or a gradient then differs from the reference, or the loops fail.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.compiler.derivation import Derivation
from scratchformer.compiler.numba_code import numba_source
from scratchformer.compiler.plan import Plan
from scratchformer.compiler.python_target import PythonTarget
from scratchformer.compiler.trees import COLUMN, ROW
from scratchformer.compiler.twins import CompiledTwin
from scratchformer.notation.grammar import Node, walk
from scratchformer.rng import Key

COUNT = 1000
SHARE = 0.98  # of the changes; some of the others change nothing, such as two sums that do not depend on each other
PARTNERS = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "exp": "tanh",
    "log": "exp",
    "tanh": "exp",
    "erf": "tanh",
    "sqrt": "abs",
}
OPPOSITES = {"=": "≠", "≠": "=", "<": "≥", "≥": "<", ">": "≤", "≤": ">"}


class Filled:
    """NumPy, but new arrays are not as some earlier array has left its memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 1, dtype)


class Interpreted(PythonTarget):
    """Loops that Python runs as they are printed. source: how they are printed."""

    xp = Filled()
    empty = staticmethod(xp.empty)

    def __init__(self, source: Callable[[Plan], str] = numba_source) -> None:
        self.source = source

    def takes(self, dtype: np.dtype, op: Any) -> bool:
        return dtype == np.float64


@cache
def cases() -> dict[str, list[tuple]]:
    """Arguments for each operation: numbers of order 1, equal ones, and rows far from 0."""
    rng = np.random.default_rng(0)

    def x(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    targets, none, key = np.array([[1, 4, 0], [2, 2, 3]]), np.full((2, 3), 2), Key(1)
    rows = [x(2, 3, 5), x(2, 3, 5) + 1000 * x(2, 3, 1), np.round(x(2, 3, 5))]
    logits = [rows[0], 300 * rows[2], rows[1], 4 * rows[0]]  # in the last most rows have a probability above ½
    return {
        "add": [(x(2, 3, 4), x(2, 3, 4))],
        "cross_entropy": [(z, targets, *more) for z in logits for more in ((None, 0.0), (2, 0.1))]
        + [(rows[0], none, 2)],
        "dropout": [(z, p, key) for z in rows for p in (0.3, 0.75, 1 - 1e-9)],
        "embedding": [(targets, x(5, 4))],
        "gather": [(x(2, 5, 4), targets)],
        "gelu": [(z, kind) for z in rows[:1] for kind in ("none", "tanh")],
        "layernorm": [(z, x(5), x(5), eps) for z in rows[:2] for eps in (1e-5, 0.1)],
        "log_softmax": [(z,) for z in logits],
        "max_pool": [(z, lengths) for z in rows for lengths in (None, np.array([0, 2]))],
        "mean_pool": [(z, lengths) for z in rows for lengths in (None, np.array([0, 2]))],
        "relu": [(z,) for z in rows],
        "rmsnorm": [(z, x(5), eps) for z in rows[:2] for eps in (1e-5, 0.1)],
        "rotary": [(x(2, 3, 4, 6), start) for start in (0, 3)],
        "silu": [(rows[0],)],
        "softmax": [(z,) for z in logits],
        "swiglu": [(rows[0], rows[2])],
        "tanh": [(rows[0],)],
    }


@cache
def expected(name: str, case: int) -> tuple:
    """y, dy and the gradients of the reference."""
    args = cases()[name][case]
    y, kept = getattr(ops, name).reference(*args)
    dy = np.random.default_rng(1).standard_normal(np.shape(y))[()]
    gradients = getattr(ops, f"{name}_backward").reference(dy, kept)
    return y, dy, gradients if isinstance(gradients, tuple) else (gradients,)


def twin_of(name: str, which: str = "", changed: Plan | str = "") -> CompiledTwin:
    """The twin of an operation, with another plan in place of the one called `which`, or with other loops for it."""

    def source_of(plan: Plan) -> str:
        return changed if plan.name == which and isinstance(changed, str) else numba_source(plan)

    twin = CompiledTwin(getattr(ops, name), getattr(ops, f"{name}_backward"), Interpreted(source_of))
    twin.derivation = derivation = copy.copy(derivation_of(name))
    if isinstance(changed, Plan):
        made, field = derivation.pair, "backward" if which.endswith("_backward") else "forward"
        derivation.pair = lambda *key: made(*key)._replace(**{field: changed})
    return twin


@cache
def derivation_of(name: str) -> Derivation:
    return CompiledTwin(getattr(ops, name), getattr(ops, f"{name}_backward"), Interpreted()).derivation


def agrees(name: str, which: str = "", changed: Plan | str = "") -> bool:
    """Whether the loops give what the reference gives, in all cases, although a plan may have been changed."""
    for case, args in enumerate(cases()[name]):
        y, dy, gradients = expected(name, case)
        twin = twin_of(name, which, changed)
        with np.errstate(all="ignore"):
            assert twin.fits(*args), f"{name}: case {case} does not fit"
            try:
                found, kept = twin.forward(*args)
                given = twin.backward(dy, kept)
            except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError, ValueError):
                return False
        given = given if isinstance(given, tuple) else (given,)
        for a, b in zip((found, *given), (y, *gradients), strict=True):
            if np.shape(a) != np.shape(b) or not np.allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max()):
                return False
    return True


@cache
def plans(name: str) -> list[Plan]:
    """The plans of an operation."""
    pair = twin_of(name).derivation.compile()
    return [pair.forward, *([pair.backward] if pair.backward else [])]


# Changes of a plan. Each function gives all changes of a kind, as functions of the plan.


def trees(plan: Plan) -> Iterator[tuple[str, str, Node]]:
    """The trees of a plan: of values or of sums, by name."""
    used = {name for each in plan.passes for name in (*each.before, *each.steps)} | {*plan.last, *plan.head, *plan.tail}
    yield from (("values", name, value.tree) for name, value in plan.values.items() if name in used)
    yield from (("sums", name, each.tree) for name, each in plan.sums.items())


def with_tree(plan: Plan, where: str, name: str, old: Node, new: Node) -> Plan:
    """The plan with another node in place of the first that is `old` in this tree."""
    done = False

    def replaced(tree):
        nonlocal done
        if tree == old and not done:
            done = True
            return new
        return tuple(map(replaced, tree)) if isinstance(tree, tuple) else tree

    table = dict(getattr(plan, where))
    table[name] = table[name]._replace(tree=replaced(table[name].tree))
    return plan._replace(**{where: table})


def other_nodes(plan: Plan) -> Iterator[Plan]:
    """An operation, a function, a constant, an operand or an axis that is another."""
    loaded = {array.name: array.axes for array in plan.reads}
    for where, name, tree in trees(plan):
        for node in dict.fromkeys(walk(tree)):
            for new in wrong(node, plan, loaded):
                yield with_tree(plan, where, name, node, new)


def wrong(node: Node, plan: Plan, loaded: dict[str, tuple[str, ...]]) -> Iterator[Node]:
    """What a mistake may put in the place of a node."""
    kind, *parts = node
    if kind in PARTNERS:
        yield (PARTNERS[kind], *parts)
    if kind == "/" or (kind == "-" and parts[0][0] != "num"):  # (1 − half is half − 1: Python counts from the end)
        yield (kind, parts[1], parts[0])
    if kind == "neg":
        yield parts[0]
    if kind == "call" and parts[0] in PARTNERS:
        yield ("call", PARTNERS[parts[0]], parts[1])
    if kind == "num":
        yield ("num", parts[0] + 1)
    if kind == "size":
        yield ("size", COLUMN if parts[0] != COLUMN else ROW)
    if kind in ("number", "value") and parts[0] in plan.numbers:
        yield from (("number", other) for other in plan.numbers if other != parts[0])
    if kind == "sum":
        yield from (("sum", other) for other, each in plan.sums.items() if other != parts[0] and each.at is None)
    if kind == "if":
        ((relation, left, right), *others), a, b = parts
        yield ("if", ((OPPOSITES[relation], left, right), *others), a, b)
        yield ("if", parts[0], b, a)
    if kind == "load":
        array, places = parts
        yield from (
            ("load", other, places) for other, axes in loaded.items() if axes == loaded.get(array) and other != array
        )
        for i, place in enumerate(places):
            yield ("load", array, (*places[:i], ("num", 0.0) if place[0] == "at" else ("at", COLUMN), *places[i + 1 :]))


def other_passes(plan: Plan) -> Iterator[Plan]:
    """A sum or a value in the pass before or after its own, what is left out, what is kept too long."""
    for i, each in enumerate(plan.passes):
        for field in ("before", "sums", "totals", "steps", "keep"):
            for name in getattr(each, field):
                less = each._replace(**{field: tuple(other for other in getattr(each, field) if other != name)})
                yield plan._replace(passes=(*plan.passes[:i], less, *plan.passes[i + 1 :]))
                for j in (i - 1, i + 1):  # (a sum over rows may be taken in a later pass)
                    if field in (("before", "sums", "totals") if j < i else ("before", "sums")) and 0 <= j < len(
                        plan.passes
                    ):
                        passes = [*plan.passes]
                        passes[i] = less
                        passes[j] = passes[j]._replace(**{field: (*getattr(passes[j], field), name)})
                        yield plan._replace(passes=tuple(passes))


def other_totals(plan: Plan) -> Iterator[Plan]:
    """A sum over rows that is added at another place."""
    for name, each in plan.sums.items():
        for i, place in enumerate(each.at or ()):
            at = (*each.at[:i], ("num", 0.0) if place[0] == "at" else ("at", plan.axes[0]), *each.at[i + 1 :])
            yield plan._replace(sums={**plan.sums, name: each._replace(at=at)})


def other_sums(plan: Plan) -> Iterator[Plan]:
    """A maximum that is a sum, and the reverse."""
    for name, each in plan.sums.items():
        if each.at is None:
            function = "sum" if each.function == "max" else "max"
            yield plan._replace(sums={**plan.sums, name: each._replace(function=function)})


def sources(plan: Plan) -> Iterator[str]:
    """Loops in which a sum is not reset for a row, nothing is added, or the first or last turn is left out."""
    lines = numba_source(plan).splitlines()
    loop = next((i for i, line in enumerate(lines) if line.strip().startswith("for ")), None)
    for i, line in enumerate(lines):
        text, indent = line.strip(), line[: len(line) - len(line.lstrip())]
        if (
            text.startswith(("sum", "max"))
            and (text.endswith("= R(0)") or text.endswith("= R(-np.inf)"))
            and plan.axes[:-1]
        ):
            yield "\n".join([*lines[:loop], "    " + text, *lines[loop:i], *lines[i + 1 :]])
        if text.startswith("for ") and "range(" in text and "first" not in text:
            head, size = text.removesuffix("):").split("range(")
            if not size.startswith("min"):
                yield "\n".join([*lines[:i], f"{indent}{head}range(1, {size}):", *lines[i + 1 :]])
                yield "\n".join([*lines[:i], f"{indent}{head}range({size} - 1):", *lines[i + 1 :]])
        if " += " in text:
            yield "\n".join([*lines[:i], line.replace(" += ", " = ", 1), *lines[i + 1 :]])


def all_changes() -> list[tuple[str, str, Plan | str]]:
    """(operation, plan's name, changed plan or source), the same list every time."""
    found = []
    for name in cases():
        for plan in plans(name):
            for kind in (other_nodes, other_passes, other_totals, other_sums, sources):
                found += [(name, plan.name, changed) for changed in kind(plan) if changed != plan]
    return found


@pytest.mark.parametrize("name", cases())
def test_unchanged_plans_agree(name):
    assert agrees(name)


def test_wrong_plans_are_found():
    found = all_changes()
    chosen = random.Random(0).sample(found, min(COUNT, len(found)))
    survivors = []
    for name, which, changed in chosen:
        original = next(plan for plan in plans(name) if plan.name == which)
        if agrees(name, which, changed) and source_of(changed) != source_of(original):
            survivors.append(f"{which}: {difference(original, changed)}")
    report = "\n".join(survivors)
    assert len(survivors) <= (1 - SHARE) * len(chosen), (
        f"{len(survivors)} of {len(chosen)} wrong plans survive:\n{report}"
    )


def source_of(plan: Plan | str) -> str:
    return plan if isinstance(plan, str) else numba_source(plan)


def difference(plan: Plan, changed: Plan | str) -> str:
    """The lines of the loops that a change has changed."""
    left, right = source_of(plan).splitlines(), source_of(changed).splitlines()
    return " | ".join(
        [*(line.strip() for line in left if line not in right), "→", *(x.strip() for x in right if x not in left)]
    )
