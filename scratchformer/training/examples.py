"""The programs that belong to the package: in a checkout those of examples/, otherwise the installed copies."""

from __future__ import annotations

import ast
from pathlib import Path

from ..shell.source import syntax_tree

PACKAGE = Path(__file__).resolve().parents[1]


def examples_folder() -> Path | None:
    """The folder of the programs; None where the package is neither installed as a whole nor in a checkout.

    The current folder has no say in this, since what is found here is executed.
    """
    checkout = PACKAGE.parent
    if (PACKAGE / "examples").is_dir():
        return PACKAGE / "examples"
    return checkout / "examples" if (checkout / "pyproject.toml").is_file() else None


def examples() -> dict[str, Path]:
    """The file of each program by its name, such as "enwik8"."""
    folder = examples_folder()
    return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.py"), key=Path.as_posix)}


def is_example(path: Path) -> bool:
    """Whether a file, if it is a link the file that it leads to, is one of the package's programs."""
    return path.is_file() and path.resolve() in {file.resolve() for file in examples().values()}


def first_line(file: Path) -> str:
    """The first line of a program's docstring; the program is not executed."""
    return (ast.get_docstring(syntax_tree(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
