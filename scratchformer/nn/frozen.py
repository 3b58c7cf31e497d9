"""A part of a model that is not trained, and costs no backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .layer import Layer, Param


class Frozen(Layer):
    """Runs `layer` and leaves its parameters as they are: forward keeps no cache, and backward does nothing.

    For the layers nearest to the input, such as the body of a classifier, if only its head is trained:
    `model.body = Frozen(model.body)`. Backward gives None: no gradient passes through, so what lies below is not
    trained either. The parameters become `frozen`, and optimizers leave them out. They keep their names, so weights are
    saved and loaded as before. All other attributes are those of the layer (`body.max_length`).
    """

    def __init__(self, layer: Layer) -> None:
        if not isinstance(layer, Layer):
            raise TypeError(f"layer: expected a Layer, got {type(layer).__name__}")
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
