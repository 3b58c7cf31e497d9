"""Parts of the cases of derivations that need more than the arguments of a call: those of layers and optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..nn import Layer
from ..notation.run import getdoc
from ..testing.draw import Sizes
from .entry import DerivationCase

GELU = "gelu_tanh"  # an activation that takes complex numbers


def prepared(d: Sizes, layer: Layer) -> dict[str, Any]:
    """The layer's parameters and gradients by name ("query.w", "dquery.w"); all are drawn, in float64."""
    layer.to(dtype=np.float64)
    named = layer.named_parameters()
    for p in named.values():
        p.data[...] = d.generator.standard_normal(p.data.shape) / np.sqrt(p.data.shape[0])
    gradients = {f"d{name}": partial(getattr, p, "grad") for name, p in named.items()}
    return {name: p.data for name, p in named.items()} | gradients


def derived(
    d: Sizes,
    layer: Layer,
    *inputs: Any,
    names: dict[str, Any] | None = None,
    parts: Mapping[str, Part] | None = None,
    leave: str | tuple[str, ...] = "",
    **options: Any,
) -> DerivationCase:
    """The case of a layer, whose derivation is the docstring of its class. parts: see `functions_of`; leave: see
    `without`.
    """
    docstring = without(getdoc(type(layer)), leave)
    names = prepared(d, layer) | (names or {})
    if parts:
        options["functions"] = functions_of(parts)
    return DerivationCase(layer.forward, layer.backward, inputs, names, options, docstring)


Part = Layer | tuple[Callable, Callable]  # a layer, or its forward and backward


def functions_of(parts: Mapping[str, Part]) -> dict[str, Callable]:
    """The functions that a derivation calls for parts with derivations of their own, by the names of these.

    norm(s) is the output of the forward, norm_backward(dy, s) the gradient of its first input, and
    cross_backward_memory(dh, g, memory) that of the input of this name. They run as they are, on complex arrays for
    derivatives.
    """
    functions: dict[str, Callable] = {}
    for name, part in parts.items():
        forward, backward = (part.forward, part.backward) if isinstance(part, Layer) else part
        functions[name] = part if isinstance(part, Layer) else output(forward)
        inputs = [p.name for p in inspect.signature(forward).parameters.values() if p.default is p.empty]
        for place, given in enumerate(inputs):
            called = f"{name}_backward_{given}" if place else f"{name}_backward"
            functions[called] = partial(gradient, forward, backward, place)
    return functions


def gradient(forward: Callable, backward: Callable, place: int, dy: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
    """The gradient of the input at this place."""
    _, cache = forward(*inputs)
    returned = backward(dy, cache)
    return returned[place] if isinstance(returned, tuple) else returned


def without(docstring: str, start: str | tuple[str, ...]) -> str:
    """The docstring without the paragraphs that begin with `start` and the equations below them.

    For a class with several orders of the same parts, of which a case runs one. The lines keep their numbers.
    """
    kept, leaving, above = [], False, ""
    for line in docstring.splitlines():
        if line and not line.startswith(" ") and not above:
            leaving = bool(start) and line.startswith(start)
        kept.append("" if leaving else line)
        above = line
    return "\n".join(kept)


def shows(source: Callable) -> Callable[[Callable], Callable]:
    """A decorator for a function that runs `source`, whose lines of code the derivation shows."""

    def decorate(function: Callable) -> Callable:
        function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        function.__wrapped__ = source  # type: ignore[attr-defined]
        return function

    return decorate


def output(forward: Callable, **options: Any) -> Callable:
    """The function of arrays that a forward computes, without its cache."""
    return lambda *inputs: forward(*inputs, **options)[0]
