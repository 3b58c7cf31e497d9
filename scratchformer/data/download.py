"""Downloads: each file once, with its checksum verified, and with plain messages if something fails.

Checksums are written "md5:..." or "sha256:...". pooch downloads to a temporary file beside the destination. The file is
renamed only if its checksum is right, and is deleted otherwise.
"""

from __future__ import annotations

from pathlib import Path

from ..shell.files import cache_dir
from ..shell.reading import DataError, expect_file


class NoConnection(DataError):
    """A download failed because of the network: no connection, or no answer in time."""


def fetch(url: str, checksum: str, filename: str) -> Path:
    """The path of `filename` in `cache_dir()`, downloaded from `url` unless a file with that checksum is there.

    Raises NoConnection if the server cannot be reached, and DataError if it refuses, the checksum is wrong or the file
    cannot be written. Each message is one line. A failed download leaves no file behind.
    """
    import pooch  # here and below, since it takes 7 MB of memory that training does not need
    from requests.exceptions import ConnectionError, Timeout

    folder = cache_dir()
    if (folder / filename).exists():
        expect_file(folder / filename)
    pooch.get_logger().setLevel("WARNING")
    try:
        file = pooch.retrieve(url, known_hash=checksum, fname=filename, path=folder, progressbar=True)
    except (OSError, ValueError) as error:
        kind = NoConnection if isinstance(error, (ConnectionError, Timeout)) else DataError
        raise kind(
            f"download of {url} to {folder} failed: {_reason(error, url, checksum)}; to use a local copy: --data PATH"
        ) from error
    return Path(file)


def _reason(error: Exception, url: str, checksum: str) -> str:
    """Why a download failed, in one line, unlike the libraries' own messages."""
    from urllib.parse import urlsplit

    from requests.exceptions import ConnectionError, HTTPError, RequestException, Timeout

    host = urlsplit(url).netloc
    if isinstance(error, Timeout):
        return f"{host} did not answer in time"
    if isinstance(error, HTTPError) and error.response is not None:
        return f"{host} answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, ConnectionError):
        return f"no connection to {host}"
    if isinstance(error, OSError) and not isinstance(error, RequestException):
        return error.strerror or str(error)
    if isinstance(error, ValueError) and "hash" in str(error):
        return f"the file from {host} does not have the checksum {checksum}"
    return " ".join(str(error).split())
