"""Models whose weights are rounded to 8 or 4 bits, so that generation reads less memory for a token."""

from __future__ import annotations

from typing import Any, TypeVar

from ..backend import CPU
from ..models import EncoderDecoder, LanguageModel
from ..nn import Linear, LoRA, RelativeSelfAttention, TiedOutput, merge_lora
from ..nn.quantized import QuantizedLinear, gather
from ..shell.text import with_article

Model = TypeVar("Model", LanguageModel, EncoderDecoder)


def quantize(model: Model, bits: int = 8) -> Model:
    """Round the weights of a trained model's affine maps to integers of 8 or 4 bits, and return the model itself.

    A `LoRA` is merged first. Embeddings, norms, biases, keys and values stay as they are. So does the projection of
    distances in relative attention, which is read once for many tokens. The float weights are dropped, so the model can
    generate, translate and be evaluated, but not be trained or saved. `ops.quantized` says how weights are rounded and
    multiplied. Without the extra `fast`, every product converts its weights to floats again, which takes many times as
    long as keeping them in float32.

    Raises ValueError for other bits, for weights that are not finite, and for a model that is on a GPU or quantised.
    """
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise TypeError(f"model: expected a LanguageModel or an EncoderDecoder, got {with_article(type(model))}")
    if model.device is not CPU:
        raise ValueError(f"model: expected one on the CPU, where integers are multiplied, got one on {model.device}")
    layers = [layer for _, layer in model.named_layers()]
    if any(isinstance(layer, QuantizedLinear) for layer in layers):
        raise ValueError("model: expected one that is not quantised yet")
    if any(isinstance(layer, LoRA) for layer in layers):
        merge_lora(model)
    kept = {id(layer.position) for layer in layers if isinstance(layer, RelativeSelfAttention)}
    chosen: dict[int, Any] = {id(x): x for x in layers if type(x) in (Linear, TiedOutput) and id(x) not in kept}
    quantized = [QuantizedLinear(layer, bits) for layer in chosen.values()]  # all of them before anything is changed
    gather(quantized)
    for layer, new in zip(chosen.values(), quantized, strict=True):
        layer.__class__ = QuantizedLinear  # an object may change its class
        vars(layer).clear()
        vars(layer).update(vars(new))
    model.to()  # new arrays for the parameters that are left, so that those of the others can be freed
    return model
