"""A stack of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..checks import expect_boolean, expect_instance
from ..rng import Key, fold
from .attention import causal, length_with
from .frozen import Frozen
from .layer import Layer, expect_backward, list_of_layers
from .recompute import Recompute

Stored = tuple[Array, ...]  # what one block stores for past positions during generation


class StackCache(NamedTuple):
    blocks: list  # the cache of each block
    norm: Any
    block_inputs: list  # with memories, the input (B, T, C) of each block


class Stack(Layer):
    """y = norm(block_n(... block_1(x))): blocks one after another, and an optional final norm.

    blocks: layers with `y, cache = forward(x, *shared, pattern=..., key=...)`, from (B, T, C) to (B, T, C). Training
    needs nothing more of a block. `shared` are further inputs that every block gets, such as an encoder's output.
    pattern says which positions may interact (None: all), and key is for dropout (None: evaluation).

    For generation a block may also have these two methods:

    | allocate(x, length) -> stored      room for `length` positions of sequences like x (B, any T, C)
    | extend(x, stored, past, *shared, pattern=...) -> y

    `stored` is a tuple of arrays with sequences along axis 0 and positions along axis 2, such as keys and values
    (B, H, length, D). `extend` returns what `forward` returns at new positions x (B, T, C), after `past` positions that
    are already in `stored`, and stores x too; a position never sees a later one. For a block without these methods the
    stack stores the inputs and runs forward over all of them at every new position: the same numbers, more slowly. It
    also does so for a class that defines a `forward` but inherits `extend`, which would compute something else.
    Blocks with shared inputs must have both methods; there `Stack.extend` takes a list of values, one for each block,
    such as the keys and values that a block made of an encoder's output. Raises ValueError for a block that returns
    another shape than it got; TypeError in backward if blocks have shared inputs and one is `Frozen` below one that is
    trained.

    norm: a layer, or None. recompute: gradient checkpointing of every block, see `Recompute`; of the last block, whose
    backward comes first, the cache is kept.

    Forward, with two blocks. A shared input m goes to both, as m1 and as m2:

        m := shared        m1 = m        m2 = m
        g = block1(x, m1)        h = block2(g, m2)        y = norm(h)

    Backward. The blocks run in reverse order:

        dh_tc = Σ_c' dy_tc' ∂y_tc'/∂h_tc
        dg_sc = Σ_t Σ_c' dh_tc' ∂h_tc'/∂g_sc        dx_sc = Σ_t Σ_c' dg_tc' ∂g_tc'/∂x_sc

    A shared input goes to every block, so its gradient is the sum over the blocks. It is returned after dx.

        dm1_ic = Σ_t Σ_c' dg_tc' ∂g_tc'/∂m1_ic        dm2_ic = Σ_t Σ_c' dh_tc' ∂h_tc'/∂m2_ic
        dm_ic = dm1_ic + dm2_ic
    """

    def __init__(self, blocks: Iterable[Layer], norm: Layer | None = None, recompute: bool = False) -> None:
        expect_instance("norm", norm, Layer, none=True)
        expect_boolean(recompute=recompute)
        self.blocks, self.norm, self.recompute = list_of_layers("blocks", blocks), norm, recompute

    def trained(self) -> list[Layer]:
        """The blocks as forward and backward run them."""
        if not self.recompute:
            return list(self.blocks)
        return [Recompute(block, keep=i == len(self.blocks)) for i, block in enumerate(self.blocks, 1)]

    def forward(
        self, x: Array, *shared: Any, key: Key | None = None, memories: Array | None = None, **options: Any
    ) -> tuple[Array, StackCache]:
        """memories: (B, depth, M, C), the memory of each block: see `TransformerBlock`."""
        caches, inputs, norm = [], [], None
        for i, block in enumerate(self.trained()):
            own = {"key": fold(key, i)}
            if memories is not None:
                own["memory"] = memories[:, i]
                inputs.append(x)
            y, cache = block.forward(x, *shared, **options, **own)
            if y.shape != x.shape:
                raise ValueError(
                    f"block {i}: expected to return {tuple(x.shape)}, as it got, returned {tuple(y.shape)}"
                )
            x = y
            caches.append(cache)
        if self.norm is not None:
            x, norm = self.norm.forward(x)
        return x, StackCache(caches, norm, inputs)

    def backward(self, dy: Array, cache: StackCache) -> Any:
        """dx, or a tuple of dx and the gradient of each shared input."""
        expect_backward(cache, StackCache, dy=dy)
        dx = dy if self.norm is None else self.norm.backward(dy, cache.norm)
        if dx is None:  # the norm is `Frozen`
            return None
        totals: list[Array] = []
        for i, (block, block_cache) in reversed([*enumerate(zip(self.trained(), cache.blocks, strict=True))]):
            dx = block.backward(dx, block_cache)
            if dx is None:  # it is `Frozen`, and so is what precedes it
                if totals:
                    raise TypeError(
                        f"block {i} is Frozen below one that is trained, so the gradient of the input that they share "
                        "is unknown: to keep its parameters as they are, use Group(..., frozen=True)"
                    )
                return None
            dx, *dshared = dx if isinstance(dx, tuple) else (dx,)
            totals = [total + d for total, d in zip(totals, dshared, strict=True)] if totals else dshared
        return (dx, *totals) if totals else dx

    def allocate(self, x: Array, length: int) -> list[Stored]:
        """For each block, room for `length` positions of sequences like x (B, any T, C)."""
        blocks: list[Any] = self.blocks
        stored = [(block.allocate if extends(block) else allocate_inputs)(x, length) for block in blocks]
        for i, arrays in enumerate(stored):
            shapes = [tuple(array.shape) for array in arrays]
            if any(len(shape) < 3 or (shape[0], shape[2]) != (x.shape[0], length) for shape in shapes):
                expected = f"({x.shape[0]}, ..., {length}, ...): sequences along axis 0 and positions along axis 2"
                raise ValueError(f"block {i}: allocate: expected arrays {expected}, got {shapes}")
        return stored

    def extend(self, x: Array, stored: list[Stored], past: int, *shared: Sequence[Any], **options: Any) -> Array:
        """The output at new positions x (B, T, C) after `past` stored ones; shared: values for each block."""
        block: Any
        for i, (block, own) in enumerate(zip(self.blocks, stored, strict=True)):
            if shared and not extends(block):
                raise TypeError(f"block {i}: a block with shared inputs needs an extend of its own for generation")
            extend = block.extend if extends(block) else partial(extend_inputs, block)
            x = extend(x, own, past, *(values[i] for values in shared), **options)
        return x if self.norm is None else self.norm(x)


def extends(layer: Any) -> bool:
    """Whether the layer has an `extend` that was written for its `forward`, not for that of a class above it."""
    if isinstance(layer, Frozen):
        return extends(layer.layer)
    for kind in type(layer).__mro__:
        if "extend" in vars(kind) or "forward" in vars(kind):
            return "extend" in vars(kind)
    return False


def allocate_inputs(x: Array, length: int) -> Stored:
    """Room for the inputs of a block that has no `allocate` of its own."""
    B, _, C = x.shape
    return (array_module(x).empty((B, 1, length, C), x.dtype),)


def extend_inputs(block: Layer, x: Array, stored: Stored, past: int, pattern: ops.Pattern | None = None) -> Array:
    """The result of `extend` for a block without one: forward over all inputs so far, of which the last T are new."""
    (inputs,), T, total = stored, x.shape[1], length_with(x, stored[0], past)
    inputs[:, 0, past:total] = x
    return block(inputs[:, 0, :total], pattern=causal(pattern))[:, -T:]
