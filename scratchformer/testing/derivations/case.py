"""What a case is, and how its sizes are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..cases import Draw


class DerivationCase(NamedTuple):
    """A pair whose docstring is a derivation, with arguments. names, options: as in `check_derivation`."""

    op: Callable
    op_backward: Callable | None
    args: tuple
    names: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    docstring: str | None = None  # where it is not that of `op`


class Sizes(Draw):
    """A `Draw` whose sizes are all different."""

    def __init__(self, seed: int = 0, scale: float = 1.0, **options: Any) -> None:
        super().__init__(seed, scale, **options)
        shuffle = self.generator.permutation
        self.left = [int(size) for size in (*shuffle([3, 4, 5, 6]), 2)]

    def __getattr__(self, letter: str) -> int:
        if len(letter) == 1 and letter not in self.sizes:
            preferred = (*self.left, *range(7, 20))
            self.sizes[letter] = next(size for size in preferred if size not in self.sizes.values())
        return super().__getattr__(letter)
