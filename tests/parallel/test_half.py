"""Training in half precision: what stays in float32, how accurate gradients are, and the loss scale of float16."""

import json
import math
import os
import re
import signal
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from scratchformer.backend import Device, to_cpu
from scratchformer.data import SegmentBatches
from scratchformer.models import LanguageModel, TransformerXL
from scratchformer.models.predictor import Predictor
from scratchformer.optim import Adam, Constant
from scratchformer.parallel.precision import half_type
from scratchformer.rng import Key
from scratchformer.testing import check_precision
from scratchformer.training import Diverged, LossScale, Replicas, SnapshotError, estimate, load_model

from ..training.visible_loop import train

KINDS = ("LanguageModel", "Classifier")
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half the distance from 1 to the next number


@pytest.fixture(params=UNIT)
def precision(request):
    if request.param == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return request.param


def as_pair(model, inputs):
    """The loss of a model as a pair of functions of its inputs, of which there are `inputs`, and of its parameters."""
    params = model.parameters()

    def use(weights):
        for p, w in zip(params, weights, strict=True):
            p.bind(w, np.zeros_like(w), None)

    def loss(*args):
        use(args[inputs:])
        y, cache = model.loss(*args[:inputs])
        return y, (args[inputs:], cache)

    def loss_backward(dloss, cache):
        use(cache[0])
        model.loss_backward(dloss, cache[1])
        return tuple(p.grad for p in params)

    return loss, loss_backward


@pytest.mark.parametrize("kind", KINDS)
def test_all_gradients_of_a_model_are_within_their_error_bounds(make_model, make_batches, kind, precision):
    """The weights are small, since a bound doubles its argument's error at every norm that may divide by a small ρ."""
    batch = next(iter(make_batches(kind).batch(0).split(2)))
    model = make_model(kind)
    for name, p in model.named_parameters().items():
        if name.endswith(".w"):
            p.data[...] *= 1 / 16 if name.startswith("output") else 1 / 4
    weights = [p.data.astype(np.float64) for p in model.parameters()]
    rows = check_precision(*as_pair(model, len(batch)), *batch, *weights, dtype=precision)
    assert len(rows) == 1 + len(weights)
    assert all(row.bound < math.inf for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_differ_from_float64_by_about_one_rounding(make_model, make_batches, kind, precision):
    """Errors of single roundings are independent, so most of them cancel in the sums."""
    batch = make_batches(kind).batch(0)
    exact = make_model(kind, dtype=np.float64)
    Replicas(exact, 1).gradients(batch, Key(0))
    model = make_model(kind)
    with Replicas(model, 2, micro_batch=2, precision=precision) as replicas:
        replicas.loss_scale = LossScale(1024.0)
        replicas.gradients(batch, Key(0))
    error = np.linalg.norm(model.flat.grad - exact.flat.grad) / np.linalg.norm(exact.flat.grad)
    assert 0.05 * UNIT[precision] < error < 4 * UNIT[precision]


def test_float16_on_a_device(device, make_model, make_batches):
    batch, found = make_batches("Classifier").batch(0), []
    for precision in ("float32", "float16"):
        model = make_model("Classifier", device)
        replicas = Replicas(model, 1, micro_batch=3, precision=precision)
        replicas.loss_scale = LossScale(1024.0)
        replicas.gradients(batch, Key(0))
        found.append(to_cpu(model.flat.grad))
    assert np.linalg.norm(found[1] - found[0]) < 4 * UNIT["float16"] * np.linalg.norm(found[0])


def test_weights_and_gradients_stay_in_float32(make_model, make_batches, precision):
    model, batch = make_model("Classifier"), make_batches("Classifier").batch(0)
    before = model.flat.data.copy()
    with Replicas(model, 2, micro_batch=2, precision=precision) as replicas:
        replicas.gradients(batch, Key(0))
        first, second = replicas.models
        halves = [p.data for replica in replicas.models for p in replica.parameters()]
        assert {a.dtype for a in halves} == {np.dtype(replicas.half.dtype)} and replicas.half.itemsize == 2
        assert all(np.shares_memory(a, replicas.half) for a in halves)
        assert {p.grad.dtype for p in second.parameters()} == {np.dtype(np.float32)}
        assert first.flat.grad is model.flat.grad and not np.shares_memory(second.flat.grad, model.flat.grad)
        assert np.array_equal(model.flat.data, before) and model.flat.data.dtype == np.float32
        model.flat.data += 1
        (seen,) = replicas.map_models(lambda replica, _: replica.flat.data.astype(np.float32), [0])
        np.testing.assert_allclose(seen, model.flat.data, rtol=UNIT[precision])


def test_a_power_of_two_changes_no_bit(make_model, make_batches):
    model, batch = make_model("LanguageModel"), make_batches("LanguageModel").batch(0)
    replicas, found = Replicas(model, 2, micro_batch=3), []
    for scale in (1.0, 2.0**20, 2.0**-20):
        replicas.loss_scale = SimpleNamespace(scale=scale)
        replicas.gradients(batch, Key(0))
        found.append(model.flat.grad.copy())
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_a_scale_saves_gradients_that_are_too_small_for_float16(make_model, make_batches):
    """With a loss of which each target is a small part, gradients of activations fall below 2⁻²⁴."""
    batch, model = make_batches("LanguageModel").batch(0), make_model("LanguageModel")
    replicas = Replicas(model, 1, precision="float16")
    lost = {}
    for scale in (2.0**-12, 1.0):
        replicas.loss_scale = SimpleNamespace(scale=scale)
        replicas.gradients(batch, Key(0))
        lost[scale] = int((model.flat.grad == 0).sum())
    assert lost[2.0**-12] > 2 * lost[1.0]


class Units(NamedTuple):
    units: np.ndarray
    labels: np.ndarray


def test_inputs_of_real_numbers_are_rounded(make_model, precision):
    replicas = Replicas(make_model("Classifier"), 1, precision=precision)
    moved = replicas.move(Units(np.ones((2, 3), np.float32), np.ones(2, np.int64)))
    assert moved.units.dtype == replicas.half.dtype and moved.labels.dtype == np.int64


# The loss scale


def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps():
    scale = LossScale(8.0, patience=2)
    found = [(scale.skips(norm), scale.scale) for norm in (1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 0.0, math.inf)]
    assert found == [
        (False, 8.0), (True, 4.0), (False, 4.0), (False, 8.0), (False, 8.0), (True, 4.0), (False, 4.0), (True, 2.0),
    ]  # fmt: skip
    assert scale.skipped == 3
    assert [scale.skips(math.inf) for _ in range(2)] == [True, False] and scale.scale == 1.0


@pytest.fixture
def overflow_at(monkeypatch):
    """overflow_at(numbers): a wrapper of batches; the gradients of these are 2⁴⁰ times as large, and overflow."""
    backwards = {kind: kind.loss_backward for kind in (Predictor, LanguageModel)}

    class Planted:
        def __init__(self, batches, steps):
            self.batches, self.steps, self.now = batches, steps, False

        def batch(self, step):
            self.now = step in self.steps
            return self.batches.batch(step)

        def __getattr__(self, name):  # what batches with a memory have
            return getattr(self.batches, name)

    def plant(steps):
        def wrap(batches, _model):
            planted = Planted(batches, steps)
            factor = lambda: 2.0**40 if planted.now else 1.0  # noqa: E731
            for kind, whole in backwards.items():
                patched = lambda m, d, cache, whole=whole: whole(m, factor() * d, cache)  # noqa: E731
                monkeypatch.setattr(kind, "loss_backward", patched)
            return planted

        return wrap

    return plant


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_batches_that_overflow_are_skipped_and_the_run_ends_as_well(tmp_path, train_tiny, overflow_at, capsys):
    planted = range(2, 24, 5)
    options = {"precision": "float16", "total": 24, "model_options": {"dropout": 0.0}, "evaluate_every": 24}
    wrap, scale = overflow_at(planted), LossScale(patience=4)
    state, _, adam = train_tiny("LanguageModel", tmp_path / "a", 24, batches=wrap, loss_scale=scale, **options)
    notes = capsys.readouterr().err
    assert len(re.findall("a gradient overflowed float16 at loss scale [0-9.]+; the scale is halved", notes)) == 3
    assert f"batches skipped because their gradients overflowed: {len(planted)}" in notes
    assert adam.steps == 24 - len(planted)
    plain, _, _ = train_tiny("LanguageModel", tmp_path / "b", 24, batches=overflow_at(()), **options)
    assert state["best"]["loss"] == pytest.approx(plain["best"]["loss"], rel=0.02)
    assert state["loss_scale"]["skipped"] == len(planted) and plain["loss_scale"]["skipped"] == 0
    (last,) = (r for r in records(tmp_path / "a") if r["step"] == 24 and "loss" in r)
    assert (last["skipped_batches"], last["loss_scale"]) == (len(planted), scale.scale)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_run_that_is_stopped_at_a_batch_that_overflows_ends_bit_for_bit(tmp_path, text, overflow_at, at):
    """Of a model with a memory, which must belong to the batch; the steps 0, 2 and 3 are skipped."""
    asked = []

    class Stopping(SegmentBatches):
        stop = None

        def batch(self, number):
            asked.append(number)
            if number == self.stop:
                os.kill(os.getpid(), signal.SIGINT)
            return super().batch(number)

    def run(out, stop=None, resume=False):
        model = TransformerXL(256, 8, 2, 2, 8, 8, key=Key(0))
        batches = Stopping(text[:600], 4, 8, Key(1), 2, 8)
        batches.stop = stop
        with Replicas(model, 2, micro_batch=3, precision="float16") as replicas:
            adam = Adam(model.parameters(), 1e-2)
            planted = overflow_at((0, 2, 3))(batches, model)
            train(replicas, adam, Constant(1e-2), planted, 5, out, loss_scale=LossScale(patience=2), resume=resume)
        return model.flat.data

    whole = run(tmp_path / "whole")
    assert asked == [*range(5)]
    asked.clear()
    with pytest.raises(KeyboardInterrupt, match="is saved in"):
        run(tmp_path / "parts", at)
    assert asked == [*range(at + 1)]
    assert np.array_equal(run(tmp_path / "parts", resume=True), whole)
    assert asked == [*range(5)]


def test_a_skipped_step_changes_nothing_but_the_scale(tmp_path, train_tiny, overflow_at):
    before = []
    options = {"precision": "float16", "prepare": lambda model, _: before.append(model.flat.data.copy())}
    state, model, adamw = train_tiny("Classifier", tmp_path, 3, batches=overflow_at(range(3)), **options)
    assert np.array_equal(model.flat.data, before[0]) and adamw.steps == 0 and not adamw.m.any()
    assert state["loss_scale"] == {"scale": 2.0**12, "good": 0, "skipped": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_bit_for_bit(tmp_path, train_tiny, overflow_at, kind):
    """With dropout, overflows before and after the interruption, and a scale that grows."""

    def run(out, steps, **more):
        options = {"precision": "float16", "loss_scale": LossScale(patience=2), "evaluate": None}
        return train_tiny(kind, out, steps, batches=overflow_at((1, 5)), **options, **more)

    state, whole, adam = run(tmp_path / "whole", 8)
    run(tmp_path / "parts", 3)
    again, resumed, adam_again = run(tmp_path / "parts", 8, resume=True)
    assert np.array_equal(whole.flat.data, resumed.flat.data) and whole.flat.data.dtype == np.float32
    assert np.array_equal(adam.m, adam_again.m) and np.array_equal(adam.v, adam_again.v)
    assert state["loss_scale"] == again["loss_scale"] == {"scale": 2.0**15, "good": 0, "skipped": 2}
    saved, _ = load_model(tmp_path / "parts")
    assert np.array_equal(saved.flat.data, whole.flat.data)


def test_a_run_is_not_resumed_in_another_precision(tmp_path, train_tiny):
    train_tiny("Classifier", tmp_path, 3, precision="float16")
    with pytest.raises(SnapshotError, match="has precision 'float16', this run has 'float32'"):
        train_tiny("Classifier", tmp_path, 6, resume=True)


def test_a_loss_that_is_not_finite_is_a_divergence(tmp_path, train_tiny):
    """A weight beyond 65,504 is infinite in float16, whatever the scale."""

    def prepare(model, _):
        model.named_parameters()["body.blocks.1.feedforward.up.w"].data[...] = 1e5

    with pytest.raises(Diverged, match=r"step 1: loss .* not finite is the output of body.blocks.1.feedforward.up "):
        train_tiny("LanguageModel", tmp_path, 3, precision="float16", prepare=prepare)


def test_a_gradient_that_is_never_finite_is_a_divergence(tmp_path, train_tiny, overflow_at):
    scale, wrap = LossScale(4.0), overflow_at(range(9))
    with pytest.raises(Diverged, match=r"step 3: .* the first that is not finite is the gradient of output"):
        train_tiny("LanguageModel", tmp_path, 9, precision="float16", loss_scale=scale, batches=wrap)
    assert scale.skipped == 2


# What is refused, and what is said


def test_precisions_that_cannot_be_had_are_refused(make_model, monkeypatch):
    model = make_model("Classifier")
    for precision, message in (
        ("half", "precision: expected one of float32, bfloat16, float16, tf32, got 'half'"),
        ("tf32", "precision: tf32 is for products on a GPU"),
    ):
        with pytest.raises(ValueError, match=message):
            Replicas(model, 1, precision=precision)
    with pytest.raises(ValueError, match="expected a model in float32, for its master weights, got float64"):
        Replicas(make_model("Classifier", dtype=np.float64), 1, precision="float16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"pip install 'scratchformer\[fast\]'"):
        Replicas(model, 1, precision="bfloat16")


def test_a_run_says_its_precision_and_what_would_make_it_faster(make_model, make_batches, monkeypatch, precision):
    batch, replicas = make_batches("Classifier").batch(0), Replicas(make_model("Classifier"), 1, precision=precision)
    for found in (None, object()):
        monkeypatch.setattr("scratchformer.parallel.precision.find_spec", lambda _, found=found: found)
        said = replicas.describe(batch)
        assert f", in {precision} (slow on a CPU" in said if precision == "float16" else f", in {precision}" in said
        assert ("scratchformer[fast]" in said) == (found is None and precision == "bfloat16")


def test_the_estimate_of_half_precision(make_model, make_batches, precision):
    model, batch = make_model("LanguageModel"), make_batches("LanguageModel").batch(0)
    whole, half = (estimate(Replicas(model, 2, 2, precision=p), batch) for p in ("float32", precision))
    assert (half.weights, half.gradients, half.half) == (whole.weights, whole.gradients, whole.weights // 2)
    assert 0.5 <= half.activations / whole.activations < 0.7
    assert "their copy in half precision" in str(half) and "copy" not in str(whole)


def test_tf32_is_on_only_inside_replicas_that_ask_for_it(make_model, monkeypatch):
    """With a stand-in for the part of CuPy that has this setting."""
    used = {"float32": 1}
    products = ModuleType("cupy._core._routines_linalg")
    products.COMPUTE_TYPE_DEFAULT, products.COMPUTE_TYPE_TF32 = 1, 7
    products.get_compute_type = lambda dtype: used[np.dtype(dtype).name]
    products.set_compute_type = lambda dtype, kind: used.update({np.dtype(dtype).name: kind})
    core = ModuleType("cupy._core")
    core._routines_linalg = products
    cupy = ModuleType("cupy")
    for name, module in {"cupy": cupy, "cupy._core": core, "cupy._core._routines_linalg": products}.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert half_type("tf32", SimpleNamespace(device=Device("gpu", cupy))) is None
    tf32, float32 = (Replicas(make_model("LanguageModel"), 1) for _ in range(2))
    tf32.device, tf32.precision, float32.device = Device("gpu", cupy), "tf32", Device("gpu", cupy)
    with tf32:
        assert used == {"float32": 7}
        with float32:
            assert used == {"float32": 1}
        assert used == {"float32": 7}
    assert used == {"float32": 1}
