"""The index notation of derivations: read, evaluated, checked and typeset."""

from .check import Report, check_derivation, check_equations
from .grammar import Equation, NotationError, parse
from .latex import latex
from .layout import Derivation, Item, read
from .mistakes import Mistake, plant_mistakes
from .page import array_as_json, as_json
from .walk import DerivationError, Row

__all__ = [
    "Derivation",
    "DerivationError",
    "Equation",
    "Item",
    "Mistake",
    "NotationError",
    "Report",
    "Row",
    "array_as_json",
    "as_json",
    "check_derivation",
    "check_equations",
    "latex",
    "parse",
    "plant_mistakes",
    "read",
]
