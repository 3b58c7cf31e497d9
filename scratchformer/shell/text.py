"""Texts for messages: on one line, of bounded length, with all characters visible."""

from __future__ import annotations

import math
import re
from typing import Any

# Control characters, and those that hide text, reverse it or end a line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def one_line(text: str) -> str:
    """`text`, part of which may come from a file, for a terminal: its control characters are written as "\\x1b"."""
    return _CONTROL.sub(lambda control: repr(control[0])[1:-1], text)


def shown(x: Any) -> str:
    """`x` for a message: its repr on one line, cut after 80 characters."""
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, int) and x.bit_length() > 64:
        return f"a number of {int(x.bit_length() * math.log10(2)) + 1} digits"
    try:
        text = " ".join(repr(x).split())
    except (RecursionError, ValueError):  # nested too deeply; too many digits
        text = f"a {type(x).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str, length: int = 200) -> str:
    """`text` from a file, for a message: unchanged, or as `shown` if it is long or has characters that do not print."""
    return text if len(text) <= length and text.isprintable() else shown(text)


def apart(x: float, y: float, fewest: int = 6) -> tuple[str, str]:
    """Two numbers for a message, with `fewest` digits each, or with as many as it takes to see that they differ."""
    for digits in range(fewest, 18):
        texts = f"{x:.{digits}g}", f"{y:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def with_article(kind: Any) -> str:
    """The name of a class with its article: "a Linear", "an Adam"."""
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
