"""How much of a part a stage is scored on."""

import numpy as np
import pytest
from scratchformer.training.stage import Stage

from scratchformer.data import Labelled
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, AdamW, Muon
from scratchformer.training.settings import Run


def test_a_short_run_is_scored_on_no_more_than_it_trained_on_but_at_least_1000():
    short = Stage(Run(seed=0, steps=3, preset_steps=100))
    assert [short.scored("test", 25_000, trained) for trained in (96, 5_000, 30_000)] == [1_000, 5_000, 25_000]
    assert short.scored("test", 800, 96) == 800
    assert short.scored("test", 25_000, 96, least=2_000) == 2_000
    assert short.scored("validation", 25_000, 96) == 25_000  # comparable after resuming with more steps
    told = "1,000 of 25,000 reviews (the run has only 3 steps)"
    assert short.share(1_000, 25_000, "reviews") == told and short.share(800, 800, "reviews") == "800 reviews"


def test_a_run_of_all_steps_and_one_that_is_only_scored_are_scored_on_everything():
    for settings in (dict(steps=100, preset_steps=100), dict(steps=200, preset_steps=100), dict(steps=3)):
        assert Stage(Run(seed=0, **settings)).scored("test", 25_000, 96) == 25_000


def test_texts_at_equal_distances_keep_the_shares_of_sorted_classes():
    texts = Labelled([np.array([i]) for i in range(30)], np.repeat([0, 1, 2], 10))
    few = texts.evenly(6)
    assert few.labels.tolist() == [0, 0, 1, 1, 2, 2] and [int(i) for (i,) in few.ids] == [0, 5, 10, 15, 20, 25]
    for whole in (texts.evenly(30), texts):
        assert np.array_equal(np.concatenate(whole.ids), np.arange(30)) and len(whole.labels) == 30


SETTINGS = dict(seed=0, steps=100, preset_steps=100, lr=1e-3, warmup=10, precision="float32")


def stage(**settings):
    return Stage(Run(**SETTINGS | settings))


@pytest.mark.parametrize(
    ("settings", "kind", "rate"),
    [
        ({}, Adam, 1e-3),
        (dict(optimizer="adam", muon_lr=0.05), Adam, 1e-3),
        (dict(weight_decay=0.1), AdamW, 1e-3),
        (dict(optimizer="muon", muon_lr=0.05), Muon, 0.05),
    ],
)
def test_the_optimizer_and_its_rate_are_settings(settings, kind, rate):
    own = stage(**settings)
    optimizer = own.optimizer(LanguageModel(7, 4, 2, 1, 5))
    assert type(optimizer) is kind and optimizer.lr == rate and own.schedule()(9) == rate


def test_muon_gets_the_decay_and_the_precision_of_the_run():
    pytest.importorskip("ml_dtypes")
    model = LanguageModel(7, 4, 2, 1, 5)
    for precision, own in dict(float32="float32", bfloat16="bfloat16", float16="float32", tf32="float32").items():
        muon = stage(optimizer="muon", muon_lr=0.02, precision=precision, weight_decay=0.3).optimizer(model)
        assert (muon.precision, muon.weight_decay, muon.adam_lr) == (own, 0.3, 1e-3)
    assert stage(optimizer="muon", muon_lr=0.02).optimizer(model).weight_decay == 0
