"""Random derivations: what the loops give, and what the notation's evaluator makes of the same equations."""

import linecache
import random

import numpy as np
import pytest

from scratchformer.compiler import CompileError
from scratchformer.compiler.python_target import PythonTarget
from scratchformer.compiler.twins import CompiledTwin, Kept
from scratchformer.dispatch import backward, operation
from scratchformer.notation.layout import read
from scratchformer.notation.values import Scope, bind, evaluate

NAMES = "a b c n R i k1 r1 k2 sum0 max0 exp1 row0 t1 x w columns first s h".split()  # loops have them too


class Equations:
    """Random equations for an array with all axes and some of: another one, one that all rows share, one without a
    column, and a number.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        choose = self.random.choice
        self.column, rows = choose("icdjkv"), choose(["", "n", "bt"])
        leads = {"": [(), (3,), (2, 2)], "n": [(1,), (3,), (2, 3)], "bt": [(1, 3), (2, 3)]}[rows]
        self.rows, self.lead, self.columns = rows, choose(leads), choose([1, 2, 3, 5, 8])
        names = self.random.sample([name for name in NAMES if name != self.column], 7)
        self.letters = {names[0]: rows + self.column}  # of each name
        for name, letters in zip(names[1:5], (rows + self.column, self.column, rows, ""), strict=True):
            if choose([True, False]) and (rows or letters not in (rows, self.column)):
                self.letters[name] = letters
        self.arguments, self.lines = list(self.letters), []
        for name in names[5:]:
            column = choose(["", self.column])
            a, b, c = (self.leaf(column) for _ in range(3))
            cases = choose(["", "", f" where {a} {choose('<>≤≥=≠')} {b}, {c} elsewhere"])
            self.lines.append(f"{element(name, rows + column)} = {self.expression(2, column)}{cases}")
            self.letters[name] = rows + column
        c, (x, y, there) = self.column, (element(name, rows + self.column) for name in (names[0], "y", f"{names[0]}"))
        self.lines.append(f"{y} = {self.expression(3, c)} + 0 {x}")
        self.lines.append(f"d{x} = d{y} {self.expression(3, c)} + Σ_{c}' d{y}' {there}'")
        for name in self.arguments:
            if rows == "n" and self.letters[name] == c:
                self.lines.append(f"d{name}_{c} = Σ_n d{y} {self.expression(1, c, sums=False)}")

    def leaf(self, column):
        """column: the letter of the column in the expression, or "" if it has none."""
        usable = [name for name, letters in self.letters.items() if column or self.column not in letters]
        found = [element(name, self.letters[name].replace(self.column, column)) for name in usable]
        if column and self.random.random() < 0.2:
            found = [column, f"({column}/2)", self.column.upper()]
        return self.random.choice([*found, *found, self.random.choice(["0", "1", "2", "0.7"])])

    def expression(self, depth, column, sums=True):
        """An expression in parentheses."""
        if not depth:
            return f"({self.leaf(column)})"
        a, b = (self.expression(depth - 1, column, sums) for _ in range(2))
        forms = [f"{a} + {b}", f"{a} − {b}", f"{a} {b}", f"{a}/(1 + abs{b})", f"{a}/3", f"{a}^2", f"{a}^3", f"−{a}"]
        forms += [f"{name}{a}" for name in ("tanh", "sin", "cos", "erf", "abs")] + [f"exp(−{a}²)", f"log(1 + {a}²)"]
        forms += [f"max({a}, {b})", f"min({a}, {b})", f"[{a} < {b}]", f"[{a} ≥ {b}]", f"{a} mod 0.7"]
        if sums:
            c = f"{self.column}'" if column else self.column
            inner = self.expression(depth - 1, c, sums=False)
            forms += [f"Σ_{c} {inner}", f"mean_{c}{inner}", f"max_{c}{inner}"] * 2
        return f"({self.random.choice(forms)})"

    def arrays(self):
        """The arguments, and dy. Some are read-only, or transposed."""
        rng = np.random.default_rng(self.random.randrange(1000))
        sizes = {**dict(zip(self.rows, self.lead, strict=False)), self.column: (self.columns,)}
        values = {}
        for name, letters in {**{name: self.letters[name] for name in self.arguments}, "dy": "*"}.items():
            lead = self.lead if letters == "*" or letters[:-1] or letters == self.rows != "" or not self.rows else ()
            shape = (*(lead if letters else ()), *(sizes[self.column] if letters[-1:] in ("*", self.column) else ()))
            values[name] = rng.standard_normal(shape) if letters else self.random.choice([0.3, 2, -1.5, np.float32(2)])
            if letters and self.random.random() < 0.3:
                values[name] = np.ascontiguousarray(values[name].T).T
                values[name].flags.writeable = False
        return values


def element(name, letters):
    return f"{name}_{letters}" if letters else name


def pair_of(equations, seed):
    """An operation and its backward that have these equations in their docstring, and that do not run."""
    arguments = ", ".join(equations.arguments)
    lines = "".join(f"        {line}\n" for line in equations.lines)
    source = f'def op({arguments}):\n    """Loops.\n\n    Equations:\n\n{lines}    """\n    raise NotImplementedError\n'
    source += f"def op_backward(dy, cache):\n    {arguments}, = cache\n    raise NotImplementedError\n"
    file = f"<equations {seed}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space = {}
    exec(compile(source, file, "exec"), space)
    return operation(space["op"]), backward(space["op_backward"]), f"Loops.\n\nEquations:\n\n{lines}"


def evaluated(equations, docstring, values):
    """What the notation's evaluator makes of the equations, by name."""
    known = {name: np.asarray(value, float) for name, value in values.items()}
    if equations.rows == "n":
        lead = len(equations.lead)
        known = {key: x.reshape(-1, *x.shape[lead:]) if has_rows(equations, key) else x for key, x in known.items()}
    scope = Scope(known)
    scope.sizes = {equations.column: equations.columns}
    scope.sizes |= dict(zip(equations.rows, known["dy"].shape[:-1], strict=False))
    for item in read(docstring, [*known], frozenset(), "op").equations:
        scope.bound = {}
        bind(item.equation, scope)
        (_, name, indices), value = item.equation.parts[0], evaluate(item.equation.parts[-1], scope)
        axes = [axis for axis in value.axes if isinstance(axis, int)] + [index[1] for index in indices]
        data = value.data.transpose([value.axes.index(axis) for axis in axes if axis in value.axes])
        for place, axis in enumerate(axes):
            if axis not in value.axes:
                data = np.repeat(np.expand_dims(data, place), scope.size(axis), place)
        scope.values[name] = data
    return scope.values


def has_rows(equations, name):
    return name == "dy" or equations.letters[name].startswith(equations.rows)


@pytest.mark.parametrize("part", range(5))
def test_loops_compute_what_the_equations_say(part):
    compared = 0
    for seed in range(part * 40, part * 40 + 40):
        equations = Equations(seed)
        op, op_backward, docstring = pair_of(equations, seed)
        twin, values = CompiledTwin(op, op_backward, PythonTarget()), equations.arrays()
        dy, args = values["dy"], [values[name] for name in equations.arguments]
        try:
            plans = twin.derivation.compile()
        except CompileError:  # sums that a loop over rows cannot compute
            continue
        assert twin.fits(*args), docstring
        with np.errstate(all="ignore"):
            expected = evaluated(equations, docstring, values)
            y, kept = twin.forward(*args)
            gradients = twin.backward(dy, kept)
        assert type(kept) is Kept
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        names = ("y", *plans.backward.results)
        for name, found in zip(names, (y, *gradients), strict=True):
            known = expected[name].reshape(found.shape)
            atol = 1e-9 * max(1, abs(known).max())
            np.testing.assert_allclose(found, known, rtol=0, atol=atol, err_msg=f"{seed}: {name}\n{docstring}")
        compared += 1
    assert compared > 30
