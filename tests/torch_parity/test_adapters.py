"""Adapters that the library peft has written."""

import json

import numpy as np
import pytest

from scratchformer.models import GPT2, Classifier, Llama
from scratchformer.models.adapters import load_adapter
from scratchformer.models.pretrained import PretrainedError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
IDS = np.random.default_rng(0).integers(0, 64, (2, 9))
LLAMA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=16)  # fmt: skip
GPT = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)


def saved(folder, kind, **options):
    """A folder with the model, one with its adapter, and the logits of both together."""
    torch.manual_seed(1)
    if kind == "llama":
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    else:
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))
    theirs.eval().save_pretrained(folder / "model")
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **options)).eval()
    adapted.save_pretrained(folder / "adapter")
    logits = adapted(torch.from_numpy(IDS)).logits.detach().numpy()
    return (Llama if kind == "llama" else GPT2).from_pretrained(folder / "model"), folder / "adapter", logits


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", dict(target_modules=["q_proj", "v_proj"])),
        ("llama", dict(target_modules="all-linear", use_rslora=True)),
        ("gpt2", dict(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)),
    ],
)
def test_the_adapted_model_computes_the_same(tmp_path, kind, options):
    ours, folder, logits = saved(tmp_path, kind, **options)
    assert np.abs(ours(IDS) - logits).max() > 0.01
    load_adapter(ours, folder)
    np.testing.assert_allclose(ours(IDS), logits, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(use_dora=True), "use_dora: expected False, got True"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save: expected None, got .'lm_head'."),
        (dict(rank_pattern={"q_proj": 2}), "rank_pattern: expected {}, got {'q_proj': 2}"),
        (dict(bias="all"), "bias: expected 'none', got 'all'"),
    ],
)
def test_what_computes_something_else_is_refused(tmp_path, options, message):
    ours, folder, _ = saved(tmp_path, "llama", target_modules=["q_proj", "v_proj"], **options)
    before = {name: array.copy() for name, array in ours.state_dict().items()}
    with pytest.raises(PretrainedError, match=rf"adapter_config\.json: {message}"):
        load_adapter(ours, folder)
    assert all(np.array_equal(array, before[name]) for name, array in ours.state_dict().items())


def test_an_adapter_of_another_model(tmp_path):
    ours, folder, _ = saved(tmp_path, "llama", target_modules=["q_proj", "v_proj"])
    before = {name: array.copy() for name, array in ours.state_dict().items()}
    other = GPT2(64, 32, 2, 2, 16)
    with pytest.raises(PretrainedError, match=r"for another model: .* layers\.0\.self_attn\.q_proj\.lora_A"):
        load_adapter(other, folder)
    narrow = Llama(64, 16, 4, 2, 16, kv_heads=2)
    with pytest.raises(
        PretrainedError, match=r"expected a finite change of shape \(16, 16\) and rank 4, got the shapes \(4, 32\)"
    ):
        load_adapter(narrow, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 0}))
    with pytest.raises(PretrainedError, match="r and lora_alpha: expected numbers, got 0 and 6"):
        load_adapter(ours, folder)
    with pytest.raises(TypeError, match="model: expected a PublishedDecoder, got Classifier"):
        load_adapter(Classifier(9, 2, 8, 2, 1, 8), folder)
    assert all(np.array_equal(array, before[name]) for name, array in ours.state_dict().items())
