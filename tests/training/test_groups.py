"""Training in groups: a resumed run gives the same bits, snapshots hold the groups, and adapted models are loaded."""

import copy

import numpy as np
import pytest

from scratchformer.nn import add_lora
from scratchformer.optim import AdamW, Group
from scratchformer.training import SnapshotError, load_model, load_snapshot

GROUPS = [Group("*.norm1.*", frozen=True), Group("output.*", lr=0.05, weight_decay=0.1), Group("*.query.w", lr=0.001)]


def grouped(groups):
    return lambda params, lr: AdamW(params, lr, groups=groups)


@pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])
def test_a_resumed_run_with_groups_ends_as_the_uninterrupted_one_bit_for_bit(tmp_path, train_tiny, kind):
    options = {"make_optimizer": grouped(GROUPS)}
    _, model, straight = train_tiny(kind, tmp_path / "straight", 10, **options)
    train_tiny(kind, tmp_path / "run", 6, **options)
    _, again, resumed = train_tiny(kind, tmp_path / "run", 10, model_seed=9, resume=True, **options)
    first, second = (load_snapshot(tmp_path / run) for run in ("straight", "run"))
    assert first.state["optimizer_groups"] == second.state["optimizer_groups"]
    for part in "model", "optimizer":
        for name, array in getattr(first, part).items():
            np.testing.assert_array_equal(getattr(second, part)[name], array, err_msg=name)
    np.testing.assert_array_equal(model.flat.data, again.flat.data)
    assert straight.steps == resumed.steps == 10
    norms = sum(p.data.size for name, p in model.named_parameters().items() if ".norm1." in name)
    assert first.optimizer["m"].size == model.flat.data.size - norms


def test_a_snapshot_holds_the_groups_and_a_run_in_others_is_refused(tmp_path, train_tiny):
    train_tiny("LanguageModel", tmp_path, 3, make_optimizer=grouped(GROUPS))
    groups = load_snapshot(tmp_path).state["optimizer_groups"]
    assert [g["lr"] for g in groups if "output.w" in g["parameters"]] == [pytest.approx(5)]
    assert [g["frozen"] for g in groups if "body.blocks.0.norm1.gamma" in g["parameters"]] == [True]
    for other in [], [*GROUPS[:2]], [*GROUPS[:2], Group("*.query.w", lr=0.002)]:
        with pytest.raises(SnapshotError, match=r"has optimizer_groups .*, this run has"):
            train_tiny("LanguageModel", tmp_path, 6, resume=True, make_optimizer=grouped(other))


def test_the_optimizer_of_another_model_is_refused(tmp_path, train_tiny):
    with pytest.raises(ValueError, match="optimizer: expected one for the model of the replicas"):
        train_tiny(
            "LanguageModel",
            tmp_path / "run",
            3,
            make_optimizer=lambda p, lr: AdamW(copy.deepcopy(p.layer).parameters(), lr),
        )
    assert not (tmp_path / "run").exists()


def test_an_adapted_model_is_trained_resumed_and_loaded(tmp_path, train_tiny):
    def adapt_and_optimize(params, lr):
        add_lora(params.layer, 2, 4.0)
        return AdamW(params.layer.parameters(), lr, groups=[Group("*.lora_*"), Group("*", frozen=True)])

    options = {"make_optimizer": adapt_and_optimize}
    _, straight, _ = train_tiny("LanguageModel", tmp_path / "straight", 6, **options)
    train_tiny("LanguageModel", tmp_path / "run", 3, **options)
    _, resumed, _ = train_tiny("LanguageModel", tmp_path / "run", 6, resume=True, **options)
    np.testing.assert_array_equal(resumed.flat.data, straight.flat.data)
    loaded, _ = load_model(tmp_path / "run")
    assert loaded.config == resumed.config and loaded.config["lora"]["rank"] == 2
    ids = np.array([[1, 2, 3]])
    np.testing.assert_array_equal(loaded(ids), resumed(ids))
    assert any(p.data.any() for name, p in loaded.named_parameters().items() if name.endswith("lora_b"))
