# ruff: noqa: F811 (fixtures that come from another conftest)
"""Dynamic evaluation, compared with a loop over windows, and what it must leave as it was."""

import math

import numpy as np
import pytest

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.data import DataError, TextBatches
from scratchformer.models import TransformerXL
from scratchformer.ops import IGNORED
from scratchformer.optim import SGD, Adam
from scratchformer.records import DynamicRMS, Recall, evaluate_dynamic, observe_gradients, recalling
from scratchformer.rng import Key
from scratchformer.training import Diverged, Replicas, evaluate_language_model

from ..training.conftest import make_model, text  # noqa: F401

CONTEXT = 8
PERIOD = np.array([3, 14, 15, 9, 2, 6, 5, 21, 8, 11, 27, 0])


@pytest.fixture
def repeated():
    """A text that repeats itself: a model that learns from it while reading predicts the rest."""
    return np.tile(PERIOD, 25).astype(np.uint8)


def adapting(replicas, text, lr=0.01, decay=0.01, count=4):
    """A DynamicRMS for the model of replicas that has observed batches of a text."""
    optimizer = DynamicRMS(replicas.model.parameters(), lr, decay)
    observe_gradients(replicas, optimizer, TextBatches(text, 6, CONTEXT, Key(3)), count)
    return optimizer


def gradient(model, ids, targets):
    """The model's flat gradient of the mean loss of one batch, and this loss."""
    model.zero_grad()
    loss, cache = model.loss(*(to_device(a.astype(np.int32), model.device) for a in (ids, targets)))
    model.loss_backward(1.0, cache)
    return to_cpu(model.flat.grad).copy(), float(loss)


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def one_prediction_at_a_time(model, text, stride, per_step, lr, learn):
    """Nats of each position, and the weights after it all, by plain gradient descent.

    Each position is predicted from the first window that reaches it, and positions that were predicted together are
    then learned together: alone, or with all other positions of their windows.
    """
    last = len(text) - 1 - CONTEXT
    starts = [*range(0, last, stride), last]
    nats, done = [], 0
    for first in range(0, len(starts), per_step):
        rows, targets = [], []
        for start in starts[first : first + per_step]:
            for i in range(done + 1, start + CONTEXT + 1):
                seen = to_device(text[None, start:i].astype(np.int32), model.device)
                nats.append(-log_softmax(to_cpu(model(seen))[0, -1])[text[i]])
            window = text[start : start + CONTEXT + 1].astype(np.int32)
            old = np.arange(start + 1, start + CONTEXT + 1) <= done
            rows.append(window[:-1])
            targets.append(np.where(old & (learn == "new"), IGNORED, window[1:]))
            done = start + CONTEXT
        model.flat.data -= lr * to_device(gradient(model, np.array(rows), np.array(targets))[0], model.device)
    return nats, to_cpu(model.flat.data).copy()


@pytest.mark.parametrize("learn", ["new", "all"])
@pytest.mark.parametrize(("stride", "per_step"), [(8, 1), (4, 1), (3, 2), (4, 5), (1, 4)])
def test_every_token_is_predicted_once_before_it_is_learned(device, make_model, text, learn, stride, per_step):
    model, by_hand = (make_model("LanguageModel", device, np.float64) for _ in range(2))
    nats, _ = one_prediction_at_a_time(by_hand, text[:60], stride, per_step, 0.3, learn)
    assert len(nats) == 59
    with Replicas(model, 2 if device is CPU else 1) as replicas:
        sgd = SGD(model.parameters(), 0.3)
        found = evaluate_dynamic(replicas, text[:60], sgd, stride, per_step, learn)
        fixed = evaluate_language_model(replicas, text[:60], stride)
    assert found["loss"] == pytest.approx(math.fsum(nats) / 59, rel=1e-10)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-12)
    assert abs(found["loss"] - fixed["loss"]) > 1e-3  # so it has learned


@pytest.mark.parametrize("learn", ["new", "all"])
def test_the_probabilities_of_all_ends_of_a_text_sum_to_1(make_model, text, learn):
    """They would not if the model had learned anything from the end before it predicts it."""
    model, nats = make_model("LanguageModel", dtype=np.float64), []
    with Replicas(model, 1) as replicas:
        for whole in text[:41], *(np.append(text[:41], end) for end in range(29)):
            found = evaluate_dynamic(replicas, whole, SGD(model.parameters(), 0.3), CONTEXT, 1, learn)
            nats.append(found["loss"] * (len(whole) - 1))
    beginning, *whole = nats
    assert sum(math.exp(beginning - total) for total in whole) == pytest.approx(1, rel=1e-9)


def test_what_is_recalled_says_nothing_of_what_follows(make_model, text):
    """The probabilities of all possible next tokens sum to 1, with and without dynamic evaluation, if matches are
    searched in the whole text.
    """
    model, text = (
        make_model("LanguageModel", dtype=np.float64, embeddings=[{"layer": Recall, "orders": [1, 2, 1]}]),
        text[:50] % 4,
    )
    sgd = SGD(model.parameters(), 0.3)
    with Replicas(model, 1) as replicas:
        for evaluate in evaluate_language_model, lambda *given: evaluate_dynamic(*given, sgd, CONTEXT, 1):
            nats = []
            for whole in text, *(np.append(text, end) for end in range(29)):
                nats.append(evaluate(replicas, recalling(whole, [1, 2, 1])[9:])["loss"] * (len(whole) - 10))
            beginning, *whole = nats
            assert sum(math.exp(beginning - total) for total in whole) == pytest.approx(1, rel=1e-9)
        recalled = evaluate_language_model(replicas, recalling(text, [1, 2, 1]))["loss"]
        assert abs(evaluate_language_model(replicas, text)["loss"] - recalled) > 1e-4


@pytest.mark.parametrize("learn", ["new", "all"])
def test_without_steps_it_is_the_usual_score(device, make_model, text, learn):
    model = make_model("LanguageModel", device, np.float64)
    for stride, per_step in (None, 4), (3, 1), (8, 7):
        with Replicas(model, 1) as replicas:
            expected = evaluate_language_model(replicas, text[:100], stride)
            found = evaluate_dynamic(replicas, text[:100], SGD(model.parameters(), 0.0), stride, per_step, learn)
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_step_of_the_optimizer_is_that_of_the_paper(device, make_model, text):
    """One number at a time, from the gradients of single batches."""
    model, lr, decay, eps = make_model("LanguageModel", device, np.float64), 0.02, 0.4, 1e-3
    batches = TextBatches(text, 6, CONTEXT, Key(3))
    observed = [gradient(model, *batches.batch(i))[0] for i in range(3)]
    rms = [math.sqrt(math.fsum(g[i] ** 2 for g in observed) / 3) for i in range(len(observed[0]))]
    mean = math.fsum(rms) / len(rms)
    pulls = [min(1.0, decay * r / mean) for r in rms]
    assert 0 < sum(pull == 1 for pull in pulls) < len(pulls)
    start = to_cpu(model.flat.data).copy()
    optimizer = DynamicRMS(model.parameters(), lr, decay, eps)
    with Replicas(model, 1) as replicas:
        observe_gradients(replicas, optimizer, batches, 3)
    expected = list(start)
    for step in range(3, 6):
        g, _ = gradient(model, *batches.batch(step))
        optimizer.step()
        for i, w in enumerate(expected):
            expected[i] = w - lr * g[i] / (rms[i] + eps) + pulls[i] * (start[i] - w)
        np.testing.assert_allclose(to_cpu(model.flat.data), expected, rtol=1e-9, atol=1e-12)


def test_learning_helps_on_a_text_that_repeats_itself(device, make_model, repeated, text):
    model = make_model("LanguageModel", device)
    with Replicas(model, 1) as replicas:
        fixed = evaluate_language_model(replicas, repeated)["bits_per_byte"]
        for optimizer in adapting(replicas, text), Adam(model.parameters(), 0.01), SGD(model.parameters(), 0.5):
            learning = evaluate_dynamic(replicas, repeated, optimizer, windows_per_step=1)["bits_per_byte"]
            assert learning < 0.9 * fixed


def test_the_pull_keeps_weights_near_the_trained_ones(make_model, text):
    """With a decay so large that every parameter returns at once, only the last gradient is left."""
    model = make_model("LanguageModel", dtype=np.float64)
    with Replicas(model, 1) as replicas:
        free, held = (adapting(replicas, text, decay=decay) for decay in (0.0, 1e12))
        model.flat.grad[...] = 1.0
        far = []
        for optimizer in free, held:
            before = model.flat.data.copy()
            for _ in range(5):
                optimizer.step()
            far.append(np.abs(model.flat.data - before))
            model.flat.data[...] = before
    moved = held.squares > 0  # a parameter without gradients in training is not pulled
    np.testing.assert_allclose(far[0][moved], 5 * far[1][moved], rtol=1e-6)


def options_of(device):
    return [("float32", 1), *([("float32", 2), ("bfloat16", 2)] if device is CPU else [])]


def test_the_model_is_as_before(device, make_model, text, monkeypatch):
    """Bit for bit, after a score, after an error and after Ctrl-C, and so are the weights in half precision."""
    pytest.importorskip("ml_dtypes")
    for precision, count in options_of(device):
        model = make_model("LanguageModel", device, dropout=0.5)
        before = to_cpu(model.flat.data).copy()
        with Replicas(model, count, precision=precision) as replicas:
            fixed = evaluate_language_model(replicas, text[:100])
            half = None if replicas.half is None else replicas.half.copy()

            def expect_as_before(replicas=replicas, model=model, before=before, half=half):
                np.testing.assert_array_equal(to_cpu(model.flat.data), before)
                if half is not None:
                    np.testing.assert_array_equal(replicas.half, half)

            learning = evaluate_dynamic(replicas, text[:100], adapting(replicas, text))
            assert learning != fixed
            expect_as_before()
            for error in ZeroDivisionError, KeyboardInterrupt:
                optimizer, steps = adapting(replicas, text), []
                step = optimizer.step

                def stop(*arguments, step=step, steps=steps, error=error):
                    step(*arguments)
                    steps.append(1)
                    if len(steps) == 3:
                        raise error

                monkeypatch.setattr(optimizer, "step", stop)
                with pytest.raises(error):
                    evaluate_dynamic(replicas, text[:100], optimizer)
                assert len(steps) == 3
                expect_as_before()
            assert evaluate_language_model(replicas, text[:100]) == fixed
            assert evaluate_dynamic(replicas, text[:100], adapting(replicas, text)) == learning  # no dropout


def test_replicas_in_half_precision_learn(make_model, repeated):
    pytest.importorskip("ml_dtypes")
    model = make_model("LanguageModel")
    with Replicas(model, 1, precision="bfloat16") as replicas:
        fixed = evaluate_language_model(replicas, repeated)["loss"]
        found = evaluate_dynamic(replicas, repeated, Adam(model.parameters(), 0.01))["loss"]
    with Replicas(model, 1) as replicas:
        expected = evaluate_dynamic(replicas, repeated, Adam(model.parameters(), 0.01))["loss"]
    assert found == pytest.approx(expected, rel=0.02)
    assert found < 0.9 * fixed


@pytest.mark.parametrize("learn", ["new", "all"])
def test_the_number_of_replicas_changes_no_bit(make_model, text, learn):
    results = []
    for count in 1, 2, 3:
        model = make_model("LanguageModel")
        with Replicas(model, count) as replicas:
            optimizer = adapting(replicas, text)
            results.append(evaluate_dynamic(replicas, text[:300], optimizer, 3, 7, learn))
    assert results[0] == results[1] == results[2]


def test_tokens_of_several_bytes(make_model, text):
    sizes, model = np.arange(29) % 4 + 1, make_model("LanguageModel")
    with Replicas(model, 1) as replicas:
        plain, found = (
            evaluate_dynamic(replicas, text, SGD(model.parameters(), 0.1), sizes=size) for size in (None, sizes)
        )
    assert found["loss"] == plain["loss"]
    nats = plain["loss"] * (len(text) - 1)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / sizes[text[1:]].sum(), rel=1e-12)


def test_steps_that_are_too_large_are_named(make_model, text):
    model = make_model("LanguageModel")
    before = model.flat.data.copy()
    with Replicas(model, 1) as replicas, np.errstate(all="ignore"):
        with pytest.raises(Diverged, match=r"no longer finite after [0-9]+ steps: use a lower lr"):
            evaluate_dynamic(replicas, text, SGD(model.parameters(), 1e30))
    np.testing.assert_array_equal(model.flat.data, before)


def test_bad_arguments(make_model, text):
    model, other = make_model("LanguageModel"), make_model("LanguageModel")
    sgd = SGD(model.parameters(), 0.1)
    replicas = Replicas(model, 1)
    for error, match, arguments in [
        (TypeError, "replicas: expected", (model, text, sgd)),
        (TypeError, "optimizer: expected", (replicas, text, 0.1)),
        (ValueError, "optimizer: .* another model", (replicas, text, SGD(other.parameters(), 0.1))),
        (TypeError, "data", (replicas, text.astype(float), sgd)),
        (DataError, "nothing to predict", (replicas, text[:1], sgd)),
        (ValueError, "stride: expected at most the context", (replicas, text, sgd, 9)),
        (ValueError, "windows_per_step", (replicas, text, sgd, 4, 0)),
        (ValueError, "learn", (replicas, text, sgd, 4, 1, "old")),
        (ValueError, "observe", (replicas, text, DynamicRMS(model.parameters(), 0.1, 0.1))),
    ]:
        with pytest.raises(error, match=match):
            evaluate_dynamic(*arguments)
    for error, match, arguments in [
        (TypeError, "optimizer: expected", (sgd, 1)),
        (ValueError, "count", (DynamicRMS(model.parameters(), 0.1, 0.1), 0)),
    ]:
        optimizer, count = arguments
        with pytest.raises(error, match=match):
            observe_gradients(replicas, optimizer, TextBatches(text, 6, CONTEXT, Key(3)), count)
    for error, match, options in [
        (ValueError, "decay", {"decay": -1.0}),
        (ValueError, "eps", {"eps": 0.0}),
        (ValueError, "lr", {"lr": math.nan}),
    ]:
        with pytest.raises(error, match=match):
            DynamicRMS(model.parameters(), **{"lr": 0.1, "decay": 0.1, **options})
    with pytest.raises(TypeError, match="float16"):
        DynamicRMS(make_model("LanguageModel", dtype=np.float16).parameters(), 0.1, 0.1)


def test_models_that_it_is_not_for(make_model, text):
    xl = TransformerXL(29, 12, 3, 1, context=8, memory=4)
    for error, match, replicas in [
        (ValueError, "Transformer-XL reads it in segments", Replicas(xl, 1)),
        (TypeError, "got a Classifier", Replicas(make_model("Classifier"), 1)),
        (ValueError, "no loss scale for float16", Replicas(make_model("LanguageModel"), 1, precision="float16")),
    ]:
        with pytest.raises(error, match=match):
            evaluate_dynamic(replicas, text, SGD(replicas.model.parameters(), 0.1))


def test_a_restored_optimizer_goes_on(make_model, text):
    """Its state has what it observed, and how often."""
    model = make_model("LanguageModel")
    with Replicas(model, 1) as replicas:
        first = DynamicRMS(model.parameters(), lr=1e-3, decay=1e-3)
        observe_gradients(replicas, first, TextBatches(text, 4, model.context, Key(0)), 2)
        second = DynamicRMS(model.parameters(), lr=1e-3, decay=1e-3)
        second.load_state_dict(first.state_dict())
        found = [evaluate_dynamic(replicas, text[:60], optimizer) for optimizer in (first, second)]
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="state of another optimizer: observed"):
        second.load_state_dict({name: x for name, x in first.state_dict().items() if name != "observed"})
