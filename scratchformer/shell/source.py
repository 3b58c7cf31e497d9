"""Python source that is read and not run."""

from __future__ import annotations

import ast
from typing import cast


def syntax_tree(source: str) -> ast.Module:
    """The syntax tree of a module's source, with its docstrings: under -OO, `ast.parse` of Python 3.14 drops them.

    Raises SyntaxError, or ValueError for a null character.
    """
    return cast(ast.Module, compile(source, "<unknown>", "exec", ast.PyCF_ONLY_AST, dont_inherit=True, optimize=0))
