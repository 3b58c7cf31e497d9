"""A classifier that starts as a language model."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from ..checks import expect_instance
from ..models import Classifier, LanguageModel
from ..models.model import named

# Options of a body that do not change what its weights mean; the shapes of weights are compared when they are loaded.
MAY_DIFFER = {"max_length", "dropout", "recompute", "embedding_std", "final_norm", "d_ff"}


def start_from(classifier: Classifier, pretrained: LanguageModel) -> None:
    """Copy the body of a language model into a classifier. The sizes and the blocks must be the same, and the
    classifier causal too.

    A language model has no embedding of features; its weights become 0. Raises ValueError if the bodies do not fit.
    Source: Dai, Le, "Semi-supervised sequence learning", 2015; Howard, Ruder, "Universal language model fine-tuning for
    text classification", 2018.
    """
    expect_instance("pretrained", pretrained, LanguageModel)
    expected, given = (with_defaults(model.body.config) for model in (classifier, pretrained))
    further = classifier.body.further
    pairs = zip(expected["embeddings"] or (), further, strict=True)
    expected["embeddings"] = [each for each, layer in pairs if not layer.width]
    given["embeddings"] = given["embeddings"] or []
    if pretrained.pattern is not None:
        raise ValueError(f"pretrained: expected full causal attention, got {pretrained.pattern}")
    for name in sorted((expected.keys() | given.keys()) - MAY_DIFFER):
        if expected.get(name) != given.get(name):
            raise ValueError(f"pretrained: expected a body with {name} {expected.get(name)}, got {given.get(name)}")
    weights = pretrained.body.state_dict()
    for layer in (each for each in further if each.width):
        weights |= {f"{layer.name}.{name}": 0 * data for name, data in layer.state_dict().items()}
    classifier.body.load_state_dict(weights)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a body, with what its blocks do by default."""
    defaults = named(config["block"]).items()
    return {name: p.default for name, p in defaults if p.default is not Parameter.empty} | dict(config)
