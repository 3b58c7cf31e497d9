"""The index notation of derivations: read, evaluated, checked and typeset."""

from .check import DerivationReport, check_derivation, check_equations
from .grammar import Equation, NotationError, parse
from .latex import latex
from .layout import DerivationText, Item, read
from .mistakes import PlantedMistake, plant_mistakes
from .page import array_as_json, as_json
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
    "array_as_json",
    "as_json",
    "check_derivation",
    "check_equations",
    "latex",
    "parse",
    "plant_mistakes",
    "read",
]
