"""Transformer blocks: the residual branches that they are made of, and stacks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .. import ops
from ..backend import Array, array_module
from ..checks import expect_boolean, expect_floating, expect_fraction, expect_instance, expect_one_of, expect_shape
from ..dispatch import has_twin, is_fast, operation
from ..rng import Key, fold
from .attention import SelfAttention, causal, length_with
from .frozen import Frozen
from .layer import Layer, Part, add_backward, expect_backward, list_of_layers
from .pointwise import Dropout, FeedForward, LayerNorm
from .recompute import Recompute
from .relative_attention import RelativeSelfAttention

ORDERS = ("post", "pre")


class ResidualCache(NamedTuple):
    norm: Any
    branch: Any
    after: Any
    dropout: Any
    added: bool  # whether dropout and the sum were one operation


class Residual(Layer):
    """A branch whose output is added to its input, with a norm after the sum or before the branch.

    | order "post", as in the tutorial:    y = norm(x + dropout(branch(x)))
    | order "pre", as in GPT-2:            y = x + dropout(branch(norm(x)))
    | order "pre", as in OLMo 2:           y = x + dropout(after(branch(x)))

    branch: a layer whose output is as wide as its input, such as attention or a feed-forward layer. norm: a layer such
    as `LayerNorm`; it may be None in "pre" order. dropout: a `Dropout`, or None. after: a norm of what the branch
    returns, or None.

    x: (B, S, C). Further inputs and options of `forward` go to the branch, except `key`, which is for dropout.
    The branch may return fewer positions than it was given, (B, T, C) with T < S. They are then the last T, and the
    S − T before them are a memory: the branch reads them, but they are constants without a residual or a gradient.
    y: (B, T, C). Raises ValueError for any other order.

    A residual only connects layers, so a block can own the layers under its own names and connect them when it runs:
    see `Block`.

    Backward. A sum passes its gradient to both of its terms. So x gets two gradients, which add up: one directly, and
    one by way of the branch. The branch reads n and returns f, its dropout included.

    In "post" order n is x, and ds, which the norm passes back, goes both ways:

        n = x        f = branch(n)        s_tc = x_tc + f_tc        y = norm(s)
        ds = norm_backward(dy, s)        dn = branch_backward(ds, n)        dx_tc = ds_tc + dn_tc
        ds = self.norm.backward(dy, cache.norm)
        dx, _ = ops.add(ds, dn[:, -T:])

    In "pre" order the sum is y. dy reaches x unchanged, whatever the branch does, and only the gradient of the branch
    passes through the norm, whose input is called s here:

        s = x        n = norm(s)        f = branch(n)        y_tc = x_tc + f_tc
        dn = branch_backward(dy, n)        ds = norm_backward(dn, s)        dx_tc = dy_tc + ds_tc
        dx = add_backward(dy, before, dn, cache.norm)

    With a norm after the branch and none before it, the branch gets the gradient that this norm, which reads f, passes
    back:

        n = x        f = branch(n)        g = after(f)        y_tc = x_tc + g_tc
        df = after_backward(dy, f)        dn = branch_backward(df, n)        dx_tc = dy_tc + dn_tc
        df = self.after.backward(df, cache.after)

    The slice [:, -T:] leaves out what the branch passes back to a memory. In "pre" order with a memory, the gradient
    that the norm passes back is cut in the same way, and `ops.add` adds it to dy. Gradients of the branch's further
    inputs are returned after dx.

    Source: He et al., "Deep residual learning for image recognition", 2016, section 3.2; for the two orders Xiong et
    al., "On layer normalization in the transformer architecture", 2020, table 1; for the norm after the branch OLMo
    team, "2 OLMo 2 furious", 2024, section 3.2.
    """

    def __init__(
        self,
        branch: Layer,
        norm: Layer | None,
        order: str = "post",
        dropout: Dropout | None = None,
        after: Layer | None = None,
    ) -> None:
        expect_one_of("order", order, ORDERS)
        expect_instance("branch", branch, Layer)
        expect_instance("norm", norm, Layer, none=order == "pre")
        expect_instance("dropout", dropout, Layer, none=True)
        expect_instance("after", after, Layer, none=True)
        self.branch, self.norm, self.order, self.after = branch, norm, order, after
        self.dropout = Dropout(0.0) if dropout is None else dropout

    def forward(self, x: Array, *inputs: Any, key: Key | None = None, **options: Any) -> tuple[Array, ResidualCache]:
        n, norm, after = x, None, None
        if self.norm is not None and self.order == "pre":
            n, norm = self.norm.forward(x)
        f, branch = self.branch.forward(n, *inputs, **options)
        if self.after is not None:
            f, after = self.after.forward(f)
        y, *summed = self.sum(x[:, -f.shape[1] :], f, key)
        if self.norm is not None and self.order == "post":
            y, norm = self.norm.forward(y)
        return y, ResidualCache(norm, branch, after, *summed)

    def sum(self, x: Array, f: Array, key: Key | None) -> tuple[Array, Any, bool]:
        """x + dropout(f), the cache of dropout, and whether compiled loops have computed both at once."""
        if key is not None and type(self.dropout) is Dropout and (p := self.dropout.p) and is_fast():
            if has_twin(ops.dropout_add, f, p, key, x):
                return *ops.dropout_add(f, p, key, x), True
        f, dropout = self.dropout.forward(f, key)
        s, _ = ops.add(x, f)
        return s, dropout, False

    def backward(self, dy: Array, cache: ResidualCache) -> Any:
        """dx (B, T, C), of the last T positions; or a tuple of dx and the gradients of the further inputs."""
        expect_backward(cache, ResidualCache, dy=dy)
        expect_shape("dy", dy, "B T C")
        for name, part in ("branch", self.branch), ("norm", self.norm), ("after", self.after):
            if isinstance(part, Frozen):
                raise TypeError(
                    f"{name}: expected a layer through which the gradient passes, got a Frozen one: "
                    "to keep its parameters as they are, use Group(..., frozen=True)"
                )
        T = dy.shape[1]
        before = self.norm if self.order == "pre" else None  # the norm that the branch reads
        ds = dy
        if self.norm is not None and before is None:
            ds = self.norm.backward(dy, cache.norm)
        if cache.added:
            df, _ = ops.dropout_add_backward(ds, cache.dropout)
        else:
            df = self.dropout.backward(ds, cache.dropout)
        if self.after is not None:
            df = self.after.backward(df, cache.after)
        dn = self.branch.backward(df, cache.branch)
        dn, *others = dn if isinstance(dn, tuple) else (dn,)
        if before is None:
            dx, _ = ops.add(ds, dn[:, -T:])
        elif dn.shape == dy.shape:
            dx = add_backward(dy, before, dn, cache.norm)
        else:
            dx, _ = ops.add(dy, before.backward(dn, cache.norm)[:, -T:])
        return (dx, *others) if others else dx

    def around(self, branch: Callable[[Array], Array], x: Array) -> Array:
        """y with another function in place of the branch, such as its `extend`, without dropout or a cache."""
        f = branch(x if self.norm is None or self.order == "post" else self.norm(x))
        y = x + (f if self.after is None else self.after(f))
        return y if self.norm is None or self.order == "pre" else self.norm(y)


class BlockCache(NamedTuple):
    attention: ResidualCache
    feedforward: ResidualCache


class Block(Layer):
    """Two residual branches, self-attention and then a feed-forward layer, each with its own norm.

    attention: a layer such as `SelfAttention`, with `forward(x, pattern)`; generation uses its `allocate` and `extend`
    if it has them (see `Stack`). feedforward: a layer that acts on each position separately. norm1, norm2: the norms of
    the two branches. norm: their order, "post" or "pre", see `Residual`. after1, after2: norms of what the branches
    return, or None. dropout: the probability of dropout on the output of a branch, before the sum.

    x, y: (B, T, C). For the mathematics see `Residual`.
    """

    attention, norm1, after1 = Part("first.branch"), Part("first.norm"), Part("first.after")
    feedforward, norm2, after2 = Part("second.branch"), Part("second.norm"), Part("second.after")
    dropout = Part("first.dropout", "second.dropout")
    norm = Part("first.order", "second.order")

    def __init__(
        self,
        attention: Layer,
        feedforward: Layer,
        norm1: Layer | None,
        norm2: Layer | None,
        norm: str = "post",
        dropout: float = 0.0,
        after1: Layer | None = None,
        after2: Layer | None = None,
    ) -> None:
        expect_one_of("norm", norm, ORDERS)
        branches, norms = dict(attention=attention, feedforward=feedforward), dict(norm1=norm1, norm2=norm2)
        for name, layer in (branches | norms).items():
            expect_instance(name, layer, Layer, none=norm == "pre" and name in norms)
        expect_fraction("dropout", dropout, letter="p")
        shared = Dropout(dropout)
        self.first = Residual(attention, norm1, norm, shared, after1)
        self.second = Residual(feedforward, norm2, norm, shared, after2)

    def forward(
        self, x: Array, pattern: ops.Pattern | None = None, key: Key | None = None, **options: Any
    ) -> tuple[Array, BlockCache]:
        """options: passed on to the attention."""
        h, attention = self.first.forward(x, pattern, key=fold(key, 1), **options)
        y, feedforward = self.second.forward(h, key=fold(key, 2))
        return y, BlockCache(attention, feedforward)

    def backward(self, dy: Array, cache: BlockCache) -> Array:
        expect_backward(cache, BlockCache, dy=dy)
        return self.first.backward(self.second.backward(dy, cache.feedforward), cache.attention)

    def allocate(self, x: Array, length: int) -> Stored:
        """Room for what the attention stores for `length` positions of sequences like x (B, any T, C)."""
        return (self.attention.allocate if extends(self.attention) else allocate_inputs)(x, length)

    def extend(self, x: Array, stored: Stored, past: int, pattern: ops.Pattern | None = None) -> Array:
        """The output at new positions x (B, T, C) after `past` stored ones, without dropout: see `Stack`."""
        if not extends(self.attention):
            return extend_inputs(self, x, stored, past, pattern=pattern)
        return extend_block(x, self, stored, past, pattern)


class ParallelBlockCache(NamedTuple):
    attention: ResidualCache
    norm2: Any
    feedforward: Any
    dropout: Any
    added: bool  # whether dropout and the sum were one operation


class ParallelBlock(Block):
    """A pre-norm block whose two branches both read x: y = x + attention(norm1(x)) + feedforward(norm2(x)).

    The arguments are those of `Block`, with norm "pre". x, y: (B, T, C).

    Forward:

        s = x        n = norm1(s)        a = attention(n)
        r = x        u = norm2(r)        f = feedforward(u)        y_tc = x_tc + a_tc + f_tc

    Backward. Each of the three terms passes dy on. In a `Block`, the gradient of the second branch goes through the
    first one; here neither branch has to wait for the other.

        dn = attention_backward(dy, n)        ds = norm1_backward(dn, s)
        du = feedforward_backward(dy, u)        dr = norm2_backward(du, r)
        dx_tc = dy_tc + ds_tc + dr_tc

    In code, where the first two terms are those of the first residual branch:

        dx = self.first.backward(dy, cache.attention)
        dx = add_backward(dx, self.norm2, du, cache.norm2)

    Source: Wang, Komatsuzaki, "GPT-J-6B: a 6 billion parameter autoregressive language model", 2021.
    """

    def forward(self, x: Array, pattern: ops.Pattern | None = None, key: Key | None = None) -> tuple[Array, Any]:
        h, attention = self.first.forward(x, pattern, key=fold(key, 1))
        u, norm2 = self.norm2.forward(x)
        f, feedforward = self.feedforward.forward(u)
        y, *summed = self.second.sum(h, f, fold(key, 2))
        return y, ParallelBlockCache(attention, norm2, feedforward, *summed)

    def backward(self, dy: Array, cache: Any) -> Array:
        expect_backward(cache, ParallelBlockCache, dy=dy)
        if cache.added:
            df, _ = ops.dropout_add_backward(dy, cache.dropout)
        else:
            df = self.second.dropout.backward(dy, cache.dropout)
        du = self.feedforward.backward(df, cache.feedforward)
        dx = self.first.backward(dy, cache.attention)
        dx = add_backward(dx, self.norm2, du, cache.norm2)
        return dx

    def extend(self, x: Array, stored: Stored, past: int, pattern: ops.Pattern | None = None) -> Array:
        """As for `Block`; the attention must have an `extend`."""
        h = self.first.around(lambda n: self.attention.extend(n, stored, past, pattern), x)
        return h + self.feedforward(self.norm2(x))


class TransformerBlock(Block):
    """Self-attention and a feed-forward layer, each with a residual connection and a layer norm.

    | post-norm, as in the tutorial:    h = norm1(x + attention(x))        y = norm2(h + feedforward(h))
    | pre-norm, as in GPT-2:            h = x + attention(norm1(x))        y = h + feedforward(norm2(h))

    x, y: (B, T, C). Dropout applies to the outputs of attention and feed-forward layer, before the sum (the tutorial
    applies it to h and y, after the norms).
    d_ff, activation: see `FeedForward`. causal, wide, bias: see `SelfAttention`. eps: added to the variance in
    both norms. `relative=True` uses `RelativeSelfAttention`; `forward` then also takes a memory (B, M, C): the inputs
    of this block at the M previous positions, treated as constants. Attention then sees [memory, x] instead of x (with
    pre-norm, both normalised).

    These halves are the two `Residual`s of `Block`, whose methods run them; this class only adds the memory.

    Backward. x and h are used twice, by a branch and by the sum that skips it. So dx and dh have two terms each. What a
    branch reads has a name of its own, and so a gradient of its own.

    Post-norm. The attention reads n and the feed-forward layer u. Every gradient passes through both norms:

        n = x        a = attention(n)        s_tc = x_tc + a_tc        h = norm1(s)
        u = h        f = feedforward(u)        r_tc = h_tc + f_tc        y = norm2(r)
        dr = norm2_backward(dy, r)        du = feedforward_backward(dr, u)        dh_tc = dr_tc + du_tc
        ds = norm1_backward(dh, s)        dn = attention_backward(ds, n)        dx_tc = ds_tc + dn_tc

    Pre-norm. The norms are in the branches and read s and r. dy reaches x through the two sums alone, unchanged:

        s = x        n = norm1(s)        a = attention(n)        h_tc = x_tc + a_tc
        r = h        u = norm2(r)        f = feedforward(u)        y_tc = h_tc + f_tc
        du = feedforward_backward(dy, u)        dr = norm2_backward(du, r)        dh_tc = dy_tc + dr_tc
        dn = attention_backward(dh, n)        ds = norm1_backward(dn, s)        dx_tc = dh_tc + ds_tc

    The memory gets no gradient, but it contributes to the gradients of the parameters: the key and value projections,
    and the norm before them, are applied to it too.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        norm: str = "post",
        causal: bool = False,
        wide: bool = False,
        d_ff: int | None = None,
        activation: ops.Activation = "relu",
        dropout: float = 0.0,
        bias: bool = False,
        eps: float = 1e-5,
        key: Key = Key(0),
        relative: bool = False,
    ) -> None:
        expect_boolean(relative=relative)
        attention = RelativeSelfAttention if relative else SelfAttention
        super().__init__(
            attention(d_model, heads, causal, wide, bias, fold(key, "attention")),
            FeedForward(d_model, d_ff, activation, fold(key, "feedforward")),
            LayerNorm(d_model, eps),
            LayerNorm(d_model, eps),
            norm,
            dropout,
        )

    def forward(
        self, x: Array, pattern: ops.Pattern | None = None, key: Key | None = None, memory: Array | None = None
    ) -> tuple[Array, BlockCache]:
        if memory is None:
            return super().forward(x, pattern, key)
        return super().forward(self.after(memory, x), pattern, key, queries=x.shape[1])

    allocate, extend = Block.allocate, Block.extend  # without a memory `forward` is that of `Block`

    def after(self, memory: Array, x: Array) -> Array:
        """[memory, x]: (B, M + T, C)."""
        if not isinstance(self.attention, RelativeSelfAttention):
            raise ValueError("memory: expected None, since only a relative block can take one")
        expect_floating(x=x, memory=memory)
        expect_shape("x", x, "B T C")
        expect_shape("memory", memory, "B M C", B=x.shape[0], C=x.shape[2])
        return array_module(memory, x).concatenate([memory, x], axis=1)


@operation
def extend_block(x: Array, block: Block, stored: Stored, past: int, pattern: ops.Pattern | None = None) -> Array:
    """What `Block.extend` returns: forward only, with the keys and values of past positions stored."""
    h = block.first.around(lambda n: block.attention.extend(n, stored, past, pattern), x)
    return block.second.around(block.feedforward, h)


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

        dh = norm_backward(dy, h)        dg = block2_backward(dh, g, m2)        dx = block1_backward(dg, x, m1)

    A shared input goes to every block, so its gradient is the sum over the blocks. It is returned after dx.

        dm1 = block1_backward_memory(dg, x, m1)        dm2 = block2_backward_memory(dh, g, m2)
        dm_ic = dm1_ic + dm2_ic
    """

    def __init__(self, blocks: Iterable[Layer], norm: Layer | None = None, recompute: bool = False) -> None:
        expect_instance("norm", norm, Layer, none=True)
        expect_boolean(recompute=recompute)
        self.blocks, self.norm, self.recompute = list_of_layers("blocks", blocks), norm, recompute

    def trained(self) -> list[Layer]:
        """The blocks as forward and backward run them with `recompute`."""
        return [Recompute(block, keep=i == len(self.blocks)) for i, block in enumerate(self.blocks, 1)]

    def forward(
        self, x: Array, *shared: Any, key: Key | None = None, memories: Array | None = None, **options: Any
    ) -> tuple[Array, StackCache]:
        """memories: (B, depth, M, C), the memory of each block: see `TransformerBlock`."""
        caches, inputs, norm = [], [], None
        for i, block in enumerate(self.trained() if self.recompute else self.blocks):
            if memories is not None:
                options["memory"] = memories[:, i]
                inputs.append(x)
            y, cache = block.forward(x, *shared, key=fold(key, i), **options)
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
        blocks = self.trained() if self.recompute else self.blocks
        for i, (block, block_cache) in reversed([*enumerate(zip(blocks, cache.blocks, strict=True))]):
            dx = block.backward(dx, block_cache)
            if dx is None:  # it is `Frozen`, and so is what precedes it
                if totals:
                    raise TypeError(
                        f"block {i} is Frozen below one that is trained, so the gradient of the input that they share "
                        "is unknown: to keep its parameters as they are, use Group(..., frozen=True)"
                    )
                return None
            dx, *dshared = dx if isinstance(dx, tuple) else (dx,)
            totals = [ops.add(total, d)[0] for total, d in zip(totals, dshared, strict=True)] if totals else dshared
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
        for i, (block, cache) in enumerate(zip(self.blocks, stored, strict=True)):
            if shared and not extends(block):
                raise TypeError(f"block {i}: a block with shared inputs needs an extend of its own for generation")
            extend = block.extend if extends(block) else partial(extend_inputs, block)
            x = extend(x, cache, past, *(values[i] for values in shared), **options)
        return x if self.norm is None else self.norm(x)


def extends(layer: Any) -> bool:
    """Whether the layer has an `extend` that was written for its `forward`, not for that of a class above it."""
    if isinstance(layer, Frozen):
        return extends(layer.layer)
    return "extend" in next(vars(kind) for kind in type(layer).__mro__ if vars(kind).keys() & {"extend", "forward"})


def allocate_inputs(x: Array, length: int) -> Stored:
    """Room for the inputs of a block that has no `allocate` of its own."""
    B, _, C = x.shape
    return (array_module(x).empty((B, 1, length, C), x.dtype),)


def extend_inputs(block: Layer, x: Array, stored: Stored, past: int, pattern: ops.Pattern | None = None) -> Array:
    """The result of `extend` for a block without one: forward over all inputs so far, of which the last T are new."""
    (inputs,), T, total = stored, x.shape[1], length_with(x, stored[0], past)
    inputs[:, 0, past:total] = x
    return block(inputs[:, 0, :total], pattern=causal(pattern))[:, -T:]
