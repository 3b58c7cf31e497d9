"""GGUF files: read back with gguf, and compared in llama.cpp where llama-cpp-python is installed."""

import json

import numpy as np
import pytest

from scratchformer.catalogue.tables import LLAMA3
from scratchformer.data import Subwords
from scratchformer.export.gguf_file import ARCHITECTURES, NotInGGUF, splitting, write_gguf
from scratchformer.export.huggingface import write_folder
from scratchformer.models import GPT2, Llama
from scratchformer.models.families import FAMILIES
from scratchformer.models.gemma3 import Gemma3
from scratchformer.rng import Key

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
SIZES = dict(vocab_size=256, d_model=32, heads=4, depth=2, context=64)
MODELS = {
    "GPT2": lambda: GPT2(**SIZES, tied=False, d_ff=40),
    "windowed": lambda: Llama(**SIZES, kv_heads=2, window=33, scaling={"rope_type": "linear", "factor": 2.0}),
    "llama3": lambda: Llama(**SIZES, scaling=LLAMA3, head_width=16, tied=True),
    "biases": lambda: Llama(**SIZES, bias=True, output_bias=True, feedforward_bias=True),
    "qwen2": lambda: Llama(**SIZES, bias=True),
    "gemma3_text": lambda: Gemma3(
        **SIZES | {"depth": 6}, by_block={"window": [5] * 5 + [None], "base": [1e4] * 5 + [1e6]}
    ),
} | {
    kind: lambda family=family: family(**SIZES)
    for kind, family in FAMILIES.items()
    if kind in ARCHITECTURES and kind not in ("mistral", "qwen2", "gemma3_text")
}


def written(model, folder, vocabulary=None):
    for name, p in model.named_parameters().items():
        p.data += 0.1 * Key(0).fold(name).generator().standard_normal(p.data.shape, np.float32)
    write_folder(model, folder / "model", vocabulary)
    write_gguf(folder / "model", folder / "model.gguf")
    return folder / "model.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_llama_cpp(name, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = MODELS[name]()
    options = dict(n_ctx=33, logits_all=True, verbose=False, type_k=0, type_v=0, n_threads=1)
    llama = llama_cpp.Llama(str(written(model, tmp_path)), **options)
    ids = Key(1).generator().integers(0, 256, (1, 33))
    llama.eval(ids[0].tolist())
    # llama.cpp rounds GELU, and what goes into it, to half precision
    np.testing.assert_allclose(
        llama.scores[:33], model(ids)[0], atol=5e-3 if isinstance(model, GPT2 | Gemma3) else 2e-5
    )
    text = "Hé\n\x01 as".encode()
    assert llama.tokenize(text, add_bos=False) == list(text)


def test_names_sizes_and_numbers(tmp_path):
    model = MODELS["llama3"]()
    file = gguf.GGUFReader(written(model, tmp_path))
    values = {name: field.contents() for name, field in file.fields.items()}
    assert values["general.architecture"] == "llama" and values["llama.context_length"] == 64
    assert values["llama.attention.head_count_kv"] == 4 and values["llama.rope.dimension_count"] == 16
    tensors = {tensor.name: tensor.data for tensor in file.tensors}
    params = model.named_parameters()
    np.testing.assert_array_equal(tensors["blk.1.ffn_up.weight"], params["body.blocks.1.feedforward.up.w"].data.T)
    keys = params["body.blocks.1.attention.key.w"].data.T.reshape(4, 16, 32)
    order = np.arange(16).reshape(2, 8).T.reshape(-1)  # 0 8 1 9 ...
    np.testing.assert_array_equal(tensors["blk.1.attn_k.weight"], keys[:, order].reshape(64, 32))
    assert tensors["rope_freqs.weight"].shape == (8,) and "output.weight" not in tensors


def test_a_learned_vocabulary(tmp_path):
    texts = ["the cat sees the dog", "the dog sees the cat 12 times"]
    vocabulary = Subwords.byte_bpe(texts, 270)
    path = written(GPT2(**SIZES | {"vocab_size": 275}), tmp_path, vocabulary)
    values = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert values["tokenizer.ggml.eos_token_id"] == 0
    assert values["tokenizer.ggml.token_type"][0] == gguf.TokenType.CONTROL
    assert values["tokenizer.ggml.token_type"][-3:] == [gguf.TokenType.UNUSED] * 3 or len(vocabulary) == 275
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(str(path), n_ctx=33, verbose=False)
    assert llama.tokenize(texts[1].encode(), add_bos=False) == vocabulary.encode(texts[1]).tolist()


def test_pieces_of_words_are_joined_in_the_order_of_the_merges(tmp_path):
    write_folder(Llama(**SIZES | {"vocab_size": 300}), tmp_path / "model")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁theca", "▁t", "he", "▁the", "ca"]
    settings = {
        "model": {
            "type": "BPE",
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [["h", "e"], ["▁", "t"], ["▁t", "he"], ["c", "a"]],
            "byte_fallback": True,
            "unk_token": "<unk>",
        },
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
        "added_tokens": [{"content": word, "id": i, "special": True} for i, word in enumerate(words[:3])],
    }
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(settings))
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    values = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    scores = dict(zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"], strict=True))
    assert [scores[word] for word in ("he", "▁t", "▁the", "ca")] == [0, -1, -2, -3]
    types = values["tokenizer.ggml.token_type"]
    kinds = gguf.TokenType
    assert types[:4] == [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.BYTE] and types[-1] == kinds.UNUSED
    assert values["tokenizer.ggml.add_space_prefix"]
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=33, verbose=False, vocab_only=True)
    assert [words[i] for i in llama.tokenize(b"the cat", add_bos=False)] == ["▁the", "▁", "ca", "t"]


@pytest.mark.parametrize(
    "model, reason",
    [
        (lambda: GPT2(**SIZES, activation="gelu"), "only gelu_tanh"),
        (lambda: Llama(**SIZES, bias=True, by_block={"window": [None, 4]}), "none in some of the layers"),
        (lambda: Llama(**SIZES, bias=True, scaling=LLAMA3), "expected linear, or llama3 in a Llama"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(model, reason, tmp_path):
    with pytest.raises(NotInGGUF, match=reason):
        written(model(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_unknown_way_to_split_is_refused():
    with pytest.raises(NotInGGUF, match="pre_tokenizer: unknown"):
        splitting({"type": "Whitespace"}, {"merges": ["a b"]})
