"""Pythia and Gemma 3 compared with transformers: logits, gradients and greedy text, and what is refused."""

import json

import numpy as np
import pytest

from scratchformer.generation import generate
from scratchformer.models import Gemma3, PretrainedError, Pythia, from_pretrained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

T, V = 9, 23
SIZES = dict(vocab_size=V, num_hidden_layers=2, intermediate_size=10, max_position_embeddings=T + 8, eos_token_id=None)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 1.5, "beta_slow": 0.1}
NEOX = SIZES | dict(hidden_size=24, num_attention_heads=3)
GEMMA = SIZES | dict(hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=6, query_pre_attn_scalar=6)
CASES = {
    "pythia": (Pythia, NEOX),
    "pythia, tied, half rotated, no biases": (
        Pythia,
        NEOX
        | dict(tie_word_embeddings=True, attention_bias=False, hidden_act="relu", layer_norm_eps=0.1)
        | dict(rope_parameters=YARN | {"rope_theta": 100.0, "partial_rotary_factor": 0.5}),
    ),
    "gemma": (Gemma3, GEMMA | dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"])),
    "gemma, untied, biases, scaling": (
        Gemma3,
        GEMMA
        | dict(tie_word_embeddings=False, attention_bias=True, sliding_window=2, rms_norm_eps=0.1)
        | dict(layer_types=["full_attention", "sliding_attention"])
        | dict(rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}}),
    ),
}
LIBRARY = {
    Pythia: ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    Gemma3: ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def saved(folder, name):
    """The library's model with random weights, after it was saved in `folder`."""
    kind, settings = CASES[name]
    config, model = (getattr(transformers, each) for each in LIBRARY[kind])
    torch.manual_seed(0)
    theirs = model(config(**settings)).eval()
    for p in theirs.parameters():
        p.data += 0.3 * torch.randn_like(p)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_library_computes(name, tmp_path):
    theirs = saved(tmp_path, name)
    ours = from_pretrained(tmp_path)
    assert type(ours) is CASES[name][0]
    ids = np.random.default_rng(1).integers(1, V, (2, T + 1))  # without 0, whose row their padding never trains
    logits = theirs(torch.from_numpy(ids[:, :-1])).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten())
    expected.backward()
    loss, cache = ours.loss(ids[:, :-1], ids[:, 1:])
    ours.loss_backward(1.0, cache)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(ours(ids[:, :-1]), logits.detach().numpy(), rtol=0, atol=2e-5)
    grads = {n.removeprefix(ours.prefix).replace("lm_head", ours.layers["output"]): p.grad.numpy()
             for n, p in theirs.named_parameters()}  # fmt: skip
    largest = max(np.abs(grad).max() for grad in grads.values())
    for parameter, source in ours.tensors().items():
        grad, found = grads[source.name], ours.named_parameters()[parameter].grad
        grad = (grad.T if source.transposed else grad)[..., source.columns]
        skipped = int(parameter.endswith("tokens.table"))
        np.testing.assert_allclose(found[skipped:], grad[skipped:], rtol=0, atol=2e-5 * largest, err_msg=parameter)
    text = np.stack(list(generate(ours, ids[:, :2], T, temperature=0)), axis=1)
    options = dict(max_new_tokens=T, do_sample=False, attention_mask=torch.ones(2, 2, dtype=torch.long))
    expected = theirs.generate(torch.from_numpy(ids[:, :2]), pad_token_id=0, **options)[:, 2:].numpy()
    np.testing.assert_array_equal(text, expected)


REFUSED = [
    ("pythia", {"use_parallel_residual": False}, "use_parallel_residual: expected True, got False"),
    ("pythia", {"rope_theta": 5.0}, "rope_theta: expected 10000.0, got 5.0"),
    ("pythia", {"partial_rotary_factor": 1.0}, "partial_rotary_factor: expected 0.25, got 1.0"),
    ("pythia", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "head_width: expected an even number"),
    ("pythia", {"rope_parameters": {"partial_rotary_factor": 2.0}}, "rotary_width: expected at most 8"),
    ("pythia", {"rope_parameters": [1]}, "cannot create this model"),
    ("gemma", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar: expected head_dim, 6, got 7"),
    ("gemma", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected None, got 50.0"),
    ("gemma", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected None, got 30.0"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected False or None, got True"),
    ("gemma", {"hidden_activation": "gelu"}, "hidden_activation: expected 'gelu_pytorch_tanh', got 'gelu'"),
    ("gemma", {"layer_types": ["full_attention"]}, "layer_types: expected 2 of sliding_attention or full_attention"),
    ("gemma", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern: expected a number >= 1"),
    ("gemma", {"sliding_window": None}, "sliding_window: expected a number, since layer_types has sliding_attention"),
    ("gemma", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters: expected sliding_attention and full_atten"),
    ("gemma", {"rope_scaling": 3}, "full_attention: expected settings by name, got 3"),
]


def test_what_would_compute_something_else_is_refused(tmp_path):
    for name in "pythia", "gemma":
        (tmp_path / name).mkdir()
        saved(tmp_path / name, name)
    for name, changes, message in REFUSED:
        path = tmp_path / name / "config.json"
        text = path.read_text()
        path.write_text(json.dumps(json.loads(text) | changes))
        with pytest.raises(PretrainedError) as raised:
            from_pretrained(tmp_path / name)
        assert message in str(raised.value)
        path.write_text(text)


def test_angles_of_older_folders(tmp_path):
    """Gemma's base and scaling, and those of blocks with a window, beside each other in config.json."""
    saved(tmp_path, "gemma")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    config |= dict(rope_theta=7.0, rope_local_base_freq=5.0, rope_scaling={"rope_type": "linear", "factor": 8.0})
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window_pattern": 2}))
    near, far = (block.attention for block in from_pretrained(tmp_path).body.blocks)
    assert (near.base, near.scaling, near.window) == (5.0, None, 3)
    assert (far.base, far.scaling, far.window) == (7.0, {"rope_type": "linear", "factor": 8.0}, None)
