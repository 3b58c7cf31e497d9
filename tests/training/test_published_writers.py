"""Published Llama, Mistral and Qwen2 that write, with their tokenizers: tiny ones, in the files of the large."""

import importlib
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from scratchformer.commands import cli
from scratchformer.data import DataError, PublishedTokenizer
from scratchformer.generation import generate, printable, stream_text
from scratchformer.models import Llama
from scratchformer.models.pretrained import PretrainedError
from scratchformer.rng import Key
from scratchformer.training.readers import load_writer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

TEXTS = ["the film was low, lower, the lowest of the films\n", "é€ the café film é€"] * 3
TEXT = "the  film's\n\tcafé 𝄞€ \u00a0low"  # 𝄞 is in no text that was learned


def qwen2():
    """Bytes; no begin token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(r" ?\p{L}+|\s+|[^\s\p{L}]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    return tokenizer, "<|endoftext|>", "<|im_end|>"


def llama3():
    """Bytes, after a begin token."""
    tokenizer, *_ = qwen2()
    tokenizer.add_special_tokens(["<|begin|>"])
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    template = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.enable_truncation(3)  # left over from training
    return tokenizer, "<|endoftext|>", "<|im_end|>"


def llama2():
    """Pieces of words, with bytes for what no piece has, after a begin token."""
    learned = tokenizers.Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    learned = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in learned["merges"]]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer, "<s>", "</s>"


KINDS = {"qwen2": ("qwen2", qwen2), "llama 3": ("llama", llama3), "llama 2": ("llama", llama2),
         "mistral": ("mistral", llama2)}  # fmt: skip
LENGTH = 131_072


@pytest.fixture(params=KINDS)
def published(request, tmp_path):
    """The folder, its tokenizer, and the ids of two tokens. The model has more tokens than the tokenizer."""
    kind, make = KINDS[request.param]
    tokenizer, *names = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size() + 7
    model = Llama(size, 16, 4, 1, 8, kv_heads=2, d_ff=8, bias=kind == "qwen2", std=0.5, key=Key(1))
    tensors, sources = {}, model.tensors()
    for name, p in model.named_parameters().items():
        tensor = sources[name]
        prefix = "" if tensor.name.startswith("lm_head") else "model."
        tensors[prefix + tensor.name] = np.ascontiguousarray(p.data.T if tensor.transposed else p.data)
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=8)
    set_config(tmp_path, model_type=kind, vocab_size=size, max_position_embeddings=LENGTH, **sizes)
    return tmp_path, tokenizer, [tokenizer.token_to_id(name) for name in names]


def set_config(folder, name="config.json", **settings):
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | settings))


def test_text_is_read_and_streamed_as_the_tokenizer_does(published, monkeypatch):
    """Each character as soon as its last byte is written; nothing for a token that the tokenizer does not know."""
    folder, tokenizer, (end, other) = published
    set_config(folder, eos_token_id=end)
    set_config(folder, "generation_config.json", eos_token_id=[other])
    model, vocabulary = load_writer(folder)
    ids = vocabulary.encode(TEXT)
    tokenizer.no_truncation()
    assert ids.dtype == np.int32 and ids.tolist() == tokenizer.encode(TEXT).ids and model.context == LENGTH
    begins = [vocabulary.pieces[i] for i in ids if vocabulary.pieces[i] in (b"<s>", b"<|begin|>")]
    content = ids[len(begins) :].tolist()
    assert len(begins) == (tokenizer.post_processor is not None)
    assert b"".join(vocabulary.pieces[i] for i in content).decode().removeprefix(" ") == TEXT == tokenizer.decode(ids)
    unknown = model.config["vocab_size"] - 1
    written = [content[0], unknown, *content[1:], end, other, content[0]]
    module = importlib.import_module("scratchformer.generation.generate")
    monkeypatch.setattr(module, "generate", lambda *args: (np.array([i]) for i in written))
    found = list(stream_text(model, "the", len(written), vocabulary))
    name = vocabulary.pieces[end].decode()  # in config.json alone, so it ends nothing
    assert "".join(found).removeprefix(" ") == TEXT + name and "" not in found


def test_the_context_is_as_long_as_the_folder_allows(published):
    folder, _, _ = published
    assert [load_writer(folder, context)[0].context for context in (None, 9, 1, LENGTH + 1)] == [LENGTH, 9, 1, LENGTH]


def test_the_command_writes(published, capsys):
    folder, _, _ = published
    set_config(folder, eos_token_id=None)
    options = ["--prompt", "the film", "--tokens", "12", "--device", "cpu", "--temperature", "0"]
    cli.main(["generate", str(folder), *options])
    model, vocabulary = load_writer(folder)
    ids = [i[0] for i in generate(model, vocabulary.encode("the film")[None], 12, temperature=0)]
    expected = b"".join(vocabulary.pieces[i] for i in ids).decode(errors="replace")
    assert capsys.readouterr().out == f"the film{printable(expected)}\n"


def test_the_name_of_a_special_token_in_a_prompt_is_that_token(published):
    folder, _, (_, other) = published
    vocabulary = PublishedTokenizer(folder, 10**4)
    assert other in vocabulary.encode(f"the {vocabulary.pieces[other].decode()}")


def test_ids_become_the_text_again(published):
    """Special tokens are left out, and so is the last id, which the tokenizer does not know."""
    folder, tokenizer, (end, _) = published
    size = tokenizer.get_vocab_size() + 1
    vocabulary = PublishedTokenizer(folder, size)
    ids = vocabulary.encode(TEXT)
    assert vocabulary.decode([*ids, size - 1, end]) == vocabulary.decode(ids) == TEXT
    assert vocabulary.decode([]) == ""
    with pytest.raises(IndexError, match=f"ids: expected values from 0 to {size - 1}, got {size}"):
        vocabulary.decode([size])
    with pytest.raises(TypeError, match="ids: expected an array"):
        vocabulary.decode(TEXT)


@pytest.mark.parametrize("published", ["llama 2"], indirect=True)
def test_folders_that_cannot_be_read(published):
    folder, tokenizer, _ = published
    path, size = folder / "tokenizer.json", tokenizer.get_vocab_size() + 7
    settings = json.loads(path.read_text())

    def message(kind=DataError):
        with pytest.raises(kind) as raised:
            load_writer(folder)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    for ids in (size, [2, -1], "</s>", True):
        set_config(folder, "generation_config.json", eos_token_id=ids)
        assert message().endswith(
            f"generation_config.json: eos_token_id: expected ids from 0 to {size - 1}, got {ids!r}"
        )
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json is damaged: " in message()
    lost = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}], "pair": []}
    path.write_text(json.dumps(settings | {"post_processor": lost | {"special_tokens": {}}}))  # the library panics
    assert "tokenizer.json is damaged: no entry found for key" in message()
    path.write_text(json.dumps(settings | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))
    assert "tokenizer.json: vocabulary: expected tokens made of bytes, like GPT-2's, got the decoder {" in message()
    path.write_text(json.dumps(settings | {"decoder": json.loads(decoders.ByteLevel().__getstate__())}))
    assert "tokenizer.json: vocabulary: expected tokens made of bytes" in message()
    path.write_text(json.dumps(settings).replace('"id": 1,', f'"id": {2**31},'))  # would end the process
    assert f"'<s>' has the id {2**31}; expected 0 to " in message()
    path.write_text(path.read_text()[:-9])
    assert "tokenizer.json is damaged: " in message()
    path.rename(folder / "tokenizer.model")
    assert "tokenizer.json: no such file; to make it from the folder's other files, run in Python: " in message()
    set_config(folder, model_type="bert")
    assert "expected model_type 'gpt2' or 'gemma3_text' or 'llama' or " in message(PretrainedError)
