"""The tutorial's models as functions of arrays, for libraries that compile a function: JAX and tinygrad.

Both have the parameters of scratchformer's model, with its names and shapes. A training step is the same as for the
other peers: forward, backward, clipping to norm 1, and Adam; the whole step is compiled as one function.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from scratchformer.models import LanguageModel
from scratchformer.nn import Layer

RATE, BETAS, EPS = 1e-4, (0.9, 0.999), 1e-8  # of Adam

Gradients = Callable[[Any], tuple[float, dict[str, np.ndarray]]]
Step = Callable[[Any], float]


def forward(lib: SimpleNamespace, p: dict[str, Any], model: Layer, ids: Any, real: Any = None) -> Any:
    """The logits of every position; with `real` (B, T), which is true where a text has a token, those of every text.

    p: the parameters. lib: the few functions whose names or arguments differ between the libraries.
    """
    (B, T), C, H = ids.shape, model.config["d_model"], model.config["heads"]
    x = lib.rows(p["body.tokens.table"], ids) + p["body.positions.table"][:T]
    for number in range(model.config["depth"]):
        a = {name.split(".", 3)[3]: value for name, value in p.items() if name.startswith(f"body.blocks.{number}.")}
        weights = lib.joined([a[f"attention.{name}.w"] for name in ("query", "key", "value")])
        q, k, v = (part.reshape(B, T, H, C // H) for part in lib.divided(x @ weights))
        y = lib.attention(q, k, v, real).reshape(B, T, C)
        x = lib.norm(x + y @ a["attention.unify.w"] + a["attention.unify.b"]) * a["norm1.gamma"] + a["norm1.beta"]
        hidden = lib.relu(x @ a["feedforward.up.w"] + a["feedforward.up.b"])
        y = hidden @ a["feedforward.down.w"] + a["feedforward.down.b"]
        x = lib.norm(x + y) * a["norm2.gamma"] + a["norm2.beta"]
    if real is not None:
        x = (x * real[..., None]).sum(1) / real.sum(1)[:, None]
    return x @ p["output.w"] + p["output.b"]


def arguments(batch: Any) -> tuple[np.ndarray, ...]:
    """The ids, the classes to predict and, for a classifier, where its texts have a token."""
    ids, *lengths, classes = (np.asarray(a, np.int32) for a in batch)
    return ids, classes, *(np.arange(ids.shape[1]) < each[:, None] for each in lengths)


def jax_peer(model: Layer, bfloat16: bool) -> tuple[Gradients, Step]:
    """The loss and gradients of a batch, and a training step, by JAX.

    bfloat16: the type of forward and backward; parameters and Adam stay in float32.
    """
    import jax
    import jax.numpy as jnp

    parameters = {name: np.array(value) for name, value in model.state_dict().items()}
    kind = parameters["output.w"].dtype
    jax.config.update("jax_enable_x64", kind == np.float64)
    jax.config.update("jax_platforms", "cpu")
    causal = isinstance(model, LanguageModel)

    def attention(q: Any, k: Any, v: Any, real: Any) -> Any:
        scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=kind) / q.shape[-1] ** 0.5
        allowed = jnp.tri(q.shape[1], dtype=bool) if causal else real[:, None, None, :]
        weights = jax.nn.softmax(scores, where=allowed).astype(v.dtype)
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    lib = SimpleNamespace(
        rows=lambda table, ids: table[ids],
        joined=lambda parts: jnp.concatenate(parts, axis=1),
        divided=lambda x: jnp.split(x, 3, axis=-1),
        attention=attention,
        norm=lambda x: jax.nn.standardize(x, epsilon=1e-5),
        relu=jax.nn.relu,
    )

    def loss(p: dict[str, Any], ids: Any, classes: Any, *real: Any) -> Any:
        if bfloat16:
            p = {name: value.astype(jnp.bfloat16) for name, value in p.items()}
        logits = forward(lib, p, model, ids, *real).astype(kind)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), classes[..., None], -1).mean()

    slope = jax.value_and_grad(loss)

    def update(state: Any, *batch: Any) -> Any:
        p, mean, square, number = state
        value, grad = slope(p, *batch)
        number, norm = number + 1, jnp.sqrt(sum((g**2).sum() for g in grad.values()))
        grad = {name: g * jnp.minimum(1, 1 / norm) for name, g in grad.items()}
        b1, b2 = BETAS
        mean = {name: b1 * mean[name] + (1 - b1) * g for name, g in grad.items()}
        square = {name: b2 * square[name] + (1 - b2) * g * g for name, g in grad.items()}
        first, second = 1 - b1**number, 1 - b2**number
        p = {n: p[n] - RATE * mean[n] / first / (jnp.sqrt(square[n] / second) + EPS) for n in p}
        return (p, mean, square, number), value

    compiled = jax.jit(update, donate_argnums=0)
    state: Any = None

    def step(batch: Any) -> float:
        nonlocal state
        if state is None:
            p = {name: jnp.array(value) for name, value in parameters.items()}
            state = p, *({name: jnp.zeros_like(value) for name, value in p.items()} for _ in range(2)), jnp.float32(0)
        state, value = compiled(state, *arguments(batch))
        return float(value)

    def gradients(batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        value, grad = jax.jit(slope)(parameters, *arguments(batch))
        return float(value), {name: np.asarray(g) for name, g in grad.items()}

    return gradients, step


def tinygrad_peer(model: Layer) -> tuple[Gradients, Step]:
    """As `jax_peer`, by tinygrad. Kernels are searched for with a beam of 2, but not in float64, which is not timed."""
    double = model.flat.data.dtype == np.float64
    os.environ.setdefault("BEAM", "0" if double else "2")
    os.environ.setdefault("DEV", "CPU" if shutil.which("clang") else "CPU:LLVM")
    from tinygrad import Context, Tensor, TinyJit
    from tinygrad.nn.optim import Adam

    causal = isinstance(model, LanguageModel)
    p = {name: Tensor(np.array(value)).realize().is_param_(True) for name, value in model.state_dict().items()}

    def attention(*parts: Any) -> Any:
        *parts, real = parts
        q, k, v = (part.transpose(1, 2) for part in parts)
        mask = None if real is None else real[:, None, None, :]
        return q.scaled_dot_product_attention(k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)

    lib = SimpleNamespace(
        rows=lambda table, ids: table[ids],
        joined=lambda parts: Tensor.cat(*parts, dim=1),
        divided=lambda x: x.chunk(3, dim=-1),
        attention=attention,
        norm=lambda x: x.layernorm(),
        relu=lambda x: x.relu(),
    )
    adam = Adam([*p.values()], RATE, *BETAS, EPS)

    def loss(ids: Any, classes: Any, *real: Any) -> Any:
        logits = forward(lib, p, model, ids, *real)
        return logits.flatten(0, -2).sparse_categorical_crossentropy(classes.flatten())

    @TinyJit
    def update(*batch: Any) -> Any:
        adam.zero_grad()
        value = loss(*batch).backward()
        norm = sum(each.grad.square().sum() for each in p.values()).sqrt()
        for each in p.values():
            each.grad = each.grad * (1 / norm).minimum(1)
        return value.realize(*adam.schedule_step())

    def step(batch: Any) -> float:
        with Context(TRAINING=1):
            return update(*(Tensor(a).realize() for a in arguments(batch))).item()

    def gradients(batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        value = loss(*map(Tensor, arguments(batch))).backward()
        return value.item(), {name: each.grad.numpy() for name, each in p.items()}

    return gradients, step
