"""Models here compared with what the transformers library makes of the folders that they are exported to."""

import logging
from pathlib import Path

import numpy as np
import pytest

from scratchformer.data import Subwords
from scratchformer.export.command import export_model
from scratchformer.export.huggingface import write_folder
from scratchformer.models import GPT2, Llama
from scratchformer.models.families import FAMILIES
from scratchformer.models.pretrained import tensors_at
from scratchformer.rng import Key

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
logging.getLogger("transformers").setLevel(logging.ERROR)

SIZES = dict(vocab_size=256, d_model=32, heads=4, depth=2, context=19)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "GPT2ForCausal, not tied": lambda: GPT2(**SIZES, tied=False, activation="gelu", d_ff=40, eps=1e-3),
    "Mistral": lambda: Llama(**SIZES, kv_heads=2, window=5, tied=True, scaling={"rope_type": "linear", "factor": 2.0}),
    "Llama, scaled": lambda: Llama(**SIZES, scaling=LLAMA3, base=5e5, head_width=8, eps=1e-3),
    "Llama, biases": lambda: Llama(**SIZES, bias=True, output_bias=True, feedforward_bias=True),
    "Qwen2": lambda: Llama(**SIZES, bias=True),
    "Qwen2, windows": lambda: Llama(**SIZES, bias=True, by_block={"window": [None, 4]}),
} | {f"family {kind}": lambda family=family: family(**SIZES) for kind, family in FAMILIES.items()}


def changed(model):
    for name, p in model.named_parameters().items():
        p.data += 0.1 * Key(0).fold(name).generator().standard_normal(p.data.shape, np.float32)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text(name, tmp_path):
    model = changed(MODELS[name]())
    write_folder(model, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = Key(1).generator().integers(0, 256, (2, 19))
    with torch.no_grad():
        np.testing.assert_allclose(theirs(torch.tensor(ids)).logits.numpy(), model(ids), atol=2e-5)
        written = theirs.generate(
            torch.tensor(ids[:1, :3]), do_sample=False, max_new_tokens=16, min_new_tokens=16, pad_token_id=0
        )
    ours = ids[:1, :3]
    while ours.shape[1] < 19:
        ours = np.append(ours, model(ours)[:, -1:].argmax(-1), axis=1)
    assert np.array_equal(written.numpy(), ours)


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_the_library_saved_comes_back(kind, tmp_path):
    """A folder that the library saved is loaded and exported: its tensors are the same, bit by bit."""
    model = FAMILIES[kind](**SIZES)
    write_folder(model, tmp_path / "first")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    for path in "tokenizer.json", "tokenizer_config.json":
        (tmp_path / "theirs" / path).write_bytes((tmp_path / "first" / path).read_bytes())
    write_folder(FAMILIES[kind].from_pretrained(tmp_path / "theirs"), tmp_path / "again", source=tmp_path / "theirs")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    expected = theirs.state_dict()
    assert expected.keys() == again.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("learned", [True, False])
def test_the_vocabulary(learned, tmp_path):
    texts = ["the cat sees the dog. It's 12 o'clock", "naïve   \n\nδ\x00😀 <s>"]
    vocabulary = Subwords.byte_bpe(texts, 280) if learned else None
    write_folder(GPT2(**SIZES | {"vocab_size": 280 if learned else 256}), tmp_path / "model", vocabulary)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == (vocabulary.encode(text).tolist() if learned else list(text.encode()))
        assert tokenizer.decode(ids) == text


def test_a_published_folder_goes_through_all_formats(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("gguf")
    vocabulary = Subwords.byte_bpe(["the cat sees the dog"], 270)
    write_folder(changed(GPT2(**SIZES | {"vocab_size": 270})), tmp_path / "model", vocabulary)
    for name in "again", "again.gguf", "again.onnx":
        export_model(tmp_path / "model", tmp_path / name)
        with pytest.raises(ValueError, match="expected a new file or folder"):
            export_model(tmp_path / "model", tmp_path / name)
    (_, first), (_, second) = (tensors_at(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name].read(), second[name].read()) for name in first)
    with pytest.raises(ValueError, match="expected a name in an existing folder"):
        export_model(tmp_path / "model", Path(tmp_path / "missing/model.onnx"))
