"""Pack a built site into the package: `python .ci/pack_site.py SITE`. The same site gives the same archive."""

import sys
import zipfile
from pathlib import Path

ARCHIVE = Path(__file__).resolve().parent.parent / "scratchformer" / "site.zip"
LEFT_OUT = (".doctrees", ".buildinfo", "objects.inv")  # what only Sphinx reads


def pack(site: Path, archive: Path) -> None:
    """Write all files of the folder `site` to `archive`."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(site.rglob("*"), key=Path.as_posix):
            name = path.relative_to(site)
            if path.is_file() and name.parts[0] not in LEFT_OUT:
                entry = zipfile.ZipInfo(name.as_posix())  # dated 1980
                packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "index.html").is_file():
        sys.exit("error: expected the folder of a site: python .ci/pack_site.py SITE")
    pack(Path(sys.argv[1]), ARCHIVE)
