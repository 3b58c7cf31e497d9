"""Translates functions of one number, such as `portable.exp32`, into CUDA code by running them.

The function is called with a `Traced` in place of a number. Each NumPy function that it calls becomes a line of code,
which names the result. Arithmetic of float32 uses the namespace `ieee` of cuda/float32.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

TYPES = {"f": "float", "i": "int", "b": "bool"}  # in CUDA, by the letter of NumPy's `dtype.kind`
COMPARISONS = {"less": "<", "greater": ">", "equal": "=="}
INTEGER_OPERATIONS = {
    **{"add": "{} + {}", "subtract": "{} - {}", "bitwise_and": "{} & {}", "bitwise_or": "{} | {}"},
    **{"right_shift": "{} >> {}", "left_shift": "int((unsigned){} << {})"},
}


def code_of(function: Callable, x: str, y: str) -> str:
    """CUDA code that computes y = function(x) for float32 variables with the names x and y."""
    lines: list[str] = []
    result = function(Traced(x, "f", lines))
    return "\n".join([*lines, f"{y} = {result.name};"])


class Traced(NDArrayOperatorsMixin):
    """A number: its name, its kind, and the lines that compute it."""

    def __init__(self, name: str, kind: str, lines: list[str]) -> None:
        self.name, self.kind, self.lines = name, kind, lines

    def line(self, kind: str, text: str) -> Traced:
        """A new number, which a line of code sets to the expression `text`."""
        name = f"t{len(self.lines)}"
        self.lines.append(f"const {TYPES[kind]} {name} = {text};")
        return Traced(name, kind, self.lines)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any) -> Traced:
        name, names = ufunc.__name__, [name_of(x) for x in inputs]
        if name in COMPARISONS:
            a, b = (f"ieee::widen({each})" for each in names)
            return self.line("b", f"{a} {COMPARISONS[name]} {b}")
        if self.kind == "i":
            return self.line("i", INTEGER_OPERATIONS[name].format(*names))
        return self.line("f", f"ieee::{name}({', '.join(names)})")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Traced:
        if function is not np.where:
            return NotImplemented
        kind = next(x.kind for x in (*args[1:], Traced("", "f", [])) if isinstance(x, Traced))
        return self.line(kind, "{} ? {} : {}".format(*map(name_of, args)))

    def view(self, dtype: Any) -> Traced:
        """The number with the same bits."""
        kind = np.dtype(dtype).kind
        return self.line(kind, f"{'__float_as_int' if kind == 'i' else '__int_as_float'}({self.name})")

    def astype(self, dtype: Any) -> Traced:
        kind = np.dtype(dtype).kind
        return self.line(kind, f"({TYPES[kind]}){self.name}")


def name_of(x: Any) -> str:
    """The name of a traced number, or the text of a constant."""
    if isinstance(x, Traced):
        return x.name
    return f"__int_as_float({x.view(np.int32):#x})" if isinstance(x, np.float32) else str(x)
