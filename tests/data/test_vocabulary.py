import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.data import DataError, Vocabulary, tokenize


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("It's GREAT!", ["it's", "great", "!"]),
        ("one<br /><br />two", ["one", "two"]),
        ("Don’t", ["don't"]),
        ("'quoted' dogs'", ["'", "quoted", "'", "dogs", "'"]),
        ("rock'n'roll", ["rock'n'roll"]),
        ("8/10, really...", ["8", "/", "10", ",", "really", ".", ".", "."]),
        ("_Alien_", ["_", "alien", "_"]),
        ("Amélie ÜBER 映画", ["amélie", "über", "映画"]),
        ("<pad> \t\n\x85", ["<", "pad", ">"]),
        ("", []),
    ],
)
def test_tokenize(text, tokens):
    assert tokenize(text) == tokens


@given(st.text())
def test_tokens_are_lower_case_and_lose_nothing_but_space(text):
    tokens = tokenize(text)
    joined = "".join(text.lower().replace("<br />", "").replace("’", "'").split())
    assert "".join(tokens) == joined
    assert all(token.split() == [token] for token in tokens)


def test_build_takes_the_most_frequent_and_breaks_ties_by_the_alphabet():
    texts = ["pear pear pear fig fig", "apple apple date", "cherry fig"]
    assert Vocabulary.build(texts, 6).words == ("<pad>", "<unk>", "fig", "pear", "apple", "cherry")
    assert len(Vocabulary.build(texts, 100)) == 7
    assert Vocabulary.build(texts, 2).words == ("<pad>", "<unk>")
    with pytest.raises(ValueError, match="size"):
        Vocabulary.build(texts, 1)


@given(st.lists(st.text("abc d"), max_size=8), st.integers(2, 9), st.randoms(use_true_random=False))
def test_build_does_not_depend_on_the_order_of_texts(texts, size, shuffler: random.Random):
    shuffled = list(texts)
    shuffler.shuffle(shuffled)
    first, second = Vocabulary.build(texts, size), Vocabulary.build(shuffled, size)
    assert first.words == second.words
    assert first.fingerprint == second.fingerprint
    assert len(first) <= size


def test_encode_and_decode():
    vocabulary = Vocabulary(["a", "film", "good", "!"])
    ids = vocabulary.encode("A GOOD unseen film!")
    assert ids.dtype == np.int32
    assert ids.tolist() == [2, 4, 1, 3, 5]
    assert vocabulary.decode(ids) == "a good <unk> film !"
    assert vocabulary.decode([0, 2]) == "<pad> a"
    assert vocabulary.decode([]) == ""
    assert vocabulary.encode("").shape == (0,)
    assert vocabulary.encode("<pad> <unk>").tolist() == [1] * 6  # a text cannot spell a special
    for wrong in ([6], [2, -1]):
        with pytest.raises(IndexError, match="0 to 5"):
            vocabulary.decode(wrong)


@pytest.mark.parametrize("words", [["a", "b", "a"], ["a", ""], ["a b"], ["a\n"], ["<unk>"], ["\x85"]])
def test_words_that_cannot_be_a_vocabulary(words):
    with pytest.raises(ValueError, match="words"):
        Vocabulary(words)


def test_fingerprint_tells_vocabularies_apart():
    fingerprint = Vocabulary(["a", "b"]).fingerprint
    assert len(fingerprint) == 64
    assert fingerprint == Vocabulary(["a", "b"]).fingerprint
    assert len({fingerprint, Vocabulary(["b", "a"]).fingerprint, Vocabulary(["ab"]).fingerprint}) == 3


def test_save_and_load(tmp_path):
    vocabulary = Vocabulary(["don't", "é", "映", "\x00", "."])
    path = tmp_path / "vocabulary.txt"
    path.write_text("what was there before")
    vocabulary.save(path)
    assert path.read_bytes() == "<pad>\n<unk>\ndon't\né\n映\n\x00\n.\n".encode()
    assert Vocabulary.load(path).words == vocabulary.words
    assert [file.name for file in tmp_path.iterdir()] == ["vocabulary.txt"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "vocabulary.txt"
    Vocabulary(["old"]).save(path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        Vocabulary(["new"]).save(path)
    assert Vocabulary.load(path).words[2:] == ("old",)
    assert [file.name for file in tmp_path.iterdir()] == ["vocabulary.txt"]


def test_load_finds_damage_at_every_cut(tmp_path):
    whole, cut = tmp_path / "whole.txt", tmp_path / "cut.txt"
    vocabulary = Vocabulary(["film", "don't", "é"])
    vocabulary.save(whole)
    content = whole.read_bytes()
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        if b"\n" in content[size - 1 : size] and content[:size].count(b"\n") >= 2:  # the end of a line
            assert Vocabulary.load(cut).fingerprint != vocabulary.fingerprint
        else:
            with pytest.raises(DataError, match=r"cut\.txt is damaged"):
                Vocabulary.load(cut)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"<unk>\n<pad>\na\n", "begin with <pad> and <unk>"),
        (b"<pad>\n<unk>\na\na\n", "'a' occurs 2 times"),
        (b"<pad>\n<unk>\na\n\nb\n", "number 3, '', is empty"),
        (b"<pad>\r\n<unk>\r\na\r\n", "begin with"),
        (b"<pad>\n<unk>\n\xff\xfe\n", "not UTF-8 at byte 12"),
        (b"PK\x03\x04", "cut short"),
    ],
)
def test_load_says_what_is_wrong(tmp_path, content, word):
    path = tmp_path / "vocabulary.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=word) as error:
        Vocabulary.load(path)
    assert str(path) in str(error.value)


def test_load_of_none(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        Vocabulary.load(tmp_path / "absent.txt")


def test_a_single_text_is_no_list_of_texts():
    with pytest.raises(TypeError, match=r"^words: expected a list of texts, got str$"):
        Vocabulary("abc")
    with pytest.raises(TypeError, match=r"^texts: expected a list of texts, got str$"):
        Vocabulary.build("abc", 10)


def test_ids_that_are_no_row_of_integers():
    vocabulary = Vocabulary(["a", "b"])
    for wrong, error in (([1.7, 2.9], TypeError), ([[2, 3]], ValueError), (2, ValueError)):
        with pytest.raises(error, match=r"^ids: expected"):
            vocabulary.decode(wrong)
    assert vocabulary.decode([]) == ""
