"""Imports go down: the table of rooms in CONTRIBUTING.md, and no circle of modules."""

import ast
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import scratchformer

PACKAGE = Path(scratchformer.__file__).parent
TABLE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAME = "scratchformer"


def rooms() -> dict[str, set[str]]:
    """Which rooms each room may import, by the table."""
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", TABLE.partition("| room |")[2].partition("\n\n")[0], re.MULTILINE)
    allowed: dict[str, set[str]] = {}
    for room, cell in rows:
        low = [*allowed][: [*allowed].index("dispatch") + 1] if "dispatch" in allowed else []
        named = {*allowed} if "all above" in cell else set(re.findall(r"`(\w+)`", cell))
        assert named <= {*allowed}, f"{room}: expected rooms above it in the table, got {named - {*allowed}}"
        allowed[room] = {room, *low, *named}
    return allowed


def modules_in(package: Path) -> dict[str, Path]:
    found = {}
    for path in package.rglob("*.py"):
        name = ".".join([NAME, *path.relative_to(package).with_suffix("").parts])
        found[name.removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else NAME


@cache
def named_by_imports(text: str, package: tuple[str, ...]) -> list[list[str]]:
    """For each import of a module's text, what it may mean: the first of these names that is a module. Imports inside
    functions count, those for type checkers do not. package: the parts of the name of the package it is in.
    """
    tree = ast.parse(text)
    checkers = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    ignored = {id(n) for each in checkers for part in each.body for n in ast.walk(part)}
    names = []
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            names += [[alias.name] for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names += [[f"{base}.{alias.name}", base] for alias in node.names]
    return names


def imported(module: str, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports."""
    path = modules[module]
    package = tuple(module.split(".")[: None if path.name == "__init__.py" else -1])
    for names in named_by_imports(path.read_text(encoding="utf-8"), package):
        yield from [name for name in names if name in modules][:1]


def graph(package: Path) -> dict[str, set[str]]:
    modules = modules_in(package)
    return {module: {*imported(module, modules)} - {module} for module in modules}


def upward(edges: dict[str, set[str]]) -> list[str]:
    """The imports that the table does not allow."""
    allowed = rooms()
    return sorted(
        f"{module} imports {other}"
        for module, others in edges.items()
        for other in others
        if room_of(other) not in allowed[room_of(module)]
    )


def circles(edges: dict[str, set[str]]) -> list[str]:
    """The modules that import each other: what is left after all those were taken away that import, or are imported by,
    none of the rest.
    """
    rest = set(edges)
    while ends := {m for m in rest if not edges[m] & rest or not any(m in edges[other] for other in rest)}:
        rest -= ends
    return sorted(rest)


def test_every_room_is_in_the_table():
    assert {room_of(module) for module in modules_in(PACKAGE)} <= rooms().keys()


def test_every_import_is_in_the_table():
    assert upward(graph(PACKAGE)) == []


def test_no_modules_import_each_other():
    assert circles(graph(PACKAGE)) == []


@pytest.mark.parametrize(
    "file, line, expected",
    [
        (
            "ops/add.py",
            "def late():\n    from ..training import folder",
            "ops.add imports scratchformer.training.folder",
        ),
        ("kernels/__init__.py", "from .. import data", "kernels imports scratchformer.data"),
        ("nn/pointwise.py", "import scratchformer.optim.adam", "nn.pointwise imports scratchformer.optim.adam"),
        ("shell/text.py", "from ..rng import Key", "shell.text imports scratchformer.rng"),
    ],
)
def test_an_import_that_goes_up_is_found(tmp_path, file, line, expected):
    package = shutil.copytree(PACKAGE, tmp_path / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    before = upward(graph(package))
    with open(package / file, "a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    assert set(upward(graph(package))) - {*before} == {f"{NAME}.{expected}"}


def test_a_circle_is_found_also_inside_functions(tmp_path):
    package = shutil.copytree(PACKAGE, tmp_path / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    with open(package / "nn" / "pointwise.py", "a", encoding="utf-8") as module:
        module.write("\n\ndef late():\n    from .block import Block\n")
    assert {f"{NAME}.nn.pointwise", f"{NAME}.nn.block"} <= {*circles(graph(package))}
