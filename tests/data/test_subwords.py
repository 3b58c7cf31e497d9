"""Sub-word vocabularies: learned, saved, loaded, published; and texts through them and back."""

import json

import numpy as np
import pytest

from scratchformer.data import DataError, Subwords
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


@pytest.mark.parametrize(
    ("kind", "specials"),
    [("bpe", ("<pad>", "<unk>", "<bos>", "<eos>")), ("byte_bpe", (GPT2_END,)), ("wordpiece", BERT_SPECIALS)],
)
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


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe"])
def test_the_same_texts_give_the_same_vocabulary(learned, kind):
    """(The library's WordPiece breaks ties in no fixed order.)"""
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
@pytest.mark.parametrize("text", [TEXT, UNSEEN, TEXT * 3 + UNSEEN * 2, "", "\n", "\n\n", "a\n b\n\nc\n\n\n d\n"])
def test_a_long_text_in_parts_gives_the_same_tokens(learned, monkeypatch, text, at_once):
    monkeypatch.setattr("scratchformer.data.subwords._LINES", at_once)
    vocabulary = learned["byte_bpe"]
    found = vocabulary.encode_long(text)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, vocabulary.encode(text))


def test_the_end_of_a_text_is_a_token_and_decodes_to_nothing(learned):
    vocabulary = learned["byte_bpe"]
    ids = vocabulary.encode(f"the{GPT2_END}low")
    assert vocabulary[GPT2_END] in ids
    assert vocabulary.decode(ids) == "thelow"
    assert vocabulary.sizes[ids].sum() == len(f"the{GPT2_END}low")


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_pieces_are_only_of_vocabularies_of_bytes(learned, kind):
    with pytest.raises(ValueError, match="vocabulary: expected tokens made of bytes, as GPT-2's, got "):
        _ = learned[kind].pieces


def test_tokens_and_ids_that_are_not_there(learned):
    vocabulary = learned["byte_bpe"]
    with pytest.raises(DataError, match=r"vocabulary: no token '\[MASK\]' in it"):
        _ = vocabulary["[MASK]"]
    for bad in [-1], [0, len(vocabulary)]:
        with pytest.raises(IndexError, match=f"ids: expected 0 to {len(vocabulary) - 1}, got "):
            vocabulary.decode(bad)
    assert vocabulary.decode([]) == ""


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
    with pytest.raises(DataError, match=r"vocabulary .*vocabulary\.json: no such file"):
        Subwords.load(path)
    learned["byte_bpe"].save(path)
    whole = path.read_bytes()
    for damaged in whole[:-20], b"", b"[]", b"\xff\xfe":
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"vocabulary .*vocabulary\.json is damaged"):
            Subwords.load(path)


def test_without_the_library_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    (tmp_path / "vocabulary.json").write_text("{}")
    for use in (lambda: Subwords.bpe(LINES, 300), lambda: Subwords.load(tmp_path / "vocabulary.json")):
        with pytest.raises(ImportError, match=r"pip install 'scratchformer\[subwords\]'"):
            use()


# Published vocabularies


def write_gpt2(folder, learned):
    """vocab.json and merges.txt as they are published, with the end of a text as the last token."""
    model = json.loads(learned["byte_bpe"].tokenizer.to_str())["model"]
    words = sorted((word for word in model["vocab"] if word != GPT2_END), key=model["vocab"].get)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate([*words, GPT2_END])}))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")


def write_bert(folder, learned, lowercase=None):
    vocabulary = learned["wordpiece"].tokenizer.get_vocab()
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(vocabulary, key=vocabulary.get)))
    if lowercase is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))


def test_gpt2s_vocabulary_agrees_with_transformers(learned, tmp_path):
    transformers = pytest.importorskip("transformers")
    write_gpt2(tmp_path, learned)
    ours = Subwords.from_gpt2(tmp_path)
    theirs = transformers.GPT2TokenizerFast(vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"))
    assert len(ours) == len(theirs) and ours[GPT2_END] == len(ours) - 1
    for text in (TEXT, UNSEEN, *LINES, f"the{GPT2_END}low", " leading"):
        ids = ours.encode(text)
        assert ids.tolist() == theirs(text)["input_ids"]
        assert ours.decode(ids) == text.replace(GPT2_END, "")
        assert b"".join(ours.pieces[i] for i in ids) == text.encode()


@pytest.mark.parametrize("lowercase", [None, True, False])
def test_berts_vocabulary_agrees_with_transformers(learned, tmp_path, lowercase):
    transformers = pytest.importorskip("transformers")
    write_bert(tmp_path, learned, lowercase)
    ours = Subwords.from_bert(tmp_path)
    theirs = transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), do_lower_case=lowercase is not False)
    assert len(ours) == len(theirs)
    for text in (TEXT, UNSEEN, "The LOW café", "the [MASK] low"):
        ids = ours.encode(text)
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours["[MASK]"] in ours.encode("the [MASK] low")
    assert (ours["[UNK]"] in ours.encode("THE")) == (lowercase is False)


def test_published_files_that_are_missing_or_damaged(learned, tmp_path):
    with pytest.raises(DataError, match=r"vocab\.txt: no such file"):
        Subwords.from_bert(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n")
    with pytest.raises(DataError, match=r"vocab\.txt is none of BERT: \[CLS\], \[SEP\], \[MASK\] missing"):
        Subwords.from_bert(tmp_path)
    with pytest.raises(DataError, match=r"vocab\.json: no such file"):
        Subwords.from_gpt2(tmp_path)
    write_gpt2(tmp_path, learned)
    words, merges = (tmp_path / "vocab.json").read_text(), (tmp_path / "merges.txt").read_text()
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"merges\.txt: no such file"):
        Subwords.from_gpt2(tmp_path)
    for name, text in (("vocab.json", words[:-9]), ("merges.txt", merges + "never seen\n")):
        write_gpt2(tmp_path, learned)
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=r"vocab\.json and merges\.txt do not fit or are damaged"):
            Subwords.from_gpt2(tmp_path)
    write_gpt2(tmp_path, learned)
    (tmp_path / "vocab.json").write_text(words.replace("endoftext", "end"))
    with pytest.raises(DataError, match=r"vocab\.json is none of GPT-2: <\|endoftext\|> missing"):
        Subwords.from_gpt2(tmp_path)
