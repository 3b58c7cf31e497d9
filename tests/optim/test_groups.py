"""Which parameters an optimizer steps, and how: groups, freezing, parts of a model, copies, changed parameters."""

import copy
import json
import pickle

import numpy as np
import pytest

from scratchformer.backend import to_cpu
from scratchformer.models import LanguageModel
from scratchformer.nn import Frozen, Layer, Linear, Param, TransformerBlock
from scratchformer.optim import SGD, Adam, AdamW, Group, Muon, clip_by_global_norm
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT

OPTIMIZERS = {
    "Adam": lambda params, **options: Adam(params, 1e-2, **options),
    "AdamW": lambda params, **options: AdamW(params, 1e-2, **options),
    "Muon": lambda params, **options: Muon(params, 1e-2, 1e-2, hidden="*", **options),
    "SGD": lambda params, **options: SGD(params, 1e-2, momentum=0.9, **options),
}
both_copies = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def language_model(depth=1):
    return LanguageModel(7, 4, 2, depth, 5, key=Key(1))


def fill(model, step=0):
    """Normal gradients for all parameters."""
    for name, p in model.named_parameters().items():
        p.grad[...] = Key(step).fold(name).generator().standard_normal(p.data.shape)


def moved(model, before):
    """The names of the parameters that have changed."""
    return {name for name, value in model.state_dict().items() if not np.array_equal(value, before[name])}


def names(model, start):
    return {name for name in model.named_parameters() if name.startswith(start)}


# Parts of a model


@every_optimizer
@pytest.mark.parametrize("first", ["flat arrays first", "optimizer first", "no flat arrays"])
def test_the_head_alone_is_trained(make, first):
    model = language_model()
    if first == "flat arrays first":
        assert model.flat
    optimizer = make(model.output.parameters())
    if first == "optimizer first":
        assert model.flat
    before = model.state_dict()
    fill(model)
    optimizer.step()
    assert moved(model, before) == {"output.w", "output.b"}
    assert all(getattr(optimizer, name).size == 4 * 7 + 7 for name in optimizer.buffers)


@every_optimizer
def test_two_optimizers_share_a_model(make):
    """Each steps its part just as an optimizer of the whole model would."""
    model, twin = language_model(), language_model()
    whole, parts = make(twin.parameters()), [make(model.body.parameters()), make(model.output.parameters())]
    for step in range(3):
        for some in (model, twin):
            fill(some, step)
        whole.step()
        for part in parts:
            part.step()
    assert not moved(model, twin.state_dict())


def test_a_part_in_any_order_is_stepped_as_the_whole():
    model, twin = language_model(), language_model()
    backwards, whole = Adam(list(reversed(model.parameters())), 1e-2), Adam(twin.parameters(), 1e-2)
    for step in range(2):
        fill(model, step), fill(twin, step)
        backwards.step(), whole.step()
    assert not moved(model, twin.state_dict())


def test_only_its_own_gradients_are_cleared_and_clipped():
    model = language_model()
    adam = Adam(model.output.parameters(), 1e-2)
    fill(model)
    own = np.concatenate([p.grad.ravel().copy() for p in model.output.parameters()])
    body = {name: p.grad.copy() for name, p in model.body.named_parameters().items()}
    assert clip_by_global_norm(adam.gradients(), 0.5) == pytest.approx(np.linalg.norm(own), rel=1e-6)
    clipped = np.concatenate([p.grad.ravel() for p in model.output.parameters()])
    np.testing.assert_allclose(clipped, own * 0.5 / np.linalg.norm(own), rtol=1e-5)
    adam.zero_grad()
    assert not any(p.grad.any() for p in model.output.parameters())
    assert all(np.array_equal(p.grad, body[name]) for name, p in model.body.named_parameters().items())


def test_the_gradients_of_a_whole_model_are_one_piece():
    model = language_model()
    (grad,) = AdamW(model.parameters(), 1e-2).gradients()
    assert np.shares_memory(grad, model.flat.grad) and grad.size == model.flat.grad.size


# Groups


@every_optimizer
def test_a_group_has_a_learning_rate_of_its_own(make):
    """Its steps are ten times larger, also after a schedule has changed the rate."""
    model, twin = language_model(), language_model()
    grouped, plain = make(model.parameters(), groups=[Group("output.*", lr=0.1)]), make(twin.parameters())
    for lr in 1e-2, 1e-3:
        before = model.state_dict(), twin.state_dict()
        grouped.lr = plain.lr = lr
        for some in (model, twin):
            fill(some)
        grouped.step(), plain.step()
        for name in before[0]:
            factor = 10 if name.startswith("output.") else 1
            change, expected = (m.state_dict()[name] - b[name] for m, b in zip((model, twin), before, strict=True))
            np.testing.assert_allclose(change, factor * expected, rtol=2e-2, atol=1e-6, err_msg=name)


@every_optimizer
def test_a_frozen_group_stays_and_takes_no_memory(make):
    model = language_model()
    optimizer = make(model.parameters(), groups=[Group("body.*", frozen=True)])
    before = model.state_dict()
    for step in range(2):
        fill(model, step)
        optimizer.step()
    assert moved(model, before) == names(model, "output.")
    assert all(getattr(optimizer, name).size == 4 * 7 + 7 for name in optimizer.buffers)
    assert sum(g.size for g in optimizer.gradients()) == 4 * 7 + 7


@every_optimizer
def test_a_frozen_parameter_stays(make):
    model = language_model()
    for p in model.body.parameters():
        p.frozen = True
    optimizer = make(model.parameters())
    before = model.state_dict()
    fill(model)
    optimizer.step()
    assert moved(model, before) == names(model, "output.")


def test_the_first_group_that_matches_holds():
    model = language_model()
    groups = [
        Group("output.b", frozen=True),
        Group("output.*", lr=0.1),
        Group("*.table", lr=0.2),
    ]
    adam = Adam(model.parameters(), 1e-2, groups=groups)
    by_name = {name: group for group in adam.settings()["groups"] for name in group["parameters"]}
    assert by_name.keys() == model.named_parameters().keys()
    assert by_name["output.b"]["frozen"] and not by_name["output.w"]["frozen"]
    assert by_name["output.w"]["lr"] == pytest.approx(10)  # times the optimizer's
    assert by_name["body.tokens.table"]["lr"] == pytest.approx(20)
    assert by_name["body.blocks.0.norm1.gamma"]["lr"] == 1


def test_adamw_decays_what_has_two_axes():
    """A group's own weight decay applies to all its parameters."""
    model = language_model()
    adam = AdamW(model.parameters(), 0.1, weight_decay=0.5, groups=[Group("*.norm1.*", weight_decay=0.2)])
    before = model.state_dict()
    adam.zero_grad()
    adam.step()
    for name, value in model.state_dict().items():
        decay = 0.2 if ".norm1." in name else 0.5 if value.ndim >= 2 else 0.0
        np.testing.assert_allclose(value, before[name] * np.float32(1 - 0.1 * decay), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(groups=[Group("outputs.*", lr=1.0)]), r"groups: 'outputs\.\*' matches no parameter; .*output\.w"),
        (dict(groups=[Group("*", frozen=True)]), "groups: expected a parameter that is not frozen, got none"),
        (dict(groups=[Group("*", lr=-1.0)]), "lr of group '\\*': expected a finite number >= 0, got -1.0"),
        (dict(groups=[Group("*", weight_decay=float("nan"))]), "weight_decay of group '\\*': expected .* got nan"),
        (dict(groups=["output.*"]), "groups: expected a list of Groups, got"),
        (dict(groups=Group("*")), "groups: expected a list of Groups, got Group"),
        (dict(groups=[Group("*", frozen="no")]), "frozen of group '\\*': expected True or False, got 'no'"),
        (dict(groups=[Group("*", lr="1")]), "lr of group '\\*': expected a number, got '1'"),
        (
            dict(groups=[Group("*"), Group("output.*", lr=1.0)]),
            r"'output\.\*' matches no parameter that no group before",
        ),
        (dict(groups=[Group(3)]), "groups: match: expected a str, got 3"),
    ],
)
def test_invalid_groups_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Adam(language_model().parameters(), 1e-2, **options)


def test_a_groups_rate_with_an_optimizers_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match="lr: expected a number > 0, since a group has its own, got 0"):
        Adam(language_model().parameters(), 0, groups=[Group("output.*", lr=1.0)])
    Adam(language_model().parameters(), 0, groups=[Group("output.*", weight_decay=1.0)])


# Copies


@every_optimizer
@both_copies
@pytest.mark.parametrize("flat", [True, False])
def test_a_copy_of_model_and_optimizer_trains_as_they_do(make, copied, flat):
    model = language_model()
    optimizer = make(model.parameters(), groups=[Group("body.*", lr=1e-3)])
    if flat:
        assert model.flat
    fill(model)
    optimizer.step()
    twin, twin_optimizer = copied((model, optimizer))
    before = model.state_dict()
    twin_optimizer.zero_grad()
    fill(twin, 1)
    assert sum(g.size for g in twin_optimizer.gradients()) == twin.flat.grad.size
    twin_optimizer.step()
    assert moved(twin, before) == set(before)
    assert not moved(model, before)  # the original
    fill(model, 1)
    optimizer.step()
    assert not moved(model, twin.state_dict())


@both_copies
def test_a_new_optimizer_trains_a_copied_model(copied):
    model = language_model()
    assert model.flat
    twin = copied(model)
    before = twin.state_dict()
    fill(twin)
    Adam(twin.parameters(), 1e-2).step()
    assert moved(twin, before) == set(before) and not moved(model, before)
    twin.flat.data[...] = 0
    assert not any(value.any() for value in twin.state_dict().values())


# Parameters that changed after the optimizer was made


def test_a_moved_model_is_noticed():
    model = language_model()
    adam = Adam(model.parameters(), 1e-2)
    model.to(STRICT)
    with pytest.raises(ValueError, match=r"params: expected float32 on cpu, got float32 on .*strict.*layer\.to"):
        adam.step()


def test_a_model_moved_to_the_device_it_is_on_is_trained():
    model = language_model()
    adam = Adam(model.parameters(), 1e-2)
    model.to("cpu")
    before = model.state_dict()
    adam.zero_grad()
    fill(model)
    assert clip_by_global_norm(adam.gradients(), 1.0) > 1
    adam.step()
    assert moved(model, before) == set(before)


@pytest.mark.parametrize("call", ["zero_grad", "gradients", "step"])
def test_a_cast_model_is_noticed_by_whatever_comes_first(call):
    model = language_model()
    adam = Adam(model.parameters(), 1e-2)
    model.to(dtype=np.float64)
    with pytest.raises(ValueError, match="params: expected float32 on cpu, got float64 on cpu"):
        getattr(adam, call)()
    assert adam.steps == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_an_added_block_is_noticed(steps):
    model = language_model()
    adam = Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        adam.step()
    model.body.blocks.append(TransformerBlock(4, 2, causal=True, key=Key(9)))
    before = model.state_dict()
    with pytest.raises(ValueError, match=r"params: .*\.query\.w.*, \S+, \S+ and 10 more added after the optimizer"):
        adam.step()
    assert not moved(model, before) and adam.steps == steps
    assert model.flat.data.size == sum(p.data.size for p in model.parameters())  # a new one can be made
    Adam(model.parameters(), 1e-2).step()


def test_a_removed_layer_is_noticed():
    model = language_model(depth=2)
    adam = Adam(model.parameters(), 1e-2)
    del model.body.blocks[1]
    with pytest.raises(ValueError, match=r"params: .*body\.blocks\.1\."):
        adam.step()


def test_a_layer_that_was_frozen_is_noticed():
    model = language_model()
    adamw = AdamW(model.parameters(), 1e-2)
    model.body = Frozen(model.body)
    with pytest.raises(ValueError, match=r"params: body\.tokens\.table, .* frozen or unfrozen after the optimizer"):
        adamw.step()


def test_an_unfrozen_parameter_is_noticed():
    model = language_model()
    model.output.b.frozen = True
    adam = Adam(model.parameters(), 1e-2)
    adam.step()
    model.output.b.frozen = False
    with pytest.raises(ValueError, match=r"params: output\.b frozen or unfrozen after the optimizer"):
        adam.step()
    for p in model.parameters():
        p.frozen = True
    with pytest.raises(ValueError, match=r"params: \S+, \S+, \S+ and \d+ more frozen or unfrozen after the optimizer"):
        adam.step()


class Rebinds(Layer):
    """y = x w, whose backward assigns a new gradient instead of adding in place."""

    def __init__(self):
        self.w = Param(np.ones((2, 3), np.float32), "w")

    def forward(self, x):
        return x @ self.w.data, x

    def backward(self, dy, x):
        self.w.grad = self.w.grad + x.T @ dy
        return dy @ self.w.data.T


@pytest.mark.parametrize("flat", [True, False])
def test_an_assigned_gradient_trains(flat):
    layer = Rebinds()
    if flat:
        assert layer.flat
    sgd = SGD(layer.parameters(), 0.1)
    x = np.ones((4, 2), np.float32)
    for _ in range(2):
        layer.zero_grad()
        y, cache = layer.forward(x)
        layer.backward(np.ones_like(y), cache)
        sgd.step()
    np.testing.assert_allclose(layer.w.data, np.full((2, 3), 1 - 2 * 0.1 * 4), rtol=1e-6)


def test_assigned_data_is_trained_on():
    layer = Linear(2, 3)
    sgd = SGD(layer.parameters(), 1.0)
    layer.w.data = np.full((2, 3), 5, np.float32)
    layer.w.grad[...] = 1
    sgd.step()
    assert (layer.w.data == 4).all() and (layer.flat.data[:6] == 4).all()


def test_assigning_flat_arrays_assigns_the_parameters():
    layer = Linear(2, 3)
    sgd = SGD(layer.parameters(), 1.0)
    layer.flat.data = np.full(9, 5, np.float32)
    layer.flat.grad = layer.flat.grad + 1
    sgd.step()
    assert (layer.w.data == 4).all() and (layer.b.data == 4).all()
    with pytest.raises(ValueError, match=r"flat\.grad: expected \(9,\), got \(3,\)"):
        layer.flat.grad = np.zeros(3)


def test_parameters_are_floating_point_numbers():
    for data, found in ((np.array([1, 2]), "int64"), ([1.0], "list"), (np.ones(2, bool), "bool")):
        with pytest.raises(TypeError, match=f"^w: expected an array of floating-point numbers, got {found}"):
            Param(data, "w")
    for dtype in int, bool, complex:
        with pytest.raises(TypeError, match=r"^dtype: expected a floating-point type"):
            Linear(2, 3).to(dtype=dtype)
    with pytest.raises(TypeError, match=r"^device: expected a Device or its name, .* pass a type as dtype="):
        Linear(2, 3).to(np.float64)


# Half precision


@pytest.mark.parametrize("make", [Adam, AdamW])
def test_adam_refuses_half_precision(make):
    """Its v, a mean of squares, is 0 in float16 for any gradient below 2e-4, and eps is 0 too."""
    model = language_model().to(dtype=np.float16)
    with pytest.raises(TypeError, match="params: expected float32 or float64, got float16"):
        make(model.parameters(), 1e-3)


# Settings


def test_settings_are_json_and_say_what_the_optimizer_is():
    model = language_model()
    adamw = AdamW(model.parameters(), 1e-3, betas=(0.9, 0.98), groups=[Group("output.*", frozen=True)])
    settings = adamw.settings()
    assert json.loads(json.dumps(settings)) == settings
    assert (settings["class"], settings["betas"], settings["eps"]) == ("AdamW", [0.9, 0.98], 1e-8)
    assert [g["parameters"] for g in settings["groups"] if g["frozen"]] == [["output.w", "output.b"]]
    assert {g["weight_decay"] for g in settings["groups"]} == {0.0, 0.01}
    assert to_cpu(adamw.m).size == sum(p.data.size for p in model.body.parameters())
    assert SGD(model.parameters(), 0.1, momentum=0.5).settings()["momentum"] == 0.5
    muon = Muon(model.parameters(), groups=[Group("output.*", frozen=True)])
    for optimizer, whole in (adamw, []), (muon, [True]):
        groups = optimizer.settings()["groups"]
        assert [g["whole"] for g in groups if g["whole"]] == whole
        assert {*groups[0]} == {"lr", "weight_decay", "frozen", "whole", "parameters"}
