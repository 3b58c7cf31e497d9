"""What the optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..backend import Array, array_module, to_cpu
from ..nn import FlatParameters, Param

CHUNK = 1 << 16  # elements that a CPU takes at once, so that what it computes in between stays in cache


def pieces(flat: Array) -> list[slice]:
    """Cut a flat array (P,) into slices of cache size on a CPU; on another device it is one piece."""
    size = CHUNK if array_module(flat) is np else max(1, flat.size)
    return [slice(start, min(start + size, flat.size)) for start in range(0, flat.size, size)]


class Optimizer:
    """Steps the parameters against their gradients.

    params: Params, each of which is stepped once however often it is listed (tied weights). If they are all those of
    a model they are one flat array, and a step is a few operations on it. lr: the learning rate, an attribute that a
    schedule may set before each step. `buffers` are the names of the state arrays, each as long as the parameters.
    """

    buffers: tuple[str, ...] = ()

    def __init__(self, params: Iterable[Param], lr: float) -> None:
        self.flat = FlatParameters.of({id(p): p for p in params}.values())
        if not lr >= 0:
            raise ValueError(f"lr: expected a number >= 0, got {lr}")
        self.lr = lr
        self.steps = 0
        xp = array_module(self.flat.data)
        for name in self.buffers:
            setattr(self, name, xp.zeros_like(self.flat.data))

    def zero_grad(self) -> None:
        """Set the gradients to zero. The optimizer's state is untouched."""
        self.flat.grad[...] = 0

    def step(self, map: Callable = map) -> None:
        """Update the parameters in place from their gradients, which are left as they are.

        map: applies a function to independent pieces of the arrays; a thread pool's `map` shares them out.
        """
        self.steps += 1
        arrays = (self.flat.data, self.flat.grad, *(getattr(self, name) for name in self.buffers))
        list(map(lambda part: self.update(*(a[part] for a in arrays)), pieces(self.flat.data)))

    def update(self, w: Array, g: Array, *buffers: Array) -> None:
        """Step one piece of the flat arrays: change `w` and `buffers` in place, not `g`."""
        raise TypeError(f"{type(self).__name__} has no update")

    def state_dict(self) -> dict[str, np.ndarray]:
        """The state by name, on the CPU: the number of steps, and the buffers."""
        state = {name: to_cpu(getattr(self, name)).copy() for name in self.buffers}
        return {"steps": np.array(self.steps, np.int64), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; raises ValueError, and changes nothing, if it is another optimizer's or model's."""
        expected = {"steps": (), **{name: tuple(self.flat.data.shape) for name in self.buffers}}
        found = {name: tuple(value.shape) for name, value in state.items()}
        if found != expected:
            raise ValueError(f"state of another optimizer: expected {expected}, got {found}")
        self.steps = int(state["steps"])
        xp = array_module(self.flat.data)
        for name in self.buffers:
            getattr(self, name)[...] = xp.asarray(to_cpu(state[name]))
