"""What the presets train with; those named tutorial have the settings of the tutorial's own programs."""

import json

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.models import LanguageModel
from scratchformer.nn.recompute import recomputes_blocks
from scratchformer.optim import Adam, AdamW, Constant, Cosine, InverseSquareRoot, Muon
from scratchformer.rng import Key
from scratchformer.training import stage
from scratchformer.training.settings import start_run

NEEDED = {
    **dict.fromkeys(["gpt2", "bert", "reviews"], ("tokenizers",)),
    "translate": ("tokenizers", "sacrebleu", "sacremoses"),
    **dict.fromkeys(["digits", "units"], ("sklearn", "networkx")),
}


class Captured(Exception):
    """Ends a program just before it trains."""


@pytest.fixture
def trained(example, text_file, reviews_folder, sentences_folder, tmp_path, monkeypatch):
    """trained("imdb", "--preset", "tutorial"): the model, optimizer, schedule, batches and steps passed to `train`."""

    def run(name, *options, gradients=False):
        def train(replicas, optimizer, schedule, batches, steps, *_arguments, **_options):
            if gradients:
                assert np.isfinite(replicas.gradients(batches.batch(0).split(2)[0], Key(0)))
            raise Captured(replicas.model, optimizer, schedule, batches, steps)

        monkeypatch.setattr(stage, "train", train)
        reviews = dict.fromkeys(["imdb", "bert", "reviews"], reviews_folder)
        data = (reviews | {"translate": sentences_folder}).get(name, text_file)
        without = name in ("digits", "units") or any(str(option).startswith("photos") for option in options)
        source = () if without else ("--data", data)
        source += ("--validation", 100) if name in reviews and "--resume" not in options else ()
        folder = () if "--resume" in options else ("--out", tmp_path / "new", "--replicas", 1)
        with pytest.raises(Captured) as captured:
            example(name).start([str(x) for x in (*source, "--device", "cpu", *folder, *options)])
        return captured.value.args

    return run


@pytest.mark.parametrize(
    "name", ["enwik8", "imdb", "bert", "reviews", "gpt2", "translate", "sparse", "digits", "units"]
)
def test_a_gradient_at_the_default_sizes(trained, name):
    """The other tests run the programs with the sizes in TINY."""
    for module in NEEDED.get(name, ()):
        pytest.importorskip(module)
    model = trained(name, "--recompute", gradients=True)[0]
    assert recomputes_blocks(model)
    assert model.flat.data.size > 100_000 or name in ("digits", "units")


def test_xl_has_no_more_parameters(trained):
    plain, xl = (trained("enwik8", "--model", model, "--recall", 0)[0].flat.data.size for model in ("plain", "xl"))
    assert 0.95 * plain < xl <= plain


def test_the_generator_of_the_tutorial(trained):
    """5,000 texts of warm-up, in batches of 32, then a constant rate; no regularisation."""
    model, optimizer, schedule, batches, steps = trained("enwik8", "--preset", "tutorial")
    assert schedule == Constant(1e-4, 156) and steps == 170_000
    assert batches.batch(0).ids.shape == (32, 256)
    assert model.config["norm"] == "post" and model.body.dropout.p == optimizer.weight_decay == 0


def test_the_classifier_of_the_tutorial(trained):
    """10,000 texts of warm-up, in batches of 4; 80 epochs of the training part; no regularisation."""
    model, optimizer, schedule, batches, steps = trained("imdb", "--preset", "tutorial")
    assert schedule == Constant(1e-4, 2_500) and steps == 450_000
    assert len(batches.batch(0).ids) == 4 and batches.keep == "head" and batches.word_dropout == 0
    assert model.config["norm"] == "post" and model.body.dropout.p == optimizer.weight_decay == 0


def test_the_schedule_is_an_option(trained):
    adam = ("--optimizer", "adam")
    assert trained("enwik8", *adam)[2] == Cosine(2e-3, 100, 1000, floor=2e-4)
    assert trained("enwik8", *adam, "--schedule", "constant")[2] == Constant(2e-3, 100)
    shorter = trained("enwik8", "--preset", "tutorial", "--schedule", "cosine", "--steps", 100)
    assert shorter[2] == Cosine(1e-4, 20, 100, floor=1e-5)


def test_enwik8_recalls_and_learns_with_muon(trained):
    """The presets `small` and `hour` use recall and Muon; `tutorial` uses neither."""
    for preset, d_model, columns in ("small", 128, 20), ("hour", 256, 20):
        model, optimizer, _, batches, _ = trained("enwik8", "--preset", preset)
        assert (type(optimizer), optimizer.lr, optimizer.adam_lr) == (Muon, 0.02, 2e-3)
        assert batches.batch(0).ids.shape[2] == columns
        assert batches.data.dtype == np.uint16
        assert model.body.further[-1].table.data.shape == ((columns - 1) * 257, d_model)
    model, optimizer, _, batches, _ = trained("enwik8", "--preset", "tutorial")
    assert not model.body.further and type(optimizer) is not Muon and batches.batch(0).ids.ndim == 2


def test_the_translators_of_an_hour_are_three_of_the_usual_size(trained, example):
    for module in NEEDED["translate"]:
        pytest.importorskip(module)
    usual, hour = (trained("translate", "--preset", preset) for preset in ("small", "hour"))
    assert hour[0].config == usual[0].config and (usual[4], hour[4]) == (7680, 6400)
    preset = example("translate").presets["hour"]
    assert (preset["models"], preset["backwards"], preset["neighbours"]) == (3, 1, 32)


def test_the_photographs_are_read_with_the_color_before_in_sight(trained):
    """The strided heads see 639 back, where another color of the pixel to come is."""
    for module in "sklearn", "PIL":
        pytest.importorskip(module)
    model, optimizer, _, batches, _ = trained("sparse", "--preset", "photos")
    assert model.pattern.of_heads(4) == [(slice(0, 2), ops.Local(31)), (slice(2, 4), ops.Strided(639))]
    assert type(optimizer) is Muon and batches.batch(0).ids.shape == (2, 4096)
    other, optimizer, _, batches, _ = trained("sparse", "--preset", "photos-full")
    assert type(optimizer) is Muon and batches.batch(0).ids.shape == (32, 256) and type(other) is LanguageModel
    assert len(batches.data) == 2 * 369 * 3 * 640


def test_muon_is_an_option(trained):
    """Its rate is that of the schedule; AdamW keeps the preset's. There are matrices of blocks in every model."""
    for model in "plain", "xl", "llama":
        optimizer, schedule = trained("enwik8", "--model", model, "--optimizer", "muon", "--muon-lr", "0.03")[1:3]
        assert (type(optimizer), optimizer.lr, optimizer.adam_lr) == (Muon, 0.03, 2e-3)
        assert schedule == Cosine(0.03, 100, 1000, floor=0.003)


def test_muon_translates(trained):
    """It steps the matrices of both stacks, and nothing else; the schedule is then a cosine."""
    for module in NEEDED["translate"]:
        pytest.importorskip(module)
    options = ("--optimizer", "muon", "--muon-lr", "0.03", "--steps", 1000)
    model, optimizer, schedule = trained("translate", *options)[:3]
    assert (type(optimizer), optimizer.lr) == (Muon, 0.03)
    assert schedule == Cosine(0.03, 200, 1000, floor=0.0015)
    stacks = [*model.encoder, *model.decoder]
    matrices = [p for block in stacks for p in block.parameters() if p.name == "w"]
    whole = [p for p, how in zip(optimizer.stepped, optimizer.treatments, strict=True) if how.whole]
    assert {id(p) for p in whole} == {id(p) for p in matrices}


def test_the_translator_learns_with_muon_and_the_preset_adam_as_in_the_paper(trained):
    for module in NEEDED["translate"]:
        pytest.importorskip(module)
    model, optimizer, schedule, _, steps = trained("translate")
    assert (type(optimizer), optimizer.lr, optimizer.adam_lr, steps) == (Muon, 0.01, 5e-3, 7680)
    assert schedule == Cosine(0.01, 300, 7680, floor=0.0005) and model.config["norm"] == "pre"
    for preset, peak, warmup in ("adam", 4e-3, 1920), ("paper", 7e-4, 4000):
        model, optimizer, schedule = trained("translate", "--preset", preset)[:3]
        assert type(optimizer) is Adam and schedule == InverseSquareRoot(peak, warmup)
        assert model.config["norm"] == "post"


def test_muon_pre_trains(trained):
    pytest.importorskip("tokenizers")
    _, optimizer, schedule, _, steps = trained("bert")
    assert (type(optimizer), optimizer.lr, optimizer.adam_lr) == (Muon, 0.01, 1e-3)
    assert schedule == Cosine(0.01, 100, 5_000) and steps == 5_000
    optimizer, schedule = trained("bert", "--muon-lr", "0.03")[1:3]
    assert (type(optimizer), optimizer.lr, schedule.peak) == (Muon, 0.03, 0.03)
    optimizer, schedule = trained("bert", "--optimizer", "adam")[1:3]
    assert (type(optimizer), optimizer.lr, optimizer.betas, schedule.peak) == (AdamW, 1e-3, (0.9, 0.98), 1e-3)


@pytest.mark.parametrize("name", ["enwik8", "bert", "translate"])
def test_the_rate_of_muon_needs_muon(example, tmp_path, name):
    options = ["--optimizer", "adam", "--muon-lr", "0.03", "--out", str(tmp_path / "run")]
    with pytest.raises(ValueError, match="--muon-lr: applies only to --optimizer muon"):
        example(name).start(options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", ["small", "tutorial"])
def test_a_run_without_a_saved_schedule_keeps_the_cosine(trained, example, tmp_path, preset):
    program, options = example("enwik8"), ["--out", str(tmp_path), "--preset", preset]
    start_run("enwik8", "", program.presets, options, program.options).save()
    settings = json.loads((tmp_path / "settings.json").read_text())
    del settings["schedule"]
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"sha256": None}))
    assert isinstance(trained("enwik8", "--resume", tmp_path)[2], Cosine)
