"""Low-rank adaptation: fine-tuning a trained model with a few parameters beside its weight matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

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
        self.scale = 1.0 if alpha is None else float(alpha) / int(rank)
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
        expect_backward(cache, LoRACache, dy=dy)
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
    linears = [place for place in _places(model, Linear) if place.layer.activation is None]
    chosen = [place for place in linears if any(fnmatchcase(place.name, pattern) for pattern in layers)]
    if next(_places(model, LoRA), None):
        raise ValueError("model: it already has LoRA layers; merge_lora turns them into Linear layers")
    if not layers:
        raise ValueError("layers: expected at least one pattern, got none")
    for pattern in layers:
        if not any(fnmatchcase(place.name, pattern) for place in chosen):
            names = ", ".join(place.name for place in linears)
            raise ValueError(f"layers: {pattern!r} matches no Linear without an activation; the model has {names}")
    holders = _holders(model)
    frozen = [name for name, layer in model.named_layers() if isinstance(layer, Frozen)]
    for place in chosen:
        if isinstance(place.owner, tuple):
            raise ValueError(f"layers: {place.name} is in a tuple, where it cannot be replaced: use a list")
        if holders[id(place.layer.w)] > 1:
            raise ValueError(
                f"layers: {place.name} shares its weights with another layer, which would not get the change"
            )
        if inside := [part for part in frozen if not part or f"{place.name}.".startswith(f"{part}.")]:
            raise ValueError(
                f"layers: {place.name} is in {inside[0] or 'the model'}, which is Frozen, so it gets no gradient"
            )
    made = [LoRA(place.layer, rank, alpha, fold(key, place.name)) for place in chosen]
    for place, lora in zip(chosen, made, strict=True):
        place.put(lora)
    if hasattr(model, "config"):
        model.config["lora"] = {"rank": rank, "alpha": alpha, "layers": list(layers)}


def merge_lora(model: Layer) -> None:
    """Replace every `LoRA` of `model` by a Linear that computes the same, for generation at full speed.

    The parameters get new arrays, so create optimizers and replicas afterwards.
    """
    for place in list(_places(model, LoRA)):
        place.put(place.layer.merge())
    for _, layer in model.named_layers():
        for p in layer.parameters() if isinstance(layer, Frozen) else ():
            p.frozen = True  # also what was trained before it was adapted
    if hasattr(model, "config"):
        model.config.pop("lora", None)
    model.to()


class _Place(NamedTuple):
    """Where a layer is: its full name, and an attribute of its owner, or a place in a list, tuple or dict."""

    name: str
    owner: Any
    key: Any

    @property
    def layer(self) -> Any:
        return getattr(self.owner, self.key) if isinstance(self.owner, Layer) else self.owner[self.key]

    def put(self, layer: Layer) -> None:
        """Replace the layer by another."""
        if isinstance(self.owner, Layer):
            setattr(self.owner, self.key, layer)
        else:
            self.owner[self.key] = layer


def _places(model: Layer, kind: type) -> Iterator[_Place]:
    """Every place of a `kind` in `model`. A layer that is used several times is visited once."""
    seen = set()
    for prefix, layer in model.named_layers():
        layer = _inside(layer)
        if id(layer) in seen or isinstance(layer, LoRA):
            continue
        seen.add(id(layer))
        attributes = layer.named_attributes().items()
        parts = {name: value for name, value in attributes if name != "config"}  # which has the arguments of a Model
        yield from _places_in(layer, parts, f"{prefix}." if prefix else "", kind)


def _places_in(owner: Any, parts: Any, prefix: str, kind: type) -> Iterator[_Place]:
    """The places of a `kind` among `parts`, by name or number, and in containers among them."""
    for key, value in list(parts.items() if isinstance(parts, Mapping) else enumerate(parts)):
        name, where = f"{prefix}{key}", (owner, key)
        while isinstance(value, Frozen | Recompute):
            where, value = (value, "layer"), value.layer
        if type(value) is kind:
            yield _Place(name, *where)
        elif isinstance(value, Mapping | list | tuple):
            yield from _places_in(value, value, f"{name}.", kind)


def _inside(layer: Any) -> Any:
    """What a `Frozen` or `Recompute` runs; any other layer itself. These have the names of what they run."""
    while isinstance(layer, Frozen | Recompute):
        layer = layer.layer
    return layer


def _holders(model: Layer) -> Counter[int]:
    """In how many places each parameter of `model` is, by its id: those of its Linears, and all other layers."""
    counts = Counter(id(place.layer.w) for place in _places(model, Linear))
    others = {id(layer): layer for _, layer in model.named_layers() if type(_inside(layer)) is not Linear}.values()
    counts.update(id(part) for layer in others for _, part in layer.named_children() if isinstance(part, Param))
    return counts
