"""Running programs as a user does, on small data and without a network."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scratchformer.rng import Key

HERE = Path(__file__).parent
PROGRAMS = {
    "enwik8": [HERE.parents[1] / "examples" / "enwik8.py"],
    "imdb": [HERE.parents[1] / "examples" / "imdb.py"],
    "tiny": [HERE / "tiny_training.py"],
    "scratchformer": ["-m", "scratchformer"],
    "python": [],
}
WORDS = "a the film story acting plot was is not very good bad dull bright long short never again it i".split()


class Run(NamedTuple):
    """A finished run: its folder, and what the program printed."""

    folder: Path
    output: str


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """No data cache, and proxies that refuse every connection."""
    nowhere = "http://127.0.0.1:9"
    proxies = {name: nowhere for base in ("http_proxy", "https_proxy", "all_proxy") for name in (base, base.upper())}
    cache = {"SCRATCHFORMER_DATA": str(tmp_path_factory.mktemp("cache")), "PYTHONUTF8": "1"}
    return {k: v for k, v in os.environ.items() if k.lower() != "no_proxy"} | proxies | cache


@pytest.fixture(scope="session")
def start(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.Popen]:
    """start("enwik8", "--steps", 3, ...) starts a program in a folder of its own; other options are Popen's."""

    def start(program: str, *args: object, **options: Any) -> subprocess.Popen:
        command = [sys.executable, *PROGRAMS[program], *args]
        return subprocess.Popen(
            [part if isinstance(part, bytes) else str(part) for part in command],
            **{
                "env": environment,
                "cwd": tmp_path_factory.mktemp("cwd"),
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )

    return start


@pytest.fixture(scope="session")
def call(start: Callable[..., subprocess.Popen]) -> Callable[..., subprocess.CompletedProcess]:
    """call("enwik8", "--steps", 3, ...) runs a program to its end; `status` is the exit status that is expected."""

    def call(program: str, *args: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess:
        process = start(program, *args, **options)
        out, err = process.communicate(timeout=120)
        assert process.returncode == status, err
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(process.args, status, out, err)

    return call


@pytest.fixture(scope="session")
def fail(call: Callable[..., subprocess.CompletedProcess]) -> Callable[..., str]:
    """fail("enwik8", "--steps", 0, ...) runs a program that must end with one line on standard error, `error: ...`, and
    exit status 1; returns the line.
    """

    def fail(program: str, *args: object, **options: Any) -> str:
        lines = call(program, *args, status=1, **options).stderr.strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        return lines[0]

    return fail


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 120,000 bytes, with characters of two bytes."""
    draw = Key(0).fold("text").generator()
    words = draw.choice([*WORDS, "café", "straße"], 25_000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(" ".join(words).encode()[:120_000])
    return path


@pytest.fixture(scope="session")
def reviews_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder aclImdb with 1,300 training and 40 test reviews of each class; good ones say so."""
    folder = tmp_path_factory.mktemp("reviews") / "aclImdb"
    draw = Key(0).fold("reviews").generator()
    for split, count in ("train", 1300), ("test", 40):
        for kind, rating, word in ("pos", 9, "wonderful"), ("neg", 2, "awful"):
            place = folder / split / kind
            place.mkdir(parents=True)
            for number in range(count):
                words = [word, *draw.choice(WORDS, draw.integers(3, 12))]
                (place / f"{number}_{rating}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def enwik8_run(call: Callable, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """examples/enwik8.py after two steps; read it, but copy it before you change it."""
    folder = tmp_path_factory.mktemp("runs") / "enwik8"
    result = call("enwik8", "--data", text_file, "--out", folder, "--steps", 2, "--device", "cpu")
    return Run(folder, result.stdout)


@pytest.fixture(scope="session")
def imdb_run(call: Callable, reviews_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """examples/imdb.py after two steps; read it, but copy it before you change it."""
    folder = tmp_path_factory.mktemp("runs") / "imdb"
    result = call("imdb", "--data", reviews_folder, "--out", folder, "--steps", 2, "--device", "cpu")
    return Run(folder, result.stdout)
