"""Kinds of mistakes for `checkers.py`, each as a change of a right operation and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scratchformer.testing.contracts import as_tuple, is_floating

Parts = tuple[Callable, Callable, tuple]  # op, op_backward, args


def given(returned: Any) -> list[np.ndarray]:
    """The gradients that a backward returned, without those of a bias that is not there."""
    return [g for g in as_tuple(returned) if g is not None]


def last(g: np.ndarray, value: Callable) -> np.ndarray:
    """A copy with another last element."""
    g = g.copy()
    g.flat[-1] = value(g.flat[-1])
    return g


# Changes of one gradient; each is planted in every gradient of an operation.
OF_A_GRADIENT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a factor of 1.01": lambda g: 1.01 * g,
    "a factor of 1.001": lambda g: 1.001 * g,
    "a factor of 1.0001": lambda g: 1.0001 * g,
    "a factor of 1.00001": lambda g: 1.00001 * g,
    "one element is 1% too large": lambda g: last(g, lambda value: 1.01 * value),
    "one element is left out": lambda g: last(g, lambda value: 0.0),
    "computed in float16": lambda g: g.astype(np.float16).astype(g.dtype),
    "computed in float32": lambda g: g.astype(np.float32).astype(g.dtype),
}


def in_gradient(number: int, change: Callable[[np.ndarray], np.ndarray], parts: Parts) -> Parts:
    op, op_backward, args = parts

    def wrong(dy: Any, cache: Any) -> tuple:
        gradients = given(op_backward(dy, cache))
        gradients[number] = change(gradients[number])
        return tuple(gradients)

    return op, wrong, args


def of_dy(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Parts], Parts]:
    """The backward gets another dy."""

    def plant(parts: Parts) -> Parts:
        op, op_backward, args = parts
        changed = lambda dy, cache: op_backward(tuple(map(change, dy)) if isinstance(dy, tuple) else change(dy), cache)  # noqa: E731
        return op, changed, args

    return plant


def of_result(change: Callable[[Any], Any]) -> Callable[[Parts], Parts]:
    """The forward returns another y."""

    def plant(parts: Parts) -> Parts:
        op, op_backward, args = parts

        def wrong(*args: Any) -> tuple[Any, Any]:
            y, cache = op(*args)
            return change(y), cache

        return wrong, op_backward, args

    return plant


def forward_writes(parts: Parts) -> Parts:
    op, op_backward, args = parts

    def wrong(*args: Any) -> tuple[Any, Any]:
        result = op(*(x.copy() if is_floating(x) else x for x in args))
        next(x for x in args if is_floating(x))[...] *= 0.5
        return result

    return wrong, op_backward, args


def backward_writes(parts: Parts) -> Parts:
    op, op_backward, args = parts

    def with_inputs(*args: Any) -> tuple[Any, Any]:
        y, cache = op(*(x.copy() if is_floating(x) else x for x in args))
        return y, (cache, next(x for x in args if is_floating(x)))

    def wrong(dy: Any, cache: Any) -> Any:
        gradients = op_backward(dy, cache[0])
        cache[1][...] *= 0.5
        return gradients

    return with_inputs, wrong, args


def backward_writes_to_dy(parts: Parts) -> Parts:
    op, op_backward, args = parts

    def wrong(dy: Any, cache: Any) -> Any:
        gradients = tuple(np.array(g) for g in given(op_backward(dy, cache)))
        for part in as_tuple(dy):
            part[...] *= 0.5
        return gradients

    return op, wrong, args


def uses_up_its_cache(parts: Parts) -> Parts:
    """A second backward on the same cache gives half the gradient."""
    op, op_backward, args = parts

    def with_count(*args: Any) -> tuple[Any, Any]:
        y, cache = op(*args)
        return y, (cache, [])

    def wrong(dy: Any, cache: Any) -> tuple:
        cache, calls = cache
        calls.append(None)
        return tuple(g / min(len(calls), 2) for g in given(op_backward(dy, cache)))

    return with_count, wrong, args


def remembers_the_last_forward(parts: Parts) -> Parts:
    """The backward takes the cache of the last forward, whatever it is given."""
    op, op_backward, args = parts
    caches = {}

    def remembering(*args: Any) -> tuple[Any, Any]:
        y, caches["last"] = op(*args)
        return y, None

    return remembering, lambda dy, _: op_backward(dy, caches["last"]), args


def counts_its_calls(parts: Parts) -> Parts:
    op, op_backward, args = parts
    calls = []

    def wrong(*args: Any) -> tuple[Any, Any]:
        calls.append(None)
        y, cache = op(*args)
        scaled = tuple((1 + 0.01 * len(calls)) * part for part in as_tuple(y))
        return scaled if isinstance(y, tuple) else scaled[0], cache

    return wrong, op_backward, args


def random_backward(parts: Parts) -> Parts:
    """Gradients with noise of 1%."""
    op, op_backward, args = parts
    draw = np.random.default_rng(0).standard_normal

    def wrong(dy: Any, cache: Any) -> tuple:
        gradients = given(op_backward(dy, cache))
        return tuple(g * (1 + 0.01 * draw(g.shape)) for g in gradients)

    return op, wrong, args


def reused_buffers(parts: Parts) -> Parts:
    """Every backward returns the same arrays."""
    op, op_backward, args = parts
    buffers: list = []

    def wrong(dy: Any, cache: Any) -> tuple:
        gradients = given(op_backward(dy, cache))
        if [(b.shape, b.dtype) for b in buffers] != [(g.shape, g.dtype) for g in gradients]:
            buffers[:] = [np.empty_like(g) for g in gradients]
        for buffer, g in zip(buffers, gradients, strict=True):
            buffer[...] = g
        return tuple(buffers)

    return op, wrong, args


def tiny(parts: Parts) -> Parts:
    """A factor of 1.01, where y and its gradients are a million times smaller than the arguments."""
    op, op_backward, args = parts
    op, _, _ = of_result(lambda y: 1e-6 * y)(parts)
    return op, lambda dy, cache: tuple(1.01e-6 * g for g in given(op_backward(dy, cache))), args


def as_double(parts: Parts) -> Parts:
    op, op_backward, args = parts
    return op, lambda dy, cache: tuple(g.astype(np.float64) for g in given(op_backward(dy, cache))), args


# Changes of the pair.
OF_A_PAIR: dict[str, Callable[[Parts], Parts]] = {
    "1% too large, in a result of size 1e-6": tiny,
    "dy is taken to be 1": of_dy(np.ones_like),
    "dy is squared": of_dy(lambda dy: dy * dy),
    "dy is clipped at ±10": of_dy(lambda dy: np.clip(dy, -10, 10)),
    "dy is read in memory order": of_dy(lambda dy: np.asarray(dy).ravel(order="K").reshape(np.shape(dy))),
    "forward writes to its argument": forward_writes,
    "backward writes to the argument": backward_writes,
    "backward writes to dy": backward_writes_to_dy,
    "a second backward gives another gradient": uses_up_its_cache,
    "backward uses the last forward's cache": remembers_the_last_forward,
    "the result depends on the number of calls": counts_its_calls,
    "random numbers in the backward": random_backward,
    "every backward returns the same arrays": reused_buffers,
    "gradients of float32 are float64": as_double,
}


# Mistakes that need an operation made for them.


def view(x: np.ndarray) -> tuple[Any, Any]:
    return x.reshape(-1), x.shape


def view_backward(dy: np.ndarray, shape: tuple) -> np.ndarray:
    return dy.reshape(shape).copy()


def norm(x: np.ndarray, eps: float = 1e-5) -> tuple[Any, Any]:
    rrms = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * rrms, (x, rrms)


def norm_without_eps_backward(dy: np.ndarray, cache: tuple) -> np.ndarray:
    """Takes x̂ to have a root mean square of 1, which is so only where x is much larger than √eps."""
    x, rrms = cache
    unit = x / np.sqrt((x * x).mean(-1, keepdims=True))
    return rrms * (dy - unit * (dy * unit).mean(-1, keepdims=True))


def leaky(x: np.ndarray) -> tuple[Any, Any]:
    return np.where(x > 0, x, 0.01 * x), x


def near(distance: float) -> np.ndarray:
    """Values, half of which have this distance from zero."""
    x = np.random.default_rng(1).standard_normal((4, 5))
    x[::2] = distance * np.sign(x[::2])
    return x


def add(a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    return a + b, None


def add_backward(dy: np.ndarray, _: None) -> tuple:
    da = dy.copy()
    return da, da


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(0).standard_normal(shape)


OTHERS: dict[str, list[Parts]] = {
    "the result is a view of the argument": [(view, view_backward, (normal(2, 3),))],
    "the gradient is a view of dy": [(lambda x: (x.ravel().copy(), x.shape), np.reshape, (normal(2, 3),))],
    "two gradients are one array": [(add, add_backward, (normal(2, 3), normal(2, 3)))],
    "wrong for small values alone (ε left out)": [
        (norm, norm_without_eps_backward, (normal(4, 6, scale=scale),)) for scale in (1e-2, 1e-3, 1e-4)
    ],
    "wrong within 1e-3 of a kink": [
        (leaky, lambda dy, x: np.where(x > 1e-3, dy, 0.01 * dy), (near(distance),)) for distance in (9e-4, 1e-4, 1e-5)
    ],
    "one element of 1,000 is 1% too large": [
        (
            lambda x: (np.tanh(x), np.tanh(x)),
            lambda dy, y: last(dy * (1 - y * y), lambda v: 1.01 * v),
            (normal(10, 100),),
        )
    ],
}

# Right pairs that are hard to check.
RIGHT: dict[str, list[Parts]] = {
    "a kink within 1e-4 to 1e-8 of values": [
        (leaky, lambda dy, x: np.where(x > 0, dy, 0.01 * dy), (near(distance),))
        for distance in (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
    ],
}
