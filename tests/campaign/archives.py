"""Data files that are damaged, cut short, enormous, or not what their names say."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from area import Area, Case
from damage import damage_bytes, damage_json, replace_by_no_file, size_of

from scratchformer.data import (
    Subwords,
    Vocabulary,
    load_enwik8,
    load_imdb,
    load_imdb_subwords,
    load_multi30k,
    read_splits,
)

WORDS = "the a film was good bad long short play actor plot of and but not very I saw it again don't élan naïve".split()
MULTI30K = [f"{part}.{language}" for part in ("train", "val", "test_2016_flickr") for language in ("en", "de")]
Check = Callable[[Any], str | None]


class Archives(Area):
    name = "archives"

    def prepare(self, folder: Path) -> None:
        draw = random.Random(0)
        self.text = _words(draw, 20_000).encode()
        self.reviews = _reviews(draw)
        self.tar = _tar([(tarfile.TarInfo(name), text.encode()) for name, text in self.reviews.items()])
        self.tgz = gzip.compress(self.tar, mtime=0)
        lines = "".join(_words(draw, draw.randrange(3, 12)) + "\n" for _ in range(60))
        self.lines = {name: lines.encode() for name in MULTI30K}
        self.vocabulary = Vocabulary.build([self.text.decode()], 100)
        self.subwords = {"bpe": Subwords.bpe([lines], 60), "wordpiece": Subwords.wordpiece([lines], 60)}
        (folder / "imdb.tar.gz").write_bytes(self.tgz)
        self.imdb = _imdb(folder / "imdb.tar.gz")

    def case(self, draw: random.Random, folder: Path) -> Case:
        kinds = (self.corpus, self.corpus, self.archive, self.archive, self.members, self.members, self.reviews_folder)
        case = draw.choice((*kinds, self.multi30k, self.multi30k, self.words, self.tokens, self.bomb))(draw, folder)
        return case._replace(size=size_of(folder))

    def corpus(self, draw: random.Random, folder: Path) -> Case:
        """enwik8 or another text: in a zip, in a gzip, or not compressed."""
        kind = draw.choice(("enwik8.zip", "enwik8.gz", "enwik8"))
        path = folder / kind
        method = draw.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        right = {
            "enwik8.zip": lambda: _zip("enwik8", self.text, method),
            "enwik8.gz": lambda: gzip.compress(self.text, mtime=0),
            "enwik8": lambda: self.text,
        }[kind]()
        load = draw.choice((load_enwik8, load_enwik8, load_enwik8, lambda _: load_enwik8(folder)))

        def run() -> bytes:
            return np.concatenate(load(path)[1:]).tobytes()

        if (what := _right_or_no_file(draw, path, right)) is not None:
            return _case(what, run, lambda found: None if found == self.text else "another text", (kind, str(folder)))
        what, data = damage_bytes(draw, right)
        path.write_bytes(data)
        # A file of two gzips is a valid gzip of both texts.
        same = (
            None if kind == "enwik8" else lambda found: None if found in (self.text, 2 * self.text) else "another text"
        )
        return Case(f"{kind}: {what}", run, "either", (kind, str(folder)), check=same)

    def archive(self, draw: random.Random, folder: Path) -> Case:
        """IMDb's archive with damage to the gzip, whose checksum covers every byte."""
        path = folder / "aclImdb.tar.gz"
        load = draw.choice((_imdb, _imdb, _splits, lambda _: _imdb(folder)))
        if (what := _right_or_no_file(draw, path, self.tgz)) is not None:
            return _case(what, lambda: load(path), self.same, (path.name, str(folder)))
        what, data = damage_bytes(draw, self.tgz)
        path.write_bytes(data)
        return Case(f"IMDb: {what}", lambda: load(path), "either", (path.name,), check=self.same)

    def same(self, found: Any) -> str | None:
        if isinstance(found, dict):
            texts = [text for texts, _ in found.values() for text in texts]
            return None if sorted(texts) == sorted(self.reviews.values()) else "other reviews"
        own = self.imdb
        equal = found.fingerprint == own.fingerprint and all(map(np.array_equal, found.test.ids, own.test.ids))
        return None if equal else "other reviews"

    def members(self, draw: random.Random, folder: Path) -> Case:
        """IMDb's archive with damage to the tar inside, which the checksum of the gzip does not show."""
        path = folder / "aclImdb.tar.gz"
        members = [(tarfile.TarInfo(name), text.encode()) for name, text in self.reviews.items()]
        if draw.random() < 0.3:
            what, tar = damage_bytes(draw, self.tar)
            check = self.same if what.startswith(("cut", "end")) else None
        else:
            what, tar = _strange_member(draw, members)
            check = None
        path.write_bytes(gzip.compress(tar, 1))
        load = draw.choice((_imdb, _splits, _imdb_subwords))
        check = None if load is _imdb_subwords else check
        return Case(f"IMDb's tar: {what}", lambda: load(path), "either", ("aclImdb", str(folder)), check=check)

    def reviews_folder(self, draw: random.Random, folder: Path) -> Case:
        for name, text in self.reviews.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "aclImdb/train/labeledBow.feat").write_text("1:1\n" * 40)
        load = draw.choice((_imdb, _splits))
        one = folder / draw.choice([*self.reviews, "aclImdb/train/labeledBow.feat", "aclImdb/train/pos"])
        if "unsup" in one.parts:
            load = _splits  # the other does not read it
        what = one.name
        roll = draw.random()
        if roll < 0.1:
            return Case("IMDb's folder", lambda: load(folder), "accepted", check=self.same)
        if roll < 0.2 and one.suffix == ".txt":
            one.write_bytes(b"\xef\xbb\xbf" + one.read_bytes())
            return Case(f"byte-order mark in {what}", lambda: load(folder), "accepted", check=self.same)
        if roll < 0.5:
            what = replace_by_no_file(draw, one)
            expect = "refused" if one.suffix == ".txt" else "either"
            return Case(what, lambda: load(folder), expect, (one.name, str(folder)))
        if one.is_dir():
            shutil.rmtree(one)
        else:
            what, data = damage_bytes(draw, one.read_bytes())
            one.write_bytes(data if draw.random() < 0.8 else b"word " * draw.choice((10, 100_000, 10_000_000)))
        return Case(f"{one.name}: {what}", lambda: load(folder), "either", (one.name, str(folder)))

    def multi30k(self, draw: random.Random, folder: Path) -> Case:
        packed = draw.random() < 0.5
        suffix = ".gz" if packed else ""
        for name, data in self.lines.items():
            (folder / (name + suffix)).write_bytes(gzip.compress(data, mtime=0) if packed else data)
        one = folder / (draw.choice(MULTI30K) + suffix)
        right = one.read_bytes()

        def same(found: Any) -> str | None:
            lines = self.lines[MULTI30K[0]].decode().splitlines()
            return None if all(side == lines for part in found for side in part) else "other sentences"

        def run() -> Any:
            return load_multi30k(folder)

        names = (one.name.removesuffix(".gz"), str(folder))
        if (what := _right_or_no_file(draw, one, right)) is not None:
            return _case(what, run, same, names)
        if draw.random() < 0.2:
            data = b"\xef\xbb\xbf" + self.lines[one.name.removesuffix(".gz")]
            one.write_bytes(gzip.compress(data) if packed else data)
            return Case(f"byte-order mark in {one.name}", run, "accepted", check=same)
        what, data = damage_bytes(draw, self.lines[one.name.removesuffix(".gz")])
        if packed and draw.random() < 0.5:
            one.write_bytes(gzip.compress(data))
            return Case(f"{one.name}, before it was packed: {what}", run, "either", names)
        if packed:
            what, data = damage_bytes(draw, right)
        one.write_bytes(data)
        return Case(f"{one.name}: {what}", run, "either", names, check=same if packed else None)

    def words(self, draw: random.Random, folder: Path) -> Case:
        path = folder / "vocabulary.txt"
        self.vocabulary.save(path)
        fingerprint = self.vocabulary.fingerprint if draw.random() < 0.5 else None

        def run() -> Any:
            return Vocabulary.load(path, fingerprint)

        def same(found: Any) -> str | None:
            return None if found.words == self.vocabulary.words else "other words"

        if (what := _right_or_no_file(draw, path, path.read_bytes())) is not None:
            return _case(what, run, same, (path.name,))
        what, data = damage_bytes(draw, path.read_bytes())
        path.write_bytes(data)
        return Case(f"vocabulary.txt: {what}", run, "either", (path.name,), check=same if fingerprint else None)

    def tokens(self, draw: random.Random, folder: Path) -> Case:
        path = folder / "vocabulary.json"
        vocabulary = draw.choice(list(self.subwords.values()))
        vocabulary.save(path)

        def run() -> Any:
            found = Subwords.load(path)
            found.encode("the film was good")
            return found

        def same(found: Any) -> str | None:
            return None if found.fingerprint == vocabulary.fingerprint else "other tokens"

        if (what := _right_or_no_file(draw, path, path.read_bytes())) is not None:
            return _case(what, run, same, (path.name,))
        if draw.random() < 0.3:
            what, data = damage_bytes(draw, path.read_bytes())
        else:
            what, text = damage_json(draw, json.loads(path.read_bytes()))
            data = text.encode(errors="surrogatepass")
        path.write_bytes(data)
        return Case(f"vocabulary.json: {what}", run, "either", (path.name,))

    def bomb(self, draw: random.Random, folder: Path) -> Case:
        """A small file that unpacks to a large one."""
        unit = draw.choice(
            (b"\0", b" ", b"a", b"\n", b"a b\n", b"good film\n", b"\xff", b"<br />", _words(draw, 50).encode())
        )
        kind = draw.choice(("enwik8.gz", "enwik8.zip", "train.en.gz", "review", "pax", "many"))
        size = 60_000_000 if kind == "enwik8.zip" else draw.choice((50_000_000, 400_000_000))
        path = folder / kind
        if kind == "enwik8.zip":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("enwik8", "w") as member:
                for part in _parts(unit, size):
                    member.write(part)
            return Case(f"{kind} of {size} × {unit[:9]!r}", lambda: load_enwik8(path), "refused", (kind,))
        if kind == "enwik8.gz":
            _pack(path, _parts(unit, size))
            return Case(f"{kind} of {size} × {unit[:9]!r}", lambda: load_enwik8(path), "refused", (kind,))
        if kind == "train.en.gz":
            for name, data in self.lines.items():
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            _pack(path, _parts(unit, size))
            return Case(f"{kind} of {size} × {unit[:9]!r}", lambda: load_multi30k(folder), "refused", (kind,))
        path = folder / "aclImdb.tar.gz"
        if kind == "many":
            count = size // 50_000
            text = (unit * 1000)[:1000]
            members = (
                part for i in range(count) for part in (_header(f"aclImdb/train/pos/{i}_9.txt", 1000), text + bytes(24))
            )
            _pack(path, members)
            expect = "either"
        else:
            header = _header(
                "aclImdb/train/pos/5_9.txt" if kind == "review" else "./x",
                size,
                "0" if kind == "review" else draw.choice("xgLK"),
            )
            _pack(path, [header, *_parts(unit, size), bytes(-size % 512), self.tar])
            expect = "refused"
        return Case(f"IMDb with a {kind} of {size} × {unit[:9]!r}", lambda: _splits(path), expect, ("aclImdb",))


def _case(what: str, run: Callable, same: Check, names: tuple[str, ...]) -> Case:
    return Case(what, run, "accepted" if what == "right" else "refused", names, check=same)


def _right_or_no_file(draw: random.Random, path: Path, right: bytes) -> str | None:
    """Write the right file in one case of ten, and something that is not a file in another one of ten. Returns what was
    written, or None if nothing was.
    """
    roll = draw.random()
    if roll > 0.2:
        return None
    path.write_bytes(right)
    return "right" if roll < 0.1 else replace_by_no_file(draw, path)


def _imdb(path: Path) -> Any:
    return load_imdb(path, vocabulary_size=100, validation=10)


def _imdb_subwords(path: Path) -> Any:
    return load_imdb_subwords(path, vocabulary_size=100, validation=10)


def _splits(path: Path) -> Any:
    return read_splits(path, optional=("unsup",))


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def _reviews(draw: random.Random) -> dict[str, str]:
    """The text of each member of a small archive."""
    found = {}
    for part in ("train/pos", "train/neg", "test/pos", "test/neg", "train/unsup"):
        for i in range(20):
            found[f"aclImdb/{part}/{i}_{7 if 'pos' in part else 3}.txt"] = f"{_words(draw, draw.randrange(3, 30))} {i}"
    return found


def _tar(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _header(name: str, size: int, kind: str = "0", **fields: bytes) -> bytes:
    """A tar header with a right checksum. fields: bytes that replace others, such as `at_100=b"..."`."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind.encode()
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT)[-512:])
    for place, value in fields.items():
        start = int(place.removeprefix("at_"))
        header[start : start + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header[:512])


def _strange_member(draw: random.Random, members: list[tuple[tarfile.TarInfo, bytes]]) -> tuple[str, bytes]:
    """The archive with a strange member at a random place."""
    place = draw.randrange(len(members))
    name = draw.choice((members[place][0].name, "aclImdb/train/pos/99_9.txt", "aclImdb/test/neg/99_1.txt", "x"))
    kind = draw.choice(("type", "size", "name", "content", "pax", "field", "chain", "twice", "without"))
    text = draw.choice((b"a good film", b"", b" ", b"\xff", b"\xef\xbb\xbfgood", b"\0" * 600, "é".encode() * 300))
    what, strange = f"{kind} of {name}: ", b""
    match kind:
        case "type":
            one = draw.choice("0123456789LKxgSVMXAD\0")
            what += repr(one)
            strange = _header(name, len(text), one) + _padded(text)
        case "size":
            size = draw.choice((0, 1, 511, 513, 10**6, 10**9, 8**11 - 1))
            field = draw.choice((
                b"%011o\0" % size, b"-0000000001\0", b"\x80" + bytes(3) + size.to_bytes(8, "big"),
                b"\x80" + b"\xff" * 11, b"\xff" * 12, b"99999999999\0", b" " * 12, b"\0" * 12, b"\xff" * 11 + b"\0",
                b"\x80\x01" + bytes(10),
            ))  # fmt: skip
            what += repr(field)
            strange = _header(name, 0, draw.choice("0000xgLKS5"), at_124=field) + _padded(text)
        case "name":
            name = draw.choice((
                "/etc/passwd", "../../x", "aclImdb/train/pos/../../../x", "aclImdb/train/pos/1_9.txt\n", "",
                f"aclImdb/train/pos/{'9' * 60}_1.txt", "aclImdb/train/pos/1_1.txt/", "a" * 100,
                "aclImdb//train/pos/9_9.txt", "aclImdb/train/pos/٣_9.txt", "./aclImdb/train/pos/77_9.txt",
            ))  # fmt: skip
            what += repr(name)
            strange = _header(name, len(text)) + _padded(text)
        case "content":
            text = draw.choice((b"a " * 2_000_000, b"word" * 1_000_000, "😀 ".encode() * 500_000, text))
            what += f"{len(text)} bytes"
            strange = _header(name, len(text)) + _padded(text)
        case "pax":
            records = draw.choice((
                b"17 path=../../x12\n", b"12 size=1e9\n", b"30 size=99999999999999999999\n", b"9 size=-1\n", b"0 a=b\n",
                b"99999999999999999999 path=x\n", b"13 mtime=nan\n", b"20 hdrcharset=BINARY\n", b"x" * 600,
                b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n", b"30 GNU.sparse.map=1,2,3,4,5,6\n", b"\xff" * 100,
                b"24 GNU.sparse.size=9999999\n25 GNU.sparse.numblocks=1\n", b"",
                b"16 size=99999999\n", b"6 a=\n" * 10_000
            ))  # fmt: skip
            what += repr(records[:40])
            one = draw.choice("xgX")
            strange = _header("pax", len(records), one) + _padded(records) + _header(name, len(text)) + _padded(text)
        case "field":
            at = draw.choice((0, 100, 108, 116, 136, 148, 156, 257, 263, 329, 337, 345))
            value = draw.randbytes(draw.randrange(1, 12))
            what += f"{value!r} at {at}"
            strange = _header(name, len(text), **{f"at_{at}": value}) + _padded(text)
        case "chain":
            count = draw.choice((3, 100, 5000))
            one = draw.choice("xgLK")
            what += f"{count} × {one}"
            strange = (_header("x", 12, one) + _padded(b"12 path=abc\n")) * count
        case "twice":
            other = members[place][1] if draw.random() < 0.5 else text
            strange = _header(members[place][0].name, len(other)) + _padded(other)
        case "without":
            members = [m for m in members if not m[0].name.startswith(f"aclImdb/{draw.choice(('train', 'test'))}/pos")]
    place = min(place, len(members))
    return what, _before(members, place, strange)


def _before(members: list[tuple[tarfile.TarInfo, bytes]], place: int, strange: bytes) -> bytes:
    """A tar with `strange` before member number `place`."""
    parts = [_header(info.name, len(data)) + _padded(data) for info, data in members]
    return b"".join([*parts[:place], strange, *parts[place:], bytes(1024)])


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def _zip(member: str, content: bytes, method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(zipfile.ZipInfo("other"), b"something else", method)
        archive.writestr(zipfile.ZipInfo(member), content, method)
    return buffer.getvalue()


def _parts(unit: bytes, size: int) -> list[bytes]:
    """About `size` bytes of repeated `unit`, in equal parts that share their memory."""
    part = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    return [part] * (size // len(part))


def _pack(path: Path, parts: Any) -> None:
    """Write a gzip of `parts`; equal parts are compressed once, since a gzip may have several members."""
    packed: dict[bytes, bytes] = {}
    with open(path, "wb") as file:
        for part in parts:
            if part not in packed:
                packed[part] = gzip.compress(part, 1)
            file.write(packed[part])
