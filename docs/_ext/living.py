"""A living training step: `.. living::` puts a small model into the page, which runs it from the plan of its trace.

Each plan is a script in _static/living/models, which a page loads when its model is shown; so are the functions of each
operation, which the plans share. The tutorial's generator is put together from the parts that the reader chooses: there
is a plan for each combination of parts, in which the numbers and widths of heads are letters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from itertools import product
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import numpy as np
from docutils import nodes
from levels import Without
from live import PageSizes, checked, planted
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from static_files import load_files
from step_plan import Functions, StepPlan, operations_json, plan_of, with_mistake, wrong_plans

from scratchformer import models, nn
from scratchformer.catalogue import mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.compiler.derivation import Derivation
from scratchformer.compiler.javascript_code import javascript_source
from scratchformer.optim.adam import adam_step
from scratchformer.optim.sgd import sgd_step
from scratchformer.pages.live import begin
from scratchformer.rng import Key

ROWS, LENGTH, SYMBOLS = 6, 12, 24  # sequences in a batch, of which the first one is drawn; tokens in each; known tokens
HIDDEN, SOURCE = 2, 8  # tokens that BERT predicts in each sequence, and those that are translated
NORMS: dict[str, Callable[..., nn.Layer]] = {"layer": nn.LayerNorm, "RMS": nn.RMSNorm}
ATTENTION: dict[str, Callable[..., nn.Layer]] = {"relative": nn.RelativeSelfAttention, "rotary": nn.RotarySelfAttention}
PARTS: dict[str, tuple[Any, ...]] = {
    "positions": ("learned", "sinusoidal", "relative", "rotary", "none"),
    "norm": tuple(NORMS),
    "order": ("post", "pre"),
    "depth": (1, 2),
}
SIZES = {"width": (8, 16, 24, 32), "heads": (1, 2, 4)}
FIRST = dict(width=16, heads=2, positions="learned", norm="layer", order="post", depth=1, optimizer="Adam")
GENERATOR = "LanguageModel"
LETTERS = {"H": 5, "D": 14}  # the sizes of heads while a plan is made
SEED = 3
SETTINGS = dict(momentum=0.9, beta1=0.9, beta2=0.999, eps=1e-8, share=1.0)
OPTIMIZERS = {  # how each one steps: its function, its settings, and a learning rate to begin with
    "Adam": ("adam_step", {"decay": 0.0}, 0.01),
    "AdamW": ("adam_step", {"decay": 0.01}, 0.01),
    "momentum": ("sgd_step", {"decay": 0.0}, 0.1),
    "SGD": ("sgd_step", {"decay": 0.0, "momentum": 0.0}, 0.3),
}
TEXT = """\
the cat sat on the mat. the dog sat on the log. the cat saw the dog, and the dog saw the cat. \
a bird came to the tree, and the cat ran to the tree. the bird sang a song. the dog lay in the sun. \
"""
FILES = (
    "live/evaluate.js",
    "live/live.js",
    "living/step.js",
    "living/tasks.js",
    "living/picture.js",
    "living/living.js",
)
STYLES = ("live/live.css", "living/living.css")


class Shown(NamedTuple):
    """A model of the family: what it is called, how it is made, what it learns (see tasks.js), and a batch for that."""

    title: str
    make: Callable[..., Any]
    task: str
    batch: Callable[[np.random.Generator], tuple[np.ndarray, ...]]


def texts(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    return tuple(draw.integers(0, SYMBOLS, (2, ROWS, LENGTH)))


def segments(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Texts, and a memory of as many vectors for the one block."""
    return *texts(draw), draw.standard_normal((ROWS, 1, LENGTH, small["d_model"]))


def pairs(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Rows of two texts, with hidden tokens."""
    ids, _ = texts(draw)
    lengths, second = np.full(ROWS, LENGTH), np.arange(LENGTH) // (LENGTH // 2) * np.ones((ROWS, 1), int)
    places = np.sort(draw.permuted(np.tile(np.arange(1, LENGTH), (ROWS, 1)), axis=1)[:, :HIDDEN])
    return ids, lengths, second, places, draw.integers(0, SYMBOLS, (ROWS, HIDDEN)), draw.integers(0, 2, ROWS)


def translations(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    source, target, targets = draw.integers(0, SYMBOLS, (3, ROWS, SOURCE))
    return source, np.full(ROWS, SOURCE), target, targets


def classes(draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    ids, _ = texts(draw)
    return ids, np.full(ROWS, LENGTH), draw.integers(0, 2, ROWS)


small = dict(vocab_size=SYMBOLS, d_model=12, heads=2, depth=1)
FAMILY = {
    "GPT2": Shown("GPT-2", partial(models.GPT2, **small, context=LENGTH), "next", texts),
    "Llama": Shown("Llama", partial(models.Llama, **small, context=LENGTH, kv_heads=1, d_ff=24), "next", texts),
    "SparseTransformer": Shown(
        "the sparse transformer", partial(models.SparseTransformer, **small, context=LENGTH, stride=4), "next", texts
    ),
    "TransformerXL": Shown(
        "Transformer-XL", partial(models.TransformerXL, **small, context=LENGTH, memory=LENGTH), "segments", segments
    ),
    "BertPretraining": Shown(
        "BERT", partial(models.BertPretraining, **small, max_length=LENGTH, d_ff=24), "hidden", pairs
    ),
    "EncoderDecoder": Shown(
        "the encoder-decoder", partial(models.EncoderDecoder, **small, d_ff=24), "backwards", translations
    ),
    "Classifier": Shown(
        "the classifier", partial(models.Classifier, **small, max_length=LENGTH, num_classes=2), "direction", classes
    ),
}
MODELS = {GENERATOR: "the tutorial's generator"} | {name: shown.title for name, shown in FAMILY.items()}


def block(d_model: int, heads: int, key: Key, positions: str, norm: str, order: str) -> nn.Block:
    """A block of the generator. Its feed-forward layer is twice as wide as the model."""
    attention = ATTENTION.get(positions, nn.SelfAttention)(d_model, heads, causal=True, key=key.fold("attention"))
    feedforward = nn.FeedForward(d_model, 2 * d_model, key=key.fold("feedforward"))
    return nn.Block(attention, feedforward, NORMS[norm](d_model), NORMS[norm](d_model), order)


def generator(
    width: int, heads: int, positions: str = "learned", norm: str = "layer", order: str = "post", depth: int = 1
) -> models.LanguageModel:
    """The tutorial's generator with the parts of a reader's choice, in float64."""
    outside = positions if positions in ("learned", "sinusoidal") else "none"
    made = partial(block, positions=positions, norm=norm, order=order)
    last = NORMS[norm] if order == "pre" else None
    options = dict(positions=outside, block=made, final_norm=last, key=Key(SEED))
    return models.LanguageModel(SYMBOLS, width, heads, depth, LENGTH, **options).to(dtype=np.float64)


def make_model(name: str) -> Any:
    """A model of the family, in float64."""
    return FAMILY[name].make(key=Key(SEED)).to(dtype=np.float64)


def combinations() -> Iterator[dict[str, Any]]:
    """Every choice of the generator's parts."""
    yield from (dict(zip(PARTS, chosen, strict=True)) for chosen in product(*PARTS.values()))


def key_of(parts: dict[str, Any]) -> str:
    return "-".join([GENERATOR, *map(str, parts.values())])


def living_data(name: str, functions: Functions) -> dict[str, dict[str, Any]]:
    """What the page runs, by key: for a model of the family its plan and what it learns; and for each mistake in the
    code of its layers, the plan of the step that the wrong code takes.
    """
    shown, model, draw = FAMILY[name], make_model(name), np.random.default_rng(SEED)
    batch = shown.batch(draw)
    plan, made = plan_of(model, *batch, functions=functions)
    return with_mistakes(name, plan | {"task": shown.task}, made, batch)


def generator_data(parts: dict[str, Any], functions: Functions) -> dict[str, dict[str, Any]]:
    """The same for the generator with these parts, for all widths and numbers of heads."""
    model, batch = generator(LETTERS["H"] * LETTERS["D"], LETTERS["H"], **parts), texts(np.random.default_rng(SEED))
    plan, made = plan_of(model, *batch, letters=LETTERS, functions=functions)
    return with_mistakes(key_of(parts), plan | {"task": "next"}, made, batch)


def with_mistakes(
    key: str, plan: dict[str, Any], made: StepPlan, batch: tuple[np.ndarray, ...]
) -> dict[str, dict[str, Any]]:
    """The plan, with the weights at the beginning and the mistakes in its layers, and the plans of these mistakes."""
    data = {}
    plan |= {"start": start(made), "mistakes": [], **stepped(plan, made, batch)}
    for i, (mistake, wrong) in enumerate(wrong_plans(made, *batch)):
        told = {"operation": mistake.name.partition(":")[0], "title": mistake.title, "effect": mistake.effect}
        code = [dedent(" " * 100 + text).strip() for text in next(iter(mistake.replace.items()))]
        plan["mistakes"].append({**told, "functions": {}, "code": code, "plan": f"{key}-{i}"})
        data[f"{key}-{i}"] = wrong[0] | stepped(*wrong, batch)
    return {key: plan} | data


def stepped(plan: dict[str, Any], made: StepPlan, batch: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """What a step gives to the next one, such as the memory of Transformer-XL."""
    kept: dict[str, Any] = {"carry": {}}
    if "memory" in plan["inputs"]:
        _, (forward, _) = made.model.loss(*batch)
        kept["carry"] = {"memory": made.as_json(made.place(made.model.remember(forward)))}
    return kept


def start(made: StepPlan) -> dict[str, list[Any]]:
    """How each parameter begins: its mean, and its standard deviation times the root of a size. The page draws it."""
    beginnings = {}
    parameters = made.model.named_parameters()
    for name, p in parameters.items():
        layer, _, last = name.rpartition(".")
        inputs = parameters[f"{layer}.w"].data.shape[0] if last in "wb" and f"{layer}.w" in parameters else 1
        spread = p.data.std() * np.sqrt(inputs)
        if inputs > 1 and 0.45 < spread < 0.7:  # of a uniform distribution up to 1/√inputs: 1/√3
            beginnings[name] = [0, 3**-0.5, made.symbol(inputs)]
        else:
            beginnings[name] = [round(float(p.data.mean()) * (p.data.std() == 0), 6), round(float(p.data.std()), 3), 1]
    return beginnings


def settings_data() -> dict[str, Any]:
    """What is the same for all models: the text, how long its pieces are, the choices, and the optimizers."""
    return {
        "rows": ROWS,
        "length": LENGTH,
        "symbols": SYMBOLS,
        "hidden": HIDDEN,
        "source": SOURCE,
        "text": TEXT,
        "parts": PARTS,
        "sizes": SIZES,
        "first": FIRST,
        "settings": SETTINGS,
        "optimizers": OPTIMIZERS,
        "steps": {step.reference.__name__: step_data(step) for step in (adam_step, sgd_step)},
    }


def step_data(step: Any) -> dict[str, Any]:
    """A step of an optimizer: its code, and its equations for one weight as a live page takes them (`live.begin`);
    and the known mistakes in it, each with the code that it makes.
    """
    name = step.reference.__name__
    sizes = PageSizes(name)
    sizes.F = 1
    case = CASES[name](sizes)
    report, mistakes = checked(case), []
    data = begin(case, report)
    for mistake in mistakes_of(name):
        derivation = Derivation(step.reference, None)
        derivation.definitions, _ = with_mistake(derivation.definitions, mistake)
        source = javascript_source(derivation.compile().forward)
        told = planted(mistake, report, Without({}, frozenset(), None))
        both = {"right": data["items"][told["line"]]["html"], "wrong": told["html"]}
        mistakes.append(told | both | {"operation": name, "source": source, "functions": {}})
    source = javascript_source(Derivation(step.reference, None).compile().forward)
    return data | {"mistakes": mistakes, "source": source}


def script(key: str, data: dict[str, Any]) -> str:
    """A script that gives a page some data. A page that is opened as a file can load scripts, and no JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"(globalThis.LivingModels ??= {{}})[{json.dumps(key)}] = {text};\n"


def living_html(name: str = GENERATOR) -> str:
    return (
        f'<section class="living" data-model="{name}" data-models="{escape(json.dumps(MODELS))}" '
        'aria-label="A training step of a small transformer">\n'
        "<noscript><p>With JavaScript, a small transformer is trained here.</p></noscript>\n</section>"
    )


class LivingStep(SphinxDirective):
    """The living training step of a model: `.. living:: GPT2`, by default the tutorial's generator."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", living_html(*self.arguments), format="html")]


def write_models(folder: Path) -> None:
    """Write the data of all models below a site's folder."""
    into = folder / "_static" / "living" / "models"
    into.mkdir(parents=True, exist_ok=True)
    functions: Functions = {}
    data = {"settings": settings_data()}
    for parts in combinations():
        data |= generator_data(parts, functions)
    for name in FAMILY:
        data |= living_data(name, functions)
    data |= {f"of-{name}": each for name, each in operations_json(functions).items()}
    for key, each in data.items():
        (into / f"{key}.js").write_text(script(key, each), encoding="utf-8")


def finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        write_models(Path(app.outdir))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("living", LivingStep)
    load_files(app, '<section class="living', *STYLES, *FILES)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
