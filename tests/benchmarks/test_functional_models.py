"""benchmarks/functional_models.py: the models that libraries compile have our loss and our gradients."""

from pathlib import Path

import numpy as np
import pytest

from scratchformer import Key, models, ops
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.training.snapshot import load_file

FILE = Path(__file__).parents[2] / "benchmarks" / "functional_models.py"
IDS = Key(1).generator().integers(0, 29, (3, 8))


@pytest.fixture(params=["jax", "torch"])
def peer(request, monkeypatch):
    """A function of a model. It returns its gradients and a training step, by our references in another library."""
    pytest.importorskip(request.param)
    pytest.importorskip("array_api_compat")
    module = load_file(FILE)
    if request.param == "jax":
        config = pytest.importorskip("jax").config
        before = config.jax_enable_x64
        yield lambda model: module.jax_peer(model, bfloat16=False, ours=True)
        config.update("jax_enable_x64", before)  # a peer sets it
    else:
        monkeypatch.setattr("torch.compile", lambda graph: graph)  # compiling takes a minute
        yield module.torch_peer


def model_and_batch(kind):
    sizes = dict(d_model=6, heads=2, depth=1, key=Key(0))
    if kind == "Classifier":
        model, batch = models.Classifier(29, 2, max_length=8, **sizes), (IDS, np.array([8, 5, 1]), np.array([0, 1, 1]))
    else:
        model, batch = models.LanguageModel(29, context=8, **sizes), (IDS, np.roll(IDS, -1, axis=1))
    return model.to(dtype=np.float64), batch


def loss_of(model, batch):
    """The loss; the gradients are added to the model's."""
    loss, cache = model.loss(*batch)
    model.loss_backward(1.0, cache)
    return float(loss)


@pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])
def test_our_references_in_another_library_have_our_gradients(peer, kind, monkeypatch):
    """The library differentiates none of the operations itself: each backward is ours."""
    model, batch = model_and_batch(kind)
    loss, called = loss_of(model, batch), set()
    names = {"embedding", "linear", "relu", "layernorm", "attention", "cross_entropy"}
    names |= {"mean_pool"} if kind == "Classifier" else set()
    for name in names:

        def backward(dy, cache, name=name, backward=getattr(ops, f"{name}_backward")):
            called.add(name)
            return backward(dy, cache)

        monkeypatch.setattr(ops, f"{name}_backward", backward)
    value, gradients = peer(model)[0](batch)
    assert value == pytest.approx(loss, rel=1e-12)
    assert called == names and gradients.keys() == model.named_parameters().keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, model.named_parameters()[name].grad, rtol=1e-10, atol=1e-12, err_msg=name)


def test_our_references_in_another_library_train_alike(peer):
    model, batch = model_and_batch("LanguageModel")
    (_, step), adam = peer(model), Adam(model.parameters(), 1e-4)
    for _ in range(3):
        model.flat.grad[...] = 0
        assert step(batch) == pytest.approx(loss_of(model, batch), rel=1e-8)
        clip_by_global_norm(model.flat.grad, 1.0)
        adam.step()
