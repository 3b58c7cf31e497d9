"""The equations of optimizers, clipping and schedules, on the numbers of a run of several steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np

from .. import ops, optim
from ..nn import Param
from ..notation.run import getdoc
from ..ops.rounding import round_into
from ..optim.adam import adam_step
from ..optim.muon import COEFFICIENTS, SMALLEST, move, nesterov
from ..optim.optimizer import Optimizer, scale
from ..optim.sgd import sgd_step
from ..parallel.precision import MAX_SCALE, LossScale
from ..testing.draw import Sizes
from .derived import shows
from .entry import DerivationCase, Entry

STEPS = 6


def case(source: Callable, docstring: str | None, names: dict[str, Any]) -> DerivationCase:
    """The case of equations about arrays by name. source: the function that computed them."""

    @shows(source)
    def computed() -> float:
        return 0.0

    return DerivationCase(computed, None, (), names, {}, docstring)


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays])


def history(d: Sizes, made: Optimizer, buffers: dict[str, str]) -> DerivationCase:
    """Steps of an optimizer at a learning rate that changes.

    θ, G and the buffers have an axis t, the state after that many steps; G_0, before the first step, is 0.
    buffers: the optimizer's names of the state arrays, by their letters in the equations.
    """
    params = made.params
    rates = d.generator.uniform(0.01, 0.1, STEPS + 1)
    theta = [flat([p.data for p in params])]
    gradients = [np.zeros(theta[0].size)]
    states = {letter: [getattr(made, name).copy()] for letter, name in buffers.items()}
    for rate in rates[1:]:
        for p in params:
            p.grad[...] = d.scale * d.generator.standard_normal(p.data.shape)
        made.lr = float(rate)
        made.step()
        theta.append(flat([p.data for p in params]))
        gradients.append(flat([p.grad for p in params]))
        for letter, name in buffers.items():
            states[letter].append(getattr(made, name).copy())
    axes = flat([np.full(p.data.shape, p.data.ndim) for p in params])
    names = {"θ": np.array(theta), "G": np.array(gradients), "lr": rates, "axes": axes}
    names |= {letter: np.array(values) for letter, values in states.items()}
    return case(made.update, getdoc(type(made)), names)


def two_arrays(d: Sizes) -> list[Param]:
    return [Param(d("I J"), "w"), Param(d("K"), "b")]


def adam(d: Sizes, optimizer: type[optim.Adam], decay: str) -> DerivationCase:
    """decay: the name of the weight decay in the equations."""
    betas, eps, weight_decay = (0.7, 0.9), 0.1 * d.scale, 0.3
    made = optimizer(two_arrays(d), lr=0.1, betas=betas, eps=eps, weight_decay=weight_decay)
    states = history(d, made, {"m": "m", "v": "v"})
    names = {"β1": betas[0], "β2": betas[1], "eps": eps, decay: weight_decay}
    return states._replace(names={**states.names, **names})


def in_place(op: Callable, *args: Any) -> DerivationCase:
    """An operation that changes arrays in place. w0 is w before the operation."""
    names = dict(zip(signature(op).parameters, args, strict=True))
    before = {f"{name}0": x.copy() for name, x in names.items() if np.ndim(x)}
    op(*args)
    return case(op, getdoc(op), names | before)


def sgd(d: Sizes) -> DerivationCase:
    states = history(d, optim.SGD(two_arrays(d), lr=0.1, momentum=0.8, weight_decay=0.3), {"u": "velocity"})
    return states._replace(names={**states.names, "μ": 0.8, "λ": 0.3})


def muon(d: Sizes) -> DerivationCase:
    """Steps on a matrix. O is `newton_schulz` of the mean of m and G."""
    momentum, decay = 0.8, 0.3
    made = optim.Muon([Param(d("I J"), "w")], momentum=momentum, weight_decay=decay, hidden="*")
    states = history(d, made, {"m": "m"})
    arrays = {letter: states.names[letter].reshape(-1, d.I, d.J) for letter in ("θ", "G", "m")}
    mean = (1 - momentum) * arrays["G"] + momentum * arrays["m"]
    names = arrays | {"u": mean, "O": np.array([optim.newton_schulz(u) for u in mean]), "μ": momentum, "λ": decay}
    return states._replace(names={**states.names, **names})


def newton_schulz(d: Sizes) -> DerivationCase:
    """The iterates, and the singular values of each with the vectors of the first."""
    g = d("I J")
    X = np.array([optim.newton_schulz(g, steps) for steps in range(STEPS)])
    U, _, Vt = np.linalg.svd(X[0], full_matrices=False)
    S = np.einsum("ir,kij,rj->kr", U, X, Vt)
    names = {"g": g, "X": X, "U": U, "S": S, "V": Vt.T, "smallest": SMALLEST}
    names |= dict(zip("abc", COEFFICIENTS, strict=True))
    return case(optim.newton_schulz, getdoc(optim.newton_schulz), names)


def clipping(d: Sizes) -> DerivationCase:
    """Two arrays taken together, which have to be scaled in every other case."""
    before = [d("I J"), d("K")]
    after = [array.copy() for array in before]
    max_norm = float(np.linalg.norm(flat(before))) * (0.5 if d.seed % 2 else 2.0)
    norm = optim.clip_by_global_norm(after, max_norm)
    names = {"g": flat(before), "c": flat(after), "norm": norm, "max_norm": max_norm}
    return case(optim.clip_by_global_norm, getdoc(optim.clip_by_global_norm), names)


def schedule(d: Sizes, kind: Callable, **settings: float) -> DerivationCase:
    """The learning rates of the first steps; every fourth case has no warm-up."""
    settings = {"peak": 0.3 * d.scale, "warmup": 0 if d.seed % 4 == 3 else d.W} | settings
    made = kind(**settings)
    rates = np.array([made(step) for step in range(20)])
    return case(made.__call__, getdoc(kind), settings | {"lr": rates})


def loss_scale(d: Sizes) -> DerivationCase:
    """A linear layer, and the scale in steps of which every third or so overflows; it reaches the largest one."""
    J, dy = d("O I"), d("O")
    dx, _ = ops.linear_backward(dy[None], ops.linear(d("I")[None], J.T)[1])
    made, k = LossScale(MAX_SCALE / 4, patience=3), 7
    overflow = (d.generator.random(40) < 0.3).astype(float)
    overflow[:6] = overflow[0] = 0
    scales, good = [made.scale], [made.good]
    for o in overflow[1:]:
        made.skips(math.inf if o else 1.0)
        scales.append(made.scale)
        good.append(made.good)
    mantissa, exponent = np.frexp(dy)
    names = {"J": J, "dy": dy, "dx": dx[0], "S": 2.0**k, "k": k, "m": 2 * mantissa, "e": exponent - 1.0}
    names |= {"scale": np.array(scales), "c": np.array(good, float), "o": overflow, "N": 3.0, "largest": MAX_SCALE}
    return case(LossScale.skips, getdoc(LossScale), names)


ENTRIES = [
    Entry("Adam", "optim/adam.py")
    .derivation("", adam, optimizer=optim.Adam, decay="λ")
    .mistake(
        "zero_grad also clears Adam's moments",
        file="optim/optimizer.py",
        replace={
            "grad[...] = 0": "grad[...] = 0\n        for name in self.buffers:\n            vars(self)[name][...] = 0"
        },
        tests="tests/optim",
    )
    .mistake(
        "a tied table stepped twice",
        file="optim/optimizer.py",
        replace={"list({id(p): p for p in params}.values())": "list(params)"},
        tests="tests/optim",
    )
    .mistake(
        "resume without Adam's step count",
        file="optim/optimizer.py",
        replace={'self.steps = int(state["steps"])': "self.steps = 0"},
        tests="tests/optim",
    ),
    Entry("AdamW").derivation("", adam, optimizer=optim.AdamW, decay="weight_decay"),
    Entry("adam_step", "optim/adam.py")
    .derivation(
        "", lambda d: in_place(adam_step, d("F"), d("F"), d("F"), d("F") ** 2, 0.01, 0.9, 0.99, 1e-3, 3, 0.1, 0.5)
    )
    .mistake(
        "v is updated with 1 − β1",
        "v is too large by the factor (1 − β1)/(1 − β2), so every step is too short.",
        equation="v_i = β2 v0_i + (1 − β2) c_i c_i",
        wrong="v_i = β2 v0_i + (1 − β1) c_i c_i",
        replace={"v += (1 - beta2) * c * c": "v += (1 - beta1) * c * c"},
        tests="tests/optim",
    )
    .mistake(
        "No bias correction of v",
        "The first steps divide by a v that has only begun to grow from 0, so they are too long.",
        equation="w_i = (1 − decay) w0_i − lr (m_i/(1 − β1^t))/(√(v_i/(1 − β2^t)) + eps)",
        wrong="w_i = (1 − decay) w0_i − lr (m_i/(1 − β1^t))/(√v_i + eps)",
        replace={"    denominator *= 1 / math.sqrt(1 - power(beta2, steps))  # √v̂\n": ""},
        tests="tests/optim",
    )
    .mistake(
        "No bias correction of m",
        "The first steps use an m that has only begun to grow from 0, so they are too short.",
        equation="w_i = (1 − decay) w0_i − lr (m_i/(1 − β1^t))/(√(v_i/(1 − β2^t)) + eps)",
        wrong="w_i = (1 − decay) w0_i − lr m_i/(√(v_i/(1 − β2^t)) + eps)",
        replace={"(lr / (1 - power(beta1, steps))) * m": "lr * m"},
        tests="tests/optim",
    ),
    Entry("sgd_step").derivation("", lambda d: in_place(sgd_step, d("F"), d("F"), d("F"), 0.01, 0.9, 0.1)),
    Entry("nesterov").derivation("", lambda d: in_place(nesterov, np.zeros(d.F), d("F"), d("F"), 0.9, 0.5)),
    Entry("move").derivation("", lambda d: in_place(move, d("F"), d("F"), 0.3, 0.1)),
    Entry("SGD").derivation("", sgd),
    Entry("Muon").derivation("", muon),
    Entry("newton_schulz").derivation("", newton_schulz),
    Entry("clip_by_global_norm").derivation("", clipping),
    Entry("scale").derivation("", lambda d: in_place(scale, d("F"), 0.3)),
    Entry("round_into").derivation("", lambda d: in_place(round_into, d("F"), np.zeros(d.F))),
    Entry("Constant").derivation("", schedule, kind=optim.Constant),
    Entry("Cosine").derivation("", lambda d: schedule(d, optim.Cosine, total=15, floor=0.1 * d.scale)),
    Entry("InverseSquareRoot").derivation("", schedule, kind=optim.InverseSquareRoot),
    Entry("LossScale").derivation("", loss_scale),
]
