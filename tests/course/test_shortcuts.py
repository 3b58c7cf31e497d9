"""Answers that are right, and yet no answers: they take differences, or call what has the solution."""

import re
import sys

import numpy as np
import pytest

from scratchformer.course.course import NAMES, exercise
from scratchformer.course.grading import normal
from scratchformer.course.shortcuts import EXACT

CODE = [name for name in NAMES if exercise(name).kind == "code"]
DIFFERENCES = {  # by order: steps and weights, and a good step
    2: ([(1, 1 / 2)], 2**-17),
    4: ([(1, 2 / 3), (2, -1 / 12)], 2**-11),
}


def softmax(*lines, above=""):
    """An answer to softmax that computes dz in these lines."""
    return exercise("softmax").start.replace("    dz = ...\n", "".join(f"    {line}\n" for line in lines)) + above


@pytest.mark.parametrize(
    "lines",
    [
        ("from scratchformer import ops", "dz = ops.softmax_backward(dy, y)"),
        ("import scratchformer.ops as m", "dz = m.softmax_backward(dy, y)"),
        ("import importlib", "dz = importlib.import_module('scratchformer.ops').softmax_backward(dy, y)"),
        ("dz = __import__('scratchformer').ops.softmax_backward(dy, y)",),
        ("import sys", "dz = sys.modules['scratchformer.ops'].softmax_backward(dy, y)"),
        ("exec('from scratchformer import ops; global found; found = ops.softmax_backward(dy, y)')", "dz = found"),
        ("dz = eval('__import__(\"scratchformer.ops\").ops.softmax_backward')(dy, y)",),
        ("from scratchformer.ops import softmax_backward as b", "dz = next(map(b, [dy], [y]))"),
        ("from functools import partial", "from scratchformer import ops", "dz = partial(ops.softmax_backward, dy)(y)"),
        ("from scratchformer.ops import softmax_backward as b", "dz = b.reference(dy, y)"),
        ("from scratchformer.ops import softmax_backward as b",
         "dz = np.apply_along_axis(lambda i: b(dy, y), 0, [0])[..., 0]"),
        ("from scratchformer.course.exercises.softmax import softmax_backward as b", "dz = b(dy, y)"),
        ("from scratchformer.course.course import exercise", "exec(exercise('softmax').solution, g := {})",
         "dz = g['softmax_backward'](dy, y)"),
        ("import sys", "f = sys._getframe()", "while 'expect_formula' not in f.f_globals: f = f.f_back",
         "dz = sys.modules['scratchformer.course.exercises.softmax'].softmax_backward(dy, y)"),
    ],
)  # fmt: skip
def test_the_package_must_not_compute_the_answer(lines, verdict):
    found = verdict("softmax", softmax(*lines))
    assert not found.passed
    assert re.match(
        r"line \d+: (.*\n    This (runs \w+|imports a part) of scratchformer. Write|write .* (exec|eval)$)",
        found.message,
    )


@pytest.mark.parametrize("name", CODE)
def test_no_exercise_can_be_answered_with_its_solution_in_the_package(name, verdict):
    """The file of the exercise has the solved functions, and LIBRARY is what they were written after."""
    each = exercise(name)
    solved = [line.split()[1].split("(")[0] for line in each.solution.splitlines() if re.match("def |class ", line)]
    solved = [item for item in solved if each.start.partition(item)[2] != each.solution.partition(item)[2]]
    code = f"\nfrom scratchformer.course.exercises.{name} import {', '.join(sorted({s.rstrip(':') for s in solved}))}\n"
    found = verdict(name, each.solution + code)
    assert "is replaced by another function: define it in your file" in found.message


@pytest.mark.parametrize(
    ("name", "right", "shortcut"),
    [
        (
            "clipping",
            "    norm = np.sqrt(",
            "    from scratchformer import optim\n    return optim.clip_by_global_norm(gradients, max_norm)\n",
        ),
        (
            "sampling",
            "    if temperature == 0:\n",
            "    from scratchformer.generation.sampling import probabilities as found\n"
            "    return found(z[None], temperature, top_k, top_p)[0]\n",
        ),
        (
            "recompute",
            "        y, _ = self",
            "        from scratchformer import nn\n"
            "        return nn.Recompute(self.layer).forward(*inputs, **options)\n",
        ),
        ("block", "        dh = dy + self", "        nn.TransformerBlock(4, 2).forward(dy)\n"),
    ],
)
def test_nor_with_what_the_library_has_for_it(name, right, shortcut, verdict):
    solution = exercise(name).solution
    assert solution.count(right) == 1
    found = verdict(name, solution.replace(right, shortcut + right))
    assert not found.passed and re.search("(of|in) scratchformer. Write the answer yourself", found.message), (
        found.message
    )


def test_no_library_must_derive_it(verdict, tmp_path, monkeypatch):
    """Whether it was imported already or not."""
    library = tmp_path / "site-packages" / "autograd" / "__init__.py"
    library.parent.mkdir(parents=True)
    library.write_text("def grad(dy, y):\n    return y * (dy - (dy * y).sum(axis=-1, keepdims=True))\n")
    monkeypatch.syspath_prepend(str(library.parent.parent))
    for said in "imports a part", "runs grad":
        message = verdict("softmax", softmax("import autograd", "dz = autograd.grad(dy, y)")).message
        assert f"This {said} of autograd. Write the answer yourself" in message, message
    monkeypatch.delitem(sys.modules, "autograd")


def test_scipy_must_not_take_the_differences(verdict):
    lines = (
        *("from scipy.optimize import approx_fprime", "loss = lambda z: (softmax(z.reshape(y.shape))[0] * dy).sum()"),
        "dz = approx_fprime(np.log(y).ravel(), loss).reshape(y.shape)",
    )
    assert "of scipy.optimize. Write" in verdict("softmax", softmax(*lines)).message


STEPS = """
    x = np.log(y)
    dz = np.zeros_like(y)
    for i in np.ndindex(x.shape):
        total = 0
        for step, weight in {steps}:
            for sign in 1, -1:
                moved = x.copy()
                moved[i] += sign * step * {h}
                total += sign * weight * (dy * {forward}).sum()
        dz[i] = total / {h}
"""
INLINE = "(lambda e: e / e.sum(axis=-1, keepdims=True))(np.exp(moved - moved.max(axis=-1, keepdims=True)))"


def differences(order, forward):
    steps, h = DIFFERENCES[order]
    return STEPS.format(steps=steps, h=h, forward=forward).strip().splitlines()


@pytest.mark.parametrize("order", DIFFERENCES)
@pytest.mark.parametrize("forward", ["softmax(moved)[0]", INLINE])
def test_numerical_differences_are_no_answer(order, forward, verdict):
    lines = [
        line.removeprefix("    ")
        for line in ["    " + differences(order, forward)[0], *differences(order, forward)[1:]]
    ]
    wide = ("kind = dy.dtype", "dy, y = dy.astype(float), y.astype(float)", *lines, "dz = dz.astype(kind)")
    found = verdict("softmax", softmax(*wide))
    assert not found.passed
    assert re.match("The values are right, but", found.message) and "numerical differences" in found.message


@pytest.mark.parametrize(
    "lines",
    [
        ("x, h = np.log(y), 1e-30", "dz = np.zeros_like(y)", "for i in np.ndindex(x.shape):",
         "    moved = x.astype(complex)", "    moved[i] += 1j * h",
         "    dz[i] = (dy * softmax(moved)[0]).sum().imag / h"),
        ("x = np.log(y)", "f = lambda z: np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)", "dz = np.zeros_like(y)",
         "for i in np.ndindex(x.shape):", "    e = np.zeros(x.shape, 'complex128')", "    e[i] = (-1e-60) ** 0.5",
         "    dz[i] = np.imag((dy * f(x + e)).sum()) / 1e-30"),
        ("x, h = np.log(y.astype(np.longdouble)), 2**-14", "f = lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True)",
         "dz = np.zeros_like(y)", "for i in np.ndindex(x.shape):", "    e = np.zeros_like(x)", "    e[i] = h",
         "    d = [(dy * (f(x + k * e) - f(x - k * e))).sum() / (2 * k * h) for k in (1, 2)]",
         "    dz[i] = (4 * d[0] - d[1]) / 3"),
        ("dz = (dy - (dy * y).astype('float128').sum(axis=-1, keepdims=True)) * y",),
        ("from decimal import Decimal", "dz = y"),
        ("import mpmath", "dz = y"),
    ],
)  # fmt: skip
def test_nor_is_a_difference_of_other_numbers_than_doubles(lines, verdict):
    found = verdict("softmax", softmax(*lines))
    assert not found.passed
    assert re.match(
        r"line \d+: .*\n    The answer needs no (complex numbers|numbers of more digits), with", found.message
    )


def test_a_pair_of_numbers_may_be_a_complex_one(verdict):
    solution = exercise("rotary").solution
    assert verdict("rotary", solution.replace('"""', '"""', 1) + "\nspare = 1j\n").passed


def test_a_block_must_not_take_differences(verdict):
    lines = """x = cache[-1]
        dx, h = np.zeros_like(x), 2.0**-17
        for i in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[i] = h
            dx[i] = ((self.forward(x + step)[0] - self.forward(x - step)[0]) * dy).sum() / (2 * h)
"""
    text = exercise("block").solution.replace("feedforward)\n\n    def backward", "feedforward, x)\n\n    def backward")
    text = text.replace(
        "norm1, attention, norm2, feedforward = cache", "norm1, attention, norm2, feedforward, x = cache"
    )
    text = text.replace("        return dx", "        " + lines + "        return dx").replace(
        "from scratch", "import numpy as np\nfrom scratch", 1
    )
    assert not verdict("block", text).passed


@pytest.mark.parametrize(
    ("name", "right", "other"),
    [
        (
            "softmax",
            "dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))",
            "dz = y * dy - y * np.einsum('...i,...i->...', dy, y)[..., None]",
        ),
        ("softmax", "    dz = y * (dy", "    y = softmax(np.log(y))[0]\n    dz = y * (dy"),
        (
            "chain_rule",
            "    de = dy * s\n    ds = dy * e + de * e\n    dx = ds * np.cos(x)\n",
            "    de = ...\n    dx = dy * (np.cos(x) * np.exp(np.sin(x)) * (1 + np.sin(x)))\n",
        ),
        ("relu", "dx = dy * (y > 0)", "dx = np.where(y > 0, dy, 0)"),
    ],
)
def test_other_ways_to_the_same_gradient_are_right(name, right, other, verdict):
    """Sums in another order, a forward that runs again, all in one line: rounding differs, and that is all."""
    solution = exercise(name).solution
    assert solution.count(right) == 1
    found = verdict(name, solution.replace(right, other))
    assert found.passed, found.message


@pytest.mark.parametrize("name", CODE)
def test_rounding_is_far_from_the_limit(name, monkeypatch, verdict):
    """The gradients of inputs that are moved by their last bits agree to a tenth of the limit."""
    rng, seen = np.random.default_rng(0), []

    def probe(op, op_backward, *args):
        def gradients(args, dy=None):
            y, cache = op(*args)
            dy = normal(0, *np.shape(y))
            found = op_backward(dy, cache)
            return found if isinstance(found, tuple) else (found,)

        moved = [
            x * (1 + 2.0**-52 * rng.choice([-1, 1], x.shape)) if getattr(x, "dtype", None) == np.float64 else x
            for x in args
        ]
        for exact, other in zip(gradients(args), gradients(moved), strict=True):
            seen.append(np.abs(exact - other).max() / np.abs(exact).max())

    monkeypatch.setattr("scratchformer.course.grading.expect_formula", probe)
    assert verdict(name, exercise(name).solution).passed
    assert max(seen, default=0) < EXACT / 10


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("dz = y * (dy - (dy * y) @ np.eye(y.shape[-1])[:, :1] * 0 - (dy * y).sum(axis=-1, keepdims=True))", "float32"),
        ("dz = y.astype(float) * (dy - (dy * y).sum(axis=-1, keepdims=True))", "float32"),
    ],
)
def test_right_values_of_a_wrong_type_are_called_right(line, says, verdict):
    message = verdict("softmax", softmax(line)).message
    assert message.startswith("The values are right in float64. ") and says in message
    assert "rules=" not in message  # which an answer cannot choose


def test_numbers_that_differ_are_shown_with_digits_that_differ(verdict):
    text = exercise("adam").solution.replace("    return w", "    w = w * (1 + 1e-8)\n    return w")
    message = verdict("adam", text).message
    expected, got = re.search(r"expected (\S+), got ([^\s.]*\.\d+)", message).groups()
    assert expected != got
