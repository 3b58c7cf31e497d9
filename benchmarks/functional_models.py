"""The tutorial's models as functions of arrays, for libraries that compile a function: JAX, tinygrad and PyTorch.

All have the parameters of scratchformer's model, with its names and shapes. A training step is the same as for the
other peers: forward, backward, clipping to norm 1, and Adam. JAX and tinygrad compile the whole step as one function.
JAX and PyTorch also compile our own references: every operation and its backward are those of `scratchformer.ops`, and
the library itself differentiates only what joins them: sums, reshapes and slices.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from scratchformer import ops
from scratchformer.checks import checked_on_host
from scratchformer.models import LanguageModel
from scratchformer.nn import Layer
from scratchformer.testing.contracts import as_tuple

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
        q, k, v = (part.reshape(B, T, H, C // H) for part in lib.divided(lib.linear(x, weights)))
        y = lib.attention(q, k, v, real).reshape(B, T, C)
        y = lib.linear(y, a["attention.unify.w"], a["attention.unify.b"])
        x = lib.norm(x + y, a["norm1.gamma"], a["norm1.beta"])
        hidden = lib.relu(lib.linear(x, a["feedforward.up.w"], a["feedforward.up.b"]))
        y = lib.linear(hidden, a["feedforward.down.w"], a["feedforward.down.b"])
        x = lib.norm(x + y, a["norm2.gamma"], a["norm2.beta"])
    if real is not None:
        x = lib.mean(x, real)
    return lib.linear(x, p["output.w"], p["output.b"])


def linear(x: Any, w: Any, b: Any = 0) -> Any:
    return x @ w + b


def mean(x: Any, real: Any) -> Any:
    return (x * real[..., None]).sum(1) / real.sum(1)[:, None]


def references(pair: Callable, swapped: Callable, causal: bool) -> dict[str, Callable]:
    """The functions that `forward` calls, and the loss, computed by the operations of `scratchformer.ops`.

    pair: makes a function from an operation and its backward, which is then the derivative that the library uses.
    swapped: exchanges the second and the third axis. causal: whether attention is causal; otherwise it is masked by
    `real`.
    """
    names = "embedding", "linear", "relu", "layernorm", "mean_pool", "attention", "cross_entropy"
    op = {name: pair(checked_on_host()(getattr(ops, name)), getattr(ops, f"{name}_backward")) for name in names}

    def attention(q: Any, k: Any, v: Any, real: Any) -> Any:
        pattern = ops.Causal() if causal else ops.Padding(real.sum(1))
        return swapped(op["attention"](*map(swapped, (q, k, v)), pattern=pattern))

    return dict(
        rows=lambda table, ids: op["embedding"](ids, table),
        linear=op["linear"],
        relu=op["relu"],
        norm=op["layernorm"],
        mean=lambda x, real: op["mean_pool"](x, lengths=real.sum(1)),
        attention=attention,
        loss=op["cross_entropy"],
    )


def arguments(batch: Any) -> tuple[np.ndarray, ...]:
    """The ids, the classes to predict and, for a classifier, where its texts have a token."""
    ids, *lengths, classes = (np.asarray(a, np.int32) for a in batch)
    return ids, classes, *(np.arange(ids.shape[1]) < each[:, None] for each in lengths)


def jax_peer(model: Layer, bfloat16: bool, ours: bool = False) -> tuple[Gradients, Step]:
    """The loss and gradients of a batch, and a training step, by JAX.

    bfloat16: the type of forward and backward; parameters and Adam stay in float32. ours: with our references.
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
        linear=linear,
        attention=attention,
        norm=lambda x, gamma, beta: jax.nn.standardize(x, epsilon=1e-5) * gamma + beta,
        relu=jax.nn.relu,
        mean=mean,
        loss=lambda logits, classes: -jnp.take_along_axis(jax.nn.log_softmax(logits), classes[..., None], -1).mean(),
    )
    if ours:
        vars(lib).update(references(jax_pair, lambda x: x.swapaxes(1, 2), causal))

    def loss(p: dict[str, Any], ids: Any, classes: Any, *real: Any) -> Any:
        if bfloat16:
            p = {name: value.astype(jnp.bfloat16) for name, value in p.items()}
        return lib.loss(forward(lib, p, model, ids, *real).astype(kind), classes)

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


def jax_pair(op: Callable, backward: Callable) -> Callable:
    """An operation as a function of arrays and keyword options, whose derivative in JAX is the backward."""
    import jax

    @jax.tree_util.register_static
    @dataclass(frozen=True)
    class Constant:  # a residual that is not an array
        value: Any

    def call(*args: Any, **options: Any) -> Any:
        has_gradient = [jax.numpy.issubdtype(x.dtype, jax.numpy.floating) for x in args]

        def forwards(*args: Any) -> tuple[Any, Any]:
            y, cache = op(*args, **options)
            return y, jax.tree.map(lambda x: x if isinstance(x, jax.Array) else Constant(x), cache)

        def backwards(cache: Any, dy: Any) -> tuple[Any, ...]:
            constant = lambda x: isinstance(x, Constant)  # noqa: E731
            cache = jax.tree.map(lambda x: x.value if constant(x) else x, cache, is_leaf=constant)
            gradients = iter(as_tuple(backward(dy, cache)))
            return tuple(next(gradients) if has else None for has in has_gradient)

        function = jax.custom_vjp(lambda *args: op(*args, **options)[0])
        function.defvjp(forwards, backwards)
        return function(*args)

    return call


def torch_pair(op: Callable, backward: Callable) -> Callable:
    """As `jax_pair`, for PyTorch."""
    import torch
    from torch.utils import _pytree as pytree

    def call(*args: Any, **options: Any) -> Any:
        class Pair(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                y, cache = op(*args, **options)
                leaves, ctx.tree = pytree.tree_flatten(cache)
                is_array = [isinstance(x, torch.Tensor) for x in leaves]
                ctx.save_for_backward(*(x if array else None for x, array in zip(leaves, is_array, strict=True)))
                ctx.constants = [None if array else x for x, array in zip(leaves, is_array, strict=True)]
                return y

            @staticmethod
            def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
                parts = zip(ctx.saved_tensors, ctx.constants, strict=True)
                leaves = [constant if x is None else x for x, constant in parts]
                gradients = iter(as_tuple(backward(dy, pytree.tree_unflatten(leaves, ctx.tree))))
                return tuple(next(gradients) if x.is_floating_point() else None for x in args)

        return Pair.apply(*args)

    return call


def torch_peer(model: Layer) -> tuple[Gradients, Step]:
    """As `jax_peer` with our references, by PyTorch.

    `torch.compile` cannot trace our checks of arguments. So forward and backward are run once on fake tensors, which
    have no values, and the graph of the functions that they call is compiled.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    p = {name: torch.from_numpy(np.array(value)).requires_grad_() for name, value in model.state_dict().items()}
    values, adam = [*p.values()], torch.optim.Adam(p.values(), RATE, BETAS, EPS, fused=True)
    lib = SimpleNamespace(
        joined=lambda parts: torch.cat(parts, dim=1),
        divided=lambda x: x.chunk(3, dim=-1),
        **references(torch_pair, lambda x: x.transpose(1, 2), isinstance(model, LanguageModel)),
    )
    compiled: Any = None

    def slope(values: Any, ids: Any, classes: Any, *real: Any) -> Any:
        value = lib.loss(forward(lib, dict(zip(p, values, strict=True)), model, ids, *real), classes)
        return value, torch.autograd.grad(value, values)

    def traced(batch: Any) -> tuple[Any, list[Any]]:
        tensors = [torch.from_numpy(a).long() for a in arguments(batch)]
        return make_fx(slope, tracing_mode="fake")(values, *tensors), tensors

    def step(batch: Any) -> float:
        nonlocal compiled
        if compiled is None:
            compiled = torch.compile(traced(batch)[0])
        with torch.no_grad():
            value, gradients = compiled(values, *(torch.from_numpy(a).long() for a in arguments(batch)))
        for each, grad in zip(values, gradients, strict=True):
            each.grad = grad.contiguous()  # a copy if it is a strided view, which the fused Adam would misread
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        adam.step()
        return value.item()

    def gradients(batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        graph, tensors = traced(batch)
        with torch.no_grad():
            value, grad = graph(values, *tensors)
        return value.item(), {name: g.numpy() for name, g in zip(p, grad, strict=True)}

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
        linear=linear,
        attention=attention,
        norm=lambda x, gamma, beta: x.layernorm() * gamma + beta,
        relu=lambda x: x.relu(),
        mean=mean,
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
