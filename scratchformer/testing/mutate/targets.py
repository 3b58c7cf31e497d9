"""Which functions get mistakes, and which tests should find them."""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...shell.source import syntax_tree
from .source import functions

NO_TESTS = {"node_modules", "build", "dist", "site-packages", "__pycache__"}


class TargetFunction(NamedTuple):
    """A function in which mistakes are planted: the file as it is shown, its text, and the function's name."""

    path: Path
    source: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"


def find_targets(text: str, helpers: bool = False) -> list[TargetFunction]:
    """The functions that "my_ops.py::cube_backward", "package.module::Layer.backward" or "my_ops.py" stands for.

    A module alone stands for all its functions named *_backward and all its methods named backward. helpers: include
    the functions of the module that they call. Raises ValueError if there are none.
    """
    where, _, name = text.partition("::")
    path = find_module(where)
    try:
        with tokenize.open(path) as file:  # in the encoding that it declares
            source = file.read()
        tree = syntax_tree(source)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a Python file: {error}") from None
    defined = dict(functions(tree))
    backwards = [f for f in defined if f.endswith(("_backward", ".backward")) or f == "backward"]
    if name and name not in defined:
        there = f"it has {', '.join(backwards)}" if backwards else "it has no function named *_backward"
        raise ValueError(f"{path}: there is no function {name}; {there}")
    if not name and not backwards:
        raise ValueError(
            f"{path}: there is no function named *_backward and no method backward; name a function: {where}::NAME"
        )
    names = [name] if name else backwards
    if helpers:
        names = list(dict.fromkeys([*names, *(helper for n in names for helper in called_by(n, defined))]))
    return [TargetFunction(path, source, n) for n in names]


def find_module(text: str) -> Path:
    """The file of "my_ops.py", "folder/my_ops.py" or "package.module", without importing it."""
    if text.endswith(".py") or "/" in text:
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"{text}: there is no such file")
        return path
    locations: list[str] | None = [str(Path.cwd()), *sys.path]
    parts = text.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        finders = [getattr(finder, "find_spec", None) for finder in sys.meta_path]
        spec = next((spec for find in finders if find and (spec := find(name, locations))), None)
        if spec is None:
            raise ValueError(f"{text}: there is no module {name}")
        locations = list(spec.submodule_search_locations or ())
    if not spec or not spec.origin or not spec.origin.endswith(".py"):
        raise ValueError(f"{text}: not a module written in Python")
    path = Path(spec.origin)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def called_by(name: str, defined: dict[str, ast.FunctionDef]) -> list[str]:
    """The functions of the module, and methods of the class, that a function calls, directly or not."""
    owner = name.rpartition(".")[0]
    helpers: list[str] = []
    todo = [name]
    while todo:
        for node in ast.walk(defined[todo.pop()]):
            if isinstance(node, ast.Name):
                called = node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                called = f"{owner}.{node.attr}"
            else:
                continue
            if called in defined and called not in (name, *helpers):
                helpers.append(called)
                todo.append(called)
    return helpers


def choose_tests(target: TargetFunction, folder: Path = Path()) -> tuple[list[str], str]:
    """The test files that mention a function, and the name that they mention: that of the function, its operation, its
    class or its module. Raises ValueError if there are none.
    """
    owner, _, name = target.name.rpartition(".")
    words = [owner] if owner else [name, *([name.removesuffix("_backward")] if name.endswith("_backward") else [])]
    words.append(target.path.stem)
    files = {path: path.read_text(encoding="utf-8", errors="replace") for path in test_files(folder)}
    if re.search(r"^\s*def test", target.source, re.MULTILINE):
        files[target.path] = target.source
    for word in words:
        if chosen := [str(path) for path, text in files.items() if re.search(rf"\b{re.escape(word)}\b", text)]:
            return sorted(chosen), word
    where = folder.resolve()
    raise ValueError(f"{target}: no test file in {where} mentions {' or '.join(words)}: name the tests after --")


def test_files(folder: Path) -> Iterator[Path]:
    """test_*.py and *_test.py in a folder and all below it, without hidden folders and environments."""
    for path in sorted(folder.iterdir(), key=str):
        if path.is_dir():
            if path.name not in NO_TESTS and path.name[0] != "." and not (path / "pyvenv.cfg").exists():
                yield from test_files(path)
        elif re.fullmatch(r"test_.*\.py|.*_test\.py", path.name):
            yield path
