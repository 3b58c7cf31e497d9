"""What a case is, and how its sizes are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ... import ops
from ..cases import Draw


class DerivationCase(NamedTuple):
    """A pair whose docstring is a derivation, with arguments. names, options: as in `check_derivation`."""

    op: Callable
    op_backward: Callable | None
    args: tuple
    names: Mapping[str, Any] = {}  # noqa: RUF012
    options: Mapping[str, Any] = {}  # noqa: RUF012
    docstring: str | None = None  # where it is not that of `op`


class Sizes(Draw):
    """A `Draw` whose sizes are all different."""

    def __init__(self, seed: int = 0, scale: float = 1.0, **options: Any) -> None:
        super().__init__(seed, scale, **options)
        self.left = [int(size) for size in self.generator.permutation(np.arange(2, 9))]

    def __getattr__(self, letter: str) -> int:
        if len(letter) == 1 and letter not in self.sizes:
            self.sizes[letter] = self.left.pop()
        return super().__getattr__(letter)


def reference(name: str, *args: Any, names: Mapping[str, Any] | None = None, **options: Any) -> DerivationCase:
    """The reference of an operation and of its backward, if it has one."""
    op, op_backward = (getattr(f, "reference", f) for f in (getattr(ops, name), getattr(ops, f"{name}_backward", None)))
    return DerivationCase(op, op_backward, args, names or {}, options)
