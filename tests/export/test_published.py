"""Published models in five styles of tokenizers: read, tuned, exported, compared with transformers."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.commands import cli
from scratchformer.data import DataError, PublishedTokenizer
from scratchformer.export import export_model
from scratchformer.export.huggingface import write_folder
from scratchformer.generation import stream_text
from scratchformer.models.families import FAMILIES
from scratchformer.rng import Key
from scratchformer.training import save_snapshot
from scratchformer.training.readers import load_published, load_writer, vocabulary_file

pytest.importorskip("tokenizers")
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = ["the film was low, lower, the lowest of 12 films\n", "    for i in range(10):\n\n", "é€ the café film é€"] * 3
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
# Not special, as tokenizers have them: white space, HTML, marks of the encoding itself, letters of many bytes.
ADDED = ["▁▁", "▁▁▁▁", "\n\n", "<table>", "x▁", "  ", "Ġfoo", "é", "日本", "<0x0a>", "caf é", "[tool]"]


def byte_level(pattern=None, normalizer=None, specials=()):
    """A byte-level encoding, whose texts are divided as in GPT-2 or by `pattern`."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=bool(pattern) and "{1,3}" in pattern))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    if pattern:
        as_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([*specials])
    return tokenizer


def pieces_of_words(first, prefix):
    """Pieces of words, with single bytes for the rest. first: the special tokens. prefix: whether a space is put before
    a text.
    """
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    learned = json.loads(learned.to_str())["model"]
    names = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "▁▁▁▁", *learned["vocab"]]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), *map(tuple, learned["merges"])]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(vocabulary, [*dict.fromkeys(merges)], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer, replace = Tokenizer(model), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    tokenizer.add_special_tokens([*first])
    return tokenizer


def begun(tokenizer, begin):
    """The tokenizer, which now puts the token `begin` before a text."""
    number = tokenizer.token_to_id(begin)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)])
    return tokenizer


def qwen():
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_level(WORDS % "", normalizers.NFC(), specials)
    settings = dict(tokenizer_class="Qwen2Tokenizer", add_bos_token=False, bos_token=None, chat_template=TEMPLATE)
    return "qwen3", tokenizer, settings | dict(eos_token="<|im_end|>"), ["<|im_end|>", "<|endoftext|>"]


def llama3():
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
    tokenizer = begun(byte_level(WORDS % "{1,3}", None, specials), "<|begin_of_text|>")
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin_of_text|>", chat_template=TEMPLATE)
    return "llama", tokenizer, settings | dict(eos_token="<|eot_id|>"), ["<|end_of_text|>", "<|eot_id|>"]


def llama2():
    tokenizer = begun(pieces_of_words(["<unk>", "<s>", "</s>"], prefix=True), "<s>")
    token = {"__type": "AddedToken", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    settings = dict(tokenizer_class="LlamaTokenizer", bos_token=token | {"content": "<s>"}, unk_token="<unk>")
    return "llama", tokenizer, settings | {"eos_token": token | {"content": "</s>"}}, ["</s>"]


def gemma3():
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = begun(pieces_of_words(first, prefix=False), "<bos>")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("▁▁", "▁▁▁▁", "\n\n", "<table>")])
    settings = dict(tokenizer_class="GemmaTokenizer", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    return "gemma3_text", tokenizer, settings | dict(add_bos_token=True), ["<eos>", "<end_of_turn>"]


def gpt2():
    tokenizer = byte_level(specials=["<|endoftext|>"])
    return "gpt2", tokenizer, dict(tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>"), ["<|endoftext|>"]


STYLES = {style.__name__: style for style in (qwen, llama3, llama2, gemma3, gpt2)}


def write_published(folder, style, change=lambda tokenizer: None):
    """Write a tiny model of the family of `style`, with its tokenizer's files, to the new folder; returns the
    tokenizer, to which `change` was done. The model has the tokens that it had before, and 7 more.
    """
    kind, tokenizer, settings, ends = STYLES[style]()
    size = tokenizer.get_vocab_size() + 7
    change(tokenizer)
    sizes = dict(vocab_size=size, d_model=16, heads=2, depth=1, context=300)
    if kind == "gemma3_text":
        sizes |= {"depth": 6, "by_block": {"window": [5] * 5 + [None], "base": [1e4] * 5 + [1e6]}}
    write_folder(FAMILIES[kind](**sizes, key=Key(1)), folder)
    numbers = [tokenizer.token_to_id(end) for end in ends]
    files = {
        "config.json": json.loads((folder / "config.json").read_text()) | {"eos_token_id": numbers[0]},
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": numbers, "do_sample": True},
        "special_tokens_map.json": {"eos_token": ends[0]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    if style == "gpt2":  # as it was published first
        (folder / "tokenizer.json").unlink()
        tokenizer.model.save(str(folder))
        (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    if style == "llama3":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


def tuned(folder, run):
    """The folder of a run that tuned the model in `folder`, which is then removed."""
    model, vocabulary = load_published(folder, 300, 0.0)
    run.mkdir()
    vocabulary.save(vocabulary_file(run, type(vocabulary)))
    save_snapshot(run / "best.safetensors", model, subwords=vocabulary.fingerprint)
    shutil.rmtree(folder)
    return run


@pytest.fixture(params=STYLES)
def published(request, tmp_path):
    write_published(tmp_path / "published", request.param)
    return tmp_path / "published"


SAMPLES = [
    *(
        "the film's\n\n  low",
        "    for i in (1234, 56):\n\n\n",
        "é€𝄞 café",
        "<|im_start|>a<|im_end|>",
        "<s>▁▁ x▁ <table>",
    ),
    *("", " ", "\t\r\n x", "[PAD]Ġfoo"),
]


def test_what_a_tuned_model_brought_comes_back(published, tmp_path, monkeypatch, capsys):
    """Files byte for byte; the same ids, beginnings, ends and conversations of folder, run and export."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(published)
    files = {path.name: path.read_bytes() for path in published.iterdir()}
    _, vocabulary = load_writer(published)
    before = [theirs(text).input_ids for text in SAMPLES]
    own = [vocabulary.encode(text).tolist() for text in SAMPLES]
    assert own == before or "LlamaTokenizer" in str(type(theirs))  # which does not read all of tokenizer.json
    run, out = tuned(published, tmp_path / "run"), tmp_path / "out"
    export_model(run, out)
    ours = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {name for name, content in files.items() if ours.get(name) != content} <= {
        "config.json",
        "model.safetensors",
    }
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert [again(text).input_ids for text in SAMPLES] == before
    read = [load_writer(path) for path in (run, run / "best.safetensors", out)]
    for _, each in read:
        assert [each.encode(text).tolist() for text in SAMPLES] == own
        assert each.ends == vocabulary.ends and each.special == vocabulary.special
    texts = [list(stream_text(model, "the film", 20, each, temperature=0)) for model, each in read]
    assert texts[0] == texts[1] == texts[2]
    if b"chat_template" in files["tokenizer_config.json"]:
        pytest.importorskip("jinja2")
        told = []
        for path in run, out:
            monkeypatch.setattr("sys.stdin", __import__("io").StringIO("the film\n"))
            cli.run_command(["chat", str(path), "--tokens", "9", "--device", "cpu", "--temperature", "0"])
            told.append(capsys.readouterr().out)
        assert told[0] == told[1]


def test_a_gguf_file_begins_and_ends_as_the_folder(published, tmp_path):
    gguf = pytest.importorskip("gguf")
    _, vocabulary = load_writer(published)
    run = tuned(published, tmp_path / "run")
    export_model(run, tmp_path / "out.gguf")
    field = {name: each.contents() for name, each in gguf.GGUFReader(tmp_path / "out.gguf").fields.items()}
    begin = vocabulary.encode("low").tolist()[: len(vocabulary.encode("")) or None]
    puts = len(vocabulary.encode("low")) > len(vocabulary.encode("low", begin=False))
    assert field["tokenizer.ggml.add_bos_token"] is puts and field["tokenizer.ggml.add_eos_token"] is False
    if puts:
        assert field["tokenizer.ggml.bos_token_id"] == begin[0]
    ends = {
        field[f"tokenizer.ggml.{name}_token_id"]
        for name in ("eos", "eot")
        if f"tokenizer.ggml.{name}_token_id" in field
    }
    assert ends == vocabulary.ends
    for i, (token, kind) in enumerate(
        zip(field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"], strict=True)
    ):
        if kind == gguf.TokenType.USER_DEFINED:  # llama.cpp writes such a token's name
            assert token == vocabulary.pieces[i].decode("utf-8", "replace")


@pytest.mark.parametrize("added", [None, True, False])
@pytest.mark.parametrize("style", ["qwen", "llama3", "llama2", "gpt2"])
def test_the_first_token_is_what_tokenizer_json_puts(style, added, tmp_path):
    """As in transformers: add_bos_token in tokenizer_config.json counts only if there is no tokenizer.json."""
    transformers, gguf = pytest.importorskip("transformers"), pytest.importorskip("gguf")
    write_published(tmp_path / "model", style)
    path = tmp_path / "model/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": added}))
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")("the").input_ids
    export_model(tmp_path / "model", tmp_path / "out.gguf")
    add = gguf.GGUFReader(tmp_path / "out.gguf").fields["tokenizer.ggml.add_bos_token"].contents()
    assert add is (len(ids) > 1) is (style.startswith("llama") or (style == "gpt2" and added is True))
    run = tuned(tmp_path / "model", tmp_path / "run")
    export_model(run, tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the").input_ids == ids
    for path in run, tmp_path / "out":
        assert load_writer(path)[1].encode("the").tolist() == ids


def with_added(tokenizer):
    """The tokenizer with ADDED, which are not special."""
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in ADDED])


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """Tokenizers of each style, with ADDED: all their tokens are the model's."""
    found = {}
    for style, make in STYLES.items():
        folder = tmp_path_factory.mktemp(style)
        _, tokenizer, settings, _ = make()
        with_added(tokenizer)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        found[style] = PublishedTokenizer(folder, tokenizer.get_vocab_size())
    return found


@given(
    text=st.lists(st.sampled_from([*ADDED, "the", "low", " ", "   ", "\n", "é", "𝄞", "▁", "Ġ", "ab"]) | st.text()).map(
        "".join
    )
)
def test_pieces_are_what_is_decoded_at_once(added, text):
    for style, vocabulary in added.items():
        ids = vocabulary.encode(text, begin=False)
        ids = ids[~np.isin(ids, vocabulary.special)]
        pieces = b"".join(vocabulary.pieces[i] for i in ids).decode("utf-8", "replace")
        prefix = " " if style == "llama2" and pieces.startswith(" ") else ""  # which its decoder removes
        assert pieces == prefix + vocabulary.decode(ids), style


def test_tokens_beyond_the_model_are_refused_where_a_text_has_them(tmp_path):
    beyond = ["<image_soft_token>", "[PAD]", *(f"[U{i}]" for i in range(10))]
    for style in STYLES:
        write_published(tmp_path / style, style, lambda tokenizer: tokenizer.add_special_tokens(beyond))
        model, vocabulary = load_writer(tmp_path / style)
        size = model.config["vocab_size"]
        assert len(vocabulary.pieces) == len(vocabulary) == size
        assert vocabulary.encode("the low").max() < size and vocabulary.encode("[PAD]").max() < size
        with pytest.raises(
            DataError, match=rf"vocabulary: the text has '\[U5\]', token {size}, but the model has {size}"
        ):
            vocabulary.encode("the [U5] low")
        assert vocabulary.encode_long("the [U5] low").max() < size  # a corpus has such names as plain text
        export_model(tmp_path / style, tmp_path / f"{style}.gguf")
        run = tuned(tmp_path / style, tmp_path / f"{style} run")
        export_model(run, tmp_path / f"{style} out")
        assert (
            load_writer(run)[1].encode("low").tolist()
            == load_writer(tmp_path / f"{style} out")[1].encode("low").tolist()
        )
