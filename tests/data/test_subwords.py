"""Sub-word vocabularies: learned, saved, loaded and published ones, encoding and decoding texts."""

import json
import re

import numpy as np
import pytest

from scratchformer.data import DataError, PublishedTokenizer, Subwords
from scratchformer.data.subwords import BERT_SPECIALS, GPT2_END

pytest.importorskip("tokenizers")

LINES = [
    "The quick brown fox jumps over the lazy dog.\n",
    "the lower, the lowest: low low low  lower\n",
    "\n",
    "\tfor i in range(10):\n        print(i)\n",
    "  Straße, café — 東京 and €5 𝄞!\n\n\n",
    "don't they'll we're, 1234 <x>&amp;</x>   \n",
] * 4
TEXT = "".join(LINES)
UNSEEN = "Ünseen 𝄢 words\x00\x7f\r\n and\u3000 spaces   \n\n\n\n end"
KINDS = ["bpe", "byte_bpe", "wordpiece"]


@pytest.fixture(scope="module")
def learned():
    """A vocabulary of each kind, learned from LINES."""
    return {kind: getattr(Subwords, kind)(LINES, 320) for kind in KINDS}


# Learning


SPECIALS = {"bpe": ("<pad>", "<unk>", "<bos>", "<eos>"), "byte_bpe": (GPT2_END,), "wordpiece": BERT_SPECIALS}


@pytest.mark.parametrize(("kind", "specials"), SPECIALS.items())
def test_special_tokens_come_first_and_frequent_words_are_one_token(learned, kind, specials):
    vocabulary = learned[kind]
    assert [vocabulary[token] for token in specials] == list(range(len(specials)))
    assert len(vocabulary) <= 320
    ids = vocabulary.encode("the low the low")
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert len(ids) <= 6 and (ids >= len(specials)).all()
    assert vocabulary.decode(ids) == "the low the low"


def test_a_larger_vocabulary_makes_shorter_texts():
    lengths = [len(Subwords.byte_bpe(LINES, size).encode(TEXT)) for size in (257, 280, 350)]
    assert lengths[0] == len(TEXT.encode())
    assert lengths == sorted(lengths, reverse=True) and lengths[2] < lengths[1] < lengths[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_texts_give_the_same_vocabulary(learned, kind):
    assert getattr(Subwords, kind)(LINES, 320).fingerprint == learned[kind].fingerprint
    assert getattr(Subwords, kind)(LINES[:3], 320).fingerprint != learned[kind].fingerprint


@pytest.mark.parametrize(("kind", "specials"), [("bpe", 4), ("byte_bpe", 1), ("wordpiece", 5)])
def test_a_size_without_room_for_a_word(kind, specials):
    with pytest.raises(ValueError, match=f"size: expected more than the {specials} special tokens, got {specials}"):
        getattr(Subwords, kind)(LINES, specials)


# Encoding and decoding


@pytest.mark.parametrize("text", [TEXT, UNSEEN, "", " ", "a"])
def test_byte_pairs_give_every_text_back(learned, text):
    vocabulary = learned["byte_bpe"]
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert b"".join(vocabulary.pieces[i] for i in ids) == text.encode()
    assert vocabulary.sizes[ids].sum() == len(text.encode())


def test_byte_pairs_of_translation_give_the_words_back(learned):
    vocabulary = learned["bpe"]
    assert vocabulary.decode(vocabulary.encode("the quick, lazy dog.")) == "the quick, lazy dog."
    assert vocabulary["<unk>"] in vocabulary.encode("\u0411")


def test_wordpiece_gives_no_room_to_letters_that_are_words_of_their_own():
    """Chinese characters and punctuation marks never continue a word."""
    vocabulary = Subwords.wordpiece(["東京 北京 low lower lowest Été!", "low lower lowest"], 60).tokenizer.get_vocab()
    continuing = {token[2:] for token in vocabulary if token.startswith("##") and len(token) == 3}
    assert continuing == set("lowerst") and {"東", "low", "lower", "ete"} <= vocabulary.keys()


def test_wordpiece_is_in_lower_case(learned):
    vocabulary = learned["wordpiece"]
    assert np.array_equal(vocabulary.encode("The LOW"), vocabulary.encode("the low"))
    assert vocabulary["[UNK]"] in vocabulary.encode("\u0411")


@pytest.mark.parametrize("kind", KINDS)
def test_many_texts_at_once(learned, kind):
    vocabulary = learned[kind]
    for ids, line in zip(vocabulary.encode_all(LINES), LINES, strict=True):
        assert np.array_equal(ids, vocabulary.encode(line))


@pytest.mark.parametrize("at_once", [1, 2, 1000])
@pytest.mark.parametrize(
    "text",
    [
        *(TEXT, UNSEEN, TEXT * 3 + UNSEEN * 2, "", "\n", "\n\n", "a\n b\n\nc\n\n\n d\n"),
        *(TEXT.replace("\n", end) for end in ("\r\n", "\n\n", " \n", "\n \n", "\u2028\n", "\r\n\r\n\t")),
    ],
)
def test_a_long_text_in_parts_gives_the_same_tokens(learned, monkeypatch, text, at_once):
    monkeypatch.setattr("scratchformer.data.subwords._TEXTS", at_once)
    vocabulary = learned["byte_bpe"]
    found = vocabulary.encode_long(text)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, vocabulary.encode(text))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", " \n"])
def test_a_long_text_is_cut_at_every_kind_of_line_end(learned, monkeypatch, end):
    pieces = []
    monkeypatch.setattr(Subwords, "encode_all", lambda self, texts: pieces.extend(texts) or [np.zeros(0, np.int32)])
    learned["byte_bpe"].encode_long(end.join(["low lower"] * 50))
    assert len(pieces) == 50 and "".join(pieces) == end.join(["low lower"] * 50)


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_special_token_in_a_text_is_plain_text(learned, kind, tmp_path):
    """For every way to encode, and also in a loaded vocabulary."""
    learned[kind].save(tmp_path / "vocabulary.json")
    for vocabulary in (learned[kind], Subwords.load(tmp_path / "vocabulary.json")):
        for token in set(SPECIALS[kind]) - {"<unk>", "[UNK]"}:
            text = f"the {token} low {token}"
            ids = vocabulary.encode(text)
            assert vocabulary[token] not in ids
            assert np.array_equal(ids, vocabulary.encode_all([text])[0])
            if kind == "byte_bpe":
                assert vocabulary.decode(ids) == text
                assert np.array_equal(ids, vocabulary.encode_long(text))


def test_the_end_of_a_text_is_a_token_and_decodes_to_nothing(learned):
    vocabulary = learned["byte_bpe"]
    ids = np.array([*vocabulary.encode("the"), vocabulary[GPT2_END], *vocabulary.encode("low")])
    assert vocabulary[GPT2_END] in ids
    assert vocabulary.decode(ids) == "thelow"
    assert vocabulary.sizes[ids].sum() == len(f"the{GPT2_END}low")


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_only_byte_level_vocabularies_have_pieces(learned, kind):
    with pytest.raises(ValueError, match="vocabulary: expected tokens made of bytes, like GPT-2's, got "):
        _ = learned[kind].pieces


def test_unknown_tokens_and_ids(learned):
    vocabulary = learned["byte_bpe"]
    with pytest.raises(DataError, match=r"vocabulary: no token '\[MASK\]' in it"):
        _ = vocabulary["[MASK]"]
    for bad in [-1], [0, len(vocabulary)]:
        with pytest.raises(IndexError, match=f"^ids: expected values from 0 to {len(vocabulary) - 1}, got {bad[-1]}$"):
            vocabulary.decode(bad)
    with pytest.raises(TypeError, match="ids: expected integers, got float64"):
        vocabulary.decode([4.9, 5.2])
    with pytest.raises(ValueError, match=r"ids: expected \(T\), got \(2, 2\)"):
        vocabulary.decode([[4, 5], [6, 7]])
    assert vocabulary.decode([]) == ""


def test_texts_that_cannot_be_encoded(learned):
    for vocabulary in learned.values():
        for text in 5, None, ["a", "b"]:
            with pytest.raises(TypeError, match=r"^text: expected a str, got "):
                vocabulary.encode(text)
        with pytest.raises(TypeError, match=r"^texts\[1\]: expected a str, got None$"):
            vocabulary.encode_all(["a", None])
        with pytest.raises(TypeError, match=r"^texts: expected a list of texts, got generator$"):
            vocabulary.encode_all(text for text in "ab")
        with pytest.raises(DataError, match=r"cannot encode the text 'b\\udcff': .*surrogates not allowed"):
            vocabulary.encode_all(["a", "b\udcff"])


def test_settings_of_training_are_turned_off(learned, tmp_path):
    learned["byte_bpe"].save(tmp_path / "v.json")
    text = "hello world " * 3
    expected = learned["byte_bpe"].encode(text)
    tokenizer = Subwords.load(tmp_path / "v.json").tokenizer
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    np.testing.assert_array_equal(Subwords(tokenizer).encode(text), expected)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "cut.json"))
    np.testing.assert_array_equal(Subwords.load(tmp_path / "cut.json").encode(text), expected)
    with pytest.raises(TypeError, match="tokenizer: expected a Tokenizer, got 'x'"):
        Subwords("x")


# Files


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(learned, kind, tmp_path):
    vocabulary = learned[kind]
    vocabulary.save(tmp_path / "vocabulary.json")
    loaded = Subwords.load(tmp_path / "vocabulary.json")
    assert len(loaded) == len(vocabulary) and loaded.fingerprint == vocabulary.fingerprint
    for text in TEXT, UNSEEN:
        np.testing.assert_array_equal(loaded.encode(text), vocabulary.encode(text))
    assert loaded.decode(loaded.encode("the low")) == "the low"
    assert [path.name for path in tmp_path.iterdir()] == ["vocabulary.json"]


def test_a_file_that_is_missing_or_damaged(learned, tmp_path):
    path = tmp_path / "vocabulary.json"
    with pytest.raises(DataError, match=r"vocabulary\.json: No such file"):
        Subwords.load(path)
    learned["byte_bpe"].save(path)
    whole = path.read_bytes()
    for damaged in whole[:-20], b"", b"[]", b"\xff\xfe":
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"vocabulary\.json is damaged"):
            Subwords.load(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Unheard"}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ("normalizer", json.loads('{"type": "Sequence", "normalizers": [' * 200 + "]}" * 200)),
        ("model", None),
    ],
)
def test_what_the_library_cannot_read_is_refused_with_the_name_of_the_file(learned, tmp_path, part, value):
    whole = json.loads(learned["byte_bpe"].tokenizer.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {part: value}))
    for load in Subwords.load, lambda path: PublishedTokenizer(path.parent, len(learned["byte_bpe"])):
        with pytest.raises(DataError, match=r"tokenizer\.json is damaged: ."):
            load(tmp_path / "tokenizer.json")


def test_ids_that_cannot_be_decoded(tmp_path):
    """The library panics."""
    lib = pytest.importorskip("tokenizers")
    tokenizer = lib.Tokenizer(lib.models.BPE({"a": 0}, []))
    tokenizer.decoder = lib.decoders.Strip("a", 0, 5)
    with pytest.raises(DataError, match=r"^vocabulary: cannot decode the ids: "):
        Subwords(tokenizer).decode([0])


def test_without_the_library_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    (tmp_path / "vocabulary.json").write_text("{}")
    for use in (lambda: Subwords.bpe(LINES, 300), lambda: Subwords.load(tmp_path / "vocabulary.json")):
        with pytest.raises(ImportError, match=r"pip install 'scratchformer\[subwords\]'"):
            use()


# Published vocabularies


def write_gpt2(folder, learned):
    """vocab.json and merges.txt as published, with GPT2_END as the last token."""
    model = json.loads(learned["byte_bpe"].tokenizer.to_str())["model"]
    words = sorted((word for word in model["vocab"] if word != GPT2_END), key=model["vocab"].get)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate([*words, GPT2_END])}))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")


def write_bert(folder, learned, more=(), **settings):
    """vocab.txt with `more` words after the learned ones, and the settings, if given."""
    vocabulary = learned["wordpiece"].tokenizer.get_vocab()
    words = [*sorted(vocabulary, key=vocabulary.get), *(word for word in more if word not in vocabulary)]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_gpt2s_vocabulary_agrees_with_transformers(learned, tmp_path):
    transformers = pytest.importorskip("transformers")
    write_gpt2(tmp_path, learned)
    ours = Subwords.from_gpt2(tmp_path)
    theirs = transformers.GPT2TokenizerFast(vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"))
    assert len(ours) == len(theirs) and ours[GPT2_END] == len(ours) - 1
    for text in (TEXT, UNSEEN, *LINES, f"the{GPT2_END}low", " leading"):
        ids = ours.encode(text)
        assert ids.tolist() == theirs(text, split_special_tokens=True)["input_ids"]
        assert (ids.tolist() == theirs(text)["input_ids"]) == (GPT2_END not in text)
        assert ours[GPT2_END] not in ids
        assert ours.decode(ids) == text
        assert b"".join(ours.pieces[i] for i in ids) == text.encode()
    ids = [*ours.encode("the"), ours[GPT2_END], *ours.encode("low")]
    assert ids == theirs(f"the{GPT2_END}low")["input_ids"]
    assert ours.decode(ids) == "thelow"


@pytest.mark.parametrize("lowercase", [None, True, False])
def test_berts_vocabulary_agrees_with_transformers(learned, tmp_path, lowercase):
    transformers = pytest.importorskip("transformers")
    write_bert(tmp_path, learned, **({} if lowercase is None else {"do_lower_case": lowercase}))
    ours = Subwords.from_bert(tmp_path)
    theirs = transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), do_lower_case=lowercase is not False)
    assert len(ours) == len(theirs)
    for text in (TEXT, UNSEEN, "The LOW café"):
        ids = ours.encode(text)
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    text, options = "the [MASK] low", dict(add_special_tokens=False)
    assert ours.encode(text).tolist() == theirs(text, split_special_tokens=True, **options)["input_ids"]
    assert ours["[MASK]"] not in ours.encode(text)
    ids = [*ours.encode("the"), ours["[MASK]"], *ours.encode("low")]
    assert ids == theirs(text, **options)["input_ids"]
    assert (ours["[UNK]"] in ours.encode("THE")) == (lowercase is False)


CASED, CHINESE = ("über", "uber", "Über", "Uber"), ("東", "京", "東京")


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("accents", [True, False, None])
@pytest.mark.parametrize("chinese", [True, False])
def test_berts_settings_come_from_the_folder(learned, tmp_path, lowercase, accents, chinese):
    settings = dict(do_lower_case=lowercase, strip_accents=accents, tokenize_chinese_chars=chinese)
    write_bert(tmp_path, learned, CASED + CHINESE, **settings)
    ours = Subwords.from_bert(tmp_path)
    stripped = lowercase if accents is None else accents
    word = ("u" if stripped else "ü") if lowercase else ("U" if stripped else "Ü")
    assert ours.encode("Über").tolist() == [ours[f"{word}ber"]]
    assert ours.encode("東京").tolist() == [ours[word] for word in (CHINESE[:2] if chinese else CHINESE[2:])]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), **settings)
    for text in (TEXT, UNSEEN, "The LOW café", "Über 東京"):
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_a_folder_with_another_tokenizer_is_refused(learned, tmp_path, file):
    write_bert(tmp_path, learned)
    write_gpt2(tmp_path, learned)
    (tmp_path / file).write_text(json.dumps({"tokenizer_class": "BertJapaneseTokenizer"}))
    for load in Subwords.from_bert, Subwords.from_gpt2, Subwords.from_roberta:
        with pytest.raises(DataError, match=rf"{re.escape(file)}: tokenizer_class: expected .*, got 'BertJapanese.*"):
            load(tmp_path)


@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast", "DistilBertTokenizerFast", "ElectraTokenizer"])
def test_settings_that_change_nothing_are_accepted(learned, tmp_path, name):
    usual = dict(do_basic_tokenize=True, never_split=None, model_max_length=512, pad_token="[PAD]", clean_text=True)
    write_bert(tmp_path, learned, tokenizer_class=name, **usual, unk_token={"content": "[UNK]"}, mecab_kwargs=None)
    assert Subwords.from_bert(tmp_path).encode("the low").size == 2


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("space", [False, True])
def test_a_space_before_a_text(learned, tmp_path, space, alone):
    if alone:
        tokenizer = json.loads(learned["byte_bpe"].tokenizer.to_str())
        tokenizer["pre_tokenizer"]["add_prefix_space"] = space
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    else:
        write_gpt2(tmp_path, learned)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": space}))
    vocabulary, text = Subwords.from_gpt2(tmp_path), "the low\nlow\n\nlow"
    if alone:
        assert np.array_equal(vocabulary.encode(text), learned["byte_bpe"].encode(" " * space + text))
    assert vocabulary.decode(vocabulary.encode(text)) == " " * space + text
    assert np.array_equal(vocabulary.encode_long(text), vocabulary.encode(text))


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r\n", " \n\n\n", "\n\n\t"])
def test_a_long_text_in_the_parts_of_other_encodings(learned, end, monkeypatch):
    """In Llama 3's, several line ends may be one token; others are not cut."""
    lib = pytest.importorskip("tokenizers")
    rule = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    text, pieces = end.join(["low lower.", "lowest", "1"] * 20), []
    for pattern, cuts in [(rule, 60), (r"\n+\p{L}", 1)]:
        tokenizer = lib.Tokenizer(lib.models.BPE())
        split = lib.pre_tokenizers.Split(lib.Regex(pattern), "isolated")
        as_bytes = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence([split, as_bytes])
        alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
        trainer = lib.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([text], trainer)
        vocabulary = Subwords(tokenizer)
        assert np.array_equal(vocabulary.encode_long(text), vocabulary.encode(text))
        with monkeypatch.context() as patched:
            patched.setattr(Subwords, "encode_all", lambda self, texts: [pieces.append(len(texts)) or np.zeros(0)])
            vocabulary.encode_long(text)
        assert pieces.pop() == (cuts if end != "\n\n\t" else 1)


def write_llama(folder, special=(), added=(), around=None, files=None):
    """A tokenizer like Llama 2's, with `<s>` as 1; special, added: the tokens that tokenizer.json lists, as special or
    not; around: the processor that puts tokens around a text.
    """
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "t", "h", "e", "th", "the", "▁the"]
    words = {word: i for i, word in enumerate([*words, "<image>"])}
    lib = pytest.importorskip("tokenizers")
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = lib.Tokenizer(lib.models.BPE(words, merges, unk_token="<unk>", byte_fallback=True))
    normalizers, decoders = lib.normalizers, lib.decoders
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([*special])
    tokenizer.add_tokens([lib.AddedToken(token, special=False, normalized=False) for token in added])
    if around is not None:
        tokenizer.post_processor = around(lib.processors)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    for name, content in (files or {}).items():
        (folder / name).write_text(json.dumps(content))
    return len(words)


SPECIAL_NAMES = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "pad_token": None}
DECODER = {"1": {"content": "<s>", "special": True}, "2": {"content": "</s>", "special": True}}


@pytest.mark.parametrize(
    "described",
    [
        dict(special=["<s>", "</s>"]),
        dict(files={"tokenizer_config.json": SPECIAL_NAMES}),
        dict(added=["<s>", "</s>"], files={"tokenizer_config.json": SPECIAL_NAMES}),
        dict(files={"special_tokens_map.json": SPECIAL_NAMES}),
        dict(added=["<s>"], files={"tokenizer_config.json": {"added_tokens_decoder": DECODER}}),
        dict(files={"tokenizer_config.json": {"additional_special_tokens": ["<s>", "</s>"]}}),
        dict(files={"tokenizer_config.json": {"extra_special_tokens": {"a": "<s>", "b": "</s>"}}}),
        dict(special=["</s>"], around=lambda lib: lib.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])),
        dict(around=lambda lib: lib.BertProcessing(("</s>", 2), ("<s>", 1))),
    ],
)
def test_a_decoded_text_has_no_special_tokens(tmp_path, described):
    """Wherever the folder says that they are special."""
    vocabulary = PublishedTokenizer(tmp_path, write_llama(tmp_path, **described))
    ids = [i for i in vocabulary.encode("the the").tolist() if i > 2]
    assert len(ids) == 2
    assert vocabulary.decode([1, *ids, 2, 0]) == vocabulary.decode(ids) == "the the"
    assert "<image>" in vocabulary.decode([266])  # it is called special nowhere
    assert vocabulary.decode([260]) == "t"
    assert [vocabulary.pieces[i] for i in (1, 2, 265)] == [b"<s>", b"</s>", b" the"]


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_that_are_normalized(tmp_path, special):
    """The library itself would neither find them in a text nor leave them out, since the normalizer changes them."""
    lib = pytest.importorskip("tokenizers")
    tokens = [lib.AddedToken(token, special=special, normalized=True) for token in ("<s>", "</s>")]
    files = {"tokenizer_config.json": SPECIAL_NAMES}
    vocabulary = PublishedTokenizer(tmp_path, write_llama(tmp_path, special=tokens, files=files))
    assert vocabulary.decode([1, 265, 265, 2]) == "the the"
    ids = vocabulary.encode("<s>the</s>").tolist()
    assert (ids[0], ids[-1]) == (1, 2) and vocabulary.decode(ids) == "the"


def test_special_tokens_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    names = SPECIAL_NAMES | {"eos_token": "</s>", "unk_token": "<unk>", "additional_special_tokens": ["▁the"]}
    size = write_llama(tmp_path, added=["<s>", "<image>"], files={"tokenizer_config.json": names})
    ours, theirs = PublishedTokenizer(tmp_path, size), transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for ids in [1, 265, 265, 2, 0], [266, 1], [0, 262, 264, 2]:
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_tokenizer_json_alone_is_read(learned, tmp_path, kind):
    """As transformers 5 saves it; the same ids as from vocab.txt, or vocab.json and merges.txt."""
    transformers = pytest.importorskip("transformers")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (write_bert if kind == "bert" else write_gpt2)(first, learned)
    fast = transformers.BertTokenizerFast if kind == "bert" else transformers.GPT2TokenizerFast
    theirs = fast.from_pretrained(first)
    if kind == "gpt2":
        theirs.add_special_tokens({"pad_token": "<|pad|>"})
    theirs.save_pretrained(second)
    for name in ("vocab.txt", "vocab.json", "merges.txt"):
        (second / name).unlink(missing_ok=True)
    read = getattr(Subwords, f"from_{kind}")
    ours, old = read(second), read(first)
    assert len(ours) == len(theirs) == len(old) + (kind == "gpt2")
    for text in ("the low low lower", "The lowest, 日本 new  er\n"):
        assert ours.encode(text).tolist() == old.encode(text).tolist()
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
    if kind == "gpt2":
        ids = [*ours.encode("the low"), ours["<|pad|>"]]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "the low"


def test_a_bert_with_tokens_of_white_space(learned, tmp_path):
    """Only the ends of lines are no part of a token: some vocabularies have both a no-break space and nothing."""
    write_bert(tmp_path, learned, more=["\u3000", "\u00a0", "the\u2003"])
    vocabulary = Subwords.from_bert(tmp_path)
    assert len({vocabulary[token] for token in ("the", "the\u2003", "\u3000", "\u00a0")}) == 4
    (tmp_path / "vocab.txt").write_bytes((tmp_path / "vocab.txt").read_bytes().replace(b"\n", b"\r\n"))
    assert Subwords.from_bert(tmp_path).fingerprint == vocabulary.fingerprint


def test_published_files_that_are_missing_or_damaged(learned, tmp_path):
    with pytest.raises(DataError, match=r"vocab\.txt: No such file"):
        Subwords.from_bert(tmp_path)
    with pytest.raises(DataError, match=r"vocab\.json: No such file"):
        Subwords.from_gpt2(tmp_path)
    write_bert(tmp_path, learned, do_lower_case="yes")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is damaged"):
        Subwords.from_bert(tmp_path)
    write_gpt2(tmp_path, learned)
    with pytest.raises(DataError, match=r"vocab\.json: <s>, <pad>, </s>, <unk>, <mask> missing"):
        Subwords.from_roberta(tmp_path)
    words, merges = (tmp_path / "vocab.json").read_text(), (tmp_path / "merges.txt").read_text()
    for text in merges + "t q\n", merges + "t h e\n", merges + "\n":
        (tmp_path / "merges.txt").write_text(text)
        with pytest.raises(DataError, match=r"merges\.txt is damaged, or belongs to another vocabulary: "):
            Subwords.from_gpt2(tmp_path)
    (tmp_path / "merges.txt").write_text(merges)
    for text, message in (
        (words[:-9], r" is damaged: Unterminated string"),
        (words.replace("endoftext", "end"), r": <\|endoftext\|> missing"),
        (words.replace(": 17,", ": 99999999,"), r": .* has the id 99999999; expected 0 to"),
        (words.replace(": 17,", ': "17",'), r": .* has the id '17'; expected 0 to"),
    ):
        (tmp_path / "vocab.json").write_text(text)
        with pytest.raises(DataError, match=rf"vocab\.json{message}"):
            Subwords.from_gpt2(tmp_path)
    (tmp_path / "merges.txt").unlink()
    (tmp_path / "vocab.json").unlink()
    for kind, load in ("byte_bpe", Subwords.from_bert), ("wordpiece", Subwords.from_gpt2):
        (tmp_path / "vocab.txt").unlink(missing_ok=True)
        learned[kind].save(tmp_path / "tokenizer.json")
        with pytest.raises(DataError, match=r"tokenizer\.json: .* missing"):
            load(tmp_path)


def test_merges_that_are_cut_short_anywhere(learned, tmp_path):
    """At the end of a line, within one, or of everything: a token whose merge is missing gives it away."""
    write_gpt2(tmp_path, learned)
    path = tmp_path / "merges.txt"
    whole, expected = path.read_bytes(), Subwords.from_gpt2(tmp_path).fingerprint
    for more in b"", b"\n":
        path.write_bytes(whole.removesuffix(b"\n") + more)
        assert Subwords.from_gpt2(tmp_path).fingerprint == expected
    path.write_bytes(whole.replace(b"\n", b"\r\n"))
    assert Subwords.from_gpt2(tmp_path).fingerprint == expected
    for size in 0, 20, len(whole) // 2, len(whole) - 2:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"merges\.txt"):
            Subwords.from_gpt2(tmp_path)
    path.write_bytes(b"\n".join(whole.split(b"\n")[:-3]) + b"\n")
    with pytest.raises(DataError, match=r"merges\.txt is truncated or .*: no merge makes 2 of .*, such as '"):
        Subwords.from_gpt2(tmp_path)


def test_other_special_tokens_of_gpt2_need_no_merge(learned, tmp_path):
    write_gpt2(tmp_path, learned)
    words = json.loads((tmp_path / "vocab.json").read_text())
    for token in "<s>", "</s>", "<pad>", "[PAD]", "<|im_start|>":
        words[token] = len(words)
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    assert len(Subwords.from_gpt2(tmp_path)) == len(words)


def test_a_bert_vocabulary_that_is_truncated(learned, tmp_path):
    """The size in config.json reveals a cut at the end of a line."""
    write_bert(tmp_path, learned)
    path = tmp_path / "vocab.txt"
    whole = path.read_text()
    n = len(whole.splitlines())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": n}))
    assert len(Subwords.from_bert(tmp_path)) == n
    path.write_text("\n".join(whole.splitlines()[:-7]) + "\n")
    with pytest.raises(DataError, match=rf"vocab\.txt has {n - 7} tokens, but the model of config\.json has {n}$"):
        Subwords.from_bert(tmp_path)


def test_a_single_text_is_no_list_of_texts():
    subwords = Subwords.bpe(LINES, 300)
    for use in (lambda: Subwords.bpe("abc", 300), lambda: subwords.encode_all("abc")):
        with pytest.raises(TypeError, match=r"^texts: expected a list of texts, got str$"):
            use()
