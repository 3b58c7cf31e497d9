import errno
import hashlib
import http.server
import socket
import threading

import pooch
import pytest

from scratchformer.data import DataError, NoConnection, cache_dir, fetch

CONTENT = b"a small file\n" * 1000
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()
WRONG = "sha256:" + "0" * 64


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests += 1
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:500] if self.path == "/cut" else CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SCRATCHFORMER_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache"


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests = 0
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def left_behind(folder):
    return sorted(file.name for file in folder.rglob("*")) if folder.exists() else []


def one_line(error):
    message = str(error.value)
    assert ("no connection" in message or "in time" in message) == isinstance(error.value, NoConnection)
    assert "\n" not in message
    assert "--data PATH" in message
    return message


def test_cache_dir(monkeypatch, folder):
    assert cache_dir() == folder
    monkeypatch.setenv("SCRATCHFORMER_DATA", "")
    assert cache_dir() == pooch.os_cache("scratchformer")
    monkeypatch.setenv("SCRATCHFORMER_DATA", "~/somewhere")
    assert "~" not in str(cache_dir())


@pytest.mark.parametrize("checksum", [SHA256, MD5])
def test_fetch_downloads_once(server, folder, checksum, caplog):
    path = fetch(f"{server.url}/file", checksum, "file.txt")
    assert path == folder / "file.txt"
    assert path.read_bytes() == CONTENT
    assert fetch(f"{server.url}/file", checksum, "file.txt") == path
    assert server.requests == 1
    assert left_behind(folder) == ["file.txt"]
    assert not caplog.records


def test_a_damaged_copy_is_replaced(server, folder):
    folder.mkdir()
    (folder / "file.txt").write_bytes(b"half of i")
    assert fetch(f"{server.url}/file", SHA256, "file.txt").read_bytes() == CONTENT


def test_wrong_checksum(server, folder):
    with pytest.raises(DataError) as error:
        fetch(f"{server.url}/file", WRONG, "file.txt")
    message = one_line(error)
    assert "checksum" in message and f"{server.url}/file" in message and WRONG in message
    assert left_behind(folder) == []


@pytest.mark.parametrize(("page", "word"), [("missing", "404"), ("cut", "127.0.0.1")])
def test_server_errors(server, folder, page, word):
    with pytest.raises(DataError, match=word) as error:
        fetch(f"{server.url}/{page}", SHA256, "file.txt")
    one_line(error)
    assert left_behind(folder) == []


def test_no_network(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(NoConnection, match=f"no connection to 127.0.0.1:{port}") as error:
        fetch(f"http://127.0.0.1:{port}/file", SHA256, "file.txt")
    one_line(error)
    assert left_behind(folder) == []


def test_server_that_does_not_answer_in_time(folder, monkeypatch):
    monkeypatch.setattr("pooch.downloaders.DEFAULT_TIMEOUT", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(NoConnection, match="in time") as error:
            fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/file", SHA256, "file.txt")
    one_line(error)
    assert left_behind(folder) == []


def test_full_disk(server, folder, monkeypatch):
    def full(self, url, output_file, pooch, check_only=False):
        with open(output_file, "wb") as file:
            file.write(CONTENT[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", full)
    with pytest.raises(DataError, match="No space left on device") as error:
        fetch(f"{server.url}/file", SHA256, "file.txt")
    one_line(error)
    assert left_behind(folder) == []


def test_cache_folder_that_cannot_be_made(server, folder):
    folder.write_text("a file, where the folder should be")
    with pytest.raises(DataError) as error:
        fetch(f"{server.url}/file", SHA256, "file.txt")
    one_line(error)
