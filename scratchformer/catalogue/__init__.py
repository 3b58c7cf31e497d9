"""The catalogue of this package's operations, layers and optimizers: an entry each, in a file for each family.

An entry has the cases of its gradient checks and of its derivation, the mistakes that others have made in it, and what
its tests need not find. `scratchformer check` and the tests use the same tables. `scratchformer.testing`, which knows
nothing of this package, looks here for what a wrong gradient may come from.

    from scratchformer.catalogue import mistakes_of

    for mistake in mistakes_of("layernorm"):
        print(f"{mistake.title}. {mistake.effect}")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..testing.draw import Draw, Sizes
from . import (
    activations,
    attention,
    attention_layers,
    blocks,
    elsewhere,
    layers,
    losses,
    models,
    norms,
    optimizers,
    pooling,
    second_order,
    tables,
    twins,
)
from .entry import DerivationCase, Entry, Extension, LayerCase, OperationCase, OperationEntry
from .mistake import Mistake

# The entries of operations, backwards as operations, twins, layers with models, and optimizers.
FAMILIES = {
    "operations": (activations, norms, tables, pooling, attention, losses),
    "second order": (second_order,),
    "twins": (twins,),
    "layers": (layers, attention_layers, blocks, models),
    "optimizers": (optimizers,),
}


def entries_of(*kinds: str) -> list[Entry]:
    """The entries of these kinds; of all kinds if none is named."""
    return [entry for kind in kinds or FAMILIES for family in FAMILIES[kind] for entry in family.ENTRIES]


def derivations_of(*kinds: str) -> dict[str, Callable[[Sizes], DerivationCase]]:
    """The derivations of these kinds of entries, see `entries_of`, by name."""
    return {name: case for entry in entries_of(*kinds) for name, case in entry.derivations.items()}


OPERATIONS: dict[str, Callable[[Draw], OperationCase]] = {
    name: case for entry in entries_of("operations") for name, case in entry.cases.items()
}
SECOND_ORDER: dict[str, Callable[[Draw], OperationCase]] = {
    name: case for entry in entries_of("second order") for name, case in entry.cases.items()
}
LAYERS: dict[str, Callable[[Draw], LayerCase]] = {
    name: case for entry in entries_of("layers") for name, case in entry.cases.items()
}
MISTAKES: Sequence[Mistake] = [
    *(mistake for entry in entries_of() for mistake in entry.mistakes),
    *elsewhere.MISTAKES,
]


def mistakes_of(name: str) -> list[Mistake]:
    """The mistakes in the derivation of an operation or a layer."""
    return [each for each in MISTAKES if name in (each.operation, each.name.partition(":")[0]) and each.equation]


def known_operations() -> dict[str, OperationEntry]:
    """The operations by which `testing.known` recognises those of others, by name."""
    entries = [entry for family in FAMILIES["operations"] for entry in family.ENTRIES if entry.cases]
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


__all__ = [
    "LAYERS",
    "MISTAKES",
    "OPERATIONS",
    "SECOND_ORDER",
    "DerivationCase",
    "Draw",
    "Entry",
    "Extension",
    "LayerCase",
    "Mistake",
    "OperationCase",
    "Sizes",
    "derivations_of",
    "entries_of",
    "known_operations",
    "mistakes_of",
]
