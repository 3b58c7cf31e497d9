"""What a mistake is, and the code with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent.parent


class Mistake(NamedTuple):
    """A mistake in hand-written code, most of them found in other projects, where the tests passed.

    name: never changes. title: the mistake in a few words. effect: what it does to the gradient. operation: of which it
    is a mistake, by its name in `ops`. equation: of the operation's derivation, and `wrong`, what was written in its
    place. code: the wrong line of a program, if that says more than the equation. file: in the package, with
    `replacements` of its text that plant the mistake. A mistake has an equation, a file, or both.
    """

    name: str
    title: str = ""
    effect: str = ""
    operation: str = ""
    equation: str = ""
    wrong: str = ""
    code: str = ""
    file: str = ""
    replacements: tuple[tuple[str, str], ...] = ()

    def source(self) -> str:
        """The text of the file with the mistake."""
        text = (PACKAGE / self.file).read_text(encoding="utf-8")
        for right, wrong in self.replacements:
            text = text.replace(right, wrong)
        return text
