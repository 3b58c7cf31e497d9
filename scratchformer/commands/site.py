"""The site that comes with the package: an archive, unpacked into a folder that a browser opens without a network."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

from ..shell.files import expect_no_link, make_folder, replacing_folder
from ..shell.reading import read_json
from ..shell.text import printable

ARCHIVE = Path(__file__).parents[1] / "site.zip"  # made when a wheel is built: .ci/pack_site.py
FIRST = "index.html"
CONTENTS = "scratchformer-site.json"  # in an unpacked site: the archive's SHA-256, and the names of all files


def unpack(folder: Path) -> Path:
    """The first page of the site in `folder`, which is unpacked there unless this very site is there already.

    An earlier site is replaced as a whole. Raises ValueError if the package has no site, or if `folder` is a link or
    holds anything else.
    """
    if not ARCHIVE.exists():
        raise ValueError(
            "site: this installation has none, since a clone does not hold it; to build it, run in the clone: "
            "pip install -e '.[docs]' && python -m sphinx docs site"
        )
    digest = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()
    folder = folder.expanduser().absolute()
    expect_no_link(folder, ValueError)
    if not is_there(folder, digest):
        make_folder(folder.parent)
        with zipfile.ZipFile(ARCHIVE) as archive, replacing_folder(folder) as new:
            archive.extractall(new)
            files = [info.filename for info in archive.infolist() if not info.is_dir()]
            contents = {"sha256": digest, "files": sorted(files)}
            (new / CONTENTS).write_text(json.dumps(contents), encoding="utf-8", newline="\n")
    return folder / FIRST


def is_there(folder: Path, digest: str) -> bool:
    """Whether the site of this archive is in `folder`. Raises ValueError if it holds a file that is of no site."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise ValueError(f"--to: expected a folder, got the file {printable(str(folder))}")
    contents = read_json(folder / CONTENTS) if (folder / CONTENTS).is_file() else {}
    listed = contents.get("files")
    known = {CONTENTS, *map(str, listed if isinstance(listed, list) else ())}
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not is_plain_folder(path)}
    if others := sorted(name for name, path in there.items() if name not in known or path.is_symlink()):
        raise ValueError(
            f"--to: expected a new or empty folder, or one with an earlier site, got {printable(str(folder))} "
            f"with {printable(others[0])}"
        )
    return contents.get("sha256") == digest and there.keys() == known


def is_plain_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
