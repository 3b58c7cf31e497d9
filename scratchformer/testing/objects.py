"""Check an object with a forward and a backward, such as a layer from a course, as a pair of functions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from .adapters import ForeignPair
from .contracts import GradientError, as_arrays, floating_in, is_floating, upstream
from .runs import two


class ObjectPair(ForeignPair):
    """A NumPy layer or network with a forward and a backward.

    `y = layer.forward(*inputs)` (or `layer(*inputs)`) is followed by `layer.backward(dy)`, which returns the gradients
    of the floating-point inputs, in order. There are two other forms. If forward returns (y, cache), backward is called
    as `layer.backward(dy, cache)`. If y is a loss and backward takes no arguments, it is called as `layer.backward()`.
    An input that has no gradient is passed by keyword.

    gradients: for each parameter to check, where backward stores its gradient, as in {"W": "dW"}. A path may lead
    through attributes, keys and indices: {"layers.0.params.W": "layers.0.grads.W"}. backward may overwrite the stored
    gradient or add to it.

    The object itself is never run, only copies of it, with the checked parameters as float64. Each copy has first been
    run on other inputs, if it accepts them, so that stale state from an earlier call shows up as a wrong gradient.
    NumPy's global random generator is seeded with `seed` before each forward.
    """

    cut = "a gradient that is not stored"

    def __init__(self, layer: Any, inputs: tuple, options: dict[str, Any]) -> None:
        self.call = "forward" if hasattr(layer, "forward") else "__call__"
        if isinstance(layer, type) and inspect.isfunction(inspect.getattr_static(layer, self.call)):
            raise TypeError(f"check: expected an object, got the class {layer.__name__}: write {layer.__name__}(...)")
        self.places: Mapping[str, str] = options.pop("gradients", {})
        super().__init__(layer, type(layer).__name__, getattr(layer, self.call), inputs, options)
        parameters = list(inspect.signature(layer.backward).parameters.values())
        self.takes_dy = bool(parameters)
        self.takes_cache = len(parameters) == 2 and parameters[1].default is inspect.Parameter.empty
        self.taken = " and ".join(p.name for p in parameters)
        self.inputs = [n for n, x in self.variables.items() if is_floating(x)]
        self.layer = copy.deepcopy(layer)
        numbers = self.numbers()
        with suppress(Exception):  # other numbers may raise
            y, kept = self.run_forward(self.layer, numbers | {n: 0.9 * numbers[n] for n in self.inputs})
            self.run_backward(self.layer, upstream(y, map(np.ones_like, floating_in("y", y).values())), kept)
        self.parameters = {f"parameter {n}" if n in self.leaves else n: n for n in self.places}
        self.variables |= {n: find(self.layer, path) for n, path in self.parameters.items()}

    def to_numpy(self, x: Any) -> Any:
        return x.astype(np.float64) if is_floating(x) else x

    def forward(self, arrays: dict[str, Any]) -> tuple[tuple, Any]:
        layer = copy.deepcopy(self.layer, {id(self.variables[n]): arrays[n] for n in self.parameters})
        form, kept = self.run_forward(layer, arrays)
        return tuple(floating_in("y", form).values()), (layer, form, kept)

    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        zeros = {}  # these replace the stored gradients, for a backward that adds to them
        for path, place in self.places.items():
            with suppress(AttributeError, LookupError):  # there may be none before the first backward
                stored = find(cache[0], place)
                if isinstance(stored, np.ndarray | np.generic):  # None and 0 are shared with other attributes
                    zeros[id(stored)] = np.zeros_like(find(cache[0], path))
        layer, form, kept = copy.deepcopy(cache, zeros)
        returned = self.run_backward(layer, upstream(form, iter(dy)), kept)
        if len(returned) != len(self.inputs):
            expected = f"{len(self.inputs)} gradients, of {', '.join(self.inputs)}"
            raise GradientError(
                f"backward: expected {expected}, got {len(returned)}; pass an input without one by keyword"
            )
        gradients = dict(zip(self.inputs, returned, strict=True))
        return gradients | {n: find(layer, self.places[path]) for n, path in self.parameters.items()}

    def run_forward(self, layer: Any, arrays: dict[str, Any]) -> tuple[Any, tuple]:
        """y, and what backward gets besides dy."""
        args, kwargs = self.arguments(arrays)
        with random_numbers(self.seed):
            y = getattr(layer, self.call)(*args, **kwargs)
        y, *kept = two(y, f"forward, whose backward takes {self.taken},") if self.takes_cache else (y,)
        return as_arrays(y), tuple(kept)

    def run_backward(self, layer: Any, dy: Any, kept: tuple) -> list[np.ndarray]:
        """The gradients of the inputs. Those of a loss, by a backward without dy, are multiplied by dy here."""
        returned = layer.backward(dy, *kept) if self.takes_dy else layer.backward()
        gradients = floating_in("", as_arrays(returned)).values()
        return list(gradients) if self.takes_dy else [dy * g for g in gradients]


def find(x: Any, path: str) -> Any:
    """Follow a path such as `layers.0.W` through attributes, string keys of dicts, and indices of lists or tuples."""
    for part in path.split("."):
        x = x[part] if isinstance(x, dict) else x[int(part)] if isinstance(x, list | tuple) else getattr(x, part)
    return x


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Seed NumPy's global random generator inside the block, and restore its state afterwards."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
