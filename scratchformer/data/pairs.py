"""Sentences and their translations: parallel files, and tables of pairs as people have them."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import NamedTuple

from ..rng import Key
from ..shell.reading import DataError, decoded
from ..shell.text import printable
from ..shell.unpacking import MAX_UNPACKED, PACKED_SUFFIXES, read_unpacked
from .tables import rows

SHARE, MAX_HELD_OUT = 20, 1000  # one in so many sources is held out for validation, and as many for the test, at most


class Pairs(NamedTuple):
    """Sentences and their translations: source[i] and target[i] are a pair."""

    source: list[str]
    target: list[str]


class ParallelCorpus(NamedTuple):
    train: Pairs
    validation: Pairs
    test: Pairs

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all sentences, in hexadecimal: equal only for equal data in the same direction."""
        digest = hashlib.sha256()
        for part in self:
            for side in part:
                digest.update("\n".join(side).encode() + b"\0")
        return digest.hexdigest()


def load_pairs(path: Path, source: str, target: str) -> ParallelCorpus:
    """The sentence pairs in a file, or in two parallel files, divided into three parts.

    source, target: the languages, such as "en" and "de". The file is one of:

    - one of two files of parallel lines, whose names are the same except for the language at the end: NAME.en, NAME.de
    - JSON lines, CSV, TSV, Parquet or Arrow with columns named after the languages, or source and target, which may be
      parts of a column `translation`
    - a TSV without such names: the first column is the source and the second the target, as in the files of WMT; a
      third one, such as the attribution of Tatoeba's sentences, is not read; of four columns, as in Tatoeba's own
      export, the second and the fourth are

    All of them may be packed. Pairs with an empty side are left out, as a warning says. A twentieth of the sources, at
    most 1,000, are drawn for validation, and as many for the test, each with all its translations; the draw is always
    the same. Pairs whose target is in one of these parts are not trained on.

    Raises DataError, naming the file and the line.
    """
    partner = _partner(path, source, target)
    pairs = (
        _from_table(path, source, target)
        if partner is None
        else list(zip(*parallel_lines(*partner, empty=True), strict=True))
    )
    kept = list(dict.fromkeys(pair for pair in pairs if all(pair)))
    if empty := sum(not all(pair) for pair in pairs):
        warnings.warn(f"{printable(str(path), 4096)}: {empty:,} pairs with an empty side are left out", stacklevel=3)
    return _divided(kept, path)


def parallel_lines(*files: Path, max_bytes: int = MAX_UNPACKED, empty: bool = False) -> Pairs:
    """The lines of two files that are translations of each other. Raises DataError if their numbers differ, or if a
    line is empty, unless `empty` is true.
    """
    texts = [decoded(read_unpacked(file, max_bytes=max_bytes), file).removesuffix("\n") for file in files]
    lines = [[line.strip() for line in text.split("\n")] for text in texts]
    for file, side in zip(files, lines, strict=True):
        if not empty and "" in side:
            raise DataError(f"{file}: line {side.index('') + 1} is empty")
    if len(lines[0]) != len(lines[1]):
        raise DataError(
            f"{files[0]} has {len(lines[0]):,} lines, but {files[1].name} has {len(lines[1]):,}: "
            "they are not translations of each other"
        )
    return Pairs(*lines)


def _partner(path: Path, source: str, target: str) -> tuple[Path, Path] | None:
    """The two parallel files of which `path` is one; None if its name does not end with one of the languages."""
    packing = path.suffix if path.suffix in PACKED_SUFFIXES else ""
    name = path.name.removesuffix(packing)
    for language in (source, target):
        if name.endswith(f".{language}"):
            stem = name.removesuffix(language)
            files = [_packed(path.with_name(stem + each), packing) for each in (source, target)]
            return files[0], files[1]
    return None


def _packed(path: Path, packing: str) -> Path:
    """The file at `path`, packed like its partner or otherwise."""
    for suffix in (packing, "", *PACKED_SUFFIXES):
        if (file := path.with_name(path.name + suffix)).is_file():
            return file
    raise DataError(f"{path}: no such file, packed or not; expected the two sides of a text beside each other")


def _from_table(path: Path, source: str, target: str) -> list[tuple[str, str]]:
    names = [(source, "source", "src"), (target, "target", "tgt")]
    pairs = []
    for where, row in rows(path, {name for side in names for name in side}, quoted=False):
        if isinstance(row.get("translation"), dict):
            row = row["translation"]
        columns: list[str | None] = [next((name for name in side if name in row), None) for side in names]
        if columns == [None, None] and "0" in row:
            columns = list({2: "01", 3: "01", 4: "13"}.get(len(row), "")) or columns
        sides = [text for column in columns if column is not None and isinstance(text := row[column], str)]
        if len(sides) < 2:
            got = ", ".join(printable(str(name)[:40]) for name in list(row)[:6])
            raise DataError(f"{where}: expected a text in {source} and one in {target}, got the columns {got}")
        pairs.append((sides[0].strip(), sides[1].strip()))
    return pairs


def _divided(pairs: list[tuple[str, str]], path: Path) -> ParallelCorpus:
    """Three parts, none of which shares a source with another, and the first no target with the others."""
    sources = list(dict.fromkeys(source for source, _ in pairs))
    size = min(MAX_HELD_OUT, len(sources) // SHARE)
    if not size:
        raise DataError(f"{path}: expected at least {SHARE} different sentences to translate, got {len(sources)}")
    order = Key(0).fold("pairs").generator().permutation(len(sources))
    part_of = {sources[i]: 1 + k // size for k, i in enumerate(order[: 2 * size].tolist())}
    parts = [[pair for pair in pairs if part_of.get(pair[0], 0) == part] for part in range(3)]
    held_out = {target for part in parts[1:] for _, target in part}
    parts[0] = [pair for pair in parts[0] if pair[1] not in held_out]
    return ParallelCorpus(*(Pairs(*map(list, zip(*part, strict=True))) for part in parts))
