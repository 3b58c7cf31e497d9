"""The parts of Llama and Mistral compared with transformers: norm, positions, attention, feed-forward layer."""

import numpy as np
import pytest

from scratchformer import nn, ops

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig  # noqa: E402
from transformers.masking_utils import sliding_window_causal_mask_function  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402

B, T, C, H, G, D, F = 2, 7, 12, 6, 2, 8, 11
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
SCALINGS = [
    None,
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
]
YARNS = [  # the settings that yarn takes besides
    dict(beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.4),
    dict(attention_factor=0.8, truncate=False, beta_fast=None),
    dict(factor=0.5, mscale=2.0, truncate=False, original_max_position_embeddings=2),
]


@pytest.fixture
def single(precision):
    """float32: transformers computes norms and angles in it, whatever the type of x."""
    if precision.dtype != np.float32:
        pytest.skip("transformers computes this in float32")
    return precision


def mistral_mask(window):
    """(T, T): which keys a query sees; the arguments are the indices of a sequence, a head, a query and a key."""
    none, places = torch.tensor(0), torch.arange(T)
    return sliding_window_causal_mask_function(window)(none, none, places[:, None], places[None, :])


def config(base=10_000.0, scaling=None, **options):
    sizes = dict(hidden_size=C, num_attention_heads=H, num_key_value_heads=G, head_dim=D, intermediate_size=F)
    rope = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
    return LlamaConfig(**sizes, rope_parameters=rope, attn_implementation="eager", **options)


def agree(layer, theirs, pairs, precision, call, **options):
    """Outputs and all gradients, with random weights that are the same in both."""
    dtype = getattr(torch, np.dtype(precision.dtype).name)
    theirs, layer = theirs.to(dtype), layer.to(dtype=precision.dtype)
    for i, (ours, name) in enumerate(pairs.items()):
        values = 0.5 * precision.normal(*layer.named_parameters()[ours].data.shape, seed=10 + i)
        layer.named_parameters()[ours].data[...] = values
        theirs.get_parameter(name).data[...] = torch.from_numpy(np.transpose(values))
    assert len(pairs) == len(layer.parameters()) == len(list(theirs.parameters()))
    x, dy = precision.normal(B, T, C), precision.normal(B, T, C, seed=1)
    leaf = torch.tensor(x, requires_grad=True)
    y, cache = layer.forward(x, **options)
    expected = call(theirs, leaf)
    precision.agree(y, expected, "y")
    expected.backward(torch.tensor(dy))
    precision.agree(layer.backward(dy, cache), leaf.grad, "dx")
    for ours, name in pairs.items():
        expected = theirs.get_parameter(name).grad
        precision.agree(layer.named_parameters()[ours].grad, expected.mT if expected.ndim == 2 else expected, ours)


def test_rmsnorm(single):
    agree(nn.RMSNorm(C, 1e-3), llama.LlamaRMSNorm(C, 1e-3), {"gamma": "weight"}, single, lambda m, x: m(x))


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu(bias, precision):
    names = {f"{name}.w": f"{name}_proj.weight" for name in ("gate", "up", "down")}
    names |= {f"{name}.b": f"{name}_proj.bias" for name in ("gate", "up", "down") if bias}
    agree(nn.SwiGLU(C, F, bias), llama.LlamaMLP(config(mlp_bias=bias)), names, precision, lambda m, x: m(x))


@pytest.mark.parametrize("base", [100.0, 500_000.0])
@pytest.mark.parametrize("scaling", SCALINGS + [SCALINGS[-1] | more for more in YARNS], ids=str)
def test_rotary(scaling, base):
    """At positions up to 8,192, in float32, the precision in which the published code computes angles."""
    rope, rng = llama.LlamaRotaryEmbedding(config(base, scaling)), np.random.default_rng(0)
    for start in (0, 1000, 8192 - T):
        x = rng.standard_normal((B, H, T, D)).astype(np.float32)
        leaf = torch.tensor(x, requires_grad=True)
        expected, _ = llama.apply_rotary_pos_emb(leaf, leaf, *rope(leaf, torch.arange(start, start + T)[None]))
        y, cache = ops.rotary(x, start, base, scaling)
        expected.sum().backward()
        np.testing.assert_allclose(y, expected.detach(), rtol=0, atol=2e-6)
        np.testing.assert_allclose(ops.rotary_backward(np.ones_like(y), cache), leaf.grad, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 2, 3])
@pytest.mark.parametrize("scaling", SCALINGS[1:], ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("bias", [False, True])
def test_attention(bias, scaling, window, single):
    """With fewer heads of keys, and Mistral's mask for a sliding window."""
    made = config(100.0, scaling, attention_bias=bias)
    rope = llama.LlamaRotaryEmbedding(made)
    mask = torch.zeros(T, T).masked_fill(~mistral_mask(window or T), -torch.inf)[None, None]

    def call(attention, x):
        y, _ = attention(x, position_embeddings=rope(x, torch.arange(T)[None]), attention_mask=mask)
        return y

    ours = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "unify": "o_proj"}
    names = {f"{our}.w": f"{their}.weight" for our, their in ours.items()}
    names |= {f"{our}.b": f"{their}.bias" for our, their in ours.items() if bias}
    layer = nn.RotarySelfAttention(C, H, G, D, 100.0, scaling, causal=True, bias=bias, output_bias=bias, window=window)
    agree(layer, llama.LlamaAttention(made, 0), names, single, call)


@pytest.mark.parametrize("window", [1, 2, 5, T])
def test_a_window_is_a_causal_local_pattern(window):
    """A query sees `window` keys, itself included: one more than the radius."""
    table = (ops.Causal() & ops.Local(window - 1)).dense(T, T, np)
    assert np.array_equal(table, mistral_mask(window).numpy())
