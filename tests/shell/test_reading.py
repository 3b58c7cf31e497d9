import bz2
import gzip
import io
import lzma
import os
import pickle
import sys
import tarfile
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save

from scratchformer.data import load_enwik8, load_text
from scratchformer.shell import reading
from scratchformer.shell.reading import DataError, read_bytes, read_json, read_text
from scratchformer.shell.unpacking import read_unpacked


class Refused(ValueError):
    pass


@pytest.mark.skipif(os.name != "posix", reason="needs the links and devices that POSIX has")
def test_what_is_no_file_is_named(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_bytes(b"text")
    assert read_bytes(tmp_path / "link") == b"text"
    for path, message in [
        (tmp_path, "expected a file, got a folder"),
        ("/dev/zero", "expected a file, got a FIFO or a device"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "none", "No such file or directory"),
        (tmp_path / "file" / "none", "Not a directory"),
    ]:
        for read in read_bytes, read_text, read_json, read_unpacked:
            with pytest.raises(Refused, match=message) as refused:
                read(path, Refused)
            assert str(refused.value).startswith(str(path))


def test_limits(tmp_path):
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.truncate(reading.MAX_BYTES + 1)  # a hole: it takes no room on the disk
    for read in read_bytes, read_text, read_json, read_unpacked:
        with pytest.raises(DataError, match=r"huge: expected at most [\d,]+ bytes, got 4,294,967,297$"):
            read(path)
    path.write_bytes(gzip.compress(b" " * 100_000))
    assert read_unpacked(path) == b" " * 100_000
    with pytest.raises(DataError, match=r"huge: unpacks to more than 99,999 bytes"):
        read_unpacked(path, max_bytes=99_999)


def test_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(path) == "{}"
    assert read_json(path) == {}
    path.write_bytes(b"{}\xef\xbb")
    with pytest.raises(DataError, match=r"text is damaged: not UTF-8 at byte 2"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,}', "Expecting property name"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ("{},[]" * 500_001, "more than 1,000,000 objects and lists"),
        ("[1, 2]", r"expected an object \{...\}, got \[1, 2\]"),
    ],
)
def test_json_that_is_damaged(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(Refused, match=rf"config\.json is damaged: {message}"):
        read_json(path, Refused, len(text))


def test_json_that_is_right(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(r'{"a": 1, "a": 1, "b": ["\ud83d\ude00", 1e400, null]}')
    assert read_json(path) == {"a": 1, "b": ["😀", float("inf"), None]}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (POINTER, r"a Git LFS pointer, .* git lfs pull"),
        (PAGE, "a web page"),
        (b"\xef\xbb\xbf\n<?xml version='1.0'?>\n<!-- a\nb -->\n" + PAGE.lower(), "a web page"),
        (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "a web page"),
    ],
)
def test_what_stands_in_for_a_file_is_named(tmp_path, content, what):
    for name, read in ("a.txt", read_text), ("a.json", read_json), ("a.gz", load_enwik8):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{path}: {what}"):
            read(path)


def test_a_page_is_text_if_its_name_says_so(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(PAGE)
    assert read_text(path) == PAGE.decode() and load_enwik8(path).name == "page.html"


TEXT = "The film was good, wasn’t it? ".encode() * 50


def packed(kind, text=TEXT, names=("a.txt",)):
    """`text` as a file of another kind."""
    buffer = io.BytesIO()
    if kind == "tar":
        with tarfile.open(fileobj=buffer, mode="w:") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
    elif kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("folder/", "")
            archive.writestr("__MACOSX/a.txt", "of macOS")
            for name in names:
                archive.writestr(name, text)
    elif kind == "zst":
        zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
        return zstd.compress(text)
    elif kind in ("gz", "bz2", "xz"):
        return {"gz": gzip, "bz2": bz2, "xz": lzma}[kind].compress(text)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "kinds", ["gz", "bz2", "xz", "zst", "zip", "tar", "gz gz", "tar gz", "gz zip", "tar xz", "zip tar"]
)
def test_a_packed_text_is_unpacked(tmp_path, kinds):
    content = TEXT
    for kind in (kinds := kinds.split()):
        content = packed(kind, content)
    path = tmp_path / "a"
    path.write_bytes(content)
    assert load_text(path) == TEXT == np.concatenate(load_enwik8(path)[1:]).tobytes()
    for size in (len(content) // 2, len(content) - 9):
        path.write_bytes(content[:size])
        if "tar" != kinds[-1]:  # the end of a tar is padding
            with pytest.raises(DataError, match=rf"^{path}: truncated or corrupt"):
                load_text(path)


def test_what_unpacks_to_far_more_than_text_does_is_refused(tmp_path):
    path = tmp_path / "a"
    zeros = bytes(20 << 20)
    for kinds in (("gz",), ("bz2",), ("xz",), ("zip",), ("tar", "gz"), ("gz", "gz"), ("zip", "tar")):
        content = zeros
        for kind in kinds:
            content = packed(kind, content)
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"^{path}: unpacks to more than 16,777,216 bytes"):
            load_text(path)


def test_without_its_package_a_zstandard_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x04\x58abcdefgh")
    for name in ("compression", "backports"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=rf"^{path}: packed by Zstandard: pip install 'scratchformer\[files\]'"):
        load_text(path)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (packed("zip", names=("a", "b")), "a zip archive of 2 files: 'a', 'b' and so on; expected a single one"),
        (packed("tar", names=("a", "b")), "a tar archive of 2 files|no train review"),
        (packed("tar", names=()), "a tar archive of 0 files|binary data|no train review"),
        (b"PAR1\x15\4\x15\0", "a Parquet file|damaged"),
        (b"GGUF\3\0\0\0", "a GGUF file"),
        (b"\x7fELF\2\1\1\0", "binary data"),
        (pickle.dumps({"weight": [1.0, 2.0]}), "a pickle"),
        (save({"a": np.ones(3)}), "binary data"),
        ("text".encode("utf-16"), "binary data"),
        (np.arange(100, dtype=np.float32).tobytes(), "binary data"),
        (np.random.default_rng(0).integers(1, 256, 400, np.uint8).tobytes(), "binary data"),  # without a NUL
    ],
)
def test_a_file_of_another_kind_is_no_text(tmp_path, content, what, compressed):
    path = tmp_path / ("a.gz" if compressed else "a")
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(DataError, match=rf"^{path}: .*({what})"):
        load_enwik8(path)


@pytest.mark.parametrize(
    "content",
    [
        "x^α + 1, 日本語, \u00a0é".encode(),
        "Café, naïve".encode("latin-1"),
        "“Café”".encode("cp1252"),
        "Привет".encode("koi8-r"),
        "今日は".encode("shift-jis"),
        "今日は".encode("euc-jp"),
        b"\xef\xbb\xbftext",
        b"a\r\nb\r\n\tc\x0c\x0b",
        b"\x1b[31mred\x1b[0m",
        b"PK is short for Phil Katz, BZh for bzip2, %PDF for PDF",
        b"<p>a part of a page</p>",
        b"version 1 of the text",
        b"a",
    ],
)
def test_text_in_any_encoding_of_bytes_is_text(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert np.concatenate(load_enwik8(path)[1:]).tobytes() == content


def test_an_encoding_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes("the\ncafé\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"damaged: not UTF-8 at byte 7; convert text in another encoding"):
        read_text(path)


def test_a_file_replaced_by_one_that_is_too_large_is_refused(tmp_path, monkeypatch):
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    path.write_text("{}")
    other.write_text(" " * 100)
    monkeypatch.setattr(reading, "open", lambda *args: (os.replace(other, path), open(*args))[1], raising=False)
    with pytest.raises(DataError, match="expected at most 10 bytes, got 100"):
        read_bytes(path, max_bytes=10)
