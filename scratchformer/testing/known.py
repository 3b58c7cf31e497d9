"""Knowledge for the search for a mistake: operations to recognise, and mistakes that others have made in them.

It is handed in: `learn_from("my_package.catalogue")` names a module, which is imported when a check fails. The module
has a function `known_operations()`, which returns a dict by name, and a list `MISTAKES`.

An operation has `op` and `op_backward`, a pair with a derivation, and `names`, a function of the arguments of `op`,
which gives what the derivation uses besides them.

A mistake has a `title`, its `effect`, a `name`, and `operation`, the name of the operation that has it, or "". If an
equation of the derivation is wrong, `equation` is this equation and `wrong` what was written instead; otherwise both
are "", and `pair()` gives the operation and its backward with the mistake. If the mistake may be in a layer,
`classes()` gives the names of the classes in its module, `module()` the module without the mistake, and `names()` what
the module defines with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

_modules: list[str] = []


def learn_from(module: str) -> None:
    """Look in this module when a check fails."""
    _modules.append(module)


def operations() -> dict[str, Any]:
    """All known operations, by name."""
    return {name: each for module in _modules for name, each in import_module(module).known_operations().items()}


def mistakes() -> Iterator[Any]:
    """All known mistakes."""
    for module in _modules:
        yield from import_module(module).MISTAKES
