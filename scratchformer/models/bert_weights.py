"""The tensors of a BERT, RoBERTa or DistilBERT in a Hugging Face folder, and the settings in its config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..checks import expect_fraction
from ..nn import Layer
from ..shell.text import shown
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


class Published(NamedTuple):
    """How the folders of a kind of encoder are written: the names of its settings, classes and tensors."""

    name: str  # begins the names of its classes
    settings: Mapping[str, str]  # their names for sizes and numbers, and ours
    activation: str  # the setting of that name, and the values that are read
    activations: Collection[str]
    output_dropout: tuple[str, float | None]  # the setting, and its default; None: the dropout of the body
    layers: Mapping[str, str]  # the path of each of our layers; those within a block, without the block
    blocks: str  # the path of the list of blocks
    tied: Mapping[str, str]  # see `load_weights`
    fixed: Mapping[str, Any] = {}  # arguments of `Bert` that no setting gives
    pooling: str = "tanh"  # see `Pooler`
    padding: int | None = None  # the default of pad_token_id, if positions are counted from the number after it

    @property
    def prefix(self) -> str:
        """Of the names in the file if the model has a head."""
        return f"{self.name.lower()}."


ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
COMPUTED = {  # settings, and the values that this implementation supports
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
HEAD_COMPUTED = {"problem_type": (None, "single_label_classification")}  # the same, for a classification output
CLASSIFIER = "ForSequenceClassification"  # ends the name of the library's class with the output that is meant here
BERT = Published(
    "Bert",
    settings={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_attention_heads": "heads",
        "num_hidden_layers": "depth",
        "max_position_embeddings": "max_length",
        "intermediate_size": "d_ff",
        "type_vocab_size": "segments",
        "hidden_dropout_prob": "dropout",
        "layer_norm_eps": "eps",
    },
    activation="hidden_act",
    activations=ACTIVATIONS,
    output_dropout=("classifier_dropout", None),
    layers={
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
    },
    blocks="encoder.layer",
    tied={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)
ROBERTA = BERT._replace(
    name="Roberta",
    activations=("gelu",),  # its masked prediction has no other
    layers={
        **BERT.layers,
        "pooler.dense": "classifier.dense",
        "masked.dense": "lm_head.dense",
        "masked.norm": "lm_head.layer_norm",
        "masked.output": "lm_head",
        "output": "classifier.out_proj",
    },
    tied={"lm_head.decoder.weight": "embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"},
    padding=1,
)
DISTILBERT = Published(
    "DistilBert",
    settings={
        "vocab_size": "vocab_size",
        "dim": "d_model",
        "n_heads": "heads",
        "n_layers": "depth",
        "max_position_embeddings": "max_length",
        "hidden_dim": "d_ff",
        "dropout": "dropout",
    },
    activation="activation",
    activations=ACTIVATIONS,
    output_dropout=("seq_classif_dropout", 0.2),
    layers={
        "tokens": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm",
        "pooler.dense": "pre_classifier",
        "masked.dense": "vocab_transform",
        "masked.norm": "vocab_layer_norm",
        "masked.output": "vocab_projector",
        "output": "classifier",
        "attention.query": "attention.q_lin",
        "attention.key": "attention.k_lin",
        "attention.value": "attention.v_lin",
        "attention.unify": "attention.out_lin",
        "norm1": "sa_layer_norm",
        "feedforward.up": "ffn.lin1",
        "feedforward.down": "ffn.lin2",
        "norm2": "output_layer_norm",
    },
    blocks="transformer.layer",
    tied={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    fixed={"segments": 0, "eps": 1e-12},
    pooling="relu",
)
PUBLISHED = {each.name.lower(): each for each in (BERT, ROBERTA, DISTILBERT)}  # by model_type
FRACTIONS = ("hidden_dropout_prob", "dropout", "layer_norm_eps")  # the other settings are whole numbers
OLD_LEAVES = LEAVES | {"gamma": "gamma", "beta": "beta"}
# Tensors that a model without the head, or with tied weights, does not need.
UNUSED = (
    r"(cls\.predictions|cls\.seq_relationship|pooler|(pre_)?classifier|lm_head|vocab_[a-z_]+|qa_outputs)\..*"
    r"|embeddings\.position_ids"
)


def published_as(folder: Folder) -> Published:
    """How a folder is written, by the model_type in its config.json; raises PretrainedError for any other."""
    return PUBLISHED[read_config(folder, tuple(PUBLISHED))["model_type"]]


def bert_config(folder: Folder, dropout: float | None) -> dict[str, Any]:
    """The arguments of `Bert` for a folder; raises PretrainedError if its model computes something different,
    ValueError for a dropout out of range. The sizes are those of the folder's tensors.
    """
    if dropout is not None:
        expect_fraction("dropout", dropout, letter="p")
    kind = published_as(folder)
    computed = COMPUTED | {kind.activation: tuple(kind.activations)}
    settings, model_type = kind.settings, kind.prefix[:-1]
    fractions = [name for name in FRACTIONS if name in settings]
    config = read_config(folder, model_type, settings, computed, fractions)
    options = {ours: config[theirs] for theirs, ours in settings.items()} | {**kind.fixed}
    C, F = options["d_model"], options["d_ff"]
    tables = {"tokens": "vocab_size", "positions": "max_length", "segments": "segments"}
    shapes = {f"{kind.layers[name]}.weight": (options[size], C) for name, size in tables.items() if name in kind.layers}
    block = {f"{kind.layers['attention.query']}.weight": (C, C), f"{kind.layers['feedforward.up']}.weight": (F, C)}
    expect_sizes(folder, kind.prefix, shapes, kind.blocks, block, options["depth"])
    options["activation"] = ACTIVATIONS[config.get(kind.activation, "gelu")]
    if kind.padding is not None:
        padding, rows = config.get("pad_token_id", kind.padding), options["max_length"]
        if type(padding) is not int or not 0 <= padding < rows - 1:
            raise PretrainedError(
                f"{Path(folder) / 'config.json'}: pad_token_id: expected a whole number below "
                f"max_position_embeddings - 1 = {rows - 1}, got {shown(padding)}"
            )
        options |= {"first_position": padding + 1, "max_length": rows - padding - 1}
    return options if dropout is None else options | {"dropout": dropout}


def output_dropout(folder: Folder) -> float | None:
    """The dropout before the output of a folder's text classifier; None for that of the body."""
    name, default = published_as(folder).output_dropout
    return read_config(folder, tuple(PUBLISHED), fractions=(name,), optional=(name,)).get(name, default)


def stored_classes(folder: Folder, names: Mapping[str, tuple[int, ...]]) -> int:
    """The number of classes in a folder with a text classifier; raises PretrainedError for any other model."""
    kind = published_as(folder)
    C = next(theirs for theirs, ours in kind.settings.items() if ours == "d_model")
    config = read_config(folder, tuple(PUBLISHED), (C,), HEAD_COMPUTED)
    architectures = config.get("architectures") or [kind.name + CLASSIFIER]
    output, pooler = (f"{kind.layers[name]}.weight" for name in ("output", "pooler.dense"))
    if architectures != [kind.name + CLASSIFIER] or not {output, pooler} <= names.keys():
        raise PretrainedError(
            f"{folder} has no output for classes of texts ({shown(architectures)}): pass num_classes, and "
            "new_head=True if it has another output"
        )
    classes = names[output][:1]
    if classes in ((), (0,), (1,)):
        raise PretrainedError(
            f"{folder}: {output}: expected a row for each of two or more classes, got shape "
            f"{names[output]}, as for regression or multiple choice"
        )
    expect_sizes(folder, kind.prefix, {output: (*classes, config[C])})
    return classes[0]


def load_bert(model: Layer, folder: Folder, new: Collection[str] = ()) -> None:
    """Copy the weights of a folder into `model`, except into its layers named in `new`."""
    kind = published_as(folder)
    stored = tensor_names(folder, kind.prefix)
    tensors = {
        name: stored_as(name, kind, old="embeddings.LayerNorm.gamma" in stored)
        for name in model.named_parameters()
        if name.partition(".")[0] not in new
    }
    load_weights(model, folder, tensors, UNUSED, kind.prefix, kind.tied)


def stored_as(name: str, kind: Published = BERT, old: bool = False) -> TensorSource:
    """Where one of our parameters is in a file; old: whether the file calls the weights of norms gamma and beta."""
    leaves = OLD_LEAVES if old else LEAVES
    return TensorSource(stored_name(name, kind.layers, kind.blocks, leaves), transposed=name.endswith(".w"))
