"""Sentences and translations in the files that people have."""

import bz2
import gzip
import json

import pytest

from scratchformer.data import DataError, load_multi30k

PAIRS = [(f'sentence {i} "quoted, here', f"Satz {i} mit Ölfass") for i in range(60)]


def separated(*columns, header=()):
    rows = [header] * bool(header) + list(zip(*columns, strict=True))
    return "".join("\t".join(row) + "\n" for row in rows)


ENGLISH, GERMAN = zip(*PAIRS, strict=True)
NUMBERS = [str(i) for i in range(60)]
TABLES = {
    "wmt.tsv": separated(ENGLISH, GERMAN),
    "deu.txt": separated(ENGLISH, GERMAN, ["CC-BY 2.0 (France) Attribution: tatoeba.org #1"] * 60),
    "pairs.tsv": separated(NUMBERS, ENGLISH, NUMBERS, GERMAN),
    "named.tsv": separated(GERMAN, ENGLISH, header=("de", "en")),
    "named.csv": "target,source\n" + "".join(f'"{de}","{en.replace(chr(34), chr(34) * 2)}"\n' for en, de in PAIRS),
    "a.jsonl": "".join(json.dumps({"de": de, "en": en, "id": 1}) + "\n" for en, de in PAIRS),
    "hub.jsonl": "".join(json.dumps({"translation": {"en": en, "de": de}}) + "\n" for en, de in PAIRS),
    "list.json": json.dumps([{"src": en, "tgt": de} for en, de in PAIRS]),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_every_layout_gives_the_same_pairs(tmp_path, name, packed):
    path = tmp_path / (name + ".gz" * packed)
    content = TABLES[name].encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    corpus = load_multi30k(path)
    assert sorted(pair for part in corpus for pair in zip(*part, strict=True)) == sorted(PAIRS)
    assert [len(part.source) for part in corpus] == [54, 3, 3]
    (tmp_path / "one.en").write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    (tmp_path / "one.de.bz2").write_bytes(bz2.compress(("\n".join(GERMAN)).encode()))
    for file in ("one.en", "one.de.bz2"):
        assert load_multi30k(tmp_path / file).fingerprint == corpus.fingerprint
    if "named" in name or "json" in name:
        other = load_multi30k(path, "de", "en") if "src" not in TABLES[name] and "source" not in TABLES[name] else None
        if other:
            assert sorted(other.train.source + other.test.source + other.validation.source) == sorted(GERMAN)


def test_no_sentence_is_in_two_parts(tmp_path):
    """Tatoeba has several translations of one sentence, and several sentences with one translation."""
    pairs = [(f"source {i % 40}", f"target {i % 37}") for i in range(400)]
    (tmp_path / "a.tsv").write_text(separated(*zip(*pairs, strict=True)))
    corpus = load_multi30k(tmp_path / "a.tsv")
    parts = [set(zip(*part, strict=True)) for part in corpus]
    assert all(parts) and set.union(*parts) <= set(pairs)
    assert len({source for source, _ in parts[1]}) == len({source for source, _ in parts[2]}) == 2
    for i in range(3):
        for k in range(i):
            assert not {source for source, _ in parts[i]} & {source for source, _ in parts[k]}
    assert not {target for _, target in parts[0]} & {target for _, target in parts[1] | parts[2]}


def test_empty_sides_are_left_out_with_a_warning(tmp_path):
    (tmp_path / "a.en").write_text("\n".join([*ENGLISH, "", "more"]))
    (tmp_path / "a.de").write_text("\n".join([*GERMAN, "mehr", " "]))
    with pytest.warns(UserWarning, match=r"a\.en: 2 pairs with an empty side are left out"):
        corpus = load_multi30k(tmp_path / "a.en")
    assert sum(len(part.source) for part in corpus) == 60


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "one\n" * 30, ": line 1: expected a text in en and one in de, got the columns 0"),
        ("a.tsv", "a\tb\tc\td\te\n", ": line 1: expected a text in en and one in de, got the columns 0, 1, 2, 3, 4"),
        ("a.tsv", "a\tb\nc\n", ": line 2: expected 2 columns, as in the first line, got 1"),
        ("a.tsv", "a\tb\n", ": expected at least 20 different sentences to translate, got 1"),
        (
            "a.jsonl",
            '{"en": "a", "fr": "b"}\n',
            ": line 1: expected a text in en and one in de, got the columns en, fr",
        ),
        ("a.jsonl", '{"en": "a", "de": 1}\n', ": line 1: expected a text in en and one in de"),
        ("a.en", "a\n", ".*a.de: no such file, packed or not; expected the two sides of a text beside each other"),
    ],
)
def test_pairs_that_cannot_be_read(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=f"{'' if message.startswith('.') else path}{message}"):
        load_multi30k(path)
