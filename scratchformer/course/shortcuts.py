"""Shortcuts: answers whose values are right although nothing was derived.

They take numerical differences, or call this package or a library for automatic differentiation. The checks catch what
students try, not every trick.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..notation.run import source_of
from ..rng import Key
from ..shell.source import syntax_tree

if TYPE_CHECKING:
    from .exercise import Exercise

PACKAGE = Path(__file__).parent.parent
LIBRARIES = (  # that can differentiate
    r"autograd|casadi|jax|mlx|mxnet|numdifftools|paddle|scipy[\\/](?:optimize|differentiate)|sympy|tensorflow|tinygrad|torch"
)
NUMBERS = {  # kinds of numbers with which differences have as many digits as a formula
    "complex numbers": re.compile(r"cmath|complex\d*|c(single|double|longdouble)|imag|emath|scimath"),
    "numbers of more digits": re.compile(r"longdouble|longfloat|float(96|128)|Decimal|Fraction|mpmath|gmpy2"),
}
PAIRS = ("rotary",)  # the exercise in which a pair of real numbers may be written as a complex number
NEAR = 0.05  # a numerical difference moves an element by less than this fraction of the largest
EXACT = 1e-13  # relative; here formulas have rounding errors up to 6e-15, fourth-order differences at least 2e-13


class Shortcut(AssertionError):
    """An answer takes a shortcut, although its values may be right; the message says which one."""


@contextmanager
def expect_no_shortcut(exercise: Exercise, path: Path, text: str) -> Iterator[None]:
    """Raise Shortcut if the student's file, which runs in this block, takes one, or replaces functions of a library."""
    expect_doubles(text, pairs=exercise.name in PAIRS)
    before = {module: dict(vars(module)) for module in (np, np.linalg, math, builtins, *modules_of_package())}
    previous, calls = sys.getprofile(), Calls(exercise, path)
    if "\nfrom scratchformer" in exercise.start:  # it may call the package, but not the class that it has to write
        expect_not_named(exercise.library.__name__, text)
    else:
        sys.setprofile(calls.seen)
    try:
        yield
    finally:
        sys.setprofile(previous)
        replaced = [
            f"{module.__name__}.{name}"
            for module, kept in before.items()
            for name, value in kept.items()
            if callable(value) and vars(module).get(name) is not value
        ]
        for module, kept in before.items():
            vars(module).update(kept)
        if replaced:
            raise Shortcut(f"The answer replaces {replaced[0]}, which the check uses too: give yours another name")
        if calls.message:
            raise Shortcut(calls.message)


def modules_of_package() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE.name]


class Calls:
    """Watches for the first call from the student's file into this package, or into a library for differentiation.

    What the solution calls is allowed, by name, and so are functions that the check itself provides.
    """

    def __init__(self, exercise: Exercise, path: Path) -> None:
        self.path, self.message = str(path), ""
        nodes = list(ast.walk(syntax_tree(exercise.solution)))
        self.allowed = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        prints = str(Path(__file__).with_name("child.py"))  # what an answer prints goes there
        self.libraries = {self.path: "", prints: ""}

    def library(self, file: str) -> str:
        """The library that a file of code belongs to, if it is one that answers must not call."""
        if file not in self.libraries:
            match = re.search(rf"[\\/]site-packages[\\/]({LIBRARIES})[\\/]", file)
            other = re.sub(r"[\\/]", ".", match[1]) if match else ""
            self.libraries[file] = PACKAGE.name if PACKAGE in Path(file).parents else other
        return self.libraries[file]

    def seen(self, frame: FrameType, event: str, function: Any) -> None:
        """Called for every call and return. function: of a call of C code."""
        if event == "c_call" and function in (exec, eval) and frame.f_code.co_filename == self.path:
            self.message = f"line {frame.f_lineno}: write the answer without {function.__name__}"
        if event != "call" or self.message or not (library := self.library(frame.f_code.co_filename)):
            return
        caller = frame.f_back
        while caller and caller.f_code.co_filename != self.path and not self.library(caller.f_code.co_filename):
            caller = caller.f_back  # through NumPy or the standard library
        if caller is None or caller.f_code.co_filename != self.path or self.may(library, frame):
            return
        line = linecache.getline(self.path, caller.f_lineno).strip()
        name = name_of(frame)
        what = f"runs {name} of {library}" if name.isidentifier() else f"imports a part of {library}"
        self.message = f"line {caller.f_lineno}: {line}\n    This {what}. Write the answer yourself"

    def may(self, library: str, frame: FrameType) -> bool:
        """Whether the student's file may make this call."""
        code, name = frame.f_code, name_of(frame)
        put_in = "<locals>" in code.co_qualname and Path(code.co_filename).parent.name == "exercises"
        special = name.startswith("__") and name != "__call__"
        return library == PACKAGE.name and (name in self.allowed or put_in or special)


def expect_not_named(name: str, text: str) -> None:
    """Raise Shortcut if a student's file uses this class of the package."""
    for node in ast.walk(syntax_tree(text)):
        if name in (getattr(node, field, None) for field in ("id", "attr", "name")):
            line = f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
            raise Shortcut(f"{line}\n    This is the solution in scratchformer. Write the answer yourself")


def name_of(frame: FrameType) -> str:
    """The name of the function that a frame runs, of the one that it wraps, or of the class whose object it makes."""
    values = (frame.f_locals.get(name) for name in frame.f_code.co_freevars)
    wrapped = next((value.__qualname__ for value in values if isinstance(value, FunctionType)), "")
    return (wrapped or frame.f_code.co_qualname).removesuffix(".__init__").rpartition(".")[2]


def expect_doubles(text: str, pairs: bool = False) -> None:
    """Raise Shortcut if a student's file uses other numbers than doubles, or complex ones where they are no `pairs`."""
    for node in ast.walk(syntax_tree(text)):
        names = [getattr(node, field, None) for field in ("id", "attr", "name", "module", "value")]
        names += ["complex"] if isinstance(names[-1], complex) else []
        for kind, pattern in NUMBERS.items():
            if any(isinstance(name, str) and pattern.fullmatch(name) for name in names) and not (
                pairs and kind == "complex numbers"
            ):
                number = getattr(node, "lineno", 0)
                raise Shortcut(
                    f"line {number}: {text.splitlines()[number - 1].strip()}\n"
                    f"    The answer needs no {kind}, with which a numerical difference can be as exact as a formula. "
                    f"{FORMULA}"
                )


NUMERICAL = "The values are right, but they come from numerical differences: "
FORMULA = "Derive a formula, which is exact and takes one pass"


def expect_formula(op: Callable, op_backward: Callable, *args: Any) -> None:
    """Raise Shortcut if gradients that passed the check come from numerical differences.

    Backward may run forward again, but not on inputs that are moved a little. And a gradient must agree with that of
    the solution to more digits than a numerical difference could.
    """
    y, cache = op(*args)
    dy = Key(0).fold("formula").generator().standard_normal(np.shape(y))
    floats = [arg for arg in args if getattr(arg, "dtype", None) == np.float64]
    code, moved = source_of(op).__code__, list[str]()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code:
            for value in frame.f_locals.values():
                if isinstance(value, np.ndarray) and any(is_near(value, arg) for arg in floats):
                    moved.append(frame.f_code.co_name)

    previous = sys.getprofile()
    sys.setprofile(seen)
    try:
        gradients = op_backward(dy, cache)
    finally:
        sys.setprofile(previous)
    if moved:
        raise Shortcut(f"{NUMERICAL}backward runs {moved[0]} on inputs that are moved a little. {FORMULA}")
    student = op_backward.__globals__
    solved = student["__exercise__"].check.__globals__
    for name, function in student.items():
        if function is op and name in solved:
            _, cache = solved[name](*args)
    name = next(name for name, function in student.items() if function is op_backward and name in solved)
    right = solved[name](dy, cache)
    of = [f"d{name}" for name, arg in zip(inspect.signature(op).parameters, args, strict=False) if arg is not None]
    pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (gradients, right)), strict=True)
    for gradient, (mine, exact) in zip(of, pairs, strict=False):
        expect_digits(gradient, mine, exact)


def expect_digits(name: str, gradient: np.ndarray, exact: np.ndarray) -> None:
    """Raise Shortcut if a gradient, which is right, has fewer digits than a formula gives."""
    error = np.abs(gradient - exact).max(initial=0) / max(np.abs(exact).max(initial=0), 1e-300)
    if error > EXACT:
        raise Shortcut(
            f"The values are right, but {name} only to {-math.log10(error):.0f} digits, like numerical differences; "
            f"a formula is right to 15. {FORMULA}. If yours is one, is a number in it rounded?"
        )


def is_near(value: np.ndarray, arg: np.ndarray) -> bool:
    """Whether these are the numbers of an input, moved a little, for instance several times along a new axis."""
    try:
        difference = np.abs(value - arg)
    except ValueError:  # the shapes do not fit
        return False
    largest = np.abs(arg).max(initial=0)
    return bool(0 < difference.max(initial=0) < NEAR * largest) or np.iscomplexobj(value)
