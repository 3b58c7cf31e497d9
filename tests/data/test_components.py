"""Tokenizer files that would take endless time or memory are refused, and published ones are not."""

import itertools
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.data import DataError, Subwords, components
from scratchformer.data.components import (
    CHAINS,
    MAX_GROWTH,
    MAX_PATTERN,
    MAX_PATTERN_AND_CLASSES,
    expect_bounded,
    linear,
)
from scratchformer.data.subwords import PublishedTokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXT = "The film, again: 2,024 naïve  élan\n\n \tDON'T   stop"
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PUBLISHED = {
    "GPT-2": GPT2,
    "Llama 3": rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}",
    "Qwen2": rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "Mistral Nemo": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|{REST}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}?|{REST}",
    "DeepSeek 3": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    **{part: part for part in (r"[\r\n]", r"\s?\p{L}+", "[一-龥ࠀ-一가-퟿]+", r"\s+$", r"\p{N}{1,3}", r"\d", " {2,}")},
}  # fmt: skip
# Each takes a time that grows with a power of the text's length, or exponentially, or is none that a search needs.
ENDLESS = (
    "(a+)+$", "(a|a)*b", "(a*)*", "a*a*b", r"[\s\S]+#|.", ".*#", "(?:a?){20}a{20}", "a?" * 30 + "a" * 30, r"(a)\1",
    "(?=a+)b", "(?<=a)b", "(?>a+)b", "a+?b", "(?:a+)?b", "a{2}{3}{4}", "a{1,3}+b", "a{1,1000}b", "a{2,}b", "(a?)?a?",
    r"\s*\s*x", r"\s*[\r\n]+x", r"[^\s]*\s", r"\g<0>", "(?#x)a", "(?x)a +b", "(a", "[a", "(" * 5000, "a|" * 400,
    "[" + "a" * MAX_PATTERN_AND_CLASSES + "]",
)  # fmt: skip


def replace(found, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: found}, "content": content}


def chain(kind, parts):
    return {kind: {"type": "Sequence", CHAINS[kind][0]: list(parts)}}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(single, ids=(0,)):
    tokens = {"z": {"id": "z", "ids": list(ids), "tokens": ["z"] * len(ids)}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


A, Z = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "z", "type_id": 0}}
GREEDY = {  # what a few kilobytes of settings can ask for
    "Replace that doubles, 22 times": chain("normalizer", [replace("a", "aa")] * 22),
    "the same within lists": chain("normalizer", [chain("normalizer", [replace("a", "aa")] * 2)["normalizer"]] * 11),
    "a letter that becomes 18, again and again": chain("normalizer", [replace("a", "ﷺ"), {"type": "NFKC"}] * 4),
    "a long text for a letter": {"normalizer": replace("a", "a" * 10_000)},
    "a text before every letter": chain("normalizer", [replace("x*", "aaaa", "Regex")] * 8),
    "Prepend": chain("normalizer", [{"type": "Prepend", "prepend": "a" * 60}] * 3),
    "bytes of bytes": chain("pre_tokenizer", [BYTES] * 22),
    "bytes of bytes in both": chain("normalizer", [{"type": "ByteLevel"}] * 4) | chain("pre_tokenizer", [BYTES] * 4),
    "spaces": chain("pre_tokenizer", [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}] * 22),
    "too many parts": chain("normalizer", [{"type": "Strip", "strip_left": True, "strip_right": True}] * 100_000),
    "no step forward": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a part without a type": {"normalizer": {"normalizers": []}},
    "a charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a pattern of two kinds": {"normalizer": replace("a", "a") | {"pattern": {"String": "a", "Regex": "(a*)*"}}},
    "a decoder that doubles": chain("decoder", [replace("a", "aa")] * 22),
    "a decoder with a pattern": {"decoder": replace("(a+)+$", "", "Regex")},
    "the text twice": {"post_processor": template([A, A])},
    "the text twice, 30 times": chain("post_processor", [template([A, A])] * 30),
    "many tokens": {"post_processor": template([A] + [Z] * 1000)},
    "many ids of one": {"post_processor": template([A, Z], [0] * 1000)},
    "a long prefix": {"model": BPE | {"continuing_subword_prefix": "#" * 1000}},
    "long words": {
        "model": {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}
    },
    "a long token": {"model": BPE | {"vocab": {"a": 0, "b" * 10**6: 1}}},
    "a long unigram": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["ab" * 500_000, -2.0]]}},
    "an unknown model": {"model": {"type": "Neural"}},
    "many added tokens": {
        "added_tokens": [
            dict(id=0, content=f"{i:04}" * 250, single_word=False, lstrip=False, rstrip=False, normalized=False,
                 special=True) for i in range(400)
        ]
    },
    "added tokens that grow": chain("normalizer", [replace("a", "a" * 60), replace("a", "a" * 15)])
    | {
        "added_tokens": [
            dict(id=i, content=f"{i:04}" + "a" * 9000, single_word=False, lstrip=False, rstrip=False, normalized=True,
                 special=False) for i in range(30)
        ]
    },
    "nested": {"normalizer": json.loads('{"type": "Sequence", "normalizers": [' * 200 + "]}" * 200)},
    **{f"Split by {pattern[:20]}": {"pre_tokenizer": split(pattern)} for pattern in ENDLESS[:6]},
}  # fmt: skip


def file(tmp_path, **parts):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": BPE, "decoder": BYTES} | parts))
    return path


@pytest.mark.parametrize("what", GREEDY)
def test_a_file_that_asks_for_too_much_is_refused(tmp_path, what):
    path = file(tmp_path, **GREEDY[what])
    for load in Subwords.load, lambda path: PublishedTokenizer(path.parent, 2):
        with pytest.raises(DataError) as raised:
            load(path)  # otherwise it takes endless time or memory, here or in the first text
        assert str(raised.value).startswith(str(path)) and len(str(raised.value)) < 600


@pytest.mark.parametrize("name", PUBLISHED)
def test_patterns_of_published_tokenizers(tmp_path, name):
    assert linear(PUBLISHED[name])
    symbols = dict(zip(tokenizers.pre_tokenizers.ByteLevel.alphabet(), range(256), strict=True))
    parts = {"model": BPE | {"vocab": symbols}} | chain("pre_tokenizer", [split(PUBLISHED[name]), BYTES])
    path = file(tmp_path, **parts)
    expected = tokenizers.Tokenizer.from_file(str(path)).encode(TEXT).ids
    assert PublishedTokenizer(tmp_path, 256).encode(TEXT).tolist() == expected != []


@pytest.mark.parametrize("pattern", ENDLESS, ids=lambda pattern: pattern[:30])
def test_patterns_whose_time_has_no_bound(pattern):
    assert not linear(pattern)


@pytest.mark.parametrize(
    "part", ["a?|", "a*|", "[^a]", "[[^a][^b]]", "(?:a)?|", r"\s*\s*|", r"\s+$", "a{1,2}+|", "(|)?", "[^"]
)
def test_the_look_at_a_pattern_takes_no_time_either(part):
    assert not linear(part * (MAX_PATTERN // len(part)) + "(a+)+")  # not after 2 to the power of hundreds of steps


@pytest.mark.parametrize("pattern", [*PUBLISHED.values(), "a", "ab?c+", "(?:ab|c)?d*"])
def test_what_makes_a_pattern_endless_is_refused_in_any_pattern(pattern):
    for endless in (f"({pattern})*b", f"(?:{pattern})+", f"{pattern}|(a+)+b", f"{pattern}|a*a*b", rf"{pattern}|(a)\1"):
        assert not linear(endless)


def test_sentencepiece_in_the_form_of_llama_2(tmp_path):
    parts = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    words = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "<0x0A>": 5}
    file(
        tmp_path,
        model={"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": words, "merges": ["▁ a"]},
        post_processor=template([Z, A], [0]),
        **chain("normalizer", [{"type": "Prepend", "prepend": "▁"}, parts]),
        **chain("decoder", [*back, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]),
    )
    vocabulary = PublishedTokenizer(tmp_path, 6)
    assert vocabulary.encode("a b\n").tolist() == [0, 4, 1, 3, 5]
    assert vocabulary.decode([4, 1, 3, 5]) == "a b\n"


@pytest.mark.parametrize("setting", [{"Fixed": 10**12}, "BatchLongest"], ids=str)
def test_padding_and_truncation_are_off_before_anything_is_encoded(tmp_path, setting):
    padding = dict(
        strategy=setting, direction="Right", pad_to_multiple_of=10**12, pad_id=0, pad_type_id=0, pad_token="a"
    )
    truncation = dict(direction="Right", max_length=0, strategy="LongestFirst", stride=0)
    path = file(tmp_path, padding=padding, truncation=truncation)
    assert Subwords.load(path).encode("abba").tolist() == [0, 1, 1, 0]
    assert PublishedTokenizer(tmp_path, 2).encode("abba").tolist() == [0, 1, 1, 0]


def test_ids_that_cannot_be_decoded(tmp_path):
    """The library panics."""
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 5}
    vocabulary = Subwords.load(file(tmp_path, **chain("decoder", [{"type": "ByteFallback"}, strip])))
    with pytest.raises(DataError, match=r"^vocabulary: cannot decode the ids: "):
        vocabulary.decode([0])
    with pytest.raises(DataError, match=r"^vocabulary: cannot decode the ids: "):
        PublishedTokenizer(tmp_path, 2).decode([0])


def test_no_character_becomes_more_than_the_table_says():
    known = CHAINS["normalizer"][1]
    for character in map(chr, itertools.chain(range(0xD800), range(0xE000, 0x30000))):
        assert len(character.lower()) <= known["Lowercase"]
        for form in "NFC", "NFD", "NFKC", "NFKD":
            assert len(unicodedata.normalize(form, character)) <= known[form]
    for kind, expected in ("NFKC", 18), ("NFD", 4), ("ByteLevel", 4):
        longest = max(len(getattr(tokenizers.normalizers, kind)().normalize_str(c)) for c in "ﷺᾂ😀")
        assert longest == expected == known[kind]


texts = st.text("aﷺᾂİ中 😀", max_size=5)
parts = st.one_of(
    st.builds(replace, st.text("aﷺ ", min_size=1, max_size=2), texts),
    st.builds(replace, st.sampled_from(["a+", "a?", r"\s+", "[a中]", " {2,}"]), texts, st.just("Regex")),
    st.builds(lambda text: {"type": "Prepend", "prepend": text}, texts),
    st.sampled_from([{"type": name} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "Nmt")]),
    st.just(
        dict(type="BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True)
    ),
)


@given(st.lists(parts, max_size=4), texts.filter(bool), st.sampled_from([1, 2, 4, 20, 100, MAX_GROWTH]))
def test_a_text_grows_no_more_than_the_bound(normalizers, text, most):
    settings = {"version": "1.0", "added_tokens": [], "model": BPE} | chain("normalizer", normalizers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(components, "MAX_GROWTH", most)
        try:
            expect_bounded(settings, "x")
        except DataError:
            return
    normalizer = tokenizers.Tokenizer.from_str(json.dumps(settings)).normalizer
    try:
        assert len(normalizer.normalize_str(text)) <= most * len(text)
    except BaseException as error:  # a panic of the library, which `Subwords` reports
        if type(error).__name__ != "PanicException":
            raise


def test_our_own_vocabularies_are_within_the_limits(tmp_path):
    texts = ["the film was low, lower, the lowest of the films\n", "élan: a naïve café film\n"] * 3
    for learn in Subwords.bpe, Subwords.byte_bpe, Subwords.wordpiece:
        words = learn(texts, 300)
        words.save(tmp_path / "words.json")
        np.testing.assert_array_equal(Subwords.load(tmp_path / "words.json").encode(TEXT), words.encode(TEXT))
