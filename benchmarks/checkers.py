"""Gradient checkers side by side: what each finds among known and planted mistakes, and in what time.

    python benchmarks/checkers.py [catalogue] [planted] [right]

The checkers are this project's (`check_gradients`, for a layer `check_layer`), `torch.autograd.gradcheck`, normal and
fast, and `jax.test_util.check_grads` in reverse mode. Those of PyTorch and JAX run twice, with their default tolerances
and with tight ones. All get the same code on the same arrays, in float64: the operation and its backward in NumPy, for
PyTorch inside a `torch.autograd.Function`, for JAX inside a `custom_vjp` with `pure_callback`.

`catalogue`: the mistakes of `scratchformer.catalogue` that change a gradient or break the contract, but do not
change the result; each on the smallest case of `scratchformer.catalogue` that it changes. `planted`: kinds of
mistakes, each in ten operations. `right`: the package as it is, at scales from 1e-3 to 1e2, which no checker should
refuse. Prints Markdown. Needs PyTorch and JAX; one core (`OMP_NUM_THREADS=1 taskset -c 0`) gives the steadiest times.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import importlib.machinery
import logging
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.test_util import check_grads
from planted import OF_A_GRADIENT, OF_A_PAIR, OTHERS, RIGHT, Parts, in_gradient

from scratchformer.backend import CPU
from scratchformer.catalogue import MISTAKES, Mistake, known_operations
from scratchformer.catalogue import check as cases
from scratchformer.catalogue.mistake import PACKAGE
from scratchformer.dispatch import reference_only
from scratchformer.notation.consequences import consequences
from scratchformer.notation.grammar import canonical, parse
from scratchformer.testing import check_gradients
from scratchformer.testing.contracts import as_tuple, copied, is_floating
from scratchformer.testing.runs import argument_names

PLACES = ("ops", "kernels", "nn", "models")  # where mistakes of gradients are
PLANTED_IN = "linear gelu swiglu softmax layernorm rotary embedding max_pool attention cross_entropy".split()
SCALES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)


class CheckedPair(NamedTuple):
    """An operation of NumPy arrays with its backward. A layer's is a function of its inputs and parameters."""

    op: Callable
    op_backward: Callable
    args: tuple
    ours: Callable[[], Any]  # this project's check of it
    layer: bool = False


def case_of(package: Any, name: str, scale: float = 1.0) -> Any:
    """A case of `catalogue`; the parameters of a layer are drawn too."""
    draw = package.Draw(0, scale)
    if name in package.OPERATIONS:
        return package.OPERATIONS[name](draw)
    case = package.LAYERS[name](draw)
    for p in case.layer.parameters():
        p.data[...] = draw.generator.standard_normal(p.data.shape)
    return case


def pair_of(package: Any, name: str, scale: float = 1.0, dtype: Any = np.float64) -> CheckedPair:
    """The pair of a case of `catalogue`, with the check of the same copy of the package."""
    case = case_of(package, name, scale)
    if hasattr(case, "layer"):
        return layer_pair(case, dtype, package.check_layer)
    args = tuple(copied(x, CPU, dtype) for x in case.args)
    ours = functools.partial(package.check_gradients, case.op, case.op_backward, *args, rules=True, **case.options)
    return CheckedPair(functools.partial(case.op, **case.options), case.op_backward, args, ours)


def checked_pair(op: Callable, op_backward: Callable, args: tuple) -> CheckedPair:
    return CheckedPair(op, op_backward, args, functools.partial(check_gradients, op, op_backward, *args, rules=True))


def layer_pair(case: Any, dtype: Any, check: Callable) -> CheckedPair:
    layer = copy.deepcopy(case.layer).to(dtype=dtype)
    trained = [p for p in layer.parameters() if not getattr(p, "frozen", False)]
    count = len(case.inputs)
    options = {n: copied(x, CPU, dtype) for n, x in case.options.items()}

    def op(*arrays: Any) -> tuple[Any, Any]:
        for p, data in zip(trained, arrays[count:], strict=True):
            p.data[...] = data
        return layer.forward(*arrays[:count], **options)

    def op_backward(dy: Any, cache: Any, zero: bool = True) -> tuple:
        if zero:
            layer.zero_grad()
        dx = layer.backward(dy, cache)
        return *as_tuple(dx), *(p.grad.copy() for p in trained)

    inputs = (copied(x, CPU, dtype) for x in case.inputs)
    args = (*inputs, *(p.data.copy() for p in trained))
    return CheckedPair(op, op_backward, args, functools.partial(check, case.layer, *case.inputs, **case.options), True)


# The checkers. Each takes a pair, and raises an exception if it finds it wrong.


def as_torch(pair: CheckedPair) -> tuple[Callable, list]:
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


def torch_checker(**settings: Any) -> Callable[[CheckedPair], None]:
    def check(pair: CheckedPair) -> None:
        function, tensors = as_torch(pair)
        torch.autograd.gradcheck(function, tensors, **settings)

    return check


def as_jax(pair: CheckedPair) -> tuple[Callable, list]:
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


def jax_checker(**settings: Any) -> Callable[[CheckedPair], None]:
    def check(pair: CheckedPair) -> None:
        function, arrays = as_jax(pair)
        check_grads(function, arrays, order=1, modes=["rev"], **settings)

    return check


TIGHT = dict(atol=1e-8, rtol=1e-6)
CHECKERS: dict[str, Callable[[CheckedPair], Any]] = {
    "scratchformer": lambda pair: pair.ours(),
    "gradcheck": torch_checker(),
    "gradcheck, tight": torch_checker(**TIGHT),
    "gradcheck, fast": torch_checker(fast_mode=True),
    "gradcheck, fast, tight": torch_checker(fast_mode=True, **TIGHT),
    "check_grads": jax_checker(),
    "check_grads, tight": jax_checker(eps=1e-5, **TIGHT),
}


class Score:
    """What each checker said of some pairs, and how long it took."""

    def __init__(self) -> None:
        self.refused: dict[str, list[bool]] = defaultdict(list)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, make: Callable[[], CheckedPair]) -> dict[str, str]:
        """Give a fresh pair to every checker. Returns the messages of those that refused it."""
        said = {}
        for name, check in CHECKERS.items():
            pair, start = make(), time.perf_counter()
            try:
                with np.errstate(all="ignore"):
                    check(pair)
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
            self.seconds[name].append(time.perf_counter() - start)
            self.refused[name].append(name in said)
        if "GradientError" not in said.get("scratchformer", "GradientError"):
            print(said["scratchformer"], file=sys.stderr, flush=True)
        return said

    def update(self, other: Score) -> None:
        for name in CHECKERS:
            self.refused[name] += other.refused[name]
            self.seconds[name] += other.seconds[name]

    def row(self, title: str) -> str:
        return line([f"{title} ({len(next(iter(self.refused.values())))})", *(sum(self.refused[n]) for n in CHECKERS)])

    def times(self) -> list[str]:
        medians = [f"{1000 * statistics.median(self.seconds[n]):.1f}" for n in CHECKERS]
        totals = [f"{sum(self.seconds[n]):.1f}" for n in CHECKERS]
        return [line(["median ms a check", *medians]), line(["seconds in all", *totals])]


def line(cells: list) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(first: str) -> list[str]:
    return ["", line([first, *CHECKERS]), line(["---"] * (1 + len(CHECKERS)))]


def show(lines: list[str]) -> None:
    print(*lines, sep="\n", flush=True)


# The mistakes of the catalogue.


@contextmanager
def package_with(mistake: Mistake) -> Iterator[Any]:
    """`catalogue.check` of a second copy of the package, which has the mistake. Afterwards the right one is back."""
    path, code = str(PACKAGE / mistake.file), mistake.source()
    if not all(wrong in code for wrong in mistake.replace.values()):
        raise ValueError(f"{mistake.name}: what it replaces is not in {mistake.file}")
    loader = importlib.machinery.SourceFileLoader
    as_it_stands = loader.get_code

    def get_code(self: Any, name: str) -> Any:
        return compile(code, path, "exec") if self.path == path else as_it_stands(self, name)

    right = modules()
    for name in right:
        del sys.modules[name]
    loader.get_code = get_code  # type: ignore[method-assign]
    try:
        yield importlib.import_module("scratchformer.catalogue.check")
    finally:
        loader.get_code = as_it_stands  # type: ignore[method-assign]
        for name in modules():
            del sys.modules[name]
        sys.modules.update(right)


def modules() -> dict[str, Any]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "scratchformer"}


class Observation(NamedTuple):
    """What a pair computes, as far as a check can see it."""

    y: tuple
    gradients: tuple  # None if the backward fails
    later: tuple  # the same after a second forward, with the cache of the first, and a layer's after two backwards
    types: list[str]  # of y and the gradients, if the arguments are float32

    def differs(self, right: Observation) -> str:
        """What is wrong, in one word; empty if nothing is, or if y itself is different."""
        if not same(self.y, right.y):
            return "" if np.isfinite(np.concatenate([np.ravel(part) for part in self.y])).all() else "values"
        if not same(self.gradients, right.gradients):
            return "gradient"
        if not same(self.later, right.later):
            return "state"
        return "type" if self.types != right.types else ""


def same(a: tuple, b: tuple) -> bool:
    return len(a) == len(b) and all(
        np.shape(x) == np.shape(y) and np.allclose(x, y, rtol=1e-9, atol=1e-12 * np.abs(y).max(initial=0))
        for x, y in zip(a, b, strict=True)
    )


def evidence(make: Callable[..., CheckedPair]) -> Observation:
    pair, single = make(), make(dtype=np.float32)
    y, cache = pair.op(*copies(pair.args))
    dy = normal_like(y)
    first = gradients(pair, dy, cache)
    y, cache = pair.op(*copies(pair.args))
    pair.op(*[x[::-1].copy() if is_floating(x) else x for x in pair.args])
    later = gradients(pair, dy, cache)
    if pair.layer:
        later += copies(pair.op_backward(dy, cache, zero=False))
    results, cache = single.op(*copies(single.args))
    returned = [*as_tuple(results), *gradients(single, normal_like(results), cache)]
    return Observation(copies(as_tuple(y)), first, later, [str(x.dtype) for x in returned])


def gradients(pair: CheckedPair, dy: Any, cache: Any) -> tuple:
    return copies(tuple(g for g in as_tuple(pair.op_backward(dy, cache)) if g is not None))


def copies(arrays: tuple) -> tuple:
    return tuple(x.copy() if isinstance(x, np.ndarray) else x for x in arrays)


def normal_like(y: Any) -> Any:
    draw = np.random.default_rng(0).standard_normal
    arrays = tuple(draw(part.shape).astype(part.dtype) for part in map(np.asarray, as_tuple(y)))
    return arrays if isinstance(y, tuple) else arrays[0]


def equation_pair(mistake: Mistake, name: str, dtype: Any = np.float64) -> CheckedPair:
    """The case `name` with a backward that evaluates the derivation, one of whose equations is wrong."""
    case, known = case_of(cases, name), dict[bytes, tuple]()

    def op(*args: Any) -> tuple[Any, Any]:
        return case.op(*args, **case.options)[0], copies(args)

    def op_backward(dy: Any, args: tuple) -> tuple:
        key = b"".join(np.asarray(x).tobytes() for x in (dy, *args) if is_floating(np.asarray(x)))
        if key not in known:
            known[key] = evaluated(np.asarray(dy, float), tuple(copied(x, CPU, np.float64) for x in args))
        return tuple(g.astype(dtype) for g in known[key])

    def evaluated(dy: Any, args: tuple) -> tuple:
        entry = known_operations()[mistake.operation]
        pair, names = (entry.op, entry.op_backward), entry.names(*args, **case.options)
        derivation = consequences(*pair, *args, names=names, dy=dy, **case.options)
        place = derivation.equations.index(parse(mistake.equation, derivation.values))
        values = derivation.values | derivation.of(place, parse(mistake.wrong, derivation.values))
        floating = [canonical(n) for n, x in zip(argument_names(pair[0], args), args, strict=True) if is_floating(x)]
        return tuple(values[derivation.gradient(n)].reshape(values[n].shape) for n in floating)

    return checked_pair(op, op_backward, tuple(copied(x, CPU, dtype) for x in case.args))


def catalogue() -> None:
    """Print what each checker says of each mistake that it could find."""
    names = [*cases.OPERATIONS, *cases.LAYERS]
    right = {}
    for references in (True, False):
        with reference_only() if references else nullcontext():
            observed = {name: evidence(functools.partial(pair_of, cases, name)) for name in names}
        right[references] = dict(sorted(observed.items(), key=lambda item: sum(g.size for g in item[1].gradients)))
    in_code, in_equations = Score(), Score()
    show(head("mistake (what is wrong)"))
    for mistake in MISTAKES:
        references, kind = not mistake.file.startswith("kernels/"), ""
        if mistake.file.partition("/")[0] in PLACES:
            with package_with(mistake) as wrong:
                dispatch = sys.modules["scratchformer.dispatch"]
                with dispatch.reference_only() if references else nullcontext():
                    make, kind = first_difference(functools.partial(pair_of, wrong), right[references])
                    said = in_code.add(make) if kind else {}
        elif not mistake.file:
            known = {n: e for n, e in right[True].items() if n in cases.OPERATIONS and named(n, mistake.operation)}
            make, kind = first_difference(functools.partial(equation_pair, mistake), known)
            pair = make()
            said = in_equations.add(lambda: pair) if kind else {}  # noqa: B023
        if kind:
            show([line([f"{mistake.name} ({kind})", *("found" if n in said else "" for n in CHECKERS)])])
    show([in_code.row("**planted in the code**"), *in_code.times(), in_equations.row("**in an equation**")])


def named(case: str, operation: str) -> bool:
    """Whether this is a case of the operation."""
    return cases.OPERATIONS[case](cases.Draw()).op.__name__ == operation


def first_difference(
    make: Callable[..., CheckedPair], right: dict[str, Observation]
) -> tuple[Callable[[], CheckedPair], str]:
    """The smallest case of `right` that a mistake changes, as a function that makes the pair, and what it changes."""
    for name, expected in right.items():
        pair = functools.partial(make, name)
        try:
            kind = evidence(pair).differs(expected)
        except Exception:  # it fails at once, or the equations are not of this case
            continue
        if kind:
            return pair, kind
    return pair, ""


# Planted mistakes, and right code.


def planted() -> None:
    """Print how many mistakes of each kind the checkers find."""
    pairs = [pair_of(cases, name) for name in PLANTED_IN]
    every = Score()
    kinds: dict[str, list[Callable[[], Parts]]] = defaultdict(list)
    for pair in pairs:
        parts = pair[:3]
        for title, change in OF_A_GRADIENT.items():
            for number in range(sum(map(is_floating, pair.args))):
                kinds[title].append(functools.partial(in_gradient, number, change, parts))
        for title, plant in OF_A_PAIR.items():
            kinds[title].append(functools.partial(plant, parts))
    for title, examples in OTHERS.items():
        kinds[title] += [lambda parts=parts: parts for parts in examples]
    show(head("mistake (planted so many times)"))
    with reference_only():
        for title, makers in kinds.items():
            score = Score()
            for make in makers:
                score.add(fresh(make))
            every.update(score)
            show([score.row(title)])
    show([every.row("**all**"), *every.times()])


def fresh(make: Callable[[], Parts]) -> Callable[[], CheckedPair]:
    """A function that makes a pair with arguments of its own."""

    def again() -> CheckedPair:
        op, op_backward, args = make()
        return checked_pair(op, op_backward, copies(args))

    return again


def right() -> None:
    """Print how often each checker refuses right code."""
    show(head("right code that was refused (of so many)"))

    def add(title: str, makers: list[Callable[[], CheckedPair]], times: bool = False) -> None:
        score = Score()
        for make in makers:
            score.add(make)
        show([score.row(title), *(score.times() if times else [])])

    for scale in SCALES:
        makers = [functools.partial(pair_of, cases, name, scale) for name in cases.OPERATIONS]
        add(f"operations, scale {scale:g}", makers, times=scale == 1)
    add("layers and models", [functools.partial(pair_of, cases, name) for name in cases.LAYERS], times=True)
    for title, examples in RIGHT.items():
        add(title, [fresh(lambda parts=parts: parts) for parts in examples])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"catalogue": catalogue, "planted": planted, "right": right}
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="default: all")
    chosen = parser.parse_args().parts or parts
    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("jax").setLevel(logging.CRITICAL)  # a callback that fails is an answer
    Score().add(functools.partial(pair_of, cases, "tanh"))  # the first check of each takes longer
    for name in chosen:
        parts[name]()


if __name__ == "__main__":
    main()
