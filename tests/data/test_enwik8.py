import gzip
import hashlib
import io
import os
import platform
import zipfile
from pathlib import Path

import numpy as np
import pytest

from scratchformer.data import DataError, as_text, load_enwik8, load_standard_library

HEADER = b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.3/" xml:lang="en">\n'
TEXT = HEADER + "".join(f"<page>{n} é {n * n}</page>\n" for n in range(60)).encode()


def make_zip(member="enwik8", content=TEXT, compression=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in (("../outside.txt", b"not to be written"), (member, content)):
            archive.writestr(zipfile.ZipInfo(name), data, compression)  # without the time of day
    return buffer.getvalue()


def whole(corpus):
    return np.concatenate(corpus[1:]).tobytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("enwik8.zip", make_zip()),
        ("enwik8", TEXT),
        ("enwik8.gz", gzip.compress(TEXT, mtime=0)),
        ("enwik8-first.gz", gzip.compress(TEXT, mtime=0)),
    ],
)
@pytest.mark.parametrize("through_folder", [False, True])
def test_every_kind_of_file(tmp_path, monkeypatch, name, content, through_folder):
    path = tmp_path / "here" / name
    path.parent.mkdir()
    path.write_bytes(content)
    monkeypatch.chdir(path.parent)
    corpus = load_enwik8(path.parent if through_folder else path)
    assert whole(corpus) == TEXT
    assert corpus.name == f"enwik8 (first {len(TEXT):,} bytes)"
    assert [file.name for file in tmp_path.rglob("*")] == ["here", name]


@pytest.mark.parametrize("size", [1, 2, 19, 20, 100, 1001])
def test_parts(tmp_path, size):
    path = tmp_path / "text"
    path.write_bytes(TEXT[:size])
    corpus = load_enwik8(path)
    assert whole(corpus) == TEXT[:size]
    assert corpus.train.dtype == corpus.validation.dtype == corpus.test.dtype == np.uint8
    assert abs(len(corpus.train) - 0.9 * size) < 1
    assert abs(len(corpus.validation) - 0.05 * size) < 1 + 1e-9


def test_a_complete_file_in_a_folder_comes_before_a_part(tmp_path):
    (tmp_path / "enwik8-first-100.gz").write_bytes(gzip.compress(TEXT[:100]))
    (tmp_path / "enwik8.zip").write_bytes(make_zip())
    assert whole(load_enwik8(tmp_path)) == TEXT


def test_an_archive_comes_before_the_unpacked_file(tmp_path):
    """The archive has a checksum; the plain file may be truncated."""
    (tmp_path / "enwik8").write_bytes(TEXT[:100])
    for name, content in ("enwik8.gz", gzip.compress(TEXT, mtime=0)), ("enwik8.zip", make_zip()):
        (tmp_path / name).write_bytes(content)
        assert whole(load_enwik8(tmp_path)) == TEXT
    for name in "enwik8.gz", "enwik8.zip":
        (tmp_path / name).unlink()
    assert whole(load_enwik8(tmp_path)) == TEXT[:100]


def test_names(tmp_path, monkeypatch):
    path = tmp_path / "story.txt"
    path.write_bytes(b"Once upon a time. " * 10)
    assert load_enwik8(path).name == "story.txt"

    path.write_bytes(TEXT)
    monkeypatch.setattr("scratchformer.data.enwik8.MEMBER_SIZE", len(TEXT))
    assert load_enwik8(path).name == "enwik8"
    path.write_bytes(TEXT + b"more")  # such as enwik9, which begins like enwik8
    assert load_enwik8(path).name == "story.txt"


@pytest.mark.parametrize(
    ("name", "content"),
    [("enwik8.zip", make_zip()), ("enwik8.gz", gzip.compress(TEXT, mtime=0)), ("enwik8.bin", make_zip())],
)
def test_truncated_at_every_place(tmp_path, name, content):
    path = tmp_path / name
    for size in range(4, len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=f"{name}: truncated or corrupt"):
            load_enwik8(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("enwik8.zip", make_zip()),
        ("enwik8.zip", make_zip(compression=zipfile.ZIP_STORED)),
        ("enwik8.gz", gzip.compress(TEXT, mtime=0)),
    ],
)
def test_no_damaged_byte_goes_unseen(tmp_path, name, content):
    path = tmp_path / name
    caught = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x25]) + content[place + 1 :])
        try:
            assert whole(load_enwik8(path)) == TEXT
        except DataError as error:
            assert name in str(error)
            caught += 1
    assert caught > len(content) // 2


def test_missing_and_empty(tmp_path):
    with pytest.raises(DataError, match="absent: No such file"):
        load_enwik8(tmp_path / "absent")
    with pytest.raises(DataError, match=r"no file enwik8, enwik8\.zip or enwik8\*\.gz in it"):
        load_enwik8(tmp_path)
    for name, content in [
        ("a.txt", b""),
        ("a.gz", b""),
        ("a.zip", b""),
        ("b.gz", gzip.compress(b"", mtime=0)),
        ("b.zip", make_zip(content=b"")),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: empty"):
            load_enwik8(path)
    path.write_bytes(make_zip(member="folder/enwik8"))
    with pytest.raises(DataError, match=r"b\.zip: a zip archive of 2 files: .*; expected a single one"):
        load_enwik8(path)


def test_without_a_path_the_official_archive_is_fetched(tmp_path, monkeypatch):
    path = tmp_path / "enwik8.zip"
    path.write_bytes(make_zip())
    asked = []
    monkeypatch.setattr("scratchformer.data.enwik8.fetch", lambda *args: asked.append(args) or path)
    assert whole(load_enwik8()) == TEXT
    assert asked == [
        (
            "http://mattmahoney.net/dc/enwik8.zip",
            "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            "enwik8.zip",
        )
    ]


def test_standard_library():
    corpus = load_standard_library()
    size = sum(map(len, corpus[1:]))
    assert 1_000_000 < size <= 8_000_000
    assert corpus.name == f"python-{platform.python_version()}-stdlib ({size:,} bytes)"
    assert all(np.array_equal(a, b) for a, b in zip(corpus[1:], load_standard_library()[1:], strict=True))
    for part in corpus[1:]:
        assert b"\ndef " in part.tobytes()
    # The three parts are alike: their byte frequencies are near each other.
    train, validation, test = (np.bincount(part, minlength=256) / len(part) for part in corpus[1:])
    assert np.abs(train - validation).sum() < 0.2
    assert np.abs(train - test).sum() < 0.2


def test_standard_library_leaves_out_what_it_should(tmp_path, monkeypatch):
    kept = {"a.py": b"# a\n", "sub/b.py": b"# b\n", "sub/testing.py": b"# c\n"}
    left_out = [
        "test/x.py",
        "sub/tests/x.py",
        "site-packages/x.py",
        "encodings/x.py",
        "lib2to3/x.py",
        "x.txt",
    ]
    for name, content in {**kept, **dict.fromkeys(left_out, b"# x\n"), "latin.py": b"# \xe9\n"}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    content = whole(load_standard_library())
    assert sorted(content.splitlines()) == [b"# a", b"# b", b"# c"]
    walk = os.walk

    def walk_backwards(folder):
        for parent, folders, names in walk(folder):
            yield parent, folders, sorted(names, reverse=True)

    monkeypatch.setattr("os.walk", walk_backwards)
    assert whole(load_standard_library()) == content
    monkeypatch.setattr("os.walk", lambda folder: ((p, f, sorted(n)) for p, f, n in walk(folder)))
    assert whole(load_standard_library()) == content
    monkeypatch.setattr("scratchformer.data.enwik8._STANDARD_LIBRARY_LIMIT", 6)
    assert len(whole(load_standard_library())) == 6
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "absent"))
    with pytest.raises(DataError, match="without the sources"):
        load_standard_library()


@pytest.mark.skipif("SCRATCHFORMER_ENWIK8" not in os.environ, reason="SCRATCHFORMER_ENWIK8 gives no path")
def test_the_real_corpus():
    corpus = load_enwik8(os.environ["SCRATCHFORMER_ENWIK8"])
    size = sum(map(len, corpus[1:]))
    assert corpus.name == ("enwik8" if size == 100_000_000 else f"enwik8 (first {size:,} bytes)")
    assert corpus.train[:10].tobytes() == b"<mediawiki"
    assert len(corpus.train) == size * 9 // 10
    assert b"[[" in corpus.test.tobytes()


def test_the_fingerprint_depends_only_on_the_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(TEXT, mtime=0))
    (tmp_path / "c.txt").write_bytes(TEXT[:-1] + b"~")
    first, same, other = (load_enwik8(tmp_path / name) for name in ("a.txt", "b.txt.gz", "c.txt"))
    assert first.fingerprint == same.fingerprint == hashlib.sha256(TEXT).hexdigest()
    assert other.fingerprint != first.fingerprint


def test_characters_cut_at_the_ends_are_dropped():
    text = "é€𝄞 a 𝄞€é"
    raw = np.frombuffer(text.encode(), np.uint8)
    assert as_text(raw, "x") == text
    for start in range(len(raw) + 1):
        for stop in range(start, len(raw) + 1):
            found = as_text(raw[start:stop], "x")
            assert found in text
            assert stop - start - len(found.encode()) <= 6
            assert len(found.encode()) == stop - start or start or stop < len(raw)


def test_bytes_that_are_not_utf8_are_refused():
    for damaged, place in (b"ab\xffcd", 2), (b"\x80ab\xc3(", 3), (b"\x80" * 5, 3):
        with pytest.raises(DataError, match=f"^story: not UTF-8 at byte {place}$"):
            as_text(np.frombuffer(damaged, np.uint8), "story")


def test_only_the_beginning_is_taken(tmp_path):
    """It is split as a file that has no more would be; a larger limit changes nothing."""
    data = b"".join(b"line %04d\n" % i for i in range(256))
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "b.txt").write_bytes(data[:1000])
    found, whole = load_enwik8(tmp_path / "a.txt", 1000), load_enwik8(tmp_path / "a.txt")
    assert found.name == "a.txt (first 1,000 bytes)"
    for part, expected in zip(found[1:], load_enwik8(tmp_path / "b.txt")[1:], strict=True):
        np.testing.assert_array_equal(part, expected)
    assert (
        load_enwik8(tmp_path / "a.txt", 2560).fingerprint
        == whole.fingerprint
        == load_enwik8(tmp_path / "a.txt", 9999).fingerprint
    )
    assert load_enwik8(tmp_path / "a.txt", 2560).name == "a.txt"
    with pytest.raises(ValueError, match="limit"):
        load_enwik8(tmp_path / "a.txt", 0)
    assert "(first 5,000 bytes)" in load_enwik8("stdlib", 5000).name
    assert load_enwik8(Path("stdlib"), 5000).name == load_enwik8("stdlib", 5000).name
    draft = tmp_path / "my (draft) text.txt"
    draft.write_bytes(b" " * 5000)
    assert load_enwik8(draft, 1000).name == "my (draft) text.txt (first 1,000 bytes)"


def test_only_bytes_are_text():
    with pytest.raises(TypeError, match=r"^data: expected an array of bytes, uint8, got int64$"):
        as_text(np.array([104, 105]), "x")
