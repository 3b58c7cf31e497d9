"""Properties of every optimizer, over flat arrays."""

import inspect
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

from scratchformer import optim
from scratchformer.backend import to_cpu
from scratchformer.compiler.in_place import IN_PLACE
from scratchformer.dispatch import Twin, fast, reference_only
from scratchformer.nn import FlatParameters, Layer, Linear, Param
from scratchformer.ops.rounding import round_into
from scratchformer.optim import SGD, Adam, AdamW, Group, Muon, optimizer
from scratchformer.optim.optimizer import CHUNK, Pieces
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT

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
    states = [
        Adam(Two("a", "b").parameters(), 0.1, groups=[Group(frozen, frozen=True)]).state_dict() for frozen in "ab"
    ]
    with pytest.raises(ValueError, match="or others are frozen"):
        Adam(Two("a", "b").parameters(), 0.1, groups=[Group("a", frozen=True)]).load_state_dict(states[1])


@every_optimizer
@pytest.mark.parametrize("count", [1, 3, 30])
def test_processes_that_keep_a_part_each_step_like_one_that_keeps_all(
    device, make_params, set_gradients, make, count, monkeypatch
):
    """30 are more than there are pieces, so some keep nothing. A state comes back to the process that keeps it."""
    monkeypatch.setattr(optimizer, "CHUNK", 3)
    monkeypatch.setattr(optimizer, "LARGE_CHUNK", 3)
    everywhere = make_params(*SHAPES, device=device)
    whole = make(everywhere)
    before = to_cpu(whole.flats[0].data).copy()
    parts, places = whole.slices(count), [whole.state_of(part) for part in whole.slices(count)]
    assert [parts[0].start, *(part.stop for part in parts)] == [0, *(part.start for part in parts[1:]), before.size]
    for step in range(2):
        set_gradients(everywhere, step)
        whole.step()
    state, after = whole.state_dict(), to_cpu(whole.flats[0].data)
    for part, place in zip(parts, places, strict=True):
        params = make_params(*SHAPES, device=device)
        one = make(params)
        one.keep(part)
        for step in range(2):
            set_gradients(params, step)
            one.step()
        kept = one.state_dict()
        assert sum(g.size for g in one.gradients()) == part.stop - part.start
        assert_same(kept, state | {name: state[name][place] for name in one.buffers})
        expected = before.copy()
        expected[part] = after[part]
        np.testing.assert_array_equal(to_cpu(one.flats[0].data), expected)
        if count > 1:
            with pytest.raises(ValueError, match=r": expected float32 \(\d+,\), got float32 \(25,\)"):
                one.load_state_dict(state)
        for name in one.buffers:
            getattr(one, name)[...] = 0
        one.load_state_dict(kept)
        assert_same(one.state_dict(), kept)


def test_parameters_that_cannot_be_divided_are_refused(make_params):
    first, second = (make_params(*SHAPES, seed=seed) for seed in range(2))
    FlatParameters.of(first)
    FlatParameters.of(second)
    with pytest.raises(ValueError, match=r"^params: expected one flat array, got 2$"):
        AdamW([*first, *second], 0.01).slices(3)
    with pytest.raises(ValueError, match=r"^params: expected them in the order of the flat array"):
        AdamW(first[::-1], 0.01).slices(3)


def test_gradients_in_two_flat_arrays_are_not_joined(make_params):
    """Even if in the second one they begin where those in the first one end."""
    first, second = make_params((4,), device=STRICT), make_params((4,), (3,), device=STRICT)
    FlatParameters.of(first)
    FlatParameters.of(second)
    for i, p in enumerate([*first, *second]):
        p.grad[...] = i
    second[0].frozen = True
    gradients = SGD([*first, *second], 0.1).gradients()
    assert [to_cpu(g).tolist() for g in gradients] == [[0.0] * 4, [2.0] * 3]


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
            for i, each in enumerate(optimizers):
                each.step(*([pool.map] if i == 1 else []))
    sizes = [w.size for (w, *_), _ in optimizers[0].work[2]]
    assert sum(sizes) == size and max(sizes) <= CHUNK
    assert_same(everything(optimizers[1]), everything(optimizers[0]))
    np.testing.assert_array_equal(np.concatenate([part[0].data for part in parts]), whole[0].data)


def test_pieces_are_as_large_as_the_device_can_take():
    """A CPU's fit in its cache. A share of 1 needs no copy of the gradient."""
    for xp, count in (np, 4), (STRICT.xp, 1):
        x = xp.zeros(3 * CHUNK + 17, np.float32)
        parts = optimizer.pieces(x)
        assert [parts[0].start, *(part.stop for part in parts)] == [*(part.start for part in parts), x.size]
        assert len(parts) == count and optimizer.scaled(x, 1.0) is x


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


@every_optimizer
def test_a_share_may_be_an_array(device, make_params, set_gradients, make):
    """As on a GPU, where it is computed without the host."""
    results = []
    for share in 0.3, device.xp.asarray(0.3):
        params = make_params(*SHAPES, device=device)
        one = make(params)
        for step in range(2):
            set_gradients(params, step)
            one.step(share=share)
        results.append(everything(one))
    assert_same(*results)


def test_each_step_may_round_into_another_array(device, make_params, set_gradients):
    params = make_params(*SHAPES, device=device)
    one = AdamW(params, 0.1)
    halves, after = [device.xp.zeros(25, np.float16) for _ in range(2)], []
    for step, half in enumerate([*halves, None]):
        set_gradients(params, step)
        one.step(half=half)
        after.append(to_cpu(one.flats[0].data).astype(np.float16))
    for half, expected in zip(halves, after, strict=False):
        np.testing.assert_array_equal(to_cpu(half), expected)


def test_what_stays_the_same_is_not_done_again_in_each_step(monkeypatch):
    """Neither the views are made again, nor are the parameters of the layer looked up."""
    model = Two("a", "b")
    one = AdamW(model.parameters(), 0.1)
    one.step()
    work = one.work
    monkeypatch.setattr(Two, "named_parameters", None)
    one.step()
    assert one.work is work


@pytest.fixture
def together(monkeypatch):
    """Lets operations that change arrays take `Pieces` without a GPU, one piece after the other. A list of the calls:
    the operation, and the shapes of the pieces.
    """
    calls = []

    def twin(op):
        def forward(*args):
            shapes = args[0].shapes
            calls.append((op.__name__, shapes))
            for i, shape in enumerate(shapes):

                def piece(x, i=i, size=math.prod(shape), shape=shape):
                    return x.flat[x.starts[i] : x.starts[i] + size].reshape(shape) if isinstance(x, Pieces) else x

                op.reference(*map(piece, args))

        fits = inspect.signature(op.reference).bind  # all its arguments are there
        return Twin(op.__name__, lambda *args: bool(fits(*args)), forward, None)

    for op in IN_PLACE:
        monkeypatch.setitem(op.chosen[False], Pieces, [twin(op)])
    return calls


class AdamOfAUser(Adam):
    """Its `update` neither takes a share nor `Pieces`."""

    def update(self, w, g, m, v, lr, weight_decay):
        assert not isinstance(w, Pieces)
        super().update(w, g, m, v, lr, weight_decay)


TOGETHER = {  # the operations that then take `Pieces`, besides `round_into`
    "AdamW": {"adam_step"},
    "Muon": {"adam_step", "nesterov", "move"},
    "Adam": set(),  # which adds the weight decay to the gradient
    "Adam without weight decay": {"adam_step"},
    "Adam of a user": set(),
    "SGD": set(),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("rounded", [False, True])
def test_what_is_stepped_together_is_stepped_as_apart(make_params, set_gradients, together, monkeypatch, name, rounded):
    """On a device that takes `Pieces`, matrices are stepped with those of the same shape, and with the transposed."""
    more = {
        "Adam without weight decay": lambda params: Adam(params, 1e-2),
        "Adam of a user": lambda params: AdamOfAUser(params, 1e-2),
    }
    monkeypatch.setattr(optimizer, "LARGE_CHUNK", 36)  # at most three matrices of twelve numbers at once
    results = []
    for inside in reference_only, nullcontext:
        params = make_params((3, 4), (5,), (4, 3), (2, 2), (3, 4), (4, 3), (4, 3), (7,), (2, 2, 2), device=STRICT)
        params[3].frozen = True  # the rest is in two places
        one = (OPTIMIZERS | more)[name](params)
        half = STRICT.xp.zeros(one.flats[0].data.shape, np.float16) if rounded else None
        with inside():
            for step in range(2):
                set_gradients(params, step)
                one.step(half=half, share=0.5)
                one.lr *= 0.5
        assert bool(together) == (inside is nullcontext and bool(TOGETHER[name]))
        results.append(everything(one) | ({"half": to_cpu(half)} if rounded else {}))
    for key, expected in results[0].items():
        np.testing.assert_allclose(results[1][key], expected, rtol=2e-5, atol=1e-7, err_msg=key)
    assert {op for op, _ in together} == TOGETHER[name] | ({"round_into"} if rounded and TOGETHER[name] else set())
    if name == "Muon":
        matrices = [shapes for op, shapes in together if op == "nesterov"]
        assert sorted(map(len, matrices)) == [2, 2, 3, 3]
        assert max(len(set(shapes)) for shapes in matrices) == 2


def test_a_device_begins_to_take_pieces_between_two_steps(make_params, set_gradients, together):
    """As inside and outside `fast()`."""
    params = make_params(*SHAPES, device=STRICT)
    one = AdamW(params, 1e-2)
    counts = []
    for inside in nullcontext, reference_only, nullcontext:
        set_gradients(params, 0)
        with inside():
            one.step()
        counts.append(len(together))
    assert counts[0] and counts == [counts[0], counts[0], 2 * counts[0]]


def test_an_optimizer_without_an_update(make_params):
    with pytest.raises(TypeError, match=r"^Optimizer has no update$"):
        optimizer.Optimizer(make_params((2,)), 0.1).step()


def test_pieces_are_like_an_array():
    x = np.arange(12, dtype=np.float16)
    parts = Pieces(x, (0, 7), ((2, 3), (4,)))
    assert (parts.dtype, parts.shape, parts.size) == (np.float16, ((2, 3), (4,)), 10)
    assert parts.flags.c_contiguous and parts.reshape(-1) is parts
    assert parts.part(slice(1, 2)) == Pieces(x, (7,), ((4,),))
