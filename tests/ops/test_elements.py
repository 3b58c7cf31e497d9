"""No element of a result or of a gradient is further from its exact value than the condition of the function explains.

The exact values come from the derivations: their equations, evaluated with mpmath's numbers on the arguments as they
are rounded. An element y is a function of the numbers x_i of all arguments, dy among them. Changing each by one part in
1/u, as rounding it does, changes y by up to u Σ_i abs(x_i ∂y/∂x_i), u being half the distance from 1 to the next number
of the type. That and the rounding of y itself is the unit of the errors here.
"""

import inspect
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from mpmath import mp, mpf

from scratchformer import ops
from scratchformer.catalogue import Sizes, entries_of
from scratchformer.compiler.equations import definitions_of
from scratchformer.dispatch import fast, reference_only
from scratchformer.notation import values
from scratchformer.notation.grammar import walk
from scratchformer.notation.run import each_argument, named_gradients, run
from scratchformer.notation.values import Scope, evaluate, learn_sizes
from scratchformer.notation.walk import arranged

BITS = 1600  # enough for a number of 2^-1074 that is left of 1, in a difference of values that are 2^-STEP apart
STEP = 300
KINDS = {"reference": reference_only, "numpy": nullcontext} | ({"numba": fast} if find_spec("numba") else {})


def elementwise(function, count=1):
    return np.frompyfunc(function, count, 1)


FUNCTIONS = {name: elementwise(getattr(mp, name)) for name in ("exp", "log", "log1p", "sqrt", "tanh", "sin", "cos", "erf")}
FUNCTIONS["floor"] = lambda a: np.floor(a.astype(float))


@contextmanager
def mpmath_numbers():
    """Inside this block, equations are evaluated with mpmath's numbers."""
    with pytest.MonkeyPatch.context() as patch, mp.workprec(BITS):
        for name, function in FUNCTIONS.items():
            patch.setitem(values.FUNCTIONS, name, function)
        patch.setattr(values, "number", lambda value: values.Named(np.array(mpf(value)), ()))
        yield


class Exact:
    """The values that the equations of a derivation give to names, and the sizes of the terms of their derivatives.

    dy: by name, such as {"dy": ...}. All values have a first axis: the first of it is as given, and in each other one
    number of an argument has grown by 2^-STEP of itself.
    """

    def __init__(self, case, arguments, ran):
        wanted = [*ran.values]
        self.definitions = definitions_of(case.op, case.op_backward, wanted, case.docstring)
        self.scope = Scope(dict(ran.values), self.definitions.aliases)
        for _, side in self.definitions.sides:
            try:
                learn_sizes(side, self.scope)
            except values.NotationError:
                pass
        for name in {*self.definitions.known} & {*self.scope.values} - {*arguments}:
            del self.scope.values[name]
        self.directions = 1 + sum(x.size for x in arguments.values())
        place = 1
        for name, x in arguments.items():
            numbers = np.array([mpf(float(each)) for each in x.ravel()], dtype=object)
            moved = np.tile(numbers, (self.directions, 1))
            for i in range(x.size):
                moved[place + i, i] *= 1 + mpf(2) ** -STEP
            place += x.size
            self.scope.values[name] = x
            self.scope.perturbed[name] = moved.reshape(self.directions, *x.shape)

    def compute(self, name):
        name = self.definitions.resolve(name)
        if name in self.scope.values or name not in self.definitions.known:
            return
        definition = self.definitions.known[name]
        needed = (definition.node, definition.bindings)
        for node in walk(needed):
            if node[0] == "name":
                self.compute(node[1])
        self.scope.bound, self.scope.outside = {}, {}
        learn_sizes(needed, self.scope)
        for letter, node in definition.bindings:
            self.scope.bound[letter] = evaluate(node, self.scope)
        value = arranged(definition.left, evaluate(definition.node, self.scope), self.scope, self.directions)
        self.scope.values[name] = self.scope.perturbed[name] = value

    def __call__(self, name, shape):
        """The values of a name and the sum of the sizes of its terms, Σ_i abs(x_i ∂y/∂x_i)."""
        self.compute(name)
        value = self.scope.perturbed[self.definitions.resolve(name)].reshape(self.directions, *shape)
        changes = np.abs(value[1:] - value[0]) * mpf(2) ** STEP
        return np.array(value[0], dtype=object), changes.sum(axis=0) if len(changes) else 0 * value[0]


def errors(found, exact, terms):
    exact, terms = (np.asarray(x, dtype=object).reshape(found.shape) for x in (exact, terms))
    """The errors of an array, in units of what the rounding of the arguments explains."""
    limits = np.finfo(found.dtype)
    unit, smallest = mpf(float(limits.eps) / 2), mpf(float(limits.smallest_normal))
    result = np.zeros(found.shape)
    for i in np.ndindex(found.shape):
        if abs(exact[i]) >= mpf(float(limits.max)):
            continue
        if not np.isfinite(found[i]):
            result[i] = np.inf
            continue
        difference = abs(mpf(float(found[i])) - exact[i])
        result[i] = float(difference / (unit * (terms[i] + abs(exact[i])) + smallest))
    return result


CASES = {
    entry.full(variant): partial(entry.derivation_case, case)
    for entry in entries_of("operations", "second order")
    for variant, case in entry.arguments.items()
    if variant != "no bias" and entry.name != "dense"  # `linear`, and an activation
    if "attention" not in entry.name or variant in ("", "causal")
}


class Tiny(Sizes):
    """Sizes of 2 or 3, so that few numbers are moved."""

    def __getattr__(self, letter):
        if letter == "C":
            self.sizes["C"] = 3
        elif len(letter) == 1 and letter not in self.sizes and letter != "R":
            self.sizes[letter] = 3 if letter in "SFV" else 1 if letter in "BH" else 2
        return super().__getattr__(letter)


def normal(rng, shape):
    return rng.standard_normal(shape)


def scales(rng, shape):
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-30, 30)


def ranges(rng, shape):
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-8, 8, shape)


def moderate(rng, shape):
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-1, 3)


def offset(rng, shape):
    return rng.standard_normal(shape) + rng.choice([-1, 1]) * 10.0 ** rng.uniform(0, 9)


def near_ties(rng, shape):
    return rng.standard_normal() * (1 + 1e-6 * rng.integers(-2, 3, shape))


def dominated(rng, shape):
    x = rng.standard_normal(shape)
    if x.ndim:
        at = tuple(rng.integers(0, n) for n in shape)
        x[at] += rng.choice([-1, 1]) * 10.0 ** rng.uniform(1, 12)
    return x


def saturated(rng, shape):
    x = 0.1 * rng.standard_normal(shape)
    if x.ndim:
        x[..., rng.integers(0, shape[-1])] += rng.uniform(5, 60)
    return x


def one_hot(rng, shape):
    x = np.zeros(shape)
    if x.ndim:
        x[..., rng.integers(0, shape[-1])] = 1
    return x if x.ndim else np.array(1.0)


def subnormal(rng, shape):
    return rng.standard_normal(shape) * 1e-40


REGIMES = [normal, scales, ranges, moderate, offset, near_ties, dominated, saturated, one_hot, subnormal]


def drawn(name, seed, dtype):
    """A case with arguments drawn from the seed, and dy."""
    rng = np.random.default_rng(seed)
    case = CASES[name](Tiny(seed))
    regimes = []

    def fill(x):
        regime = REGIMES[rng.integers(len(REGIMES))] if rng.random() < 0.8 else normal
        regimes.append(regime.__name__)
        return np.asarray(regime(rng, np.shape(x))).astype(dtype)

    args = tuple(fill(x) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in case.args)
    return case._replace(args=args), fill, regimes


def worst_of(name, seed, dtype, kind):
    case, fill, regimes = drawn(name, seed, dtype)
    bound = inspect.signature(case.op).bind(*case.args, **case.options)
    bound.apply_defaults()
    flat = each_argument(bound.arguments)
    pair = case.op, case.op_backward
    if kind != "reference":
        operation = name.partition(",")[0]
        pair = getattr(ops, operation), getattr(ops, f"{operation}_backward")
    with KINDS[kind](), np.errstate(all="ignore"):
        y, cache = pair[0](*case.args, **case.options)
        several = hasattr(y, "_fields")
        outputs = y._asdict() if several else {"y": y}
        gradient = next(iter(inspect.signature(case.op_backward).parameters))
        if not several:
            outputs = {gradient.removeprefix("d"): y}
        dy = {f"d{n}": fill(x) for n, x in outputs.items()}
        given = [d if d.shape else d[()] for d in dy.values()]
        returned = pair[1](y._make(given) if several else given[0], cache)
    from scratchformer.notation.grammar import canonical

    found = {n: np.asarray(x) for n, x in outputs.items()}
    found |= {f"d{n}": x for n, x in named_gradients(flat, returned).items()}
    with np.errstate(all="ignore"):
        wide = dict(dy) if several else next(iter(dy.values())).astype(float)
        ran = run(case.op, case.op_backward, *case.args, names=case.names,
                  dy=None if several else wide, **case.options)
    arguments = {canonical(n): x for n, x in flat.items() if isinstance(x, np.ndarray) and x.dtype.kind == "f"}
    arguments |= {canonical(n): x for n, x in dy.items()}
    worst = {}
    with mpmath_numbers():
        exact = Exact(case, arguments, ran)
        for n, x in found.items():
            assert x.dtype == dtype, (n, x.dtype)
            if canonical(n) not in exact.definitions.known and exact.definitions.resolve(canonical(n)) not in exact.definitions.known:
                continue
            right, terms = exact(canonical(n), x.shape)
            error = errors(x, right, terms)
            at = np.unravel_index(int(error.argmax()), error.shape) if error.size else ()
            right, terms = (np.asarray(v, dtype=object).reshape(x.shape) for v in (right, terms))
            worst[n] = float(error[at]), at, x[at], mp.nstr(right[at], 6), mp.nstr(terms[at], 3)
    return worst, regimes, case.args, dy


if __name__ == "__main__":
    import sys, time, collections
    names = sys.argv[3:] or [n for n in CASES]
    count, kind = int(sys.argv[1]), sys.argv[2]
    for name in names:
        for dtype in (np.float64, np.float32):
            top, start = collections.defaultdict(lambda: (-1,)), time.process_time()
            for seed in range(count):
                try:
                    worst, regimes, args, dy = worst_of(name, seed, dtype, kind)
                except Exception as e:
                    import traceback
                    print(name, dtype.__name__, seed, repr(e)[:300], traceback.format_exc(limit=-2)[-400:] if count < 3 else "")
                    break
                for n, w in worst.items():
                    if w[0] > top[n][0]:
                        top[n] = (*w, seed, regimes)
            for n, w in top.items():
                print(f"{name:24} {dtype.__name__} {n:8} {w[0]:9.3g} at {tuple(map(int, w[1]))} got {w[2]:.6g} exact {w[3]} terms {w[4]} seed {w[5]} {w[6]}")
            print(f"    {time.process_time() - start:.2f} s", flush=True)
