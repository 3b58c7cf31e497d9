"""The derivations of the package as cases for `check_derivation`, with sizes and arrays drawn from a seed.

Sizes are all different and larger than 1, so that an exchanged index shows. The tests, `scratchformer check
--derivations` and the site use the same table.
"""

from __future__ import annotations

from ...notation import Report, check_derivation, check_equations
from . import layers, operations, optimizers
from .case import DerivationCase, EquationsCase, Sizes

CASES = {**operations.CASES, **layers.CASES, **optimizers.CASES}


def check(name: str, seed: int = 0, scale: float = 1.0) -> Report:
    """Check the derivation of this name, on arrays drawn from the seed. Raises DerivationError where it is not true."""
    case = CASES[name](Sizes(seed, scale))
    if isinstance(case, EquationsCase):
        return check_equations(case.docstring, case.names, name=name)
    return check_derivation(
        case.op, case.op_backward, *case.args, names=case.names, docstring=case.docstring, seed=seed, **case.options
    )


__all__ = ["CASES", "DerivationCase", "EquationsCase", "Sizes", "check"]
