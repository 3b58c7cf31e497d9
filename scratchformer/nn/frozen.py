"""A part of a model that is not trained and needs no backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..checks import expect_instance
from .layer import Layer, Param


class Frozen(Layer):
    """Runs `layer` without training it: forward keeps no cache, and backward does nothing.

    For the layers nearest the input, such as the body of a classifier when only its head is trained:
    `model.body = Frozen(model.body)`. `backward` returns None: no gradient passes through, so layers below get none
    either. But weight decay still acts on these, so freeze them too. Nor can a part be `Frozen` whose gradient is
    needed, such as the branch of a residual layer, the output of a model, or a decoder block below one that is trained;
    there use `Group(..., frozen=True)`.

    The parameters become `frozen`, and optimizers skip them. They keep their names, so weights are saved and loaded as
    before. Other attributes are looked up on the layer (`body.max_length`).
    """

    def __init__(self, layer: Layer) -> None:
        expect_instance("layer", layer, Layer)
        self.layer = layer
        for p in layer.parameters():
            p.frozen = True

    def __getattr__(self, name: str) -> Any:
        if name == "layer":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.layer, name)

    def named_children(self) -> Iterator[tuple[str, Layer | Param]]:
        yield from self.layer.named_children()

    def forward(self, *inputs: Any, **options: Any) -> tuple[Any, None]:
        return self.layer(*inputs, **options), None

    def backward(self, dy: Any, cache: None) -> None:
        return None
