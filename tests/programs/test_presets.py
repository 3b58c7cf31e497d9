"""What the presets train with; those named tutorial have the settings of the tutorial's own programs."""

import sys

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.models import LanguageModel, Llama
from scratchformer.optim import Adam, AdamW, Constant, Cosine, InverseSquareRoot, Muon
from scratchformer.rng import Key
from scratchformer.training import Run
from scratchformer.training.start import run_main

NEEDED = {
    **dict.fromkeys(["gpt2", "bert"], ("tokenizers",)),
    "translate": ("tokenizers", "sacrebleu", "sacremoses"),
    **dict.fromkeys(["digits", "units"], ("sklearn", "networkx")),
}


class Captured(Exception):
    """Ends a program just before it trains."""


@pytest.fixture
def trained(example, text_file, reviews_folder, sentences_folder, tmp_path, monkeypatch):
    """trained("imdb", "--preset", "tutorial"): the model, optimizer, schedule, batches and number of steps. Further
    arguments replace settings of the presets.
    """

    def trained(name, *options, gradients=False, **sizes):
        for module in NEEDED.get(name, ()):
            pytest.importorskip(module)

        def steps(run, replicas, optimizer, batches, *_arguments, **_options):
            if gradients:
                assert np.isfinite(replicas.gradients(batches.batch(0).split(2)[0], Key(0)))
            rate = sys._getframe(1).f_locals["rate"]
            raise Captured(replicas.model, optimizer, rate, batches, run.total)

        monkeypatch.setattr(Run, "steps", steps)
        reviews = dict.fromkeys(["imdb", "bert"], reviews_folder)
        data = (reviews | {"translate": sentences_folder}).get(name, text_file)
        without = name in ("digits", "units") or any(str(option).startswith("photos") for option in options)
        source = () if without else ("--data", data)
        source += ("--validation", 100) if name in reviews else ()
        source += ("--device", "cpu", "--out", tmp_path / "new", "--replicas", 1)
        program = example(name)
        for preset in program.PRESETS.values():
            preset |= sizes
        with pytest.raises(Captured) as captured:
            run_main(program.main, [str(x) for x in (*source, *options)])
        return captured.value.args

    return trained


@pytest.mark.parametrize("name", ["enwik8", "imdb", "bert", "gpt2", "translate", "sparse", "digits", "units"])
def test_a_gradient_at_the_default_sizes(trained, name):
    """The other tests run the programs with the sizes in TINY."""
    model = trained(name, "--recompute", gradients=True)[0]
    assert any(getattr(layer, "recompute", False) for _, layer in model.named_layers())
    assert model.flat.data.size > 100_000 or name in ("digits", "units")


def test_the_models_of_enwik8_are_equally_large(trained):
    plain, xl, llama = (trained("enwik8", "--model", model)[0].flat.data.size for model in ("plain", "xl", "llama"))
    assert 0.95 * plain < min(xl, llama) <= max(xl, llama) <= plain


def test_the_generator_of_the_tutorial(trained):
    """5,000 texts of warm-up, in batches of 32, then a constant rate; no regularisation."""
    model, optimizer, schedule, batches, steps = trained("enwik8", "--preset", "tutorial")
    assert schedule == Constant(1e-4, 156) and steps == 170_000 and type(model) is LanguageModel
    assert batches.batch(0).ids.shape == (32, 256) and type(optimizer) is Adam
    assert model.config["norm"] == "post" and model.body.dropout.p == optimizer.weight_decay == 0


def test_the_classifier_of_the_tutorial(trained):
    """10,000 texts of warm-up, in batches of 4; 80 epochs of the training part; no regularisation."""
    model, optimizer, schedule, batches, steps = trained("imdb", "--preset", "tutorial")
    assert schedule == Constant(1e-4, 2_500) and steps == 450_000
    assert len(batches.batch(0).ids) == 4 and batches.word_dropout == 0
    assert batches.cut(np.arange(600)).tolist() == list(range(512))  # the first words
    assert model.config["norm"] == "post" and model.body.dropout.p == optimizer.weight_decay == 0


def test_the_schedule_is_an_option(trained):
    adam = ("--optimizer", "adam")
    assert trained("enwik8", *adam)[2] == Cosine(2e-3, 100, 1000, floor=2e-4)
    assert trained("enwik8", *adam, "--schedule", "constant")[2] == Constant(2e-3, 100)
    shorter = trained("enwik8", "--preset", "tutorial", "--schedule", "cosine", "--steps", 100)
    assert shorter[2] == Cosine(1e-4, 20, 100, floor=1e-5)


def test_enwik8_trains_a_llama_with_muon(trained):
    model, optimizer, schedule, _, steps = trained("enwik8")
    assert type(model) is Llama and steps == 1000 and schedule == Cosine(0.02, 100, 1000, floor=0.002)
    assert (type(optimizer), optimizer.lr, optimizer.adam_lr, optimizer.weight_decay) == (Muon, 0.02, 2e-3, 0)


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
        optimizer, schedule = trained("enwik8", "--model", model, "--muon-lr", "0.03")[1:3]
        assert (type(optimizer), optimizer.lr, optimizer.adam_lr) == (Muon, 0.03, 2e-3)
        assert schedule == Cosine(0.03, 100, 1000, floor=0.003)


def test_muon_translates(trained):
    """It steps the matrices of both stacks, and nothing else; the schedule is then a cosine."""
    model, optimizer, schedule, _, steps = trained("translate")
    assert (type(optimizer), optimizer.lr, optimizer.adam_lr, steps) == (Muon, 0.01, 5e-3, 7680)
    assert schedule == Cosine(0.01, 300, 7680, floor=0.0005) and model.config["norm"] == "pre"
    assert trained("translate", "--steps", 1000)[2] == Cosine(0.01, 200, 1000, floor=0.0005)
    stacks = [*model.encoder, *model.decoder]
    matrices = [p for block in stacks for p in block.parameters() if p.name == "w"]
    whole = [p for p, how in zip(optimizer.stepped, optimizer.treatments, strict=True) if how.whole]
    assert {id(p) for p in whole} == {id(p) for p in matrices}


@pytest.mark.parametrize(("preset", "peak", "warmup"), [("adam", 4e-3, 1920), ("paper", 7e-4, 4000)])
def test_the_translators_of_the_paper(trained, preset, peak, warmup):
    model, optimizer, schedule = trained("translate", "--preset", preset)[:3]
    assert type(optimizer) is Adam and schedule == InverseSquareRoot(peak, warmup)
    assert (optimizer.betas, optimizer.eps, model.config["norm"]) == ((0.9, 0.98), 1e-9, "post")


def test_muon_pre_trains_and_the_paper_uses_adam(trained):
    _, optimizer, schedule, _, steps = trained("bert")
    assert (type(optimizer), optimizer.lr, optimizer.adam_lr) == (Muon, 0.01, 1e-3)
    assert schedule == Cosine(0.01, 100, 5_000) and steps == 5_000
    small = dict(d_model=24, depth=1, batch_size=16)
    optimizer, schedule = trained("bert", "--preset", "base", **small)[1:3]
    assert (type(optimizer), optimizer.lr, optimizer.betas, schedule.peak) == (AdamW, 1e-4, (0.9, 0.999), 1e-4)


def test_the_rate_of_muon_needs_muon(example, tmp_path):
    options = ["--optimizer", "adam", "--muon-lr", "0.03", "--out", str(tmp_path / "run")]
    with pytest.raises(ValueError, match="--muon-lr: applies only to --optimizer muon"):
        run_main(example("enwik8").main, options)
    assert not (tmp_path / "run").exists()
