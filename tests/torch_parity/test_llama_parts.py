"""What the models of test_llama.py do not reach: rotary positions far out and with all settings, and the window."""

import numpy as np
import pytest

from scratchformer import ops

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig  # noqa: E402
from transformers.masking_utils import sliding_window_causal_mask_function  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402

B, T, H, D = 2, 7, 6, 8
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


def mistral_mask(window):
    """(T, T): which keys a query sees; the arguments are the indices of a sequence, a head, a query and a key."""
    none, places = torch.tensor(0), torch.arange(T)
    return sliding_window_causal_mask_function(window)(none, none, places[:, None], places[None, :])


def config(base, scaling):
    rope = {"rope_theta": base, **(scaling or {"rope_type": "default"})}
    return LlamaConfig(hidden_size=H * D, num_attention_heads=H, head_dim=D, rope_parameters=rope)


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


@pytest.mark.parametrize("window", [1, 2, 5, T])
def test_a_window_is_a_causal_local_pattern(window):
    """A query sees `window` keys, itself included: one more than the radius."""
    table = (ops.Causal() & ops.Local(window - 1)).dense(T, T, np)
    assert np.array_equal(table, mistral_mask(window).numpy())
