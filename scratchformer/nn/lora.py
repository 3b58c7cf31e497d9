"""Low-rank adaptation: fine-tuning a trained model with a few parameters beside its weight matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..backend import Array, to_device
from ..ops.checks import expect_instance, expect_number, expect_positive
from ..rng import Key, fold
from .frozen import Frozen
from .layer import Layer, Param
from .linear import Linear

ATTENTION = ("*.query", "*.value")  # the maps that the paper adapts


class LoRACache(NamedTuple):
    a: Any
    b: Any


class LoRA(Layer):
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
        expect_positive(rank=rank)
        if alpha is not None:
            expect_number("alpha", alpha, zero=False)
        if linear.activation is not None:
            raise ValueError(f"linear: expected a Linear without an activation, got one with {linear.activation!r}")
        d_in, d_out = linear.w.data.shape
        self.linear = linear
        self.frozen_before = [p.frozen for p in linear.parameters()]
        for p in linear.parameters():
            p.frozen = True
        self.scale = 1.0 if alpha is None else alpha / rank
        self.lora_a = Param(Linear(d_in, rank, bias=False, key=key).w.data, "lora_a")
        self.lora_b = Param(np.zeros((rank, d_out), np.float32), "lora_b")
        for p in self.lora_a, self.lora_b:
            data, grad = (to_device(x, linear.device, linear.w.data.dtype) for x in (p.data, p.grad))
            p.bind(data, grad, None)

    @property
    def w(self) -> Param:
        return self.linear.w

    @property
    def b(self) -> Param | None:
        return self.linear.b

    def named_children(self) -> Iterator[tuple[str, Layer | Param]]:
        """w and b under their former names, then lora_a and lora_b."""
        yield from self.linear.named_children()
        yield from (("lora_a", self.lora_a), ("lora_b", self.lora_b))

    def forward(self, x: Array) -> tuple[Array, LoRACache]:
        y, _ = self.linear.forward(x)
        h, a = ops.linear(x, self.lora_a.data)
        change, b = ops.linear(h, self.lora_b.data)
        return y + (self.scale * change).astype(y.dtype, copy=False), LoRACache(a, b)

    def backward(self, dy: Array, cache: LoRACache) -> Array:
        scaled = (self.scale * dy).astype(dy.dtype, copy=False)
        dh, db = ops.linear_backward(scaled, cache.b)
        dx, da = ops.linear_backward(dh, cache.a)
        dx = dx + ops.linear(dy, self.w.data.T)[0]
        self.lora_b.grad += db
        self.lora_a.grad += da
        return dx

    def merge(self) -> Linear:
        """Add the change to w and return the Linear, which now computes the same. `frozen` is as it was before."""
        self.w.data += self.scale * (self.lora_a.data @ self.lora_b.data)
        for p, frozen in zip(self.linear.parameters(), self.frozen_before, strict=True):
            p.frozen = frozen
        return self.linear


def add_lora(
    model: Layer, rank: int, alpha: float | None = None, layers: Sequence[str] = ATTENTION, key: Key = Key(0)
) -> None:
    """Replace each Linear of `model` whose full name matches one of the patterns `layers` by a `LoRA`.

    Only w and b of these layers are frozen. The groups of an optimizer decide which of the other parameters are
    trained, for example `[Group("*.lora_*"), Group("output.*"), Group("*", frozen=True)]`. `model.config["lora"]`
    records the arguments, so that `training.load_model` can repeat the call. Create optimizers and replicas afterwards.
    Raises ValueError, and changes nothing, if a pattern matches no Linear without an activation, if the weights of a
    matching one are shared, if it is in a `Frozen` layer, or if the model already has LoRA layers.
    """
    found = [place for place in _attributes(model, Linear) if getattr(*place[1:]).activation is None]
    chosen = [place for place in found if any(fnmatchcase(place[0], pattern) for pattern in layers)]
    if next(_attributes(model, LoRA), None):
        raise ValueError("model: it already has LoRA layers; merge_lora turns them into Linear layers")
    if not layers:
        raise ValueError("layers: expected at least one pattern, got none")
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name, *_ in chosen):
            names = ", ".join(name for name, *_ in found)
            raise ValueError(f"layers: {pattern!r} matches no Linear without an activation; the model has {names}")
    holders = Counter(id(getattr(*place[1:]).w) for place in _attributes(model, Linear))
    for name, owner, attribute in chosen:
        if holders[id(getattr(owner, attribute).w)] > 1:
            raise ValueError(f"layers: {name} shares its weights with another layer, which would not get the change")
    frozen = [name for name, layer in model.named_layers() if isinstance(layer, Frozen)]
    for name, *_ in chosen:
        if inside := [part for part in frozen if not part or name.startswith(f"{part}.")]:
            raise ValueError(
                f"layers: {name} is in {inside[0] or 'the model'}, which is Frozen, so it gets no gradient"
            )
    made = [LoRA(getattr(owner, attribute), rank, alpha, fold(key, name)) for name, owner, attribute in chosen]
    for (_, owner, attribute), lora in zip(chosen, made, strict=True):
        setattr(owner, attribute, lora)
    if hasattr(model, "config"):
        model.config["lora"] = {"rank": rank, "alpha": alpha, "layers": list(layers)}


def merge_lora(model: Layer) -> None:
    """Replace every `LoRA` of `model` by a Linear that computes the same, for generation at full speed.

    The parameters get new arrays, so create optimizers and replicas afterwards.
    """
    for _, owner, attribute in list(_attributes(model, LoRA)):
        setattr(owner, attribute, getattr(owner, attribute).merge())
    if hasattr(model, "config"):
        model.config.pop("lora", None)
    model.to()


def _attributes(model: Layer, kind: type) -> Iterator[tuple[str, Layer, str]]:
    """Every attribute of type `kind` of a layer in `model`: its full name, the layer, and the attribute's own name.

    A layer that is used several times is visited once.
    """
    seen = set()
    for prefix, layer in model.named_layers():
        if id(layer) in seen or isinstance(layer, LoRA):
            continue
        seen.add(id(layer))
        for name, value in vars(layer).items():
            if type(value) is kind:
                yield (f"{prefix}.{name}" if prefix else name), layer, name
