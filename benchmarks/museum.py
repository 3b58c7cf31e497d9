"""The exhibits of the museum before four checkers: what each finds, and in what time. Prints Markdown.

    OMP_NUM_THREADS=1 python benchmarks/museum.py [--seeds N]

`check_drawn` draws its arrays itself. The others, `torch.autograd.gradcheck`, its fast mode and
`jax.test_util.check_grads` in reverse mode, get normal numbers with sizes that all differ, as one would give them; so
does `check_gradients`, to show what the draws add. All have their default settings. The right gradients of all exhibits
are checked too, with N seeds (default: 10), and timed: the mean. Needs PyTorch and JAX.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.test_util import check_grads

from scratchformer.museum.exhibits import GROUPS, NAMES, Exhibit, exhibit
from scratchformer.testing import GradientError, check_drawn, check_gradients
from scratchformer.testing.contracts import as_tuple, is_floating
from scratchformer.testing.diagnosis import without_diagnosis
from scratchformer.testing.draw import Sizes
from scratchformer.testing.drawn import arguments

Check = Callable[[Exhibit, Callable, int], object]


class Pair(NamedTuple):
    """An operation of NumPy arrays with its backward, and arguments."""

    op: Callable
    op_backward: Callable
    args: tuple


def as_torch(pair: Pair) -> tuple[Callable, list]:
    """The pair as a function of tensors, and the tensors."""
    places = [i for i, x in enumerate(pair.args) if is_floating(x)]

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            args = list(pair.args)
            for i, t in zip(places, tensors, strict=True):
                args[i] = t.detach().numpy()
            y, ctx.cache = pair.op(*args)
            ctx.single = not isinstance(y, tuple)
            ys = tuple(torch.from_numpy(np.asarray(part)) for part in as_tuple(y))
            return ys[0] if ctx.single else ys

        @staticmethod
        def backward(ctx: Any, *dys: Any) -> Any:
            dy = tuple(d.numpy() for d in dys)
            gradients = as_tuple(pair.op_backward(dy[0] if ctx.single else dy, ctx.cache))
            return tuple(torch.from_numpy(np.asarray(g)) for g in gradients if g is not None)

    return Operation.apply, [torch.tensor(pair.args[i], requires_grad=True) for i in places]


def torch_checker(**settings: Any) -> Callable[[Pair], None]:
    def check(pair: Pair) -> None:
        function, tensors = as_torch(pair)
        torch.autograd.gradcheck(function, tensors, **settings)

    return check


def as_jax(pair: Pair) -> tuple[Callable, list]:
    """The pair as a function of JAX's arrays, and the arrays."""
    places = [i for i, x in enumerate(pair.args) if is_floating(x)]

    def run(*arrays: Any) -> tuple[Any, Any]:
        args = list(pair.args)
        for i, x in zip(places, arrays, strict=True):
            args[i] = np.asarray(x)
        return pair.op(*args)

    def forward(*arrays: Any) -> Any:
        return tuple(np.array(part) for part in as_tuple(run(*arrays)[0]))

    def backward(dy: Any, *arrays: Any) -> tuple:
        y, cache = run(*arrays)
        dy = tuple(map(np.asarray, dy))
        gradients = as_tuple(pair.op_backward(dy if isinstance(y, tuple) else dy[0], cache))
        return tuple(np.array(g) for g in gradients if g is not None)

    arrays = [jax.numpy.array(pair.args[i]) for i in places]
    shapes = jax.tree_util.tree_map(shape_of, forward(*(pair.args[i].copy() for i in places)))

    @jax.custom_vjp
    def function(*arrays: Any) -> Any:
        return jax.pure_callback(forward, shapes, *arrays)

    def rule(arrays: Any, dy: Any) -> Any:
        return jax.pure_callback(backward, tuple(map(shape_of, arrays)), dy, *arrays)

    function.defvjp(lambda *arrays: (function(*arrays), arrays), rule)
    return function, arrays


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def jax_checker(**settings: Any) -> Callable[[Pair], None]:
    def check(pair: Pair) -> None:
        function, arrays = as_jax(pair)
        check_grads(function, arrays, order=1, modes=["rev"], **settings)

    return check


def line(cells: list) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def on_normal_numbers(check: Callable) -> Check:
    def checked(shown: Exhibit, backward: Callable, seed: int) -> None:
        check(Pair(shown.forward, backward, arguments(shown.arguments, Sizes(seed))))

    return checked


CHECKERS: dict[str, Check] = {
    "check_drawn": lambda shown, backward, seed: check_drawn(shown.forward, backward, *shown.arguments, seed=seed),
    "check_gradients": on_normal_numbers(lambda pair: check_gradients(pair.op, pair.op_backward, *pair.args)),
    "gradcheck": on_normal_numbers(torch_checker()),
    "gradcheck, fast": on_normal_numbers(torch_checker(fast_mode=True)),
    "check_grads": on_normal_numbers(jax_checker()),
}


def refuses(checker: str, shown: Exhibit, backward: Callable, seed: int, seconds: list[float]) -> bool:
    start = time.process_time()
    try:
        with np.errstate(all="ignore"):
            CHECKERS[checker](shown, backward, seed)
    except Exception as error:
        if checker.startswith("check_drawn") and not isinstance(error, GradientError):
            raise
        return True
    finally:
        seconds.append(time.process_time() - start)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="of the right gradients (default: 10)")
    seeds = parser.parse_args().seeds
    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("jax").setLevel(logging.CRITICAL)  # a callback that fails is an answer
    seconds: dict[str, list[float]] = defaultdict(list)
    found, refused = dict.fromkeys(CHECKERS, 0), dict.fromkeys(CHECKERS, 0)
    for checker in CHECKERS:  # the first check of each takes longer
        refuses(checker, exhibit(NAMES[0]), exhibit(NAMES[0]).right, 0, [])
    print(line(["exhibit", *CHECKERS]), line(["---"] * (1 + len(CHECKERS))), sep="\n")
    with without_diagnosis():
        for group, names in GROUPS.items():
            print(line([f"**{group}**", *[""] * len(CHECKERS)]))
            for name in names:
                shown = exhibit(name)
                results = {c: refuses(c, shown, shown.wrong, 0, []) for c in CHECKERS}
                for checker, result in results.items():
                    found[checker] += result
                print(line([shown.title, *("✓" if result else "–" for result in results.values())]), flush=True)
        print(line([f"**found, of {len(NAMES)}**", *(f"**{found[c]}**" for c in CHECKERS)]))
        for shown in map(exhibit, NAMES):
            for checker in CHECKERS:
                refused[checker] += sum(
                    refuses(checker, shown, shown.right, seed, seconds[checker]) for seed in range(seeds)
                )
    print(line(["ms of CPU for a right gradient", *(f"{1000 * statistics.mean(seconds[c]):.1f}" for c in CHECKERS)]))
    print(line([f"right gradients refused, of {seeds * len(NAMES)}", *(refused[c] for c in CHECKERS)]))


if __name__ == "__main__":
    main()
