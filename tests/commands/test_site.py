"""The site in the package: unpacked as a whole, into its own folder only, whatever the archive holds."""

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from scratchformer.commands import cli, site

PAGES = {"index.html": "<p>first", "operations/linear.html": "<p>linear"}


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """archive(files) puts an archive with these files in the place of the package's."""

    def write(files=PAGES, mode=0):
        with zipfile.ZipFile(tmp_path / "site.zip", "w") as packed:
            for name, text in files.items():
                entry = zipfile.ZipInfo(name)
                entry.external_attr = mode << 16
                packed.writestr(entry, text)
        return tmp_path / "site.zip"

    monkeypatch.setattr(site, "ARCHIVE", tmp_path / "site.zip")
    write()
    return write


def read(folder):
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    del found[site.CONTENTS]
    return found


def test_a_site_is_unpacked_once_and_replaced_as_a_whole(archive, tmp_path):
    folder = tmp_path / "folder" / "site"
    assert site.unpack(folder) == folder / "index.html"
    assert read(folder) == PAGES
    made = (folder / "index.html").stat().st_mtime_ns
    site.unpack(folder)
    assert (folder / "index.html").stat().st_mtime_ns == made
    archive({"index.html": "<p>second"})
    site.unpack(folder)
    assert read(folder) == {"index.html": "<p>second"}
    (folder / "index.html").unlink()
    site.unpack(folder)
    assert read(folder) == {"index.html": "<p>second"}
    assert os.listdir(folder.parent) == ["site"]


def test_other_folders_are_left_alone(archive, tmp_path):
    folder, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    site.unpack(folder)
    (folder / "notes").write_text("mine")
    archive({"index.html": "<p>second"})
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    for given, message in (
        (elsewhere, "with mine"),
        (folder, "with notes"),
        (link, "no link"),
        (elsewhere / "mine", "file"),
    ):
        with pytest.raises(ValueError, match=message):
            site.unpack(given)
    (folder / "notes").unlink()
    (folder / "index.html").unlink()
    (folder / "index.html").symlink_to(elsewhere / "mine")
    with pytest.raises(ValueError, match=r"index\.html"):
        site.unpack(folder)
    assert (elsewhere / "mine").read_text() == "mine"


def test_the_command_prints_and_opens(archive, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: not opened.append(address))
    monkeypatch.setenv("SCRATCHFORMER_DATA", str(tmp_path / "cache"))
    cli.run_command(["site"])
    page = tmp_path / "cache" / "site" / "index.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert opened == [page.as_uri()]
    cli.run_command(["site", "--to", str(tmp_path / "to"), "--no-open"])
    assert len(opened) == 1 and (tmp_path / "to" / "index.html").is_file()


def test_a_clone_is_told_to_build_the_site(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "ARCHIVE", tmp_path / "site.zip")
    with pytest.raises(ValueError, match="python -m sphinx docs site"):
        site.unpack(tmp_path / "site")


def test_a_built_site_is_packed_alike(archive, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / ".ci")
    import pack_site

    built = tmp_path / "built"
    for name, text in {**PAGES, ".doctrees/index": "x", ".buildinfo": "x"}.items():
        (built / name).parent.mkdir(parents=True, exist_ok=True)
        (built / name).write_text(text)
    pack_site.pack(built, site.ARCHIVE)
    first = site.ARCHIVE.read_bytes()
    site.unpack(tmp_path / "site")
    assert read(tmp_path / "site") == PAGES
    contents = json.loads((tmp_path / "site" / site.CONTENTS).read_text())
    assert contents["files"] == sorted(PAGES)
    pack_site.pack(built, site.ARCHIVE)
    assert site.ARCHIVE.read_bytes() == first
    del sys.modules["pack_site"]
