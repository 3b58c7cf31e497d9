"""The index notation of derivations: read, evaluated and checked."""

from .check import DerivationReport, check_derivation
from .grammar import Equation, NotationError, parse
from .layout import DerivationText, Item, read
from .mistakes import PlantedMistake, plant_mistakes
from .walk import DerivationError, DerivationRow

__all__ = [
    "DerivationError",
    "DerivationReport",
    "DerivationRow",
    "DerivationText",
    "Equation",
    "Item",
    "NotationError",
    "PlantedMistake",
    "check_derivation",
    "parse",
    "plant_mistakes",
    "read",
]
