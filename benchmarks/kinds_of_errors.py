"""Twelve kinds of errors, planted in sixty operations, and how many of them two checkers find.

    python benchmarks/kinds_of_errors.py

The operations are those of the catalogue, and functions of PyTorch as functions of NumPy's arrays, whose right gradient
is PyTorch's. Each error is planted in the gradient of every argument that it changes. Prints, in Markdown, what
`check_gradients` and `torch.autograd.gradcheck` find of each kind, and their time by the processor's clock. Needs
PyTorch and JAX.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from checkers import CHECKERS, CheckedPair, cases, checked_pair, copies, pair_of, same
from planted import Parts, given, last, of_dy, remembers_the_last_forward
from torch.nn import functional

from scratchformer.dispatch import reference_only
from scratchformer.testing.contracts import as_tuple, is_floating
from scratchformer.testing.diagnosis import without_diagnosis

FUNCTIONS: dict[str, tuple[Callable, tuple]] = {  # each with the shapes of its arguments
    "exp": (torch.exp, ((3, 4),)),
    "log of a square": (lambda x: torch.log(x * x), ((3, 4),)),
    "sin": (torch.sin, ((3, 4),)),
    "sigmoid": (torch.sigmoid, ((3, 4),)),
    "softplus": (functional.softplus, ((3, 4),)),
    "elu": (functional.elu, ((3, 4),)),
    "abs": (torch.abs, ((3, 4),)),
    "hardtanh": (functional.hardtanh, ((3, 4),)),
    "erf": (torch.erf, ((3, 4),)),
    "mul": (torch.mul, ((3, 4), (4,))),
    "sub": (torch.sub, ((3, 4), (3, 1))),
    "div": (lambda a, b: a / (1 + b * b), ((3, 4), (4,))),
    "atan2": (torch.atan2, ((3, 4), (3, 4))),
    "hypot": (torch.hypot, ((3, 4), (4,))),
    "maximum": (torch.maximum, ((3, 4), (3, 4))),
    "where": (lambda a, b: torch.where(a > b, a * a, b), ((3, 4), (3, 4))),
    "matmul": (torch.matmul, ((3, 4), (4, 4))),
    "bmm": (torch.matmul, ((2, 3, 3), (2, 3, 3))),
    "outer": (torch.outer, ((3,), (4,))),
    "kron": (torch.kron, ((2, 2), (2, 3))),
    "det": (torch.det, ((3, 3),)),
    "inverse": (torch.inverse, ((3, 3),)),
    "solve": (torch.linalg.solve, ((3, 3), (3, 2))),
    "sum": (lambda x: x.sum(0), ((3, 4),)),
    "mean": (lambda x: x.mean(-1), ((3, 4),)),
    "var": (lambda x: x.var(-1), ((3, 4),)),
    "std": (lambda x: x.std(-1), ((3, 4),)),
    "norm": (lambda x: x.norm(dim=-1), ((3, 4),)),
    "prod": (lambda x: x.prod(-1), ((3, 4),)),
    "logsumexp": (lambda x: x.logsumexp(-1), ((3, 4),)),
    "amax": (lambda x: x.amax(-1), ((3, 4),)),
    "sort": (lambda x: x.sort(-1).values, ((3, 4),)),
    "median": (lambda x: x.median(-1).values, ((3, 5),)),
    "cumsum": (lambda x: x.cumsum(0), ((3, 4),)),
    "cumprod": (lambda x: x.cumprod(-1), ((3, 4),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), ((3, 4),)),
    "cosine_similarity": (functional.cosine_similarity, ((3, 4), (3, 4))),
    "cdist": (torch.cdist, ((3, 4), (2, 4))),
    "conv1d": (functional.conv1d, ((2, 3, 5), (4, 3, 3), (4,))),
    "group_norm": (lambda x, w: functional.group_norm(x, 2, w), ((3, 4, 2), (4,))),
    "huber_loss": (functional.huber_loss, ((3, 4), (3, 4))),
}
CATALOGUE = """
add, linear, dense, relu, gelu, silu, swiglu, tanh, softmax, soft_cross_entropy, layernorm, rmsnorm, rotary, embedding,
mean_pool, max_pool, attention, relative_shift, cross_entropy""".replace("\n", " ").strip()


def of_torch(function: Callable, args: tuple) -> Parts:
    """A function of PyTorch as an operation on NumPy's arrays."""

    def op(*arrays: Any) -> tuple[Any, Any]:
        tensors = [torch.tensor(np.array(x, order="C"), requires_grad=True) for x in arrays]
        with torch.enable_grad():
            y = function(*tensors)
        return y.detach().numpy().copy(), (y, tensors)

    def op_backward(dy: Any, cache: Any) -> tuple:
        y, tensors = cache
        dy = torch.tensor(np.array(dy, order="C"), dtype=y.dtype)
        return tuple(g.numpy().copy() for g in torch.autograd.grad(y, tensors, dy, retain_graph=True))

    return op, op_backward, args


def with_args(change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[int, Parts], Parts]:
    """An error that depends on the argument: `change` takes a gradient and its argument."""

    def plant(number: int, parts: Parts) -> Parts:
        op, op_backward, args = parts

        def keeping(*args: Any) -> tuple[Any, Any]:
            kept = [x.copy() for x in args if is_floating(x)][number]
            y, cache = op(*args)
            return y, (cache, kept)

        def wrong(dy: Any, cache: Any) -> tuple:
            gradients = given(op_backward(dy, cache[0]))
            gradients[number] = np.ascontiguousarray(change(gradients[number], cache[1]))
            return tuple(gradients)

        return keeping, wrong, args

    return plant


def first_row(g: np.ndarray) -> np.ndarray:
    """Of a sum over the first axis of dy, the first term is taken alone."""
    g = g.copy()
    g[1:] = 0
    return g


def with_dy(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[int, Parts], Parts]:
    """An error in dy, for the gradient of one argument."""

    def plant(number: int, parts: Parts) -> Parts:
        op, op_backward, args = parts
        _, other, _ = of_dy(change)(parts)

        def wrong(dy: Any, cache: Any) -> tuple:
            gradients = given(op_backward(dy, cache))
            gradients[number] = given(other(dy, cache))[number]
            return tuple(gradients)

        return op, wrong, args

    return plant


def repeats(x: np.ndarray) -> np.ndarray:
    """Which elements are equal to another one."""
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (counts[place] > 1).reshape(x.shape)


def exchanged(g: np.ndarray) -> np.ndarray:
    return g.swapaxes(-1, -2).reshape(g.shape) if g.ndim > 1 else g


KINDS: dict[str, Callable[[int, Parts], Parts]] = {
    "a factor of 1.01": with_args(lambda g, x: 1.01 * g),
    "the sign": with_args(lambda g, x: -g),
    "one element is zero": with_args(lambda g, x: last(g, lambda value: 0.0)),
    "two axes exchanged": with_args(lambda g, x: exchanged(g)),
    "a sum left out": with_dy(lambda dy: first_row(dy) if np.ndim(dy) else dy),
    "a mean in place of a sum": with_args(lambda g, x: g / len(g) if g.ndim else g),
    "shifted by one": with_args(lambda g, x: np.roll(g, 1, -1) if g.ndim else g),
    "only where x < 0": with_args(lambda g, x: np.where(x < 0, 1.1 * g, g)),
    "only where x > 3": with_args(lambda g, x: np.where(x > 3, 1.1 * g, g)),
    "only at repeated values": with_args(lambda g, x: np.where(repeats(x), 1.1 * g, g)),
    "the cache of another call": lambda number, parts: remembers_the_last_forward(parts),
    "dy is taken to be 1": with_dy(np.ones_like),
}


def arguments(title: str, args: tuple) -> tuple:
    """The arguments, of which some are above 3, or some repeated, where the error is planted there."""
    args = copies(args)
    for number, x in enumerate(filter(is_floating, args)):
        flat = x.reshape(-1)
        if "> 3" in title:
            flat[0] = 3.5 + number  # all different: at a tie the derivative may be any of several
        if "repeated" in title and x.size > 1:
            flat[-1] = flat[0]
    return args


def operations() -> Iterator[tuple[str, Parts]]:
    draw = np.random.default_rng(0).standard_normal
    for name, (function, shapes) in FUNCTIONS.items():
        yield name, of_torch(function, tuple(draw(shape) for shape in shapes))
    for name in CATALOGUE.split(", "):
        yield name, pair_of(cases, name)[:3]


def gradients(parts: Parts, then: tuple) -> tuple:
    """The gradients, after another call with the arguments `then`."""
    op, op_backward, args = parts
    y, cache = op(*copies(args))
    dy = [np.random.default_rng(1).standard_normal(np.shape(part)) for part in as_tuple(y)]
    op(*copies(then))
    return copies(tuple(given(op_backward(tuple(dy) if isinstance(y, tuple) else dy[0], cache))))


def planted(title: str, plant: Callable[[int, Parts], Parts], parts: Parts) -> Iterator[Parts]:
    """The operation with the error in the gradient of each argument that it changes."""
    op, op_backward, args = parts
    args = arguments(title, args)
    others = tuple(x[::-1] + 0.1 if is_floating(x) else x for x in args)
    count = 1 if "cache" in title else sum(map(is_floating, args))
    for number in range(count):
        wrong = plant(number, (op, op_backward, args))
        if not same(gradients(wrong, others), gradients((op, op_backward, args), others)):
            yield wrong


def found(check: Callable[[CheckedPair], Any], parts: Parts) -> tuple[bool, float]:
    """Whether a check fails, and the seconds that it takes."""
    op, op_backward, args = parts
    pair, start = checked_pair(op, op_backward, copies(args)), time.process_time()
    try:
        with np.errstate(all="ignore"), without_diagnosis():
            check(pair)
    except Exception:
        return True, time.process_time() - start
    return False, time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = ("scratchformer", "gradcheck")
    pairs = dict(operations())
    seconds = dict.fromkeys(names, 0.0)
    print("| error |", " | ".join(names), "|\n| --- | --- | --- |")
    with reference_only():
        for name, parts in pairs.items():
            for checker in names:
                if found(CHECKERS[checker], parts)[0]:
                    print(f"{checker} refuses {name}, which is right")
        for title, plant in KINDS.items():
            counts, total = dict.fromkeys(names, 0), 0
            for name, parts in pairs.items():
                for wrong in planted(title, plant, parts):
                    total += 1
                    for checker in names:
                        finds, took = found(CHECKERS[checker], wrong)
                        counts[checker] += finds
                        seconds[checker] += took
                        if not finds and checker == "scratchformer":
                            print(f"missed: {title} in {name}")
            print(f"| {title} ({total}) |", " | ".join(map(str, counts.values())), "|", flush=True)
    print("| seconds |", " | ".join(f"{each:.1f}" for each in seconds.values()), "|")


if __name__ == "__main__":
    main()
