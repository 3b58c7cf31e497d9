"""Derivations end on lines that the code contains, and everything public has a docstring."""

import ast
import inspect
import re

import pytest

from scratchformer import models, nn, ops

BACKWARDS = [name for name in ops.__all__ if name.endswith("_backward")]


def normal(text):
    """The text with normalised white space."""
    return " ".join(text.split())


def lines_of_code(docstring):
    """The indented lines of a docstring that are Python statements with an effect: assignments and calls."""
    found = []
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.startswith("    "):
            continue
        try:
            (statement,) = ast.parse(line.strip()).body
        except (SyntaxError, ValueError):
            continue
        called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if called or isinstance(statement, ast.Assign | ast.AugAssign):
            found.append(normal(line))
    return found


@pytest.mark.parametrize("name", BACKWARDS)
def test_derivation_ends_on_the_code(name):
    forward, backward = getattr(ops, name.removesuffix("_backward")), getattr(ops, name)
    lines, source = lines_of_code(forward.__doc__), normal(inspect.getsource(backward.reference))
    assert lines, f"the docstring of {forward.__name__} has no line of code"
    for line in lines:
        assert line in source, f"{name} does not contain the line its derivation ends on: {line}"


def test_the_check_finds_a_line_that_has_changed():
    (line,) = lines_of_code(ops.softmax.__doc__)
    source = normal(inspect.getsource(ops.softmax_backward.reference))
    assert line in source
    assert line not in source.replace("dz = y *", "dz = dy *")


@pytest.mark.parametrize("name", BACKWARDS)
def test_parts_of_the_docstring(name):
    """It has an equation first, then shapes, what is returned, the derivation, and what the cache keeps."""
    docstring = getattr(ops, name.removesuffix("_backward")).__doc__
    first, *rest = inspect.cleandoc(docstring).splitlines()
    rest = "\n".join(rest)
    assert " = " in first
    assert re.search(r"^\w+(, \w+)*: (\(|any shape)", rest, re.MULTILINE), "no shapes"
    assert "Returns " in rest
    assert re.search(r"^Backward[.,] ", rest, re.MULTILINE)
    assert "The cache keeps " in rest
    assert "see `" in getattr(ops, name).__doc__


@pytest.mark.parametrize("module", [ops, nn, models], ids=lambda m: m.__name__)
def test_everything_public_has_a_docstring(module):
    assert module.__doc__
    for name in module.__all__:
        thing = getattr(module, name)
        assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), name  # a dataclass writes its own
        if not inspect.isclass(thing):
            continue
        for attribute, function in vars(thing).items():
            inherited = any(getattr(getattr(base, attribute, None), "__doc__", None) for base in thing.__mro__[1:])
            protocol = attribute in ("forward", "backward")  # described once, in Layer
            if inspect.isfunction(function) and not attribute.startswith("_") and not inherited and not protocol:
                assert function.__doc__, f"{name}.{attribute}"
