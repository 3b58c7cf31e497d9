import gzip

import pytest

from scratchformer.data import DataError, load_multi30k, multi30k

ENGLISH = ["a man .", "two dogs !"]
GERMAN = ["ein Mann .", "zwei Hunde und ein Ölfass !"]


@pytest.fixture
def folder(tmp_path):
    for stem in ("train", "val", "test_2016_flickr"):
        (tmp_path / f"{stem}.en").write_text("".join(f"{stem} {line}\n" for line in ENGLISH), encoding="utf-8")
        text = "".join(f"{stem} {line}\n" for line in GERMAN)
        (tmp_path / f"{stem}.de.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_both_directions(folder):
    data = load_multi30k(folder)
    assert data.train == (["train a man .", "train two dogs !"], ["train ein Mann .", f"train {GERMAN[1]}"])
    assert data.validation.source == ["val a man .", "val two dogs !"]
    assert data.test.target[1] == f"test_2016_flickr {GERMAN[1]}"
    other = load_multi30k(folder, "de", "en")
    assert (other.train.source, other.train.target) == (data.train.target, data.train.source)
    assert other.fingerprint != data.fingerprint == load_multi30k(folder).fingerprint


def test_a_changed_sentence_changes_the_fingerprint(folder):
    before = load_multi30k(folder).fingerprint
    (folder / "val.en").write_text("val a man .\nval two cats !\n")
    assert load_multi30k(folder).fingerprint != before


def test_a_file_that_is_missing(folder):
    (folder / "val.de.gz").unlink()
    with pytest.raises(DataError, match=r"neither val\.de nor val\.de\.gz in it"):
        load_multi30k(folder)
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        load_multi30k(folder / "nowhere")


def test_sides_of_different_lengths(folder):
    (folder / "train.en").write_text("a man .\n")
    with pytest.raises(DataError, match=r"train\.en has 1 lines, but train\.de\.gz has 2"):
        load_multi30k(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a man .\n\ntwo dogs !\n", ": line 2 is empty"),
        (b"a man .\n\xff\n", " is damaged: not UTF-8 at byte 8"),
        (b"", ": line 1 is empty"),
    ],
)
def test_a_file_that_is_damaged(folder, content, message):
    (folder / "train.en").write_bytes(content)
    with pytest.raises(DataError, match=rf"train\.en{message}"):
        load_multi30k(folder)


def test_an_archive_that_is_cut_short(folder):
    path = folder / "train.de.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"train\.de\.gz: truncated or corrupt"):
        load_multi30k(folder)


def test_without_a_folder_it_is_downloaded_with_its_checksums(folder, monkeypatch):
    asked = []

    def fetch(url, checksum, filename):
        asked.append((url, checksum, filename))
        name = url.rpartition("/")[2]
        return folder / name if (folder / name).exists() else folder / name.removesuffix(".gz")

    monkeypatch.setattr(multi30k, "fetch", fetch)
    assert load_multi30k() == load_multi30k(folder)
    assert len(asked) == len(set(asked)) == 6
    assert all(url.startswith("https://") and checksum.startswith("sha256:") for url, checksum, _ in asked)


def test_an_unknown_language(folder):
    with pytest.raises(DataError, match=r"neither train\.fr nor train\.fr\.gz in it"):
        load_multi30k(folder, "en", "fr")
    with pytest.raises(
        ValueError, match="target: expected 'en' or 'de', or a path to data in other languages, got 'fr'"
    ):
        load_multi30k(None, "en", "fr")
    for wrong in ("../de", "DE", ""):
        with pytest.raises(ValueError, match="source: expected a language, such as 'en' or 'de', got"):
            load_multi30k(folder, wrong)
    with pytest.raises(ValueError, match="target: expected another language than the source, 'de'"):
        load_multi30k(folder, "de", "de")


@pytest.mark.parametrize("place", ["data/task1/raw", "datasets/Multi30k"])
@pytest.mark.parametrize("test", ["test_2016_flickr", "test2016", "test"])
def test_where_others_put_it(folder, tmp_path, place, test):
    """A clone of the dataset's repository, and the folders and names of torchtext; in French and Czech too."""
    expected = load_multi30k(folder)
    (tmp_path / "clone" / place).mkdir(parents=True)
    for file in sorted(folder.glob("*.*")):
        if file.is_file():
            name = file.name.replace("test_2016_flickr", test).replace(".de", ".cs")
            file.rename(tmp_path / "clone" / place / name)
    assert load_multi30k(tmp_path / "clone", "en", "cs") == expected


def test_a_byte_order_mark_is_not_text(folder):
    expected = load_multi30k(folder)
    path = folder / "train.en"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_multi30k(folder) == expected


def test_a_file_that_unpacks_to_far_more_than_text_is_refused(folder):
    (folder / "train.de.gz").write_bytes(gzip.compress(b"ein Hund .\n" * 200_000))
    with pytest.raises(DataError, match=r"train\.de\.gz: unpacks to more than 1,048,576 bytes"):
        load_multi30k(folder)
