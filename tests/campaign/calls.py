"""Calls of public functions and classes with valid arguments, of which the area `library` replaces some."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scratchformer import backend, data, generation, models, nn, ops, optim, records, rng, testing, training
from scratchformer.catalogue import LAYERS, OPERATIONS, Draw
from scratchformer.testing.contracts import is_array

KEY = rng.Key(3)
SIZES = {"d_model": 8, "heads": 2, "vocab_size": 11, "depth": 2, "context": 12, "max_length": 12, "num_classes": 3}
# Valid values of the arguments of layers and models. OTHERWISE has those that some classes need instead.
RIGHT = SIZES | dict(
    d_in=8, d_out=6, d_head=4, d_ff=6, kv_heads=2, head_width=4, window=3, width=1, stride=4, memory=3, rank=2,
    units=None, bias=True, causal=True, wide=True, relative=False, output_bias=True, feedforward_bias=True,
    recompute=True, tied=True, merged=False, next_sentence=True, dropout=0.1, p=0.1, eps=1e-5, std=0.5,
    embedding_std=0.5, label_smoothing=0.1, base=100.0, alpha=3.0, scale=2.0, norm="pre", activation="gelu",
    positions="learned", pool="mean", kind="fixed", evidence=3, key=KEY,
)  # fmt: skip


class Call(NamedTuple):
    """A function and valid arguments, by name. letters: for arrays, the letter of each axis, or "" if not known."""

    name: str
    function: Callable
    arguments: dict[str, Any]
    letters: dict[str, tuple[str, ...]] = {}  # noqa: RUF012


class Distinct(Draw):
    """A draw in which every letter has a size of its own, so that an axis can be recognised by its size."""

    def __getattr__(self, letter: str) -> int:
        drawn = letter not in self.sizes and letter != "C"
        size = super().__getattr__(letter)
        while drawn and list(self.sizes.values()).count(size) > 1:
            del self.sizes[letter]
            self.largest += 1
            size = super().__getattr__(letter)
        return size


def call_of(called: str, function: Callable, /, **arguments: Any) -> Call:
    return Call(called, function, arguments)


def calls(seed: int) -> dict[str, Callable[[], Call]]:
    """All calls by name, each made when it is needed."""
    found: dict[str, Callable[[], Call]] = {}
    for name in OPERATIONS:
        found[name] = lambda name=name: of_operation(name, seed)
        found[f"{name}, backward"] = lambda name=name: of_operation_backward(name, seed)
    for name in LAYERS:
        found[name] = lambda name=name: of_layer(name, seed)
        found[f"{name}, backward"] = lambda name=name: of_layer_backward(name, seed)
    for module, skipped in (nn, NOT_BY_SIZES), (models, {"Model"}):
        for name in set(module.__all__) - skipped:
            if inspect.isclass(made := getattr(module, name)):
                found[f"{name}(...)"] = lambda name=name, made=made: of_class(name, made)
    found |= {call: (lambda call=call: OTHERS[call]()) for call in OTHERS}
    return dict(sorted(found.items()))


NOT_BY_SIZES = {
    "Block", "FlatParameters", "Frozen", "Layer", "LoRA", "Param", "Recompute", "Residual", "Stack", "EmbeddingSum",
    "TiedOutput", "BasicSelfAttention", "SinusoidalPositions",
}  # fmt: skip


def of_operation(name: str, seed: int) -> Call:
    draw = Distinct(seed)
    case = OPERATIONS[name](draw)
    arguments = dict(zip(inspect.signature(case.op).parameters, case.args, strict=False)) | case.options
    return Call(f"ops.{case.op.__name__} ({name})", case.op, arguments, letters_of(draw, arguments))


def letters_of(draw: Draw, arguments: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The letter of each axis of the arrays; "" where two letters have this size."""
    by_size: dict[int, str] = {}
    for letter, size in draw.sizes.items():
        by_size[size] = letter if size not in by_size else ""
    return {name: tuple(by_size.get(n, "") for n in x.shape) for name, x in arguments.items() if is_array(x)}


def of_operation_backward(name: str, seed: int) -> Call:
    case = OPERATIONS[name](Distinct(seed))
    y, cache = case.op(*case.args, **case.options)
    dy, kept, *_ = inspect.signature(case.op_backward).parameters
    gradient = np.ones_like(y) if np.ndim(y) else 1.0
    letters = {dy: ("fixed",) * np.ndim(y)}
    return Call(f"ops.{name}, backward", case.op_backward, {dy: gradient, kept: cache}, letters)


def of_layer(name: str, seed: int) -> Call:
    draw = Distinct(seed)
    case = LAYERS[name](draw)
    names = list(inspect.signature(case.layer.forward).parameters)
    arguments = dict(zip(positional(case, names), case.inputs, strict=False)) | case.options
    letters = letters_of(draw, arguments)
    if case.layer.parameters():  # the width is that of the parameters
        letters = {n: tuple("fixed" if letter in "CI" else letter for letter in of) for n, of in letters.items()}
    function = case.layer.forward
    if any(n.isdecimal() for n in arguments):
        function = lambda **given: case.layer.forward(  # noqa: E731
            *(given[n] for n in given if n.isdecimal()), **{n: x for n, x in given.items() if not n.isdecimal()}
        )
    return Call(f"nn.{name}, forward", function, arguments, letters)


def positional(case: Any, names: list[str]) -> list[str]:
    """The names of the inputs, or numbers where forward takes any."""
    several = {"inputs", "arguments", "shared"} & {*names}
    return [str(i) for i in range(len(case.inputs))] if several else names


def of_layer_backward(name: str, seed: int) -> Call:
    case = LAYERS[name](Distinct(seed))
    y, cache = case.layer.forward(*case.inputs, **case.options)
    dy, kept, *_ = inspect.signature(case.layer.backward).parameters
    gradient = tuple(map(np.ones_like, y)) if isinstance(y, tuple) else np.ones_like(y)
    letters = {} if isinstance(y, tuple) else {dy: ("fixed",) * y.ndim}
    if name in LOOSE:
        letters = {}
    return Call(f"nn.{name}, backward", case.layer.backward, {dy: gradient, kept: cache}, letters)


# Layers that pass dy on without checking its shape.
LOOSE = {"Dropout", "SinusoidalPositions"}


def of_class(name: str, made: Callable) -> Call:
    parameters = inspect.signature(made.__init__).parameters
    if issubclass(made, models.Model):
        parameters = made.options()[0]
    arguments = {n: RIGHT[n] for n in parameters if n in RIGHT}
    arguments |= OTHERWISE.get(name, {})
    arguments = {n: x for n, x in arguments.items() if x is not LEFT_OUT}
    return Call(f"{made.__name__}(...)", made, arguments)


LEFT_OUT = object()
OTHERWISE: dict[str, dict[str, Any]] = {
    "SparseTransformer": {"positions": "grid", "width": 2, "embedding_std": LEFT_OUT, "window": 2},
    "GPT2": {"norm": LEFT_OUT, "positions": LEFT_OUT},
    "Bert": {"norm": LEFT_OUT},
    "Llama": {"window": 5},
    "MaskedPrediction": {"embedding": nn.TokenEmbedding(7, 8)},
    "TransformerXL": {"positions": LEFT_OUT, "relative": LEFT_OUT},
    "Body": {"wide": True, "d_ff": 5, "norm": "pre", "bias": True},
}


def small_model() -> models.LanguageModel:
    return models.LanguageModel(256, 8, 2, 1, 12)


def small_translator() -> models.EncoderDecoder:
    return models.EncoderDecoder(11, 8, 2, 1)


def of_optimizer(made: Callable, **more: Any) -> Call:
    def stepped(**arguments: Any) -> None:
        layer = nn.Linear(3, 2)
        arguments["params"] = layer.parameters() if arguments["params"] is PARAMS else arguments["params"]
        made(**arguments).step()

    return call_of(made.__name__, stepped, params=PARAMS, lr=0.1, weight_decay=0.1, **more)


class Parameters(list):
    """Stands for the parameters of the layer that is stepped."""


PARAMS = Parameters()


def of_schedule(made: Callable, **arguments: Any) -> Call:
    return call_of(made.__name__, lambda step, **given: made(**given)(step), step=3, peak=0.1, warmup=4, **arguments)


def generated(**arguments: Any) -> list:
    return list(islice(generation.generate(small_model(), **arguments), 4))


def trained(batches: Any, select: tuple[str, str], keep: int, every: int, clip: float, **arguments: Any) -> None:
    model = small_model()
    with training.Replicas(model, 1) as replicas:
        sgd, run = optim.SGD(model.parameters(), 0.1), training.Run(**arguments)
        for step in run.steps(replicas, sgd, batches, select, keep, every, every):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))
            run.log(loss=loss, norm=replicas.clip(sgd, clip))
            replicas.step(sgd)


def text_batches(**arguments: Any) -> Any:
    return data.TextBatches(**arguments).batch(1)


def scored(of: Callable, **arguments: Any) -> Any:
    return of(training.Replicas(small_model(), 1), **arguments)


def learned(lr: float, **arguments: Any) -> Any:
    model = small_model()
    optimizer = optim.SGD(model.parameters(), lr)
    return records.evaluate_dynamic(training.Replicas(model, 1), optimizer=optimizer, **arguments)


def consumed(of: Callable, **arguments: Any) -> list:
    return list(of(**arguments))


TEXT = np.arange(60, dtype=np.uint8)
LABELLED = data.Labelled([np.arange(1, 9), np.arange(2, 5)], np.array([0, 1]))
LOGITS = np.linspace(-1, 1, 22).reshape(2, 11)

OTHERS: dict[str, Callable[[], Call]] = {
    "SGD": lambda: of_optimizer(optim.SGD, momentum=0.5, groups=[optim.Group("b", lr=0.2, weight_decay=0.0)]),
    "Adam": lambda: of_optimizer(optim.Adam, betas=(0.9, 0.99), eps=1e-8),
    "AdamW": lambda: of_optimizer(optim.AdamW, betas=(0.9, 0.99), eps=1e-8),
    "Muon": lambda: of_optimizer(
        optim.Muon, adam_lr=0.1, momentum=0.9, betas=(0.9, 0.99), eps=1e-8, hidden="w", precision="float32"
    ),
    "newton_schulz": lambda: call_of(
        "newton_schulz", optim.newton_schulz, g=np.ones((2, 3), np.float32), precision="float32"
    ),
    "Group": lambda: call_of(
        "Group",
        lambda **given: optim.SGD(nn.Linear(3, 2).parameters(), 0.1, groups=[optim.Group(**given)]),
        match="w",
        lr=0.1,
        weight_decay=0.1,
        frozen=False,
    ),
    "Constant": lambda: of_schedule(optim.Constant),
    "Cosine": lambda: of_schedule(optim.Cosine, total=9, floor=0.01),
    "InverseSquareRoot": lambda: of_schedule(optim.InverseSquareRoot),
    "clip_by_global_norm": lambda: call_of(
        "clip_by_global_norm", optim.clip_by_global_norm, grad=np.ones(5, np.float32), max_norm=1.0
    ),
    "Key": lambda: call_of("Key", lambda word: rng.Key(1, word), word=3),
    "fold": lambda: call_of("Key.fold", lambda part: KEY.fold(part), part="a layer"),
    "get_device": lambda: call_of("get_device", backend.get_device, name="cpu"),
    "to_device": lambda: call_of("to_device", backend.to_device, x=np.ones(3), device=backend.CPU),
    "Param": lambda: call_of("Param", nn.Param, data=np.ones((2, 3), np.float32), name="w"),
    "Layer.to": lambda: call_of("Layer.to", nn.Linear(2, 3).to, device="cpu", dtype=np.float64),
    "LoRA": lambda: call_of("LoRA", nn.LoRA, linear=nn.Linear(4, 3), rank=2, alpha=3.0, key=KEY),
    "add_lora": lambda: call_of(
        "add_lora", lambda **given: nn.add_lora(nn.TransformerBlock(8, 2), **given), rank=2, alpha=3.0, key=KEY
    ),
    "Frozen": lambda: call_of("Frozen", nn.Frozen, layer=nn.Linear(4, 3)),
    "Recompute": lambda: call_of("Recompute", nn.Recompute, layer=nn.TransformerBlock(8, 2)),
    "TiedOutput": lambda: call_of("TiedOutput", nn.TiedOutput, embedding=nn.TokenEmbedding(5, 4), bias=True),
    "Residual": lambda: call_of(
        "Residual", nn.Residual, branch=nn.FeedForward(4, 6), norm=nn.LayerNorm(4), order="pre", dropout=nn.Dropout(0.1)
    ),
    "Stack": lambda: call_of(
        "Stack", nn.Stack, blocks=[nn.TransformerBlock(8, 2)], norm=nn.LayerNorm(8), recompute=True
    ),
    "EmbeddingSum": lambda: call_of(
        "EmbeddingSum",
        nn.EmbeddingSum,
        embeddings=[nn.TokenEmbedding(5, 4)],
        positions=nn.PositionEmbedding(6, 4),
        norm=nn.LayerNorm(4),
        dropout=nn.Dropout(0.1),
        scale=2.0,
    ),
    "Block": lambda: call_of(
        "Block",
        nn.Block,
        attention=nn.SelfAttention(8, 2),
        feedforward=nn.FeedForward(8, 9),
        norm1=nn.LayerNorm(8),
        norm2=nn.LayerNorm(8),
        norm="pre",
        dropout=0.1,
    ),
    "load_state_dict": lambda: call_of(
        "load_state_dict", nn.Linear(4, 3).load_state_dict, state=nn.Linear(4, 3).state_dict()
    ),
    "Local": lambda: call_of("Local", ops.Local, radius=3),
    "Strided": lambda: call_of("Strided", ops.Strided, stride=3),
    "SameBlock": lambda: call_of("SameBlock", ops.SameBlock, size=3),
    "BlockEnds": lambda: call_of("BlockEnds", ops.BlockEnds, stride=4, width=2),
    "Padding": lambda: call_of("Padding", ops.Padding, lengths=np.array([1, 3])),
    "Edges": lambda: call_of("Edges", ops.Edges, allowed=np.eye(3) > 0),
    "Heads": lambda: call_of("Heads", lambda first, second: ops.Heads(first, second), first=ops.Causal(), second=None),
    "pattern & pattern": lambda: call_of("&", lambda pattern: ops.Causal() & pattern, pattern=ops.Full()),
    "pattern | pattern": lambda: call_of("|", lambda pattern: ops.Causal() | pattern, pattern=ops.Full()),
    "sinusoidal_positions": lambda: call_of(
        "sinusoidal_positions", ops.sinusoidal_positions, length=5, d_model=6, dtype=np.float32, start=2
    ),
    "rotary_frequencies": lambda: call_of("rotary_frequencies", ops.rotary_frequencies, head_width=6, base=100.0),
    "probabilities": lambda: call_of(
        "probabilities",
        generation.probabilities,
        logits=LOGITS,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        allowed=np.ones(11, bool),
    ),
    "sample": lambda: call_of("sample", generation.sample, p=np.full((2, 4), 0.25), key=KEY),
    "generate": lambda: call_of(
        "generate",
        generated,
        prompt=np.array([[1, 2, 3]]),
        tokens=4,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        key=KEY,
        repetition_penalty=1.2,
        stop=np.array([7]),
    ),
    "penalised": lambda: call_of(
        "penalised", generation.penalised, logits=LOGITS, occurred=np.ones((2, 11), bool), penalty=1.2
    ),
    "stream_texts": lambda: call_of(
        "stream_texts",
        lambda **given: list(generation.stream_texts(small_model(), **given)),
        prompts=["A text", "B"],
        tokens=3,
        temperature=0.7,
    ),
    "stream_text": lambda: call_of(
        "stream_text",
        lambda **given: list(generation.stream_text(small_model(), **given)),
        prompt="A text",
        tokens=3,
        temperature=0.7,
        stop=["x"],
    ),
    "beam_search": lambda: call_of(
        "beam_search",
        lambda **given: generation.beam_search(small_translator(), **given),
        source=np.array([[4, 5, 2]]),
        lengths=np.array([3]),
        begin=1,
        end=2,
        beam=2,
        length_penalty=0.6,
        longer=3,
    ),
    "bleu": lambda: call_of("bleu", generation.bleu, translations=["A text."], references=["A text."]),
    "cache_for": lambda: call_of(
        "cache_for",
        lambda model, batch_size, ids: generation.cache_for(model, batch_size).logits(ids),
        model=small_model(),
        batch_size=2,
        ids=np.array([[1, 2], [3, 4]]),
    ),
    "Replicas": lambda: call_of("Replicas", training.Replicas, model=small_model(), count=2, micro_batch=3),
    "Run": lambda: call_of(
        "Run",
        trained,
        batches=data.TextBatches(TEXT, 2, 12, KEY),
        select=("loss", "min"),
        keep=0,
        every=1,
        clip=1.0,
        out=Path("run"),
        steps=1,
        seed=1,
    ),
    "evaluate_language_model": lambda: call_of(
        "evaluate_language_model",
        lambda **given: scored(training.evaluate_language_model, **given),
        data=TEXT,
        stride=5,
        batch_size=2,
    ),
    "evaluate_dynamic": lambda: call_of(
        "evaluate_dynamic",
        learned,
        data=TEXT,
        lr=0.1,
        stride=5,
        windows_per_step=2,
        learn="new",
    ),
    "DynamicRMS": lambda: call_of(
        "DynamicRMS",
        lambda **given: records.DynamicRMS(nn.Linear(3, 2).parameters(), **given),
        lr=0.1,
        decay=0.1,
        eps=0.1,
    ),
    "TextBatches": lambda: call_of("TextBatches", text_batches, data=TEXT, batch_size=2, context=5, key=KEY),
    "SegmentBatches": lambda: call_of(
        "SegmentBatches",
        lambda **given: data.SegmentBatches(**given).batch(0),
        data=TEXT,
        batch_size=2,
        context=5,
        key=KEY,
        depth=1,
        d_model=4,
    ),
    "DrawnBatches": lambda: call_of(
        "DrawnBatches",
        lambda **given: data.DrawnBatches(**given).batch(1),
        whole=data.TextBatch(TEXT.reshape(6, 10), TEXT.reshape(6, 10)),
        batch_size=2,
        key=KEY,
    ),
    "LabelledBatches": lambda: call_of(
        "LabelledBatches",
        lambda **given: data.LabelledBatches(**given).batch(1),
        dataset=LABELLED,
        batch_size=1,
        max_length=6,
        key=KEY,
    ),
    "in_order": lambda: call_of(
        "in_order", lambda **given: consumed(data.in_order, **given), dataset=LABELLED, batch_size=1, max_length=6
    ),
    "windows": lambda: call_of(
        "windows", lambda **given: consumed(data.windows, **given), data=TEXT, context=8, stride=4, batch_size=2
    ),
    "Vocabulary": lambda: call_of("Vocabulary", data.Vocabulary, words=["a", "text"]),
    "Vocabulary.build": lambda: call_of("Vocabulary.build", data.Vocabulary.build, texts=["a text", "a word"], size=4),
    "Vocabulary.encode": lambda: call_of("Vocabulary.encode", data.Vocabulary(["a"]).encode, text="a text"),
    "Vocabulary.decode": lambda: call_of("Vocabulary.decode", data.Vocabulary(["a"]).decode, ids=np.array([2, 1])),
    "tokenize": lambda: call_of("tokenize", data.tokenize, text="a text"),
    "model.allocate": lambda: call_of("allocate", small_model().allocate, batch_size=2),
    "KeyValueCache.logits": lambda: call_of(
        "KeyValueCache.logits",
        lambda ids: generation.KeyValueCache(small_model(), 2).logits(ids),
        ids=np.array([[1, 2], [3, 4]]),
    ),
    "DecoderCache": lambda: call_of(
        "DecoderCache",
        lambda ids, **given: generation.DecoderCache(**given).logits(ids),
        model=small_translator(),
        source=np.array([[4, 5, 2]]),
        lengths=np.array([3]),
        length=4,
        copies=2,
        ids=np.array([[1], [2]]),
    ),
    "DecoderCache.reorder": lambda: call_of(
        "DecoderCache.reorder",
        generation.DecoderCache(small_translator(), np.array([[4, 5, 2]]), np.array([3]), 4, 2).reorder,
        rows=np.array([1, 0]),
    ),
    "Replicas.gradients": lambda: call_of(
        "Replicas.gradients",
        training.Replicas(small_model(), 1).gradients,
        batch=data.TextBatches(TEXT, 2, 12, KEY).batch(0),
        key=KEY,
    ),
    "loss": lambda: call_of("loss", small_model().loss, ids=TEXT[None, :12], targets=TEXT[None, 1:13], key=KEY),
    "loss_backward": lambda: call_of(
        "loss_backward",
        (model := small_model()).loss_backward,
        dloss=1.0,
        cache=model.loss(TEXT[None, :12], TEXT[None, 1:13])[1],
    ),
    "TransformerXL.remember": lambda: call_of(
        "remember",
        (model := models.TransformerXL(11, 8, 2, 1, 5, 3)).remember,
        cache=model.forward(np.array([[1, 2, 3]]))[1],
        length=2,
    ),
    "evaluate_classifier": lambda: call_of(
        "evaluate_classifier",
        lambda **given: training.evaluate_classifier(
            training.Replicas(models.Classifier(12, 2, 8, 2, 1, 8), 1), **given
        ),
        dataset=LABELLED,
        max_length=6,
        keep="head",
        batch_size=2,
    ),
    "scores_of_classes": lambda: call_of(
        "scores_of_classes", records.scores_of_classes, probabilities=np.full((3, 2), 0.5), labels=np.array([0, 1, 1])
    ),
    "stack_weights": lambda: call_of(
        "stack_weights",
        records.stack_weights,
        probabilities=np.full((3, 2), 0.5),
        logits=np.array([0.5, -1.0, 2.0]),
        labels=np.array([0, 1, 1]),
    ),
    "stacked": lambda: call_of(
        "stacked",
        records.stacked,
        probabilities=np.full((3, 2), 0.5),
        logits=np.array([0.5, -1.0, 2.0]),
        weights=np.array([0.4, 0.6]),
    ),
    "evaluate_transformer_xl": lambda: call_of(
        "evaluate_transformer_xl",
        lambda **given: training.evaluate_transformer_xl(
            training.Replicas(models.TransformerXL(256, 8, 2, 1, 5, 3), 1), **given
        ),
        data=TEXT,
        memory=4,
        streams=2,
    ),
    "Param.grad": lambda: call_of(
        "Param.grad = ", lambda **given: setattr(nn.Linear(3, 2).w, "grad", given["grad"]), grad=np.ones((3, 2))
    ),
    "Subwords.bpe": lambda: call_of("Subwords.bpe", data.Subwords.bpe, texts=["a text", "a word"], size=20),
    "check_gradients": lambda: call_of(
        "check_gradients",
        lambda x, **given: testing.check_gradients(ops.tanh, ops.tanh_backward, x, **given),
        x=np.ones((2, 3)),
        seed=1,
        directions=1,
        max_elements=3,
    ),
    "check_layer": lambda: call_of(
        "check_layer",
        lambda layer, x, **given: testing.check_layer(layer, x, **given),
        layer=nn.Linear(3, 2),
        x=np.ones((2, 3)),
        seed=1,
        directions=1,
        max_elements=3,
    ),
}
