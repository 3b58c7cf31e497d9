"""Run programs as a user does, on small data and without a network."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from scratchformer.data import Subwords
from scratchformer.data.subwords import GPT2_END
from scratchformer.models import GPT2
from scratchformer.rng import Key
from scratchformer.training.snapshot import load_file
from scratchformer.training.start import run_main

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
PATIENCE = 600  # seconds after which a test stops waiting; only one that would wait for ever takes so long
WORDS = "a the film story acting plot was is not very good bad dull bright long short never again it i".split()


TINY = {  # sizes for the programs of examples/ here; test_presets.py uses their own
    "enwik8": dict(model="plain", d_model=8, heads=2, depth=1, context=16, xl_d_ff=8, batch_size=4, steps=3)
    | dict(optimizer="adam"),
    "imdb": dict(d_model=16, depth=1, max_length=16, vocabulary=100, dropout=0.1, word_dropout=0.1, batch_size=8)
    | dict(lr=1e-2, warmup=10, steps=3, validation=100),
    "bert": dict(d_model=8, heads=2, depth=1, max_length=16, vocabulary=60, batch_size=4, short_length=16, steps=3)
    | dict(tuning_batch_size=32, finetune_epochs=1, scratch_epochs=1, validation=100),
    "gpt2": dict(vocabulary=300, d_model=8, heads=2, depth=1, context=16, batch_size=4, steps=3),
    "translate": dict(d_model=32, d_ff=64, depth=1, vocabulary=100, max_length=32, dropout=0.0, lr=2e-2, steps=3)
    | dict(optimizer="adam", norm="post"),
    "sparse": dict(d_model=8, heads=2, depth=2, context=64, stride=8, batch_size=2, steps=3),
    "digits": dict(d_model=8, heads=2, depth=1, batch_size=8, steps=3),
    "units": dict(d_model=8, heads=2, depth=1, batch_size=8, steps=3),
}


class Run(NamedTuple):
    """A finished run: its folder and its output."""

    folder: Path
    output: str


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment with an empty data cache, and proxies that refuse every connection."""
    nowhere = "http://127.0.0.1:9"
    proxies = {name: nowhere for base in ("http_proxy", "https_proxy", "all_proxy") for name in (base, base.upper())}
    cache = {"SCRATCHFORMER_DATA": str(tmp_path_factory.mktemp("cache")), "PYTHONUTF8": "1"}
    return {k: v for k, v in os.environ.items() if k.lower() != "no_proxy"} | proxies | cache


@pytest.fixture(scope="session")
def start(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.Popen]:
    """start("enwik8", "--steps", 3, ...) starts a process, in a new folder; the options are those of Popen.

    program: one of examples/; "scratchformer", the command; "tiny", tiny_training.py; or "python" alone.
    """

    def start(program: str, *args: object, **options: Any) -> subprocess.Popen:
        scripts = {"scratchformer": ["-m", "scratchformer"], "python": [], "tiny": [HERE / "tiny_training.py"]}
        command = [sys.executable, *scripts.get(program, [EXAMPLES / f"{program}.py"]), *args]
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
def forks(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """forks(program, args, cwd, sizes) runs a program in a fork of runner.py: its status, output and errors."""
    folder = tmp_path_factory.mktemp("streams")
    streams = {name: str(folder / name) for name in ("output", "errors")}
    command = [sys.executable, HERE / "runner.py"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:

        def run(program: object, args: Sequence[object], cwd: object, sizes: dict[str, Any]) -> tuple[int, str, str]:
            request = dict(
                program=str(program),
                argv=[os.fsdecode(a) if isinstance(a, bytes) else str(a) for a in args],
                cwd=str(cwd),
                sizes=sizes,
                **streams,
            )
            print(json.dumps(request), file=runner.stdin, flush=True)
            return int(runner.stdout.readline()), *(Path(p).read_text("utf-8") for p in streams.values())

        yield run
        runner.stdin.close()


@pytest.fixture(scope="session")
def call(start: Callable, forks: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """call("enwik8", "--steps", 3, ...) runs a program to its end, in a new folder; returns a CompletedProcess.

    program: one of examples/, with the sizes of TINY; "tiny", tiny_training.py; "scratchformer", the command; or the
    path of a script. status: the expected exit status. cwd: the folder it is called in. With other options of Popen,
    such as env, it is started as a user would start it, with its own sizes.
    """

    def call(program: str | Path, *args: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess:
        if options.keys() <= {"cwd"}:
            scripts = {"scratchformer": "scratchformer", "tiny": HERE / "tiny_training.py"}
            script = program if isinstance(program, Path) else scripts.get(program, EXAMPLES / f"{program}.py")
            cwd = options.get("cwd") or tmp_path_factory.mktemp("cwd")
            found, out, err = forks(script, args, cwd, TINY.get(program, {}))
        else:
            process = start(program, *args, **options)
            out, err = process.communicate(timeout=PATIENCE)
            found = process.returncode
        assert found == status, err
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(args, status, out, err)

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
def example() -> Callable[[str], ModuleType]:
    """example("imdb") is the program examples/imdb.py, freshly loaded, so its presets may be changed."""

    def example(name: str) -> ModuleType:
        return load_file(EXAMPLES / f"{name}.py")

    return example


@pytest.fixture(scope="session")
def tiny_main(example: Callable[[str], ModuleType]) -> Callable[[str], Callable[[list[str]], None]]:
    """tiny_main("enwik8") starts this program, in this process and on a CPU, with three steps of a tiny model as
    its preset "small". "xl" is enwik8's other model.
    """

    def tiny_main(name: str) -> Callable[[list[str]], None]:
        name = {"xl": "enwik8"}.get(name, name)
        program = example(name)
        program.PRESETS["small"] |= TINY[name]
        return lambda argv: run_main(program.main, argv if "--device" in argv else [*argv, "--device", "cpu"])

    return tiny_main


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 30,000 bytes, with characters of two bytes."""
    draw = Key(0).fold("text").generator()
    words = draw.choice([*WORDS, "café", "straße"], 6_250)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(" ".join(words).encode()[:30_000])
    return path


@pytest.fixture(scope="session")
def reviews_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder aclImdb with 100 training and 40 test reviews of each class; the good ones say "wonderful"."""
    folder = tmp_path_factory.mktemp("reviews") / "aclImdb"
    draw = Key(0).fold("reviews").generator()
    for split, count in ("train", 100), ("test", 40):
        for kind, rating, word in ("pos", 9, "wonderful"), ("neg", 2, "awful"):
            place = folder / split / kind
            place.mkdir(parents=True)
            for number in range(count):
                words = [word, *draw.choice(WORDS, draw.integers(3, 12))]
                (place / f"{number}_{rating}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def enwik8_run(call: Callable, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """examples/enwik8.py after two steps; read-only: copy it before changing it."""
    folder = tmp_path_factory.mktemp("runs") / "enwik8"
    result = call("enwik8", "--data", text_file, "--out", folder, "--steps", 2, "--device", "cpu")
    return Run(folder, result.stdout)


@pytest.fixture(scope="session")
def xl_run(call: Callable, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """examples/enwik8.py --model xl after two steps; read-only: copy it before changing it."""
    folder = tmp_path_factory.mktemp("runs") / "xl"
    options = ("--model", "xl", "--data", text_file, "--out", folder, "--steps", 2, "--device", "cpu")
    return Run(folder, call("enwik8", *options).stdout)


@pytest.fixture(scope="session")
def imdb_run(call: Callable, reviews_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """examples/imdb.py after two steps; read-only: copy it before changing it."""
    folder = tmp_path_factory.mktemp("runs") / "imdb"
    result = call("imdb", "--data", reviews_folder, "--out", folder, "--steps", 2, "--device", "cpu")
    return Run(folder, result.stdout)


@pytest.fixture(scope="session")
def sentences_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like Multi30k's, plain and .gz: five-word English sentences, and German ones, word by word."""
    folder = tmp_path_factory.mktemp("sentences")
    english = "a the red blue big small dog cat man boy sees eats likes finds apples fish trees balls".split()
    german = "ein der rote blaue große kleine Hund Katze Mann Junge sieht isst mag findet Äpfel Fisch Bäume Bälle"
    words = dict(zip(english, german.split(), strict=True))
    draw = Key(0).fold("sentences").generator()
    parts = [english[:2], english[2:6], english[6:10], english[10:14], english[14:]]
    for stem, count in ("train", 100), ("val", 12), ("test_2016_flickr", 12):
        sentences = [[str(draw.choice(part)) for part in parts] for _ in range(count)]
        text = "".join(" ".join(s) + " .\n" for s in sentences)
        (folder / f"{stem}.en").write_text(text, encoding="utf-8")
        text = "".join(" ".join(words[w] for w in s) + " .\n" for s in sentences)
        (folder / f"{stem}.de.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.fixture(scope="session")
def translate_run(call: Callable, sentences_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """examples/translate.py after two steps; read-only: copy it before changing it."""
    for module in "sacrebleu", "sacremoses":
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("runs") / "translate"
    options = ("--data", sentences_folder, "--out", folder, "--steps", 2, "--device", "cpu")
    return Run(folder, call("translate", *options).stdout)


@pytest.fixture(scope="session")
def gpt2_run(call: Callable, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """examples/gpt2.py after two steps; read-only: copy it before changing it."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("runs") / "gpt2"
    result = call("gpt2", "--data", text_file, "--out", folder, "--steps", 2, "--device", "cpu")
    return Run(folder, result.stdout)


@pytest.fixture(scope="session")
def gpt2_folder(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with random weights and its own vocabulary, in the format of a published one."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("published")
    learned = json.loads(Subwords.byte_bpe([text_file.read_text()], 280).tokenizer.to_str())["model"]
    words = [word for word in sorted(learned["vocab"], key=learned["vocab"].get) if word != GPT2_END] + [GPT2_END]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in learned["merges"]]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    sizes = {"vocab_size": len(words), "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    tensors: dict[str, list] = {}
    model = GPT2(*sizes.values())
    for source, array in zip(model.tensors().values(), model.state_dict().values(), strict=True):
        tensors.setdefault(source.name, []).append(array)  # query, key and value in their order
    tensors = {name: np.concatenate(arrays, axis=-1) for name, arrays in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def bert_run(call: Callable, reviews_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """examples/bert.py with all its stages, two steps of the first; read-only: copy it before changing it."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("runs") / "bert"
    result = call("bert", "--data", reviews_folder, "--out", folder, "--steps", 2, "--device", "cpu")
    return Run(folder, result.stdout)
