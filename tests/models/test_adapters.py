"""Adapters in the format of PEFT; those that peft itself wrote are in tests/torch_parity."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from scratchformer.models import GPT2, Llama, load_adapter
from scratchformer.models.pretrained import PretrainedError

DRAW = np.random.default_rng(0)


def write(folder, tensors, **settings):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{name}.weight": array for name, array in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    return folder


def normal(*shape):
    return DRAW.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_weights_get_the_changes(tmp_path, rslora):
    a, b = normal(2, 8), normal(24, 2)
    gpt2, name = GPT2(11, 8, 2, 2, 5), "transformer.h.1.attn.c_attn"
    before = {name: array.copy() for name, array in gpt2.state_dict().items()}
    load_adapter(gpt2, write(tmp_path, {f"{name}.lora_A": a, f"{name}.lora_B": b}, use_rslora=rslora))
    change = 3 / (2**0.5 if rslora else 2) * (b @ a).T
    for i, part in enumerate(("query", "key", "value")):
        w = f"body.blocks.1.attention.{part}.w"
        np.testing.assert_allclose(gpt2.state_dict()[w], before.pop(w) + change[:, 8 * i : 8 * i + 8], rtol=1e-6)
    assert all(np.array_equal(gpt2.state_dict()[name], array) for name, array in before.items())


def test_what_does_not_fit_changes_nothing(tmp_path):
    llama, name = Llama(11, 8, 2, 2, 5), "model.layers.0.self_attn.q_proj"
    before = {name: array.copy() for name, array in llama.state_dict().items()}
    good = {f"{name}.lora_A": normal(2, 8), f"{name}.lora_B": normal(8, 2)}
    for tensors, settings, message in (
        (good, dict(use_dora=True), "use_dora: expected False, got True"),
        (good, dict(r=0), "r and lora_alpha: expected numbers, got 0 and 3"),
        (good, dict(peft_type="IA3"), "peft_type: expected 'LORA', got 'IA3'"),
        (good | {f"{name}.lora_B": normal(8, 3)}, {}, r"expected a finite change of shape \(8, 8\) and rank 2, got"),
        (good, dict(r=4), "expected a finite change of shape .* and rank 4, got"),
        (
            good | {f"{name}.lora_A": normal(2, 8).astype(np.int64)},
            {},
            "lora_A.weight: expected one of the types",
        ),
        (good | {f"{name}.lora_B": np.full((8, 2), np.nan, np.float32)}, {}, "expected a finite change"),
        ({f"{name}.lora_A": normal(2, 8)}, {}, r"missing: layers\.0\.self_attn\.q_proj\.lora_B"),
        (good | {"model.layers.7.self_attn.q_proj.lora_A": normal(2, 8)}, {}, "it has no layer for layers"),
        (good | {"lm_head": normal(11, 8)}, {}, "it has no layer for lm_head"),
    ):
        with pytest.raises(PretrainedError, match=message):
            load_adapter(llama, write(tmp_path, tensors, **settings))
        assert all(np.array_equal(array, before[name]) for name, array in llama.state_dict().items())
    load_adapter(llama, write(tmp_path, good))


CHANGING = dict(
    init_lora_weights=["pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq", "something new"],
    bias=["all", "lora_only"],
    use_rslora=["yes"],
    rank_pattern=[{"q_proj": 4}],
    alpha_pattern=[{"q_proj": 4}],
    modules_to_save=[["lm_head"]],
    layer_replication=[[[0, 1], [0, 1]]],
    target_parameters=[["mlp.experts"]],
    trainable_token_indices=[[3], {"embed_tokens": [3]}],
    alora_invocation_tokens=[[1, 2]],
    **{name: [True] for name in ("use_dora", "use_qalora", "lora_bias", "enable_lora")},
    **{f"{name}_config": [{"a": 1}] for name in ("megatron", "monteclora", "arrow", "kasa", "velora")},
    **{name: [{"a": 1}] for name in ("use_bdlora", "a_setting_of_a_later_version")},
)
HARMLESS = dict(
    dict.fromkeys(name for name in CHANGING if name not in ("init_lora_weights", "bias", "use_rslora")),
    init_lora_weights="eva",
    use_rslora=None,
    target_modules=["q_proj"],
    lora_dropout=0.1,
    fan_in_fan_out=True,
    eva_config={"rho": 2.0},
    task_type="CAUSAL_LM",
)


@pytest.mark.parametrize("setting", CHANGING)
def test_a_setting_that_changes_the_result_is_refused_by_name(setting, tmp_path):
    llama, name = Llama(11, 8, 2, 2, 5), "model.layers.0.self_attn.q_proj"
    good = {f"{name}.lora_A": normal(2, 8), f"{name}.lora_B": normal(8, 2)}
    for value in CHANGING[setting]:
        with pytest.raises(PretrainedError, match=rf"adapter_config\.json: {setting}: expected .*, got "):
            load_adapter(llama, write(tmp_path, good, **{setting: value}))


def test_settings_that_change_nothing_are_accepted(tmp_path):
    llama, name = Llama(11, 8, 2, 2, 5), "model.layers.0.self_attn.q_proj"
    good = {f"{name}.lora_A": normal(2, 8), f"{name}.lora_B": normal(8, 2)}
    load_adapter(llama, write(tmp_path, good, **HARMLESS))
