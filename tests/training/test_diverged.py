"""A run with a value that is not finite stops, says where, and keeps the last good snapshot."""

import math

import numpy as np
import pytest

from scratchformer.backend import to_cpu
from scratchformer.optim import Cosine
from scratchformer.training import Diverged, load_model, load_snapshot

BAD_STEP = 7


class Poisoning:
    """Batches that poison the model when the batch of step 7 is requested."""

    def __init__(self, batches, poison):
        self.batches, self.poison = batches, poison

    def batch(self, step):
        if step == BAD_STEP:
            self.poison()
        return self.batches.batch(step)


def poison(name, value=math.nan):
    """Put one bad number into the parameter `name`."""

    def wrap(batches, model):
        def act():
            data = model.named_parameters()[name].data
            data[(0,) * data.ndim] = value

        return Poisoning(batches, act)

    return wrap


def poison_gradient(name):
    """From step 7 on, backward leaves one NaN in the gradient of this parameter; forward is not affected."""

    def wrap(batches, model):
        def act():
            whole = model.loss_backward

            def loss_backward(dloss, cache):
                whole(dloss, cache)
                model.named_parameters()[name].grad[0] = math.nan

            model.loss_backward = loss_backward

        return Poisoning(batches, act)

    return wrap


def assert_the_last_snapshot_is_good(out):
    snapshot = load_snapshot(out)
    assert snapshot.state["step"] == BAD_STEP // 3 * 3
    assert all(np.isfinite(a).all() for a in (*snapshot.model.values(), *snapshot.optimizer.values()))
    load_model(out)


@pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("body.positions.table", "body.positions (PositionEmbedding)"),
        ("body.blocks.0.attention.value.w", "body.blocks.0.attention.value (Linear)"),
        ("body.blocks.1.norm2.gamma", "body.blocks.1.norm2 (LayerNorm)"),
        ("body.blocks.1.feedforward.down.b", "body.blocks.1.feedforward.down (Linear)"),
        ("output.w", "output (Linear)"),
    ],
)
def test_the_first_layer_that_is_not_finite_is_named(device, tmp_path, train_tiny, kind, name, layer):
    with pytest.raises(Diverged) as raised:
        train_tiny(kind, tmp_path, 12, device, batches=poison(name))
    message = str(raised.value)
    assert f"the first that is not finite is the output of {layer}" in message
    assert message.startswith(f"step {BAD_STEP + 1}: loss nan")
    assert str(tmp_path / "last.safetensors") in message
    assert "\n" not in message
    assert_the_last_snapshot_is_good(tmp_path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinity_counts_too(device, tmp_path, train_tiny):
    with pytest.raises(Diverged, match=r"the output of body\.blocks\.0\.feedforward\.up \(Linear\)"):
        train_tiny("LanguageModel", tmp_path, 12, device, batches=poison("body.blocks.0.feedforward.up.b", math.inf))


@pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])
def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_named(device, tmp_path, train_tiny, kind):
    name = "body.blocks.1.attention.key.w"
    with pytest.raises(Diverged) as raised:
        train_tiny(kind, tmp_path, 12, device, count=1, batches=poison_gradient(name))
    assert f"the first that is not finite is the gradient of {name}" in str(raised.value)
    assert "loss nan" not in str(raised.value)
    assert_the_last_snapshot_is_good(tmp_path)


def test_parameters_and_moments_are_not_stepped_by_a_bad_gradient(device, tmp_path, train_tiny):
    kept = {}

    def remember(model, optimizer):
        kept.update(model=model, optimizer=optimizer)

    with pytest.raises(Diverged):
        batches = poison_gradient("output.w")
        train_tiny("LanguageModel", tmp_path, 12, device, count=1, batches=batches, prepare=remember)
    assert kept["optimizer"].steps == BAD_STEP
    assert np.isfinite(to_cpu(kept["model"].flat.data)).all()
    assert np.isfinite(to_cpu(kept["optimizer"].m)).all()


def test_a_run_that_diverges_at_once_says_that_there_is_no_snapshot(tmp_path, train_tiny):
    def spoil(model, optimizer):
        model.output.b.data[0] = math.nan

    with pytest.raises(Diverged, match="No snapshot was saved yet"):
        train_tiny("LanguageModel", tmp_path, 12, prepare=spoil)
    assert not list(tmp_path.glob("*.safetensors"))


def test_watching_leaves_the_model_as_it_was(tmp_path, train_tiny):
    kept = []
    with pytest.raises(Diverged):
        train_tiny(
            "Classifier", tmp_path, 12, batches=poison("output.w"), prepare=lambda model, optimizer: kept.append(model)
        )
    assert not any("forward" in vars(layer) for _, layer in kept[0].named_layers())


def after_the_bad_step(act):
    """A `prepare` that makes training call `act(model, optimizer)` after every step from the eighth on."""

    def prepare(model, optimizer):
        step = optimizer.step

        def step_and_act(*args):
            step(*args)
            if optimizer.steps > BAD_STEP:
                act(model, optimizer)

        optimizer.step = step_and_act

    return prepare


def overflow(model, optimizer):
    model.output.w.data[0] = math.inf


def spoil_a_moment(model, optimizer):
    optimizer.v[3] = math.nan


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("act", "named"), [(overflow, "output.w is not finite"), (spoil_a_moment, "optimizer.v is not finite")]
)
@pytest.mark.parametrize("options", [{}, {"evaluate": None}, {"evaluate_every": 8}], ids=str)
@pytest.mark.parametrize("steps", [8, 9, 12])
def test_a_step_with_a_result_that_is_not_finite_is_never_saved(tmp_path, train_tiny, act, named, options, steps):
    """Whether it is the last step, one with a snapshot or an evaluation, or one that is followed by another."""
    options = {"prepare": after_the_bad_step(act), "snapshot_every": 4 if steps == 12 else 3, **options}
    with pytest.raises(Diverged, match="is not finite") as raised:
        train_tiny("LanguageModel", tmp_path, steps, **options)
    good = load_snapshot(tmp_path)
    assert good.state["step"] == (4 if steps == 12 else 6)
    assert all(np.isfinite(a).all() for a in (*good.model.values(), *good.optimizer.values()))
    assert str(raised.value).endswith(
        f". The last good snapshot is {tmp_path / 'last.safetensors'}, from step {good.state['step']}"
    )
    if steps == 8:
        assert named in str(raised.value)
    if (tmp_path / "best.safetensors").exists():
        best = load_snapshot(tmp_path / "best.safetensors")
        assert all(np.isfinite(a).all() for a in best.model.values())
        assert best.state["step"] < 8 or act is spoil_a_moment


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_rate_that_is_too_large_names_the_parameter_that_overflowed(device, tmp_path, train_tiny, monkeypatch):
    """There is only one step, so only the parameters show it."""
    monkeypatch.setattr(Cosine, "__call__", lambda self, step: 1e39)
    with pytest.raises(Diverged, match=r"step 1: .*is not finite\. No snapshot was saved yet$"):
        train_tiny("LanguageModel", tmp_path, 1, device, evaluate=None)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_good_accuracy_does_not_make_a_model_that_is_not_finite_the_best(tmp_path, train_tiny):
    scores = iter([0.5, 0.9])
    options = {
        "prepare": after_the_bad_step(overflow),
        "evaluate": lambda: {"accuracy": next(scores)},
        "evaluate_every": 4,
    }
    with pytest.raises(Diverged, match=r"step 8: output\.w is not finite"):
        train_tiny("Classifier", tmp_path, 12, **options)
    assert load_snapshot(tmp_path / "best.safetensors").state["step"] == 4


def test_training_does_not_begin_with_a_model_that_is_not_finite(tmp_path, train_tiny):
    def spoil(model, optimizer):
        model.output.b.data[0] = math.nan

    with pytest.raises(Diverged, match=r"^step 0: output\.b is not finite\. No snapshot was saved yet$"):
        train_tiny("LanguageModel", tmp_path / "run", 12, prepare=spoil)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
