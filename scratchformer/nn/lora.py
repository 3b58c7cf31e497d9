"""Low-rank adaptation: fine-tuning a trained model with a few parameters beside its weight matrices."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from .. import ops
from ..backend import Array, to_device
from ..checks import expect_instance, expect_number, expect_positive
from ..rng import Key, fold
from .frozen import Frozen
from .layer import Layer, Param, expect_backward
from .pointwise import Linear
from .recompute import Recompute

ATTENTION = ("*.query", "*.value")  # the maps that the paper adapts


LoRACache = namedtuple("LoRACache", "a b")


class LoRA(Linear):
    """y = x w + c + s (x a) b: the weight w and bias c of an affine layer stay fixed; a low-rank change is learned.

    linear: the layer to adapt; its Params become `frozen`. rank: K, the rank of the change; a, the Param `lora_a`, is
    (I, K), and b, the Param `lora_b`, is (K, O). alpha: gives s = alpha/K, so that a learning rate that suits one rank
    suits another; K by default, so that s = 1. x: (..., I). Returns (..., O). a is initially uniform in ±1/√I, like the
    w of a Linear, and b is zero, so at first the layer computes what `linear` does. Raises ValueError for a Linear with
    an activation, a rank below 1, or an alpha that is not positive.

    Forward, in indices:

        h_nk = Σ_i x_ni a_ik        y_no = Σ_i x_ni w_io + c_o + s Σ_k h_nk b_ko

    Backward. These are two linear maps, one after the other (see `linear`); the second gets s dy:

        db_ko = s Σ_n h_nk dy_no         dh_nk = s Σ_o dy_no b_ko
        da_ik = Σ_n x_ni dh_nk           dx_ni = Σ_o dy_no w_io + Σ_k dh_nk a_ik

    dx also has a term from x w + c. w and c are constants here, so their gradients are not computed.

        scaled = (self.scale * dy).astype(dy.dtype, copy=False)
        dh, db = ops.linear_backward(scaled, cache.b)
        dx, da = ops.linear_backward(dh, cache.a)
        dx = dx + ops.linear(dy, self.w.data.T)[0]

    The cache keeps x and h for the two maps. K (I + O) numbers are trained instead of I O + O: 2% as many for
    I = O = 768 and K = 8.
    Source: Hu et al., "LoRA: low-rank adaptation of large language models", 2022, section 4.1, equation 3.
    """

    def __init__(self, linear: Linear, rank: int, alpha: float | None = None, key: Key = Key(0)) -> None:
        expect_instance("linear", linear, Linear)
        vars(self).update(vars(linear))
        self.adapt(rank, alpha, key)

    def adapt(self, rank: int, alpha: float | None, key: Key) -> None:
        """Freeze w and b, and add the parameters of the change."""
        expect_positive(rank=rank)
        if alpha is not None:
            expect_number("alpha", alpha, zero=False)
        if self.activation is not None:
            raise ValueError(f"linear: expected a Linear without an activation, got one with {self.activation!r}")
        d_in, d_out = self.w.data.shape
        changes = {"lora_a": Linear(d_in, rank, bias=False, key=key).w.data, "lora_b": np.zeros((rank, d_out))}
        made = {name: Param(to_device(x, self.device, self.w.data.dtype), name) for name, x in changes.items()}
        self.scale = 1.0 if alpha is None else float(alpha) / int(rank)
        self.frozen_before = [p.frozen for p in self.parameters()]
        for p in self.parameters():
            p.frozen = True
        self.lora_a, self.lora_b = made.values()

    def forward(self, x: Array) -> tuple[Array, LoRACache]:
        y, _ = super().forward(x)
        h, a = ops.linear(x, self.lora_a.data)
        change, b = ops.linear(h, self.lora_b.data)
        return y + (self.scale * change).astype(y.dtype, copy=False), LoRACache(a, b)

    def backward(self, dy: Array, cache: LoRACache) -> Array:
        expect_backward(cache, LoRACache, dy=dy)
        scaled = (self.scale * dy).astype(dy.dtype, copy=False)
        dh, db = ops.linear_backward(scaled, cache.b)
        dx, da = ops.linear_backward(dh, cache.a)
        dx = dx + ops.linear(dy, self.w.data.T)[0]
        self.lora_b.grad += db
        self.lora_a.grad += da
        return dx

    def merge(self) -> Linear:
        """Add the change to w, and become a Linear, which computes the same. `frozen` is as it was before."""
        self.w.data += self.scale * (self.lora_a.data @ self.lora_b.data)
        before = self.frozen_before
        del self.lora_a, self.lora_b, self.scale, self.frozen_before
        for p, frozen in zip(self.parameters(), before, strict=True):
            p.frozen = frozen
        self.__class__ = Linear  # type: ignore[assignment]  # an object may change its class
        return self


def add_lora(
    model: Layer, rank: int, alpha: float | None = None, layers: Sequence[str] = ATTENTION, key: Key = Key(0)
) -> None:
    """Turn each Linear of `model` whose full name matches one of the patterns `layers` into a `LoRA`.

    Only w and b of these layers are frozen. The groups of an optimizer decide which of the other parameters are
    trained, for example `[Group("*.lora_*"), Group("output.*"), Group("*", frozen=True)]`. `model.config["lora"]`
    records the arguments, so that `training.load_model` can repeat the call. Create optimizers and replicas afterwards.
    Raises ValueError, and changes nothing, if a pattern matches no Linear without an activation, if the weights of a
    matching one are shared, if it is in a `Frozen` layer, or if the model already has LoRA layers.
    """
    inside = _layers(model)
    linears: dict[str, Any] = {name: x for name, x in inside.items() if type(x) is Linear and x.activation is None}
    called = {name: name.removesuffix(".linear") for name in linears}  # one in a NormedLinear goes by its name
    chosen = [name for name in linears if any(fnmatchcase(called[name], pattern) for pattern in layers)]
    if any(isinstance(layer, LoRA) for layer in inside.values()):
        raise ValueError("model: it already has LoRA layers; merge_lora turns them into Linear layers")
    if not layers:
        raise ValueError("layers: expected at least one pattern, got none")
    for pattern in layers:
        if not any(fnmatchcase(called[name], pattern) for name in chosen):
            names = ", ".join(linears)
            raise ValueError(f"layers: {pattern!r} matches no Linear without an activation; the model has {names}")
    holders = Counter(id(part) for layer in inside.values() for _, part in layer.named_children())
    frozen = [name for name, layer in model.named_layers() if isinstance(layer, Frozen)]
    for name in chosen:
        if holders[id(linears[name].w)] > 1:
            raise ValueError(f"layers: {name} shares its weights with another layer, which would not get the change")
        if within := [part for part in frozen if not part or f"{name}.".startswith(f"{part}.")]:
            raise ValueError(f"layers: {name} is in {within[0] or 'the model'}, which is Frozen: it gets no gradient")
    LoRA(Linear(1, 1), rank, alpha, key)  # raises the errors of its arguments before anything is changed
    for name in chosen:
        LoRA.adapt(linears[name], rank, alpha, fold(key, name))
        linears[name].__class__ = LoRA
    if hasattr(model, "config"):
        model.config["lora"] = {"rank": rank, "alpha": alpha, "layers": list(layers)}


def merge_lora(model: Layer) -> None:
    """Turn every `LoRA` of `model` into a Linear that computes the same, for generation at full speed.

    The parameters get new arrays, so create optimizers and replicas afterwards.
    """
    for layer in _layers(model).values():
        if isinstance(layer, LoRA):
            layer.merge()
    for _, layer in model.named_layers():
        for p in layer.parameters() if isinstance(layer, Frozen) else ():
            p.frozen = True  # also what was trained before it was adapted
    if hasattr(model, "config"):
        model.config.pop("lora", None)
    model.to()


def _layers(model: Layer) -> dict[str, Any]:
    """Every layer of `model` by its first name; instead of a `Frozen` or `Recompute`, what it runs."""
    by_id: dict[int, tuple[str, Any]] = {}
    for name, layer in model.named_layers():
        inside: Any = layer
        while isinstance(inside, Frozen | Recompute):
            inside = inside.layer
        by_id.setdefault(id(inside), (name, inside))
    return dict(by_id.values())
