import gzip
import os

import pytest

from scratchformer.data import reading
from scratchformer.data.reading import DataError, read_bytes, read_json, read_text, read_unpacked


class Refused(ValueError):
    pass


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_bytes(b"text")
    assert read_bytes(tmp_path / "link") == b"text"
    for path, message in [
        (tmp_path / "fifo", "expected a regular file, got a FIFO"),
        (tmp_path, "expected a file, got a folder"),
        ("/dev/zero", "expected a regular file, got a device"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "none", "No such file or directory"),
        (tmp_path / "file" / "none", "Not a directory"),
        ("a\0b", "not the name of a file"),
    ]:
        for read in read_bytes, read_text, read_json, read_unpacked:
            with pytest.raises(Refused, match=message) as refused:
                read(path, Refused)
            assert str(refused.value).startswith((str(path), repr(str(path))))


def test_limits(tmp_path):
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.truncate(reading.MOST + 1)  # a hole: it takes no room on the disk
    for read in read_bytes, read_text, read_json, read_unpacked:
        with pytest.raises(DataError, match=r"huge: expected at most [\d,]+ bytes, got 4,294,967,297$"):
            read(path)
    path.write_bytes(gzip.compress(b" " * 100_000))
    assert read_unpacked(path) == b" " * 100_000
    with pytest.raises(DataError, match=r"huge: unpacks to more than 99,999 bytes"):
        read_unpacked(path, most=99_999)


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
        ('{"a": 1,}', "not JSON at line 1, column "),
        ("", "not JSON at line 1, column 1"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"a": %s}' % ("9" * 10_000), "a number with thousands of digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "two values for 'c'"),
        (r'{"a": "\ud800"}', "an unpaired surrogate"),
        ("[1, 2]", r"expected an object \{...\}, got \[1, 2\]"),
        ('"%s"' % ("a" * 1000), r"expected an object \{...\}, got 'a{76}...$"),
    ],
)
def test_json_that_is_damaged(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(Refused, match=rf"config\.json is damaged: {message}"):
        read_json(path, Refused)


def test_json_that_is_right(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(r'{"a": 1, "a": 1, "b": ["\ud83d\ude00", 1e400, null]}')
    assert read_json(path) == {"a": 1, "b": ["😀", float("inf"), None]}
