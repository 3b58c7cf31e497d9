"""Softmax followed by cross-entropy, as one operation."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, array_module, cast, widen
from ..checks import (
    MAX_SIZE,
    expect_at_least,
    expect_columns,
    expect_floating,
    expect_fraction,
    expect_gradient,
    expect_ids,
    expect_integers,
)
from ..dispatch import backward, operation

IGNORED = -1  # the `ignore_index` that the models here use for targets that do not count


class CrossEntropyCache(NamedTuple):
    logits: Array  # (..., V)
    z_max: Array  # (N, 1)
    log_z: Array  # (N, 1), of z − z_max
    rest: Array  # (N, 1), of exp(z − z_max), without the target's
    targets: Array  # (N,), 0 where ignored
    counted: Array  # (N,), boolean
    count: Array  # how many targets count, but at least 1
    label_smoothing: float


def given_targets(logits: Array, targets: Array, ignore_index: int | None, label_smoothing: float) -> dict[str, Array]:
    """Targets (N,), which are 0 where ignored, and which of them count (N,), by name. Raises TypeError, ValueError or
    IndexError unless these are valid arguments of `cross_entropy`.
    """
    expect_floating(logits=logits)
    expect_columns("logits", logits)
    xp = array_module(logits, targets)
    expect_integers("targets", targets)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets: expected {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}")
    expect_fraction("label_smoothing", label_smoothing)
    if ignore_index is not None:
        expect_at_least(-MAX_SIZE, ignore_index=ignore_index)
    targets, counted = counted_targets(xp.reshape(targets, (-1,)), logits.shape[-1], ignore_index)
    return {"targets": targets, "counted": counted}


@operation(given=given_targets)
def cross_entropy(
    logits: Array, targets: Array, ignore_index: int | None = None, label_smoothing: float = 0.0
) -> tuple[Array, CrossEntropyCache]:
    """loss = −mean_n(Σ_v t_nv log(softmax_v(z_nv))), in nats: the mean over the rows n whose target counts.

    logits: (..., V), the z. targets: (...), integers from 0 to V − 1. ignore_index: a target that does not count (the
    models here use IGNORED, −1; PyTorch uses −100). label_smoothing: ε, the part of the target distribution t that is
    spread evenly over all V classes. Returns the loss, a scalar (a zero-dimensional array on a GPU; float32 for float16
    logits), and the cache. If no target counts, the loss is 0. Logits must not be NaN or ∞, even in rows that do not
    count: the gradient of such a row is multiplied by 0, and 0 · NaN is NaN. Raises ValueError if shapes do not fit or
    ε is not in [0, 1), TypeError if the targets are not integers, IndexError if one is out of range.

    Forward, with all leading axes folded into n. t_n is the distribution that the softmax should be: 1 at the target.
    Label smoothing spreads a part ε of it evenly over all classes. Ignored rows do not count: k_n is 1 if row n counts,
    else 0, and an ignored target is taken to be 0:

        z := logits        ε := label_smoothing        k := counted
        t_nv = (1 − ε) [v = targets_n] + ε/V
        λ_n = log(Σ_v exp(z_nv))        ℓ_n = −Σ_v t_nv (z_nv − λ_n)
        count = max(1, Σ_n k_n)        loss = 1/count Σ_n k_n ℓ_n

    No exponential overflows if the row's maximum is subtracted, which does not change the softmax. Since t sums to 1,
    the loss of a row can be computed without the softmax, whose small numbers may round to 0, with the logarithm −∞.
    The exponential of the target is added last, so that a small rest does not round to 0; log1p(x) is log(1 + x):

        z_max_n = max_v(z_nv)        rest_n = Σ_v [v ≠ targets_n] exp(z_nv − z_max_n)
        log_z_n = λ_n − z_max_n = log(Σ_v exp(z_nv − z_max_n))
            = log1p(exp(z_nv − z_max_n) − 1 + rest_n) with v = targets_n
        ℓ_n = log_z_n − (1 − ε) (z_nv − z_max_n) − ε mean_v'(z_nv' − z_max_n) with v = targets_n

    Backward. The derivative of λ is the softmax p. The logarithm undoes the exponential, and what is left is prediction
    minus target:

        p_nv := ∂λ_n/∂z_nv = exp(z_nv)/Σ_v' exp(z_nv') = exp(z_nv − z_max_n − log_z_n)
        ∂ℓ_n/∂z_nv = −Σ_v' t_nv' (δ_vv' − p_nv) = p_nv Σ_v' t_nv' − t_nv = p_nv − t_nv

    In the mean, each row has the same weight. Ignored rows have weight 0:

        dℓ_n := dloss k_n/count        dz_nv = dℓ_n ∂ℓ_n/∂z_nv = dℓ_n (p_nv − t_nv)

    If the target's p is nearly 1, rounding leaves little of 1 − p, which is computed as the sum of the others:

        gap_nv := ε (1 − 1/V) − rest_n exp(−log_z_n) where v = targets_n, p_nv − ε/V elsewhere
        dz_nv = dℓ_n gap_nv

    The code starts with p, puts the gap in place of it, and multiplies each row by its weight:

        dlogits = xp.exp(z - z_max - log_z)
        dlogits -= label_smoothing / V
        of_target = label_smoothing * (1 - 1 / V) - rest * xp.exp(-log_z)
        dlogits = xp.where(xp.arange(V) == targets[:, None], of_target, dlogits)
        dlogits *= dloss / count * cast(counted[:, None], z_max.dtype)

    The cache keeps the logits, and of each row the maximum, log_z and the rest. From these p is computed again.

    Source of label smoothing: Szegedy et al., "Rethinking the inception architecture", 2016, section 7.
    """
    xp = array_module(logits, targets)
    targets, counted = given_targets(logits, targets, ignore_index, label_smoothing).values()
    z = xp.reshape(widen(logits), (-1, logits.shape[-1]))
    z_max = xp.max(z, axis=-1, keepdims=True)
    shifted = z - z_max
    z_target = xp.take_along_axis(shifted, targets[:, None], axis=1)
    others = xp.arange(z.shape[1]) != targets[:, None]
    rest = xp.sum(xp.where(others, xp.exp(shifted), 0), axis=-1, keepdims=True)
    log_z = xp.log1p(xp.exp(z_target) - 1 + rest)  # (N, 1)
    row = log_z - (1 - label_smoothing) * z_target
    if label_smoothing:
        row -= label_smoothing * xp.mean(shifted, axis=-1, keepdims=True)
    # Not a Python number, for which the host would wait for a GPU.
    count = xp.maximum(1, xp.sum(cast(counted, row.dtype)))
    loss = xp.sum(xp.where(counted[:, None], row, 0)) / count
    return loss, CrossEntropyCache(logits, z_max, log_z, rest, targets, counted, count, label_smoothing)


def counted_targets(targets: Array, V: int, ignore_index: int | None) -> tuple[Array, Array]:
    """Targets (...), with 0 for those that are ignored, and which of them count. Raises TypeError if they are not
    integers, IndexError if one of those that count is not in 0 ... V − 1.
    """
    expect_integers("targets", targets)
    xp = array_module(targets)
    counted = xp.ones(targets.shape, dtype=xp.bool) if ignore_index is None else targets != ignore_index
    targets = xp.where(counted, targets, 0)
    try:
        expect_ids("targets", targets, V)
    except IndexError as error:
        ignored = "none is ignored" if ignore_index is None else f"{ignore_index} is ignored, which is -100 in PyTorch"
        raise IndexError(f"{error} ({ignored})") from None
    return targets, counted


@backward
def cross_entropy_backward(dloss: Array | float, cache: CrossEntropyCache) -> Array:
    """dlogits: see `cross_entropy`. dloss: a number, or a zero-dimensional array."""
    expect_gradient("dloss", dloss, ())
    logits, z_max, log_z, rest, targets, counted, count, label_smoothing = cache
    xp, V = array_module(logits), logits.shape[-1]
    z = xp.reshape(logits, (-1, V))
    dlogits = xp.exp(z - z_max - log_z)  # the softmax, in the type of z_max
    dlogits -= label_smoothing / V
    of_target = label_smoothing * (1 - 1 / V) - rest * xp.exp(-log_z)
    dlogits = xp.where(xp.arange(V) == targets[:, None], of_target, dlogits)
    dlogits *= dloss / count * cast(counted[:, None], z_max.dtype)
    return cast(xp.reshape(dlogits, logits.shape), logits.dtype)
