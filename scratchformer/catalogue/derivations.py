"""The checks of the catalogue's derivations: every equation evaluated, and mistakes planted in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from textwrap import indent
from typing import Any

from ..notation import (
    DerivationError,
    DerivationReport,
    NotationError,
    PlantedMistake,
    check_derivation,
    plant_mistakes,
)
from . import Sizes, derivations_of

CASES = derivations_of()


def check(name: str, seed: int = 0, scale: float = 1.0) -> DerivationReport:
    """Check the derivation of this name, on arrays drawn from the seed. Raises DerivationError where it is not true."""
    case = CASES[name](Sizes(seed, scale))
    return check_derivation(
        case.op, case.op_backward, *case.args, names=case.names, docstring=case.docstring, seed=seed, **case.options
    )


def variants(name: str) -> list[str]:
    """The cases of a derivation: "gelu" has "gelu" and "gelu, tanh"."""
    return [case for case in CASES if name in (case, case.partition(",")[0])]


def plant(name: str, seeds: Sequence[int] = (0, 1, 2), **options: Any) -> list[PlantedMistake]:
    """Plant mistakes in the derivation of this name, see `plant_mistakes`.

    Mistakes that one seed, or one of the derivation's cases, does not catch are tried with the next.
    """
    tried: dict[tuple[int, str, str], PlantedMistake] = {}
    for seed, variant in product(seeds, variants(name)):
        case = CASES[variant](Sizes(seed))
        survivors = {key for key, mistake in tried.items() if not mistake.caught}
        if tried and not survivors:
            break
        planted = plant_mistakes(
            case.op,
            case.op_backward,
            *case.args,
            names=case.names,
            docstring=case.docstring,
            seed=seed,
            among=survivors or None,
            options=case.options,
            **options,
        )
        tried |= {(mistake.line, mistake.what, mistake.wrong): mistake for mistake in planted}
    return list(tried.values())


def check_all(names: Sequence[str] = (), seed: int = 0, mistakes: bool = False) -> list[str]:
    """Check the derivations `names` (all if empty), print every equation with its error, and return what is wrong.

    A name is that of a case ("attention.numpy"), or the part before its point or comma. mistakes: also plant mistakes
    in the equations, and print those that the check does not find. Raises ValueError for an unknown name.
    """
    chosen = select_derivations(names)
    wrong, lines, worst, planted = [], 0, 0.0, list[PlantedMistake]()
    for name in chosen:
        try:
            report = check(name, seed)
        except (DerivationError, NotationError) as error:
            print(f"{name}: WRONG\n{indent(str(error), '    ')}", flush=True)
            wrong.append(name)
            continue
        heading, *rows = str(report).splitlines()
        print(f"{name}:{heading.partition(':')[2]}", *rows, sep="\n", flush=True)
        lines, worst = lines + len(report.rows), max(worst, report.worst)
        if mistakes and name == variants(name.partition(",")[0])[0]:
            tried = plant(name.partition(",")[0])
            planted += tried
            print(f"       {sum(m.caught for m in tried)} of {len(tried)} planted mistakes caught")
            for mistake in tried:
                if not mistake.caught:
                    print(f"  {mistake.line:4} not caught: {mistake.what}: {mistake.wrong}")
    print(f"\n{len(chosen)} derivations, {lines} equations and lines of code, none skipped; worst error {worst:.0e}")
    if mistakes:
        print(f"{len(planted)} mistakes planted, {sum(m.caught for m in planted)} caught")
    return wrong


def select_derivations(names: Sequence[str] = ()) -> list[str]:
    """The derivations `names` (all if empty): see `check_all`."""
    if unknown := set(names) - set(CASES) - {re.split("[.,]", name)[0] for name in CASES}:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    return [name for name in CASES if not names or {name, re.split("[.,]", name)[0]} & set(names)]
