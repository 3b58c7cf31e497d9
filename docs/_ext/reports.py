"""The checked derivations. A derivation that is not true stops the build."""

from __future__ import annotations

import math
from functools import cache

from scratchformer.catalogue import DerivationCase, Mistake, Sizes
from scratchformer.catalogue.derivations import CASES, check, variants
from scratchformer.notation import DerivationReport, DerivationText, parse
from scratchformer.notation.check import Walk, read_and_run
from scratchformer.notation.run import Execution
from scratchformer.pages.passages import CheckedItem, items_of, names_of
from scratchformer.testing.diagnosis import says

VISIBLE = 1e-6  # a relative error that is no rounding


@cache
def reports(name: str) -> tuple[DerivationReport, ...]:
    """The checked derivation of this name, in all its cases: each may leave out what concerns another."""
    return tuple(check(case) for case in variants(name))


@cache
def items(name: str) -> tuple[CheckedItem, ...]:
    """The items of the derivation of this name, each with its row of the largest error, see `items_of`."""
    return items_of(reports(name))


@cache
def names(name: str) -> frozenset[str]:
    """The names that occur in the derivation of this name, in ASCII."""
    return names_of(reports(name))


@cache
def compound() -> frozenset[str]:
    """The names with an underscore in any derivation; elsewhere an underscore begins the indices."""
    return frozenset(name for case in CASES for name in names(case) if "_" in name or "." in name)


def executed(case: DerivationCase) -> tuple[Execution, DerivationText]:
    """The run of a case, and its derivation."""
    options = {"names": case.names, "docstring": case.docstring, **case.options}
    return read_and_run(case.op, case.op_backward, *case.args, **options)


def consequences(name: str, mistake: Mistake) -> dict[str, float]:
    """How far results and gradients are off with a mistake in the derivation, relative to their largest numbers.

    If none of them is computed from the equation, the key is "" and the number how far the equation itself is off.
    """
    errors: dict[str, float] = {}
    for variant in variants(name):
        ran, derivation = executed(CASES[variant](Sizes()))
        right, wrong = (parse(text, check(variant).values) for text in (mistake.equation, mistake.wrong))
        place = next(number for number, item in enumerate(derivation.equations) if says(item.equation, right))
        planted = derivation.replace(place, wrong)
        walk = Walk(ran, math.inf)
        walk.prepare(planted)
        walk.items(ran.name, [item for item in planted.items if item.kind == "equation"])
        returned = {*ran.outputs, *(f"d{argument}" for argument in ran.arguments)}
        for number, (item, row) in enumerate(zip(planted.equations, walk.rows, strict=True)):
            kind, left, *_ = item.equation.parts[0] if item.equation else ("", "")
            known = kind == "name" and (left := walk.scope.resolve(left)) in returned
            if (known or number == place) and (row.error or 0) > VISIBLE:
                errors[left if known else ""] = row.error or 0
        if errors:
            break
    return {left: error for left, error in errors.items() if left} or errors
