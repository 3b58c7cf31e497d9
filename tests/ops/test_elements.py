"""No element of a result or of a gradient is further from its exact value than its condition explains.

The exact values come from the derivations: their equations, evaluated with mpmath's numbers on the arguments as they
are rounded. An element y is a function of the numbers x_i of all arguments, dy among them. If each is changed by a part
u of itself, half the distance from 1 to the next number of the type, y changes by up to u Σ_i abs(x_i ∂y/∂x_i). This
and the rounding of y itself are the unit of the errors here. Where the digits of an element are lost, its error is
millions of units.

A longer sweep, which prints the worst element of each array:

    python tests/ops/test_elements.py reference 1000            # 1,000 draws of each operation, in both types
    python tests/ops/test_elements.py numba 100 softmax         # of the twins of one operation
"""

import inspect
import math
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from mpmath import mp, mpf

from scratchformer import ops, optim
from scratchformer.catalogue import Sizes, entries_of
from scratchformer.compiler.equations import definitions_of
from scratchformer.dispatch import fast, reference_only
from scratchformer.notation import values
from scratchformer.notation.grammar import canonical, walk
from scratchformer.notation.run import each_argument, named_gradients, run
from scratchformer.notation.values import NotationError, Scope, evaluate, learn_sizes
from scratchformer.notation.walk import arranged
from scratchformer.optim.adam import adam_step
from scratchformer.optim.optimizer import sum_of_squares
from scratchformer.testing import check_precision

LIMIT = 64  # units; silu takes 1 − σ, with an error of u, times an x of up to 37
BITS = {
    np.float32: 500,
    np.float64: 1600,
}  # so that the smallest number is seen beside 1, in differences between values
STEP = 200  # of arguments of which a number differs by 2^-STEP of itself
DTYPES = np.float32, np.float64
KINDS = {"reference": reference_only, "numpy": nullcontext} | ({"numba": fast} if find_spec("numba") else {})
CASES = {
    entry.full(variant): partial(entry.derivation_case, case)
    for entry in entries_of("operations", "second order")
    for variant, case in entry.arguments.items()
    if variant not in ("no bias", "yarn") and entry.name != "dense"  # the equations are of other cases, or in parts
    if "attention" not in entry.name or variant in ("", "causal")
}
SOFTMAX = "softmax", "log_softmax", "cross_entropy", "cross_entropy, smoothing"
TWINS = [("numpy", "attention"), *(("numba", name) for name in (*SOFTMAX, "rmsnorm") if "numba" in KINDS)]

# Arrays whose elements may lose digits that their condition does not explain. Each is within the bounds of
# `check_precision`, which follow from the steps of the code: only elements that are small beside what they are
# computed from are concerned. `docs/precision.md` has the reasons.
TAIL = "Φ = ½ (1 + erf(x/√2)) of a negative x; erfc in place of erf, or the sigmoid in place of tanh, takes longer"
DOMINATED = "1 − x̂²/C of a number that is most of its row; it would take two more sums"
SCORES = "1 − p of a key that gets nearly all; it would take another pass over the scores"
KNOWN = {
    "gelu": ("y dx", TAIL),
    "geglu": ("y dgate dup", TAIL),
    "tanh": ("dx", "1 − y² of a y near 1: the cache keeps y, from which x cannot be computed again"),
    "layernorm": ("dx", DOMINATED),
    "rmsnorm": ("dx", DOMINATED),
    "attention": ("dq dk", SCORES),
    "relative_attention": ("dq dk dr dcontent_bias dposition_bias", SCORES),
    "softmax_backward": ("dz", "dp is a difference of two sums"),
    "layernorm_backward": ("gx dgy dx dgamma", DOMINATED),
    "attention_backward": ("gq gk dq dk", SCORES),
}


@contextmanager
def mpmath_numbers(dtype):
    """Inside this block, equations are evaluated with mpmath's numbers."""
    names = "exp log log1p sqrt tanh sin cos erf".split()
    functions = {name: np.frompyfunc(getattr(mp, name), 1, 1) for name in names}
    with pytest.MonkeyPatch.context() as patch, mp.workprec(BITS[dtype]):
        for name, function in {**functions, "floor": lambda a: np.floor(a.astype(float))}.items():
            patch.setitem(values.FUNCTIONS, name, function)
        patch.setattr(values, "number", lambda value: values.Named(np.array(mpf(value)), ()))
        yield


class Exact:
    """The values that definitions give to names, each with the sum of its terms, Σ_i abs(x_i ∂y/∂x_i).

    arguments: the x, arrays by name. known: everything else by name. All values have a first axis: its first part is as
    given, and in each of the others one number of an argument has grown by 2^-STEP of itself.
    """

    def __init__(self, definitions, arguments, known):
        self.definitions, self.scope = definitions, Scope({**known, **arguments}, definitions.aliases)
        for _, side in definitions.sides:
            try:
                learn_sizes(side, self.scope)
            except NotationError:
                pass  # a name that is not computed yet
        for name in {*definitions.known} & {*known} - {*arguments}:
            del self.scope.values[name]
        self.directions, place = 1 + sum(x.size for x in arguments.values()), 1
        for name, x in arguments.items():
            moved = np.tile(np.array([mpf(float(number)) for number in x.ravel()], dtype=object), (self.directions, 1))
            for i in range(x.size):
                moved[place + i, i] *= 1 + mpf(2) ** -STEP
            place += x.size
            self.scope.perturbed[name] = moved.reshape(self.directions, *x.shape)

    def compute(self, name):
        """Compute a name that has a definition, after all that it needs."""
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
        self.compute(name)
        value = self.scope.perturbed[self.definitions.resolve(name)].reshape(self.directions, *shape)
        terms = abs(value[1:] - value[0]).sum(axis=0) * mpf(2) ** STEP
        return np.asarray(value[0], dtype=object), np.asarray(terms, dtype=object)


def worst(found, exact, arguments):
    """By name, the worst element of each array: its error in units, where it is, and what it should be.

    An element that a unit changes by more than a part in 64 is not judged: how much, the derivative does not say. A
    step may give a number that is too small for its type, which an argument is then multiplied by.
    """
    limits = np.finfo(next(iter(found.values())).dtype)
    unit, largest = mpf(float(limits.eps) / 2), mpf(float(limits.max))
    smallest = mpf(float(limits.smallest_normal))
    for x in arguments.values():
        smallest *= mpf(max(1.0, float(abs(x.astype(float)).max(initial=0))))
    result = {}
    for name, x in found.items():
        right, terms = exact(canonical(name), x.shape)
        rows = []
        for i in np.ndindex(x.shape):
            judged = unit * terms[i] <= abs(right[i]) / 64 < largest / 64
            units = np.inf if judged else 0.0
            if judged and np.isfinite(x[i]):
                units = float(abs(mpf(float(x[i])) - right[i]) / (unit * (terms[i] + abs(right[i])) + smallest))
            rows.append((units, i, float(x[i]), mp.nstr(right[i], 8)))
        result[name] = max(rows)
    return result


class Tiny(Sizes):
    """Few sizes above 1, so that few numbers are moved."""

    def __getattr__(self, letter):
        if len(letter) == 1 and letter != "R":
            self.sizes.setdefault(letter, 3 if letter in "SFVC" else 1 if letter in "BH" else 2)
        return super().__getattr__(letter)


# How the numbers of an array are drawn.
EXPONENT = {np.float32: 12, np.float64: 30}  # of the scales; products of three numbers stay finite
REGIMES = {
    "normal": lambda rng, n, shape: rng.standard_normal(shape),
    "of one scale": lambda rng, n, shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-n, n),
    "of many scales": lambda rng, n, shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-8, 8, shape),
    "moderate": lambda rng, n, shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-1, 3),
    "with an offset": lambda rng, n, shape: (
        rng.standard_normal(shape) + rng.choice([-1, 1]) * 10.0 ** rng.uniform(0, 9)
    ),
    "nearly equal": lambda rng, n, shape: rng.standard_normal() * (1 + 1e-6 * rng.integers(-2, 3, shape)),
    "one is large": lambda rng, n, shape: rng.standard_normal(shape) + one(rng, shape) * 10.0 ** rng.uniform(1, n),
    "saturated": lambda rng, n, shape: 0.1 * rng.standard_normal(shape) + one(rng, shape) * rng.uniform(5, 60),
    "one hot": lambda rng, n, shape: one(rng, shape),
    "subnormal": lambda rng, n, shape: rng.standard_normal(shape) * 10.0 ** -(n * 10 + 10 if n > 12 else 40),
}


def one(rng, shape):
    """1 at one place of each row, 0 elsewhere."""
    return (np.arange(shape[-1]) == rng.integers(0, shape[-1], (*shape[:-1], 1))).astype(float) if shape else 1.0


def fill(rng, dtype, x):
    """An array of the shape of x."""
    regime = REGIMES[rng.choice([*REGIMES])] if rng.random() < 0.8 else REGIMES["normal"]
    return np.asarray(regime(rng, EXPONENT[dtype], np.shape(x))).astype(dtype)


def drawn(name, seed, dtype):
    """A case with arguments drawn from the seed, and the generator that drew them."""
    rng, case = np.random.default_rng([seed, *name.encode()]), CASES[name](Tiny(seed))
    floating = [isinstance(x, np.ndarray) and x.dtype.kind == "f" for x in case.args]
    args = [fill(rng, dtype, x) if is_floating else x for x, is_floating in zip(case.args, floating, strict=True)]
    if "attention" in name:  # scores of 1e4, or their rounding errors alone decide which key gets all
        args = [x * (dtype(100) / max(abs(x).max(), 100)) if y else x for x, y in zip(args, floating, strict=True)]
    return case._replace(args=tuple(args)), rng


def worst_of(name, seed, dtype, kind="reference"):
    """The worst element of each array of a case, see `worst`, and the case, with its dy."""
    case, rng = drawn(name, seed, dtype)
    operation = name.partition(",")[0]
    op, op_backward = case.op, case.op_backward
    if kind != "reference":
        op, op_backward = getattr(ops, operation), getattr(ops, f"{operation}_backward")
    bound = inspect.signature(case.op).bind(*case.args, **case.options)
    bound.apply_defaults()
    flat = each_argument(bound.arguments)
    with KINDS[kind](), np.errstate(all="ignore"):
        y, cache = op(*case.args, **case.options)
        output = next(iter(inspect.signature(case.op_backward).parameters)).removeprefix("d")
        outputs = y._asdict() if hasattr(y, "_fields") else {output: y}
        dy = {f"d{n}": fill(rng, dtype, x) for n, x in outputs.items()}
        given = [x if x.shape else x[()] for x in dy.values()]
        returned = op_backward(y._make(given) if hasattr(y, "_fields") else given[0], cache)
        ran = run(case.op, case.op_backward, *case.args, names=case.names, **case.options)
    found = {n: np.asarray(x) for n, x in outputs.items()}
    found |= {f"d{n}": x for n, x in named_gradients(flat, returned).items()}
    assert {x.dtype for x in found.values()} == {np.dtype(dtype)}
    arguments = {n: x for n, x in flat.items() if isinstance(x, np.ndarray) and x.dtype.kind == "f"} | dy
    arguments = {canonical(n): x for n, x in arguments.items()}
    definitions = definitions_of(case.op, case.op_backward, [*ran.values], case.docstring)
    defined = {n: x for n, x in found.items() if definitions.resolve(canonical(n)) in definitions.known}
    assert {*found} - {*defined} <= {"dbeta"}  # of the second order: 0
    with mpmath_numbers(dtype):
        return worst(defined, Exact(definitions, arguments, ran.values), arguments), case, given


def known(name):
    """The names of the arrays of an operation that may lose digits."""
    return KNOWN.get(name.partition(",")[0], ("", ""))[0].split()


def expect_digits(name, count, kind="reference"):
    for seed in range(count):
        for dtype in DTYPES[seed % 2 :: 2] if count < 20 else DTYPES:
            elements, _, _ = worst_of(name, seed, dtype, kind)
            wrong = {n: element for n, element in elements.items() if element[0] > LIMIT and n not in known(name)}
            assert not wrong, f"{name}, seed {seed}, {np.dtype(dtype)}: {wrong}"


@pytest.mark.parametrize("name", [name for name in CASES if name.partition(",")[0] not in ("gelu", "geglu")])
def test_no_element_has_lost_its_digits(name, thorough):
    expect_digits(name, 500 if thorough else 2)


@pytest.mark.parametrize(("kind", "name"), TWINS)
def test_no_element_of_a_twin_has_lost_its_digits(kind, name, thorough):
    expect_digits(name, 50 if thorough else 1, kind)


@pytest.mark.parametrize("name", KNOWN)
def test_known_losses_are_within_the_bounds_of_the_code(name, thorough):
    """And they are losses still."""
    lost = set()
    for seed in range(200 if thorough else 2):
        elements, case, dy = worst_of(name, seed, np.float32)
        lost |= {n for n, (units, *_) in elements.items() if units > LIMIT}
        if name in ops.__all__ and f"{name}_backward" in ops.__all__:
            check_precision(case.op, case.op_backward, *case.args, dy=dy[0], dtype=np.float32, **case.options)
    assert lost or not thorough


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_element_of_a_step_of_adam_has_lost_its_digits(dtype, thorough):
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "steps": 7, "decay": 0.125, "share": 0.5}
    for seed in range(500 if thorough else 4):
        rng = np.random.default_rng(seed)
        before = {n: fill(rng, dtype, np.zeros(3)) for n in "wgmv"}
        before["v"] = abs(before["v"])
        after = {n: x.copy() for n, x in before.items()}
        with reference_only(), np.errstate(all="ignore"):
            adam_step(**after, **numbers)
        arguments = {canonical(n if n == "g" else f"{n}0"): x for n, x in before.items()}
        given = {canonical(n): np.array(float(x)) for n, x in numbers.items()}
        definitions = definitions_of(adam_step, None, [*arguments, *given, *"wmv"])
        with mpmath_numbers(dtype):
            elements = worst({n: after[n] for n in "wmv"}, Exact(definitions, arguments, given), arguments)
        assert max(elements.values())[0] < LIMIT, (seed, elements)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_element_of_a_clipped_gradient_has_lost_its_digits(dtype, thorough):
    for seed in range(500 if thorough else 4):
        g = fill(np.random.default_rng(seed), dtype, np.zeros(5))
        c, squares = g.copy(), sum(mpf(float(x)) ** 2 for x in g)
        norm = mp.sqrt(squares)
        assert abs(sum_of_squares(g) - squares) <= 1e-15 * squares + 1e-307
        optim.clip_by_global_norm(c, 1.0)
        for before, after in zip(g, c, strict=True):
            right = before * min(1, 1 / norm) if norm else before
            assert abs(float(after) - right) <= 2 * np.finfo(dtype).eps * abs(right) + np.finfo(dtype).smallest_normal


if __name__ == "__main__":
    kind, count, *names = sys.argv[1:]
    for name in names or CASES:
        for dtype in DTYPES:
            top = {}
            for seed in range(int(count)):
                for n, element in worst_of(name, seed, dtype, kind)[0].items():
                    top[n] = max(top.get(n, (-math.inf,)), (*element, seed))
            for n, (units, at, value, right, seed) in top.items():
                marked = "known" if n in known(name) else "LOST" if units > LIMIT else ""
                where = f"{name:28}{np.dtype(dtype).name:9}{n:15}{units:10.3g} {marked:6}"
                print(f"{where}{value:13.6g} for {right}, at {at}, seed {seed}", flush=True)
