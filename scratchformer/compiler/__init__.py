"""Derivations compiled into loops: the equations of a docstring, written once, are what runs.

`equations` reads which form of each name is computed, `trees` makes of it what a loop can compute for one element,
`plan` puts that into passes over a row, and `derivation` says what forward and backward need. `numba_code` and its
neighbours print a plan for one target each, and `twins` calls what was printed.
"""

from __future__ import annotations

from typing import Any

from .. import ops
from ..ops.precision import round_into
from ..optim.adam import adam_step
from ..optim.clip import scale
from .equations import CompileError
from .in_place import InPlace
from .twins import Target, add_twins

__all__ = ["CompileError", "add_all"]

IN_PLACE: tuple[Any, ...] = (adam_step, round_into, scale)  # they have no backward


def add_all(target: Target) -> None:
    """Register the twins of all operations of `ops`, and of those that step weights, for a target."""
    for name in ops.__all__:
        op: Any = getattr(ops, name)
        op_backward = getattr(ops, f"{name}_backward", None)
        if hasattr(op, "reference") and op_backward is not None:
            add_twins(op, op_backward, target)
    for op in IN_PLACE:
        twin = InPlace(op, target)
        op.add_twin(target.kind, twin.fits, twin.forward, fast=True)
