"""The residual branch: what every block is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import ops
from ..backend import Array
from ..checks import expect_instance, expect_one_of, expect_shape
from ..dispatch import has_twin, is_fast
from ..rng import Key
from .dropout import Dropout
from .frozen import Frozen
from .layer import Layer, expect_backward

ORDERS = ("post", "pre")


class ResidualCache(NamedTuple):
    norm: Any
    branch: Any
    dropout: Any
    added: bool  # whether dropout and the sum were one operation


class Residual(Layer):
    """A branch whose output is added to its input, with a norm after the sum or before the branch.

    | order "post", as in the tutorial:    y = norm(x + dropout(branch(x)))
    | order "pre", as in GPT-2:            y = x + dropout(branch(norm(x)))

    branch: a layer whose output is as wide as its input, such as attention or a feed-forward layer. norm: a layer such
    as `LayerNorm`. dropout: a `Dropout`, or None.

    x: (B, S, C). Further inputs and options of `forward` go to the branch, except `key`, which is for dropout.
    The branch may return fewer positions than it was given, (B, T, C) with T < S. They are then the last T, and the
    S − T before them are a memory: the branch reads them, but they are constants without a residual or a gradient.
    y: (B, T, C). Raises ValueError for any other order.

    A residual only connects layers, so a block can own the layers under its own names and connect them when it runs:
    see `Block`.

    Backward. The sum uses x twice, so its gradient has two terms: the gradient of the sum itself, and what the branch
    passes back to its input, n. An output f_t' of the branch may depend on all n_t, so the chain rule sums over t'.

    In "post" order n is x, and ds, which the norm passes back, is the same for both terms:

        n = x        f = dropout(branch(n))        s = x + f        y = norm(s)
        ds_tc = Σ_c' dy_tc' ∂y_tc'/∂s_tc        dn_tc = Σ_t' Σ_c' ds_t'c' ∂f_t'c'/∂n_tc        dx_tc = ds_tc + dn_tc
        ds = self.norm.backward(dy, cache.norm)
        dx, _ = ops.add(ds, dn[:, -T:])

    In "pre" order the sum is y. dy passes through the sum unchanged, whatever the branch does, and only the branch
    passes its gradient through the norm:

        n = norm(x)        f = dropout(branch(n))        y = x + f
        dn_tc = Σ_t' Σ_c' dy_t'c' ∂f_t'c'/∂n_tc        dx_tc = dy_tc + Σ_c' dn_tc' ∂n_tc'/∂x_tc
        dx, _ = ops.add(dy, self.norm.backward(dn, cache.norm)[:, -T:])

    The slice [:, -T:] leaves out what the branch passes back to a memory. Gradients of the branch's further inputs are
    returned after dx.

    Source: He et al., "Deep residual learning for image recognition", 2016, section 3.2; for the two orders Xiong et
    al., "On layer normalization in the transformer architecture", 2020, table 1.
    """

    def __init__(self, branch: Layer, norm: Layer, order: str = "post", dropout: Dropout | None = None) -> None:
        expect_one_of("order", order, ORDERS)
        expect_instance("branch", branch, Layer)
        expect_instance("norm", norm, Layer)
        expect_instance("dropout", dropout, Layer, none=True)
        self.branch, self.norm, self.order = branch, norm, order
        self.dropout = Dropout(0.0) if dropout is None else dropout

    def forward(self, x: Array, *inputs: Any, key: Key | None = None, **options: Any) -> tuple[Array, ResidualCache]:
        if self.order == "post":
            f, branch = self.branch.forward(x, *inputs, **options)
            s, *summed = self.sum(x[:, -f.shape[1] :], f, key)
            y, norm = self.norm.forward(s)
        else:
            n, norm = self.norm.forward(x)
            f, branch = self.branch.forward(n, *inputs, **options)
            y, *summed = self.sum(x[:, -f.shape[1] :], f, key)
        return y, ResidualCache(norm, branch, *summed)

    def sum(self, x: Array, f: Array, key: Key | None) -> tuple[Array, Any, bool]:
        """x + dropout(f), the cache of dropout, and whether compiled loops have computed both at once."""
        p = self.dropout.p if type(self.dropout) is Dropout else 0
        if key is not None and p and is_fast() and has_twin(ops.dropout_add, f, p, key, x):
            return *ops.dropout_add(f, p, key, x), True
        f, dropout = self.dropout.forward(f, key)
        s, _ = ops.add(x, f)
        return s, dropout, False

    def backward(self, dy: Array, cache: ResidualCache) -> Any:
        """dx (B, T, C), of the last T positions; or a tuple of dx and the gradients of the further inputs."""
        expect_backward(cache, ResidualCache, dy=dy)
        expect_shape("dy", dy, "B T C")
        for name, part in ("branch", self.branch), ("norm", self.norm):
            if isinstance(part, Frozen):
                raise TypeError(
                    f"{name}: expected a layer through which the gradient passes, got a Frozen one: "
                    "to keep its parameters as they are, use Group(..., frozen=True)"
                )
        T = dy.shape[1]
        ds = dy
        if self.order == "post":
            ds = self.norm.backward(dy, cache.norm)
        if cache.added:
            df, _ = ops.dropout_add_backward(ds, cache.dropout)
        else:
            df = self.dropout.backward(ds, cache.dropout)
        dn = self.branch.backward(df, cache.branch)
        dn, *others = dn if isinstance(dn, tuple) else (dn,)
        if self.order == "post":
            dx, _ = ops.add(ds, dn[:, -T:])
        else:
            dx, _ = ops.add(dy, self.norm.backward(dn, cache.norm)[:, -T:])
        return (dx, *others) if others else dx

    def around(self, branch: Callable[[Array], Array], x: Array) -> Array:
        """y with another function in place of the branch, such as its `extend`, without dropout or a cache."""
        return self.norm(x + branch(x)) if self.order == "post" else x + branch(self.norm(x))
