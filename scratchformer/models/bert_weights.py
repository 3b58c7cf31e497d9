"""The tensors of a BERT in a Hugging Face folder, and the settings that its config.json must have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..checks import expect_fraction
from ..nn import Layer
from .pretrained import (
    LEAVES,
    Folder,
    PretrainedError,
    TensorSource,
    expect_sizes,
    load_weights,
    read_config,
    stored_name,
    tensor_names,
)

PREFIX = "bert."  # of the names in the file if the model has a head
SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "heads",
    "num_hidden_layers": "depth",
    "max_position_embeddings": "max_length",
    "intermediate_size": "d_ff",
    "type_vocab_size": "segments",
    "hidden_dropout_prob": "dropout",
    "layer_norm_eps": "eps",
}
FRACTIONS = ("hidden_dropout_prob", "layer_norm_eps")  # the others are whole numbers
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
COMPUTED = {  # settings, and the values that this implementation supports
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
HEAD_COMPUTED = {"problem_type": (None, "single_label_classification")}  # the same, for a classification output
# The library's models with this body. Only the first has the classification output that is meant here.
ARCHITECTURES = (
    "BertForSequenceClassification", "BertModel", "BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel",
    "BertForNextSentencePrediction", "BertForTokenClassification", "BertForMultipleChoice", "BertForQuestionAnswering",
)  # fmt: skip
# The path in a file of each of our layers; those within a block, without the block.
LAYERS = {
    "tokens": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "pooler.dense": "pooler.dense",
    "masked.dense": "cls.predictions.transform.dense",
    "masked.norm": "cls.predictions.transform.LayerNorm",
    "masked.output": "cls.predictions",
    "following": "cls.seq_relationship",
    "output": "classifier",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.unify": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "norm2": "output.LayerNorm",
}
OLD_LEAVES = LEAVES | {"gamma": "gamma", "beta": "beta"}
# Tensors that a model without the head, or with tied weights, does not need.
UNUSED = r"(cls\.predictions|cls\.seq_relationship|pooler|classifier)\..*|embeddings\.position_ids"
TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def bert_config(folder: Folder, dropout: float | None) -> dict[str, Any]:
    """The arguments of `Bert` for a folder; raises PretrainedError if its model computes something different,
    ValueError for a dropout out of range. The sizes are those of the folder's tensors.
    """
    if dropout is not None:
        expect_fraction("dropout", dropout, letter="p")
    config = read_config(folder, "bert", SETTINGS, COMPUTED, FRACTIONS, architectures=ARCHITECTURES)
    options = {ours: config[theirs] for theirs, ours in SETTINGS.items()}
    C, F = options["d_model"], options["d_ff"]
    tables = {"word": options["vocab_size"], "position": options["max_length"], "token_type": options["segments"]}
    shapes = {f"embeddings.{name}_embeddings.weight": (size, C) for name, size in tables.items()}
    block = {"attention.self.query.weight": (C, C), "intermediate.dense.weight": (F, C)}
    expect_sizes(folder, PREFIX, shapes, "encoder.layer", block, options["depth"])
    options["activation"] = ACTIVATIONS[config.get("hidden_act", "gelu")]
    return options if dropout is None else options | {"dropout": dropout}


def stored_classes(folder: Folder, names: Mapping[str, tuple[int, ...]]) -> int:
    """The number of classes in a folder with a text classifier; raises PretrainedError for any other model."""
    config = read_config(folder, "bert", ("hidden_size",), HEAD_COMPUTED)
    kinds = config.get("architectures") or [ARCHITECTURES[0]]
    if kinds != [ARCHITECTURES[0]] or not {"classifier.weight", "pooler.dense.weight"} <= names.keys():
        raise PretrainedError(
            f"{folder} has no output for classes of texts ({', '.join(kinds)}): pass num_classes, and new_head=True "
            "if it has another output"
        )
    classes = names["classifier.weight"][:1]
    if classes in ((), (0,), (1,)):
        raise PretrainedError(
            f"{folder}: classifier.weight: expected a row for each of two or more classes, got shape "
            f"{names['classifier.weight']}, as for regression or multiple choice"
        )
    expect_sizes(folder, PREFIX, {"classifier.weight": (*classes, config["hidden_size"])})
    return classes[0]


def load_bert(model: Layer, folder: Folder, new: Collection[str] = ()) -> None:
    """Copy the weights of a folder into `model`, except into its layers named in `new`."""
    stored = tensor_names(folder, PREFIX)
    tensors = {
        name: stored_as(name, old="embeddings.LayerNorm.gamma" in stored)
        for name in model.named_parameters()
        if name.partition(".")[0] not in new
    }
    load_weights(model, folder, tensors, UNUSED, PREFIX, TIED)


def stored_as(name: str, old: bool) -> TensorSource:
    """Where one of our parameters is in a file; old: whether the file calls the weights of norms gamma and beta."""
    leaves = OLD_LEAVES if old else LEAVES
    return TensorSource(stored_name(name, LAYERS, "encoder.layer", leaves), transposed=name.endswith(".w"))
