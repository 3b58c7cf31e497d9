"""Properties of every optimizer, over flat arrays."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from scratchformer import optim
from scratchformer.backend import to_cpu
from scratchformer.dispatch import fast, reference_only
from scratchformer.nn import Layer, Linear, Param
from scratchformer.ops.rounding import round_into
from scratchformer.optim import SGD, Adam, AdamW, Group, Muon
from scratchformer.optim.optimizer import CHUNK
from scratchformer.rng import Key

OPTIMIZERS = {
    "Adam": lambda params: Adam(params, 1e-2, weight_decay=0.1),
    "AdamW": lambda params: AdamW(params, 1e-2),
    "Muon": lambda params: Muon(params, 1e-2, 1e-2, hidden="*"),
    "SGD": lambda params: SGD(params, 1e-2, momentum=0.9, weight_decay=0.1),
}
SHAPES = ((3, 4), (5,), (2, 2, 2))

every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def everything(optimizer):
    """Copies of the parameters and of the state."""
    return {"w": np.concatenate([to_cpu(p.data).ravel() for p in optimizer.params]), **optimizer.state_dict()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name, strict=True)


@every_optimizer
def test_zero_grad_clears_the_gradients_and_nothing_else(device, make_params, set_gradients, make):
    params = make_params(*SHAPES, device=device)
    optimizer = make(params)
    set_gradients(params, 0)
    optimizer.step()
    before = everything(optimizer)
    assert any(state.any() for name, state in before.items() if name in optimizer.buffers)
    optimizer.zero_grad()
    assert not any(to_cpu(p.grad).any() for p in params)
    assert_same(everything(optimizer), before)
    assert optimizer.steps == 1


@every_optimizer
def test_a_step_leaves_the_gradients_as_they_are(device, make_params, set_gradients, make):
    params = make_params(*SHAPES, device=device)
    optimizer = make(params)
    set_gradients(params, 0)
    before = [to_cpu(grad).copy() for grad in optimizer.gradients()]
    assert sum(grad.size for grad in before) == sum(p.data.size for p in params)
    optimizer.step()
    for grad, copy in zip(optimizer.gradients(), before, strict=True):
        np.testing.assert_array_equal(to_cpu(grad), copy)


@every_optimizer
def test_a_parameter_listed_twice_is_stepped_once(device, make_params, set_gradients, make):
    """A tied table is listed by two layers, but has one set of moments."""
    params, twins = (make_params(*SHAPES, device=device) for _ in range(2))
    once, listed_twice = make(params), make([*twins, twins[0], twins[2]])
    assert sum(g.size for g in listed_twice.gradients()) == sum(p.data.size for p in twins)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(twins, step)
        once.step()
        listed_twice.step()
    assert_same(everything(listed_twice), everything(once))


class Tied(Layer):
    def __init__(self):
        self.first, self.second = Linear(3, 3, bias=False, key=Key(1)), Linear(3, 3, bias=False, key=Key(2))
        self.second.w = self.first.w


@every_optimizer
def test_layers_that_share_a_parameter_share_its_moments(device, make):
    model = Tied().to(device)
    optimizer = make([*model.first.parameters(), *model.second.parameters()])
    assert [p.flat for p in optimizer.params] == [model.flat]
    assert [getattr(optimizer, name).shape for name in optimizer.buffers] == [(9,)] * len(optimizer.buffers)


@every_optimizer
def test_a_restored_state_continues_exactly(device, make_params, set_gradients, make):
    params = make_params(*SHAPES, device=device)
    optimizer = make(params)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    twins = make_params(*SHAPES, seed=1, device=device)
    other = make(twins)
    for p, twin in zip(params, twins, strict=True):
        twin.data[...] = p.data
    other.load_state_dict(optimizer.state_dict())
    assert other.steps == 3
    for step in range(3, 6):
        for some, one in ((params, optimizer), (twins, other)):
            set_gradients(some, step)
            one.step()
    assert_same(everything(other), everything(optimizer))


@every_optimizer
def test_a_state_is_a_copy_on_the_cpu(device, make_params, set_gradients, make):
    params = make_params(*SHAPES, device=device)
    optimizer = make(params)
    set_gradients(params, 0)
    optimizer.step()
    state = optimizer.state_dict()
    before = {name: array.copy() for name, array in state.items()}
    optimizer.step()
    assert all(isinstance(array, np.ndarray) for array in state.values())
    assert_same(state, before)


@every_optimizer
@pytest.mark.parametrize("kind", ["longer", "another type", "a buffer missing", "a buffer more", "no steps"])
def test_a_wrong_state_is_refused_and_nothing_is_changed(device, make_params, set_gradients, make, kind):
    params = make_params(*SHAPES, device=device)
    optimizer = make(params)
    set_gradients(params, 0)
    optimizer.step()
    state = {name: array + 1 for name, array in optimizer.state_dict().items()}
    name = optimizer.buffers[-1]
    if kind == "longer":
        state[name] = np.zeros(state[name].size + 1, np.float32)
    elif kind == "another type":
        state[name] = state[name].astype(np.int32)
    elif kind == "a buffer missing":
        del state[name]
    elif kind == "a buffer more":
        state["other"] = state[name]
    else:
        del state["steps"]
    before = everything(optimizer)
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(state)
    assert_same(everything(optimizer), before)


class Two(Layer):
    """Two parameters of one shape, in either order."""

    def __init__(self, *names):
        for name in names:
            setattr(self, name, Param(np.ones((2, 2), np.float32), "w"))


def test_a_state_for_other_parameters_is_refused():
    """Even if it has the same size: another order, or others are frozen."""
    state = SGD(Two("a", "b").parameters(), 0.1).state_dict()
    SGD(Two("a", "b").parameters(), 0.1).load_state_dict(state)
    other = SGD(Two("b", "a").parameters(), 0.1)
    with pytest.raises(ValueError, match="its parameters have other names or another order, or others are frozen"):
        other.load_state_dict(state)
    del state["parameters"]  # an earlier version's
    other.load_state_dict(state)
    states = [
        Adam(Two("a", "b").parameters(), 0.1, groups=[Group(frozen, frozen=True)]).state_dict() for frozen in "ab"
    ]
    with pytest.raises(ValueError, match="or others are frozen"):
        Adam(Two("a", "b").parameters(), 0.1, groups=[Group("a", frozen=True)]).load_state_dict(states[1])


def test_a_part_of_a_state_comes_back_to_the_process_that_keeps_it():
    model = Two("a", "b")
    optimizer = Adam(model.parameters(), 0.1)
    model.a.grad[...] = model.b.grad[...] = 1
    optimizer.step()
    whole = optimizer.state_dict()
    optimizer.keep(optimizer.slices(2)[1])
    own = optimizer.state_dict()
    optimizer.m[...] = 0
    optimizer.load_state_dict(own)
    assert_same(optimizer.state_dict(), own)
    if own["m"].size < whole["m"].size:
        with pytest.raises(ValueError, match=r"m: expected float32 \(\d\,\), got float32 \(8,\)"):
            optimizer.load_state_dict(whole)
    assert_same(optimizer.state_dict(), own)


def test_a_long_parameter_is_divided_between_its_pieces(monkeypatch):
    monkeypatch.setattr("scratchformer.optim.optimizer.CHUNK", 8)
    layer = Linear(15, 4)  # 64 numbers
    adam = Adam(layer.parameters(), 0.1)
    assert adam.slices(4) == [slice(start, start + 16) for start in range(0, 64, 16)]
    assert [part.stop % 8 for part in adam.slices(3)] == [0, 0, 0]
    adam.keep(adam.slices(4)[1])
    assert adam.m.size == adam.v.size == 16


NUMBERS = {
    "SGD": lambda number: dict(lr=number(0.1), momentum=number(0.9), weight_decay=number(0.01)),
    "Adam": lambda number: dict(lr=number(0.1), betas=(number(0.9), number(0.99)), eps=number(1e-8)),
    "AdamW": lambda number: dict(lr=number(0.1), weight_decay=number(0.1)),
    "Muon": lambda number: dict(lr=number(0.02), adam_lr=number(1e-3), momentum=number(0.95), hidden="*"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_give_the_same_bits(name):
    """A float64 of NumPy's would make float64 of float32 arrays."""
    found = []
    for number in float, np.float64:
        model = Two("a", "b")
        optimizer = getattr(optim, name)(model.parameters(), **NUMBERS[name](number))
        for step in range(3):
            draw = np.random.default_rng(step)
            for p in model.parameters():
                p.grad[...] = draw.standard_normal(p.data.shape)
            optimizer.lr = number(0.05)
            optimizer.step()
        found.append(model.state_dict())
    assert_same(*found)


@pytest.mark.parametrize("make", [make for name, make in OPTIMIZERS.items() if name != "Muon"])
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_steps_on_a_thread_pool_and_in_pieces_are_the_same_steps(make_params, set_gradients, make, size):
    """`step()`, `step(map=pool.map)` and stepping every piece separately agree, since elements are independent."""
    whole, pooled = (make_params((size,)) for _ in range(2))
    pieces = make_params((size,))[0].data
    parts = [make_params((len(piece),)) for piece in np.array_split(pieces, 5) if len(piece)]
    for part, piece in zip(parts, (p for p in np.array_split(pieces, 5) if len(p)), strict=True):
        part[0].data[...] = piece
    optimizers = [make(params) for params in (whole, pooled, *parts)]
    with ThreadPoolExecutor(3) as pool:
        for step in range(3):
            set_gradients(whole, step)
            pooled[0].grad[...] = whole[0].grad
            for part, gradient in zip(parts, (g for g in np.array_split(whole[0].grad, 5) if len(g)), strict=True):
                part[0].grad[...] = gradient
            for i, optimizer in enumerate(optimizers):
                optimizer.step(*([pool.map] if i == 1 else []))
    assert_same(everything(optimizers[1]), everything(optimizers[0]))
    np.testing.assert_array_equal(np.concatenate([part[0].data for part in parts]), whole[0].data)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, d) for name in OPTIMIZERS for d in (np.float32, np.float64)] + [("SGD", np.float16)]
)
def test_the_precision_of_parameters_and_state_stays(device, make_params, set_gradients, name, dtype):
    params = make_params(*SHAPES, device=device, dtype=dtype)
    optimizer = OPTIMIZERS[name](params)
    optimizer.lr = np.float64(1e-2)  # what a schedule that uses NumPy returns
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    arrays = [*optimizer.gradients(), *(getattr(optimizer, name) for name in optimizer.buffers)]
    assert {a.dtype for a in (*arrays, *(p.data for p in params), *(p.grad for p in params))} == {np.dtype(dtype)}


@every_optimizer
def test_no_parameters(make):
    with pytest.raises(ValueError, match="params: expected at least one parameter, got none"):
        make([])


@every_optimizer
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("inside", [fast, reference_only])
def test_clipping_and_rounding_in_the_step_change_no_bit(device, make_params, set_gradients, make, share, inside):
    """Compared with the three one after the other; the gradient stays as it was."""
    together, apart = (make_params(*SHAPES, device=device) for _ in range(2))
    first, second = make(together), make(apart)
    flats = [each.flats[0] for each in (first, second)]
    halves = [device.xp.zeros(flat.data.shape, np.float16) for flat in flats]
    with inside():
        for step in range(3):
            for params in (together, apart):
                set_gradients(params, step)
            before = to_cpu(flats[0].grad).copy()
            first.step(share=share, half=halves[0])
            flats[1].grad[...] *= share
            second.step()
            round_into(flats[1].data, halves[1])
            np.testing.assert_array_equal(to_cpu(flats[0].grad), before)
    assert_same(everything(first), everything(second))
    np.testing.assert_array_equal(*map(to_cpu, halves))
