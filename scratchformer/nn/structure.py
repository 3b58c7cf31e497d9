"""A cheap check whether a model has changed."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

from .layer import Layer


class Structure:
    """The attributes of a layer and of all below it, and the elements of the lists, tuples and dicts among them.

    A step of training asks whether a model still has the parameters, layers and settings that it had. To go through all
    names takes a good part of a small model's step on a GPU; this takes about a tenth of that.
    """

    def __init__(self, layer: Layer) -> None:
        seen: set[int] = set()
        own = (found for _, part in layer.named_layers() for found in _containers(part, seen))
        self.found = [(container, _elements(container)) for container in own]

    def is_unchanged(self) -> bool:
        """Whether all are the same objects as they were. (A new number may count as a change even if it is equal.)"""
        for container, then in self.found:
            now = _elements(container)
            if len(now) != len(then) or not all(map(is_, now, then)):
                return False
        return True


def _elements(container: Any) -> tuple:
    return (*container, *container.values()) if isinstance(container, dict) else tuple(container)


def _containers(x: Any, seen: set[int]) -> Iterator[Any]:
    """The attributes of x if it is a layer, x itself if it is a list, tuple or dict, and all of these inside it, such
    as those of the layer in a `Frozen` one. seen: the identities of what was found before.
    """
    found = vars(x) if isinstance(x, Layer) else x
    if isinstance(found, list | tuple | dict) and id(found) not in seen:
        seen.add(id(found))
        yield found
        for part in found.values() if isinstance(found, dict) else found:
            yield from _containers(part, seen)
