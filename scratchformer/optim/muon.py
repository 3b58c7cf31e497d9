"""Muon: orthogonalised momentum for the matrices of the blocks, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend import Array, array_module, device_of
from ..checks import expect_at_least, expect_floating, expect_fraction, expect_instance, expect_number, expect_one_of
from ..dispatch import operation
from ..nn import Param
from ..ops.rounding import bfloat16
from .adam import AdamW
from .optimizer import Group, Pieces, scaled, sum_of_squares

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b and c: they enlarge small singular values fast
STEPS = 5
SMALLEST = 1e-7  # a norm below this is not scaled to 1
PRECISIONS = ("float32", "bfloat16")


@operation
def newton_schulz(g: Array, steps: int = STEPS, precision: str = "float32") -> Array:
    """A matrix like g (I, J) whose singular values are near 1: almost U Vᵀ, if g = U S Vᵀ. Of a g (..., I, J) each
    matrix is taken by itself.

    g is divided by its norm. Then each iteration k replaces X by an odd polynomial of it, with the numbers a, b and c
    of COEFFICIENTS. The result is X after `steps` iterations.

        norm := √(Σ_ij g_ij²)        X_{0,i,j} = g_ij/max(norm, smallest)
        A_kii' := Σ_j X_kij X_ki'j        B_kii' := b A_kii' + c Σ_i'' A_kii'' A_ki''i'
        X_kij = a X_{k−1,i,j} + Σ_i' B_{k−1,i,i'} X_{k−1,i',j} for k ≥ 1

    What it does is seen in the singular value decomposition of the first X, where S are the singular values and the
    columns of U and V are orthonormal:

        X_{0,i,j} = Σ_r U_ir S_{0,r} V_jr
        Σ_i U_ir U_ir' = δ_rr'        Σ_j V_jr V_jr' = δ_rr'

    In X Xᵀ = U S Vᵀ V S Uᵀ the two V cancel, and in each further product two U, so that only powers of S are left:
    X Xᵀ X = U S³ Vᵀ and X Xᵀ X Xᵀ X = U S⁵ Vᵀ. So U and V stay, and the polynomial is applied to each singular value:

        S_kr = a S_{k−1,r} + b S_{k−1,r}³ + c S_{k−1,r}^5 for k ≥ 1
        A_kii' = Σ_r U_ir S_kr² U_i'r        X_kij = Σ_r U_ir S_kr V_jr

    The division by the norm comes first because the polynomial keeps numbers from 0 to 1 bounded, but not large ones:

        Σ_r S_{0,r}² = Σ_ij X_{0,i,j}²

    Near 0 it multiplies by a, so a singular value grows by 3.4 in each iteration until it is about 1. There it does not
    converge, but stays between 0.68 and 1.14. Five iterations bring all from 0.01 on there; smaller ones end below.

    If I > J, Xᵀ is iterated, since (X Xᵀ) X = X (Xᵀ X): the square matrix is the smaller one, A of (I, I) or (J, J).

    precision: "float32" computes in the type of g; "bfloat16" rounds the factors of every product of float32 matrices
    to bfloat16, but not their sums. Raises TypeError or ValueError for a g that is no array of floating-point matrices,
    for a negative number of steps, and for another precision. There is no backward: nothing is differentiated.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the idea is from Bernstein,
    Newhouse, "Old optimizer, new norm: an anthology", 2024.
    """
    expect_matrices(g, steps, precision)
    if g.ndim > 2:
        return array_module(g).stack([newton_schulz(matrix, steps, precision) for matrix in g])
    a, b, c = COEFFICIENTS
    x = normalized(g)
    factor = to_bfloat16 if precision == "bfloat16" and g.dtype == np.float32 else lambda x: x
    for _ in range(steps):
        left = factor(x)
        gram = left @ left.T
        square = factor(gram)
        gram = b * gram + c * (square @ square)
        x = a * x + factor(gram) @ left
    return x if x.shape == g.shape else x.T


def expect_matrices(g: Array, steps: int, precision: str) -> None:
    """Raise TypeError or ValueError for arguments that `newton_schulz` does not take."""
    expect_floating(g=g)
    if g.ndim < 2 or not all(g.shape[:-2]):
        raise ValueError(f"g: expected (..., I, J), with at least one matrix, got {tuple(g.shape)}")
    expect_at_least(0, steps=steps)
    expect_one_of("precision", precision, PRECISIONS)


def normalized(g: Array) -> Array:
    """g (I, J) divided by its norm, which is computed in float64; transposed if it has more rows than columns."""
    xp = array_module(g)
    x = g.T if g.shape[0] > g.shape[1] else g
    return (x / xp.maximum(xp.sqrt(sum_of_squares(g.reshape(-1))), SMALLEST)).astype(g.dtype, copy=False)


def to_bfloat16(x: Array) -> Array:
    """x (I, J) rounded to bfloat16, as float32, in which NumPy multiplies fast."""
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@operation
def nesterov(u: Array, g: Array, m: Array, momentum: float, share: float | Array = 1.0) -> None:
    """The momentum of `Muon`: writes u and changes m in place. Both have the shape of g. share: what is left of the
    gradient after clipping; a number, or on a GPU an array () there.

    For each number i, with m0 for m before the step:

        c_i := share g_i
        m_i = momentum m0_i + (1 − momentum) c_i        u_i = (1 − momentum) c_i + momentum m_i
    """
    new = (1 - momentum) * scaled(g, share)
    m *= momentum
    m += new
    u[...] = new + momentum * m


@operation
def move(w: Array, change: Array, size: float, decay: float) -> None:
    """Subtract `size` times `change` from weights in place, after they have shrunk by the share `decay`.

    For each number i, with w0 for w before:

        w_i = (1 − decay) w0_i − size change_i
    """
    w *= 1 - decay
    w -= size * change


class Muon(AdamW):
    """Muon: each matrix of the blocks moves by its momentum with all singular values made about equal.

    A gradient of a matrix is often dominated by a few directions. Orthogonalised, rare directions count as much as
    frequent ones. Let θ_tij be a matrix (I, J) after step t, counted from 1, and G_tij its gradient in this step. With
    momentum μ, the running mean m of gradients starts at 0, and u is the mean after one more such step (Nesterov):

        m_{0,i,j} = 0        m_tij = μ m_{t−1,i,j} + (1 − μ) G_tij for t ≥ 1
        u_tij := (1 − μ) G_tij + μ m_tij

    O_t is `newton_schulz` of u_t. Its singular values are near 1, whatever the size of the gradient. Weight decay λ is
    decoupled, as in `AdamW`:

        θ_tij = (1 − lr_t λ) θ_{t−1,i,j} − lr_t √(max(1, J/I)) O_tij for t ≥ 1

    The root is for matrices with more outputs J than inputs I.

    hidden: which parameters with two axes are stepped so, as a pattern for names, as in `Group`. By
    default these are the weights of all linear layers in blocks: not tables, and not the output layer. All others are
    stepped as by `AdamW`, with the learning rate `adam_lr`, `betas` and `eps`. `lr` is that of the matrices; a schedule
    that sets it changes both in proportion. A matrix is never cut, neither for threads nor for processes.

    precision: of the products of `newton_schulz`, "float32" or "bfloat16"; float64 parameters stay in float64. params,
    groups: see `Optimizer`. The state has m and v for all parameters, but v, AdamW's, stays 0 for matrices.

    Raises as `AdamW`; ValueError if `hidden` matches no matrix; ImportError if a package that bfloat16 needs is
    missing.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. PyTorch's Muon is the same,
    with its `adjust_lr_fn="original"`, in bfloat16.
    """

    def __init__(
        self,
        params: Iterable[Param],
        lr: float = 0.02,
        adam_lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        groups: Sequence[Group] = (),
        hidden: str = "*blocks.*.w",
        precision: str = "float32",
    ) -> None:
        expect_number("lr", lr, zero=False)
        expect_number("adam_lr", adam_lr)
        expect_fraction("momentum", momentum)
        expect_one_of("precision", precision, PRECISIONS)
        expect_instance("hidden", hidden, str)
        self.adam_lr, self.momentum, self.precision = float(adam_lr), float(momentum), precision
        self.hidden = Group(hidden)
        super().__init__(params, lr, betas, eps, weight_decay, groups)
        if not any(how.whole for how in self.treatments):
            last = ", ".join(self.names[-4:])
            raise ValueError(f"hidden: {hidden!r} matches no matrix that is not frozen; the last parameters are {last}")
        if precision == "bfloat16":
            bfloat16(device_of(self.params[0].data))

    def is_whole(self, name: str, p: Param) -> bool:
        return p.data.ndim == 2 and self.hidden.matches(name)

    def rate_of(self, whole: bool) -> float:
        return 1.0 if whole else float(self.adam_lr / self.lr)

    def cost_of(self, whole: bool) -> float:
        return 20.0 if whole else 1.0  # as measured for matrices of 128 rows; larger ones take longer

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"momentum": self.momentum, "precision": self.precision}

    @property
    def matrices(self) -> int:
        """The number of parameters that are stepped as matrices."""
        return sum(how.whole for how in self.treatments)

    def state_dict(self) -> dict[str, np.ndarray]:
        """As for every optimizer, with the number of matrices, whose `v` is 0: AdamW would divide by it."""
        return super().state_dict() | {"matrices": np.array(self.matrices, np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As for every optimizer."""
        if (given := np.asarray(state.get("matrices")).tolist()) != self.matrices:
            raise ValueError(f"state of another optimizer: matrices: expected {self.matrices}, got {given}")
        super().load_state_dict({name: value for name, value in state.items() if name != "matrices"})

    def update(
        self, w: Any, g: Any, m: Any, v: Any, lr: float, weight_decay: float, share: float | Array = 1.0
    ) -> None:
        if len(w.shapes[0] if isinstance(w, Pieces) else w.shape) == 1:
            return super().update(w, g, m, v, lr, weight_decay, share)
        if isinstance(w, Pieces):
            return self.update_together(w, g, m, lr, weight_decay, share)
        u = array_module(g).empty_like(g)
        nesterov(u, g, m, self.momentum, share)
        move(w, newton_schulz(u, STEPS, self.precision), lr * root(w.shape), lr * weight_decay)
        return None

    def update_together(
        self, w: Pieces, g: Pieces, m: Pieces, lr: float, weight_decay: float, share: float | Array
    ) -> None:
        """`update` for several matrices of one shape (I, J), and then, perhaps, some of the shape (J, I)."""
        I, J = shape = w.shapes[0]
        alike, count, size = w.shapes.count(shape), len(w.shapes), I * J
        u = array_module(g.flat).empty((count, size), g.flat.dtype)
        nesterov(as_pieces(u, w.shapes), g, m, self.momentum, share)
        transposed = u[alike:].reshape(count - alike, J, I)
        x = array_module(u).concatenate([u[:alike].reshape(alike, I, J), transposed.swapaxes(1, 2)])
        x = newton_schulz(x, STEPS, self.precision)
        u[:alike].reshape(alike, I, J)[...] = x[:alike]
        transposed[...] = x[alike:].swapaxes(1, 2)
        for part in slice(0, alike), slice(alike, count):
            if shapes := w.shapes[part]:
                move(w.part(part), as_pieces(u[part], shapes), lr * root(shapes[0]), lr * weight_decay)


def root(shape: tuple[int, ...]) -> float:
    """The factor of the step of a matrix (I, J): √(max(1, J/I))."""
    return math.sqrt(max(1, shape[1] / shape[0]))


def as_pieces(x: Array, shapes: tuple[tuple[int, ...], ...]) -> Pieces:
    """The rows of x (N, P), each of which holds an array."""
    return Pieces(x.reshape(-1), tuple(range(0, x.size, x.shape[1])), shapes)
