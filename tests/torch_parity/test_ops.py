"""Every operation and its backward compared with PyTorch's."""

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.rng import Key

torch = pytest.importorskip("torch")
F = torch.nn.functional

B, H, T, S, D, C, V = 3, 2, 5, 7, 4, 6, 9
IDS = np.random.default_rng(1).integers(0, V, (B, T))
PLACES = np.random.default_rng(2).integers(0, T, (B, 2 * T))  # so that some occur twice
LENGTHS = np.array([2, T, 3])
WITHIN = torch.from_numpy(np.arange(T) < LENGTHS[:, None])  # (B, T)
KEEP = torch.from_numpy(ops.dropout(np.ones((B, T, C)), 0.25, Key(1))[0] > 0)
CAUSAL = torch.ones(T, S, dtype=torch.bool).tril(S - T)


BEFORE = torch.arange(T)[:, None] - torch.arange(T)  # (T, T): how far the key is before the query


def same_or_end(size):
    """(T, T): true where a key is in the query's block, or at the end of its own."""
    block = torch.arange(T) // size
    return (block[:, None] == block) | (torch.arange(T) % size == size - 1)


def attention(mask=None, **options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, **options)


def cross_entropy(**options):
    targets = torch.from_numpy(IDS).reshape(-1)
    return lambda z: F.cross_entropy(z.reshape(-1, V), targets, **options)


def rotary(start, base):
    """As in the published Llama code: x cos + rotate_half(x) sin, the angles of both halves alike."""
    theta = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = (torch.arange(start, start + T)[:, None] * theta).repeat(1, 2)  # (T, D)

    def turn(x):
        a, b = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat([-b, a], -1) * angles.sin().to(x.dtype)

    return turn


def relative_shift(x):
    """In a loop over pairs: the number at the distance of key s from query t."""
    rows = [torch.stack([x[..., t, S - 1 - (t + S - T - s)] for s in range(S)], -1) for t in range(T)]
    return torch.stack(rows, -2)


def relative_attention(mask=None):
    """The paper's four terms, in a loop over pairs of a query and a key."""

    def attend(q, k, v, r, u, w):
        z = q.new_full((B, H, T, S), -torch.inf)
        for t in range(T):
            for s in range(S):
                if mask is None or mask[t, s]:
                    r_ts = r[:, S - 1 - (t + S - T - s)]
                    q_t, k_s = q[:, :, t], k[:, :, s]
                    terms = (q_t * k_s).sum(-1) + (q_t * r_ts).sum(-1) + (u * k_s).sum(-1) + (w * r_ts).sum(-1)
                    z[:, :, t, s] = terms / D**0.5
        return z.softmax(-1) @ v

    return attend


RELATIVE = [(B, H, T, D), (B, H, S, D), (B, H, S, D), (H, S + T - 1, D), (H, D), (H, D)]

# For each case: our operation, PyTorch's function of the same arrays, their shapes, and our other arguments.
CASES = {
    "linear": (ops.linear, lambda x, w, b: F.linear(x, w.T, b), [(B, T, C), (C, V), (V,)], {}),
    "linear, no bias": (ops.linear, lambda x, w: F.linear(x, w.T), [(B, T, C), (C, V)], {}),
    "dense": (ops.dense, lambda x, w, b: F.relu(F.linear(x, w.T, b)), [(B, T, C), (C, V), (V,)], {}),
    "dense, gelu": (
        ops.dense,
        lambda x, w, b: F.gelu(F.linear(x, w.T, b)),
        [(B, T, C), (C, V), (V,)],
        dict(activation="gelu"),
    ),
    "dense, gelu_tanh": (
        ops.dense,
        lambda x, w, b: F.gelu(F.linear(x, w.T, b), approximate="tanh"),
        [(B, T, C), (C, V), (V,)],
        dict(activation="gelu_tanh"),
    ),
    "dense, silu": (
        ops.dense,
        lambda x, w, b: F.silu(F.linear(x, w.T, b)),
        [(B, T, C), (C, V), (V,)],
        dict(activation="silu"),
    ),
    "add": (ops.add, torch.add, [(B, T, C), (B, T, C)], {}),
    "relu": (ops.relu, F.relu, [(B, T, C)], {}),
    "gelu": (ops.gelu, F.gelu, [(B, T, C)], {}),
    "gelu, tanh": (ops.gelu, lambda x: F.gelu(x, approximate="tanh"), [(B, T, C)], dict(approximate="tanh")),
    "silu": (ops.silu, F.silu, [(B, T, C)], {}),
    "swiglu": (ops.swiglu, lambda gate, up: F.silu(gate) * up, [(B, T, C)] * 2, {}),
    "geglu": (ops.geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, [(B, T, C)] * 2, {}),
    "tanh": (ops.tanh, torch.tanh, [(B, T, C)], {}),
    "softmax": (ops.softmax, lambda z: F.softmax(z, -1), [(B, T, V)], {}),
    "log_softmax": (ops.log_softmax, lambda z: F.log_softmax(z, -1), [(B, T, V)], {}),
    "layernorm": (ops.layernorm, lambda x, g, b: F.layer_norm(x, (C,), g, b), [(B, T, C), (C,), (C,)], {}),
    "layernorm, eps": (
        ops.layernorm,
        lambda x, g, b: F.layer_norm(x, (C,), g, b, eps=0.5),
        [(B, T, C), (C,), (C,)],
        dict(eps=0.5),
    ),
    "rmsnorm": (ops.rmsnorm, lambda x, g: F.rms_norm(x, (C,), g, 1e-6), [(B, T, C), (C,)], {}),
    "rmsnorm, eps": (ops.rmsnorm, lambda x, g: F.rms_norm(x, (C,), g, 0.5), [(B, T, C), (C,)], dict(eps=0.5)),
    "rotary": (ops.rotary, rotary(0, 10_000.0), [(B, H, T, D)], {}),
    "rotary, later": (ops.rotary, rotary(3, 50.0), [(B, H, T, D)], dict(start=3, base=50.0)),
    "embedding": (
        lambda table: ops.embedding(IDS, table),
        lambda table: F.embedding(torch.from_numpy(IDS), table),
        [(V, C)],
        {},
    ),
    "gather": (
        ops.gather,
        lambda x: x[torch.arange(B)[:, None], torch.from_numpy(PLACES)],
        [(B, T, C)],
        dict(places=PLACES),
    ),
    "dropout": (lambda x: ops.dropout(x, 0.25, Key(1)), lambda x: x * KEEP / 0.75, [(B, T, C)], {}),
    "dropout_add": (
        lambda x, f: ops.dropout_add(x, 0.25, Key(1), f),
        lambda x, f: x * KEEP / 0.75 + f,
        [(B, T, C)] * 2,
        {},
    ),
    "mean_pool": (ops.mean_pool, lambda x: x.mean(1), [(B, T, C)], {}),
    "mean_pool, padding": (
        ops.mean_pool,
        lambda x: torch.stack([x[b, :n].mean(0) for b, n in enumerate(LENGTHS)]),
        [(B, T, C)],
        dict(lengths=LENGTHS),
    ),
    "max_pool": (ops.max_pool, lambda x: x.max(1).values, [(B, T, C)], {}),
    "max_pool, padding": (
        ops.max_pool,
        lambda x: x.masked_fill(~WITHIN[:, :, None], -torch.inf).max(1).values,
        [(B, T, C)],
        dict(lengths=LENGTHS),
    ),
    "attention": (ops.attention, attention(), [(B, H, T, D), (B, H, S, D), (B, H, S, D)], {}),
    "attention, grouped": (
        ops.attention,
        attention(CAUSAL, enable_gqa=True),
        [(B, 3 * H, T, D), (B, H, S, D), (B, H, S, D)],
        dict(pattern=ops.Causal()),
    ),
    "attention, causal": (ops.attention, attention(is_causal=True), [(B, H, T, D)] * 3, dict(pattern=ops.Causal())),
    "attention, causal, more keys": (
        ops.attention,
        attention(CAUSAL),
        [(B, H, T, D), (B, H, S, D), (B, H, S, D)],
        dict(pattern=ops.Causal()),
    ),
    "attention, padding": (
        ops.attention,
        attention(WITHIN[:, None, None]),
        [(B, H, T, D)] * 3,
        dict(pattern=ops.Padding(LENGTHS)),
    ),
    "attention, causal and padding": (
        ops.attention,
        attention(WITHIN[:, None, None] & CAUSAL[:, S - T :]),
        [(B, H, T, D)] * 3,
        dict(pattern=ops.Causal() & ops.Padding(LENGTHS)),
    ),
    "relative_shift": (ops.relative_shift, relative_shift, [(B, T, S + T - 1)], {}),
    "relative_attention": (ops.relative_attention, relative_attention(), RELATIVE, {}),
    "relative_attention, causal": (
        ops.relative_attention,
        relative_attention(CAUSAL),
        RELATIVE,
        dict(pattern=ops.Causal()),
    ),
    "attention, causal, fixed in one head and strided in the other": (
        ops.attention,
        attention(torch.stack([same_or_end(2), BEFORE % 2 == 0]) & (BEFORE >= 0)),
        [(B, H, T, D)] * 3,
        dict(pattern=ops.Causal() & ops.Heads(ops.SameBlock(2) | ops.BlockEnds(2), ops.Strided(2))),
    ),
    **{
        f"cross_entropy, {options}": (
            lambda z, options=options: ops.cross_entropy(z, IDS, **options),
            cross_entropy(**({"ignore_index": -100} | options)),
            [(B, T, V)],
            {},
        )
        for options in (
            {},
            dict(label_smoothing=0.1),
            dict(ignore_index=int(IDS[0, 0])),
            dict(label_smoothing=0.3, ignore_index=int(IDS[0, 0])),
        )
    },
}


@pytest.mark.parametrize("scale", [0.1, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name, scale, precision):
    ours, theirs, shapes, options = CASES[name]
    arrays = [scale * precision.normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    leaves = [torch.from_numpy(a.copy()).requires_grad_() for a in arrays]
    y, cache = ours(*arrays, **options)
    expected = theirs(*leaves)
    precision.agree(y, expected, "y")
    dy = precision.normal(*y.shape, seed=9)
    expected.backward(torch.tensor(dy))
    gradients = getattr(ops, f"{name.partition(',')[0]}_backward")(dy, cache)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    for i, (gradient, leaf) in enumerate(zip(gradients, leaves, strict=True)):
        precision.agree(gradient, leaf.grad, f"gradient {i}")


def test_every_operation_is_compared():
    assert {f"{name.partition(',')[0]}_backward" for name in CASES} == {
        n for n in ops.__all__ if n.endswith("_backward")
    }
