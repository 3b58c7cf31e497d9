"""Derivations compiled into loops: the equations of a docstring, written once, are what runs.

`equations` reads which form of each name is computed, `trees` makes of it what a loop can compute for one element,
`plan` puts that into passes over a row, and `derivation` says what forward and backward need. `numba_code` and its
neighbours print a plan for one target each, and `twins` calls what was printed.
"""

from __future__ import annotations

from typing import Any

from .. import ops
from .equations import CompileError
from .twins import Target, add_twins

__all__ = ["CompileError", "add_all"]


def add_all(target: Target) -> None:
    """Register the twins of all operations of `ops` for a target."""
    for name in ops.__all__:
        op: Any = getattr(ops, name)
        op_backward = getattr(ops, f"{name}_backward", None)
        if hasattr(op, "reference") and op_backward is not None:
            add_twins(op, op_backward, target)
