import gzip
import io
import os
import random
import re
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from scratchformer.data import (
    DataError,
    Vocabulary,
    load_imdb,
    load_imdb_subwords,
    read_splits,
)
from scratchformer.data.imdb import hold_out

WORDS = "a film the story was good bad dull bright long short acting never always again".split()


def read_reviews(path, split):
    return read_splits(path, (split,))[split]


def make_reviews(per_class=12, unsup=5):
    """Member names and texts, with ids 9, 10, 11 so that sorting as text and as numbers differ."""
    draw = random.Random(0)
    reviews = {}
    for split in ("train", "test"):
        for kind, rating in (("pos", 8), ("neg", 2)):
            for number in range(per_class):
                text = f"{split} {kind} number{number} " + " ".join(draw.choices(WORDS, k=draw.randint(3, 30)))
                reviews[f"aclImdb/{split}/{kind}/{number}_{rating}.txt"] = text.encode()
    for number in range(unsup):
        reviews[f"aclImdb/train/unsup/{number}_0.txt"] = f"unsup number{number}".encode()
    return reviews


def make_tar(reviews, extra=(), order=None):
    """The bytes of a tar with `reviews`, a dict from names to contents, and `extra` TarInfo objects."""
    buffer = io.BytesIO()
    names = list(reviews) if order is None else order
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info in extra:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(reviews[name])
            tar.addfile(info, io.BytesIO(reviews[name]))
    return buffer.getvalue()


def write_archive(path, reviews, **options):
    path.write_bytes(gzip.compress(make_tar(reviews, **options), 6))
    return path


def write_folder(path, reviews):
    for name, content in reviews.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return path


def same(first, second):
    return first.keys() == second.keys() and all(
        first[split][0] == second[split][0] and np.array_equal(first[split][1], second[split][1]) for split in first
    )


def test_what_is_read_from_an_archive(tmp_path):
    reviews = make_reviews()
    archive = write_archive(tmp_path / "a.tar.gz", reviews)
    texts, labels = read_reviews(archive, "test")
    expected = [
        reviews[f"aclImdb/test/{kind}/{number}_{rating}.txt"].decode()
        for kind, rating in (("neg", 2), ("pos", 8))
        for number in range(12)
    ]
    assert texts == expected
    assert labels.dtype == np.int64
    assert labels.tolist() == [0] * 12 + [1] * 12
    texts, labels = read_reviews(archive, "unsup")
    assert texts == [f"unsup number{number}" for number in range(5)]
    assert labels.tolist() == [-1] * 5
    assert len(read_reviews(archive, "train")[0]) == 24
    with pytest.raises(ValueError, match="train, test, unsup, got 'valid'"):
        read_reviews(archive, "valid")


def test_every_source_gives_the_same_in_the_same_order(tmp_path):
    reviews = make_reviews()
    shuffled = random.Random(1).sample(list(reviews), len(reviews))
    expected = read_splits(write_archive(tmp_path / "plain.tar.gz", reviews))

    assert same(read_splits(write_archive(tmp_path / "shuffled.tar.gz", reviews, order=shuffled)), expected)
    dotted = {f"./{name}": content for name, content in reviews.items()}
    assert same(read_splits(write_archive(tmp_path / "dotted.tar.gz", dotted)), expected)

    holder = write_folder(tmp_path / "holder", {name: reviews[name] for name in shuffled})
    assert same(read_splits(holder), expected)
    assert same(read_splits(holder / "aclImdb"), expected)
    (holder / "aclImdb").rename(tmp_path / "renamed")
    assert same(read_splits(str(tmp_path / "renamed")), expected)

    several = tmp_path / "several"
    several.mkdir()
    (several / "notes.txt").write_text("not data")
    (several / "other.tar.gz").write_text("not an archive, and not to be read")
    for word in ("train/unsup", "test", "train/pos", "train/neg"):
        part = {name: content for name, content in reviews.items() if name.startswith(f"aclImdb/{word}")}
        part["aclImdb/train/unsup/2_0.txt"] = reviews["aclImdb/train/unsup/2_0.txt"]  # in all of them
        write_archive(several / f"aclImdb_{word.replace('/', '_')}.tar.gz", part)
    assert same(read_splits(several), expected)


def test_reviews_that_share_a_number_are_both_kept(tmp_path):
    reviews = make_reviews() | {"aclImdb/train/pos/3_10.txt": b"another one"}
    texts, labels = read_reviews(write_archive(tmp_path / "a.tar.gz", reviews), "train")
    assert len(texts) == len(labels) == 25


def hostile_members():
    outside = tarfile.TarInfo("../outside.txt")
    climbing = tarfile.TarInfo("../aclImdb/train/pos/900_9.txt")
    inner = tarfile.TarInfo("aclImdb/train/pos/../../../901_9.txt")
    absolute = tarfile.TarInfo("/aclImdb/train/pos/902_9.txt")
    for info in (outside, climbing, inner, absolute):
        info.size = 3
    links = []
    for number, (kind, target) in enumerate(
        [
            (tarfile.SYMTYPE, "/etc/passwd"),
            (tarfile.LNKTYPE, "aclImdb/train/pos/1_8.txt"),
            (tarfile.DIRTYPE, ""),
        ]
    ):
        link = tarfile.TarInfo(f"aclImdb/train/pos/{910 + number}_9.txt")
        link.type, link.linkname = kind, target
        links.append(link)
    wrong = []
    for name in (
        "train/pos/920_9.txt",
        "aclImdb/train/pos/921_9.txt.bak",
        "aclImdb/train/pos/x_9.txt",
        "aclImdb/train/pos/922_9.txt\n",
        "aclImdb/train/labeledBow.feat",
        "aclImdb/test/unsup/923_0.txt",
        "xaclImdb/train/pos/924_9.txt",
    ):
        info = tarfile.TarInfo(name)
        info.size = 3
        wrong.append(info)
    return [outside, climbing, inner, absolute, *links, *wrong]


def test_hostile_members_are_skipped_and_nothing_is_written(tmp_path, monkeypatch):
    reviews = make_reviews()
    plain = write_archive(tmp_path / "plain.tar.gz", reviews)
    hostile = write_archive(tmp_path / "hostile.tar.gz", reviews, extra=hostile_members())
    deep = tmp_path / "some" / "folder"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    before = sorted(tmp_path.rglob("*"))
    assert same(read_splits(hostile), read_splits(plain))
    assert sorted(tmp_path.rglob("*")) == before


def test_truncated_archive_at_every_place(tmp_path):
    reviews = make_reviews(per_class=2, unsup=1)
    whole = gzip.compress(make_tar(reviews))
    archive = tmp_path / "cut.tar.gz"
    for size in range(2, len(whole)):
        archive.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"cut\.tar\.gz: truncated"):
            read_splits(archive)


def test_no_damaged_byte_goes_unseen(tmp_path):
    reviews = make_reviews(per_class=2, unsup=1)
    whole = gzip.compress(make_tar(reviews))
    archive = tmp_path / "flipped.tar.gz"
    archive.write_bytes(whole)
    expected = read_splits(archive)
    caught = 0
    for place in range(0, len(whole)):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 0x24]) + whole[place + 1 :])
        try:
            assert same(read_splits(archive), expected)
        except DataError as error:
            assert "flipped.tar.gz" in str(error)
            caught += 1
    assert caught > len(whole) - 10  # only fields such as the time in gzip's own header do not matter


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(tmp_path):
    reviews = make_reviews(per_class=2, unsup=1)
    tar = bytearray(make_tar(reviews))
    place = tar.index(b"aclImdb/test/pos/1_8.txt")
    tar[place + 1] ^= 1
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(gzip.compress(bytes(tar)))
    with pytest.raises(DataError, match=r"a\.tar\.gz: .*the archive does not end with its end marker"):
        read_splits(archive)


@pytest.mark.parametrize("content", [b"", b"plain text, no archive", gzip.compress(b"no tar inside" * 100, mtime=0)])
def test_what_is_not_an_archive(tmp_path, content):
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar\.gz: (truncated or corrupt|.*not a tar archive)"):
        read_splits(archive)


def test_extended_headers_are_skipped(tmp_path):
    """Some programs write such a header for the time of every file, or for a long name."""
    reviews, buffer = make_reviews(), io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x" * 5000}) as tar:
        for name, content in {"a" * 150: b"another", **reviews}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 0.5
            tar.addfile(info, io.BytesIO(content))
    (tmp_path / "pax.tar.gz").write_bytes(gzip.compress(buffer.getvalue()))
    expected = read_splits(write_archive(tmp_path / "plain.tar.gz", reviews))
    assert same(read_splits(tmp_path / "pax.tar.gz"), expected)


def test_sizes_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("scratchformer.data.imdb.MAX_ARCHIVE", 1_000_000)
    path = tmp_path / "a.tar.gz"
    write_archive(path, make_reviews() | {"aclImdb/test/pos/99_8.txt": b"a " * 600_000})
    with pytest.raises(DataError, match=r"99_8\.txt: expected at most 1,048,576 bytes, got 1,200,000$"):
        read_splits(path)
    header = tarfile.TarInfo("large")
    for size, message in (
        (2_000_000, "unpacks to more than 1,000,000 bytes"),
        (-1, "bad|truncated"),
    ):
        header.size = size
        path.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(max(0, size)), 1))
        with pytest.raises(DataError, match=rf"a\.tar\.gz: .*({message})"):
            read_splits(path)


def test_a_byte_order_mark_is_not_text(tmp_path):
    reviews = make_reviews()
    expected = read_splits(write_archive(tmp_path / "plain.tar.gz", reviews))
    marked = {name: b"\xef\xbb\xbf" + content for name, content in reviews.items()}
    assert same(read_splits(write_archive(tmp_path / "marked.tar.gz", marked)), expected)


def test_missing_and_empty_places(tmp_path):
    with pytest.raises(DataError, match="absent: no such file or folder"):
        read_reviews(tmp_path / "absent", "train")
    with pytest.raises(DataError, match=r"neither the folder aclImdb nor an archive"):
        read_reviews(tmp_path, "train")
    with pytest.raises(DataError, match=r"a\.tar\.gz: no train review in it; expected aclImdb/train/"):
        read_reviews(write_archive(tmp_path / "a.tar.gz", {"readme.txt": b"hello"}), "train")
    labelled = write_archive(tmp_path / "b.tar.gz", make_reviews(unsup=0))
    with pytest.raises(DataError, match="no unsup review in it; expected aclImdb/train/unsup/"):
        read_splits(labelled)
    assert len(read_splits(labelled, ("train", "test"))) == 2


@pytest.mark.parametrize("write", [write_folder, write_archive])
@pytest.mark.parametrize(
    ("missing", "named"),
    [("train/pos test/pos", "train/pos"), ("train/neg", "train/neg"), ("test/pos", "test/pos"), ("test/", "test")],
)
def test_a_class_that_is_missing_is_named(tmp_path, write, missing, named):
    """As after interrupted unpacking: on a single class every model would be right."""
    reviews = {name: x for name, x in make_reviews().items() if not any(part in name for part in missing.split())}
    path = write(tmp_path / "a.tar.gz", reviews)
    with pytest.raises(DataError, match=rf"a\.tar\.gz: no {named} review in it; expected aclImdb/{named}/"):
        load_imdb(path, validation=2)


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"caf\xe9 noir", "not UTF-8 at byte 3"),
        (b"", "empty review"),
        (b" \n<br /> ... !", "empty review"),
    ],
)
def test_a_bad_review_is_named(tmp_path, as_folder, content, word):
    reviews = make_reviews() | {"aclImdb/test/pos/7_8.txt": content}
    path = write_folder(tmp_path / "f", reviews) if as_folder else write_archive(tmp_path / "a.tar.gz", reviews)
    with pytest.raises(DataError, match=word) as error:
        read_reviews(path, "test")
    assert "aclImdb/test/pos/7_8.txt" in str(error.value)
    assert len(read_reviews(path, "train")[0]) == 24  # a split that is not requested is not read


def decoded(part, vocabulary):
    return [vocabulary.decode(ids) for ids in part.ids]


def test_load_imdb_splits_and_builds_the_vocabulary_from_the_training_part_alone(tmp_path):
    archive = write_archive(tmp_path / "a.tar.gz", make_reviews())
    data = load_imdb(archive, vocabulary_size=200, validation=6, seed=3)
    assert data.train.labels.tolist() == [0] * 9 + [1] * 9
    assert data.validation.labels.tolist() == [0] * 3 + [1] * 3
    assert data.test.labels.tolist() == [0] * 12 + [1] * 12
    assert all(ids.dtype == np.int32 for ids in data.train.ids)
    assert data.train.labels.dtype == np.int64

    # Each text contains its number; those held out are in no training review of the same class.
    texts, _ = read_reviews(archive, "train")
    train, validation = set(decoded(data.train, data.vocabulary)), decoded(data.validation, data.vocabulary)
    assert train < set(texts) and len(train) == 18
    held_out = [i for i, text in enumerate(texts) if data.vocabulary.decode(data.vocabulary.encode(text)) not in train]
    assert [data.vocabulary.decode(data.vocabulary.encode(texts[i])) for i in held_out] == validation
    assert Vocabulary.build(sorted(train), 200).words == data.vocabulary.words
    assert "test" not in data.vocabulary.words
    assert len(load_imdb(archive, vocabulary_size=10, validation=6).vocabulary) == 10


def test_all_reviews_of_a_film_are_held_out_or_none():
    """Eight films, each with two reviews of class 0 and one of class 1, and 24 reviews without names."""
    names = [first + last for first in ("Mar", "Hol", "Poi", "Mai") for last in ("ple", "mes")]
    texts = [f"we met {name} again {i}" for name in names for i in range(2)] + [f"dull {i}" for i in range(8)]
    texts += [f"they saw {name} there" for name in names] + [f"fine {i}" for i in range(16)]
    drawn = set()
    for seed in range(8):
        parts = hold_out(texts, np.repeat([0, 1], 24), 8, seed, "reviews")
        train, validation = ({name for name in names if name in " ".join(part)} for part, _ in parts)
        assert not train & validation
        assert [np.bincount(labels).tolist() for _, labels in parts] == [[20, 20], [4, 4]]
        drawn.add(frozenset(validation))
    assert len(drawn) > 2


def test_a_film_is_divided_if_none_fits():
    texts = [f"we met {name} again {i}" for name in ("Marple", "Holmes") for i in range(3)] + ["fine"] * 6
    (train, _), (validation, labels) = hold_out(texts, np.repeat([0, 1], 6), 8, 0, "reviews")
    assert (len(train), len(validation), labels.tolist()) == (4, 8, [0] * 4 + [1] * 4)


def test_load_imdb_is_a_function_of_its_seed(tmp_path):
    reviews = make_reviews()
    archive = write_archive(tmp_path / "a.tar.gz", reviews)
    folder = write_folder(tmp_path / "f", reviews)
    first, second, other = (
        load_imdb(path, validation=8, seed=seed) for path, seed in ((archive, 0), (folder, 0), (archive, 1))
    )
    assert first.vocabulary.fingerprint == second.vocabulary.fingerprint
    for a, b in zip(first[:3], second[:3], strict=True):
        assert np.array_equal(a.labels, b.labels)
        assert all(np.array_equal(x, y) for x, y in zip(a.ids, b.ids, strict=True))
    assert decoded(first.validation, first.vocabulary) != decoded(other.validation, other.vocabulary)


def test_load_imdb_with_a_given_vocabulary(tmp_path):
    archive = write_archive(tmp_path / "a.tar.gz", make_reviews())
    vocabulary = Vocabulary(["train", "pos"])
    data = load_imdb(archive, validation=0, vocabulary=vocabulary)
    assert data.vocabulary is vocabulary
    assert len(data.train.ids) == 24 and len(data.validation.ids) == 0
    assert {int(ids[0]) for ids in data.train.ids} == {2}
    assert {int(ids[1]) for ids in data.train.ids} == {1, 3}


@pytest.mark.parametrize("count", [24, 25])
def test_a_validation_part_that_leaves_nothing(tmp_path, count):
    archive = write_archive(tmp_path / "a.tar.gz", make_reviews())
    with pytest.raises(DataError, match=f"{count} validation reviews"):
        load_imdb(archive, validation=count)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(validation=-2), ValueError, "validation: expected a number >= 0, got -2"),
        (dict(validation=2.0), TypeError, "validation: expected an integer, got 2.0"),
        (dict(vocabulary="x"), TypeError, "vocabulary: expected a Vocabulary or None, got 'x'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        load_imdb("no/such/archive.tar.gz", **options)


def test_without_a_path_the_official_archive_is_fetched(tmp_path, monkeypatch):
    archive = write_archive(tmp_path / "a.tar.gz", make_reviews())
    asked = []
    monkeypatch.setattr("scratchformer.data.imdb.fetch", lambda *args: asked.append(args) or archive)
    assert len(load_imdb(validation=2).test.ids) == 24
    assert asked == [
        (
            "http://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            "md5:7c2ac02c03563afcf9b574c7e56c153a",
            "aclImdb_v1.tar.gz",
        )
    ]


@pytest.mark.slow
@pytest.mark.skipif("SCRATCHFORMER_IMDB" not in os.environ, reason="SCRATCHFORMER_IMDB gives no path")
def test_the_real_dataset():
    data = load_imdb(os.environ["SCRATCHFORMER_IMDB"])
    for part, size in ((data.train, 22_500), (data.validation, 2_500), (data.test, 25_000)):
        assert len(part.ids) == size
        assert np.bincount(part.labels).tolist() == [size // 2, size // 2]
    assert len(data.vocabulary) == 50_000
    assert data.vocabulary.words[2] == "the"
    unknown = np.mean(np.concatenate(data.test.ids) == 1)
    assert unknown < 0.02


def test_the_fingerprint_covers_everything_but_the_test_part(tmp_path):
    reviews = make_reviews()
    first = load_imdb(write_archive(tmp_path / "a.tar.gz", reviews), validation=4)
    again = load_imdb(write_folder(tmp_path / "folder", reviews), validation=4)
    assert first.fingerprint == again.fingerprint
    assert len(first.fingerprint) == 64
    texts, labels = first.train.ids, first.train.labels
    flipped = labels.copy()
    flipped[0] = 1 - flipped[0]
    moved = [np.concatenate(texts[:2]), texts[0][:0], *texts[2:]]
    changed = [
        first._replace(train=replace(first.train, labels=flipped)),
        first._replace(train=replace(first.train, ids=[texts[0][::-1] + 1, *texts[1:]])),
        first._replace(train=replace(first.train, ids=moved)),
        first._replace(validation=replace(first.validation, ids=first.validation.ids[::-1])),
        load_imdb(tmp_path / "folder", validation=4, seed=1),
    ]
    assert len({first.fingerprint, *(data.fingerprint for data in changed)}) == 6


def test_subwords_and_texts_to_pre_train_on(tmp_path):
    """The parts are as in `load_imdb`; pre-training texts and vocabulary contain nothing that is held out."""
    pytest.importorskip("tokenizers")
    reviews = make_reviews()
    copied = reviews["aclImdb/test/pos/3_8.txt"]
    reviews["aclImdb/train/unsup/77_0.txt"] = copied  # some of IMDb's are like this
    reviews["aclImdb/train/unsup/78_0.txt"] = b"pineapple<br /><br />pineapple"
    reviews["aclImdb/train/unsup/79_0.txt"] = b"it"  # one token
    archive = write_archive(tmp_path / "a.tar.gz", reviews)
    data = load_imdb_subwords(archive, vocabulary_size=400, validation=6, seed=4)
    words = load_imdb(archive, vocabulary_size=400, validation=6, seed=4)
    numbers = [re.findall(r"number ?(\d+)", " ".join(decoded(part, part_of.vocabulary)))
               for part_of in (data, words) for part in part_of[:3]]  # fmt: skip
    assert numbers[:3] == numbers[3:]
    assert all(np.array_equal(a.labels, b.labels) for a, b in zip(data[:3], words[:3], strict=True))

    texts = [data.vocabulary.decode(ids) for ids in data.unlabelled]
    assert len(texts) == 18 + 5 + 1
    assert texts[-1] == "pineapple pineapple"
    held_out = set(decoded(data.validation, data.vocabulary)) | set(decoded(data.test, data.vocabulary))
    assert not held_out & set(texts)
    assert "test" not in data.vocabulary.tokenizer.get_vocab()
    assert all(ids.dtype == np.int32 and len(ids) > 1 for ids in data.unlabelled)

    again = load_imdb_subwords(archive, validation=6, seed=4, vocabulary=data.vocabulary)
    assert again.vocabulary is data.vocabulary and again.fingerprint == data.fingerprint
    fewer = data._replace(unlabelled=data.unlabelled[1:])
    assert len({data.fingerprint, fewer.fingerprint, data._replace(unlabelled=()).fingerprint}) == 3


def test_without_unlabelled_reviews_the_training_part_is_pre_trained_on(tmp_path):
    pytest.importorskip("tokenizers")
    archive = write_archive(tmp_path / "a.tar.gz", make_reviews(unsup=0))
    assert len(load_imdb_subwords(archive, 300, validation=6).unlabelled) == 18
    with pytest.raises(DataError, match="no unsup review in it"):
        read_splits(archive)
