"""Runs whose files are damaged or exchanged, or are intact but have content that no program would write."""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from area import Area, Case
from runs import SIZES, make_data, set_intervals, tiny
from safetensors import safe_open
from safetensors.numpy import save_file

from scratchformer.commands import cli
from scratchformer.training import metrics, settings, start
from scratchformer.training.snapshot import checksum
from scratchformer.training.start import run_main

STEPS = 7
RESUME, EVALUATE, GENERATE, TRANSLATE, PLOT = "resume", "evaluate", "generate", "translate", "plot"
# JSON texts of values that are wrong almost everywhere.
WRONG = [
    *(
        "null",
        "true",
        "false",
        "[]",
        "{}",
        '""',
        '"text"',
        '"7"',
        "-1",
        "0",
        "0.5",
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
    ),
    *(str(2**31), str(2**63), str(2**64), str(-(2**63)), "1e308", "1e-320", "9" * 5000, "[" * 100_000 + "]" * 100_000),
    *(
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        '"' + "x" * 1_000_000 + '"',
        '"\\ud800"',
        '"a\\u0000b"',
        '{"import": 3}',
    ),
]
HOLE = "a place for a wrong value"


class Folders(Area):
    name = "folders"
    seconds = 60

    def prepare(self, folder: Path) -> None:
        for module in (
            "matplotlib.pyplot",
            "sacrebleu",
            "sacremoses",
            "tokenizers",
        ):  # import them once rather than in every case
            importlib.import_module(module)
        self.data = make_data(folder)
        self.programs, self.runs = {}, {}
        set_intervals()
        for name in SIZES:
            self.programs[name] = tiny(name)
            self.runs[name] = folder / name
            given = ["--data", self.data[name], "--out", self.runs[name], "--steps", STEPS, "--device", "cpu"]
            with quiet():
                run_main(self.programs[name].main, [str(option) for option in given])

    def case(self, draw: random.Random, folder: Path) -> Case:
        name = draw.choice(list(SIZES))
        run = folder / "run"
        shutil.copytree(self.runs[name], run)
        kinds = {
            self.damaged: 10,
            self.settings: 5,
            self.metrics: 3,
            self.snapshot: 6,
            self.exchanged: 2,
            self.linked: 3,
            self.texts: 4,
            self.whole: 1,
        }
        return draw.choices(list(kinds), list(kinds.values()))[0](draw, name, run)

    def ask(self, name: str, run: Path, command: str, *options: str) -> Callable[[], None]:
        """A function that does what a user does with a run."""
        if command == RESUME:
            arguments = ["--resume", str(run), "--device", "cpu", *options]
            return lambda: start(self.programs[name].main, arguments)
        arguments = {
            EVALUATE: ["--device", "cpu"],
            GENERATE: ["--tokens", "3", "--device", "cpu"],
            TRANSLATE: ["a short film", "--device", "cpu"],
            PLOT: [],
        }[command]
        return lambda: cli.main([command, str(run), *arguments, *options])

    def whole(self, draw: random.Random, name: str, run: Path) -> Case:
        """An intact run, or one that is resumed with fewer --steps than it has done."""
        if draw.random() < 0.3:
            steps = draw.randrange(1, STEPS)
            return Case(
                f"{name}, --steps {steps}", self.ask(name, run, RESUME, "--steps", str(steps)), names=("steps",)
            )
        command = draw.choice([command for command in commands(name) if command != PLOT])
        return Case(f"{name}, whole, {command}", self.ask(name, run, command), "accepted")

    def damaged(self, draw: random.Random, name: str, run: Path) -> Case:
        """A file of the run is damaged, or replaced by something that is not a file."""
        path = draw.choice(files(run))
        before, command = path.read_bytes(), draw.choice(readers(name, path))
        if draw.random() < 0.2:
            what, size = replace(draw, path), 0
        else:
            what, after = damage(draw, before)
            if after == before or cut_like_a_kill(path, before, after):
                what, after = "a byte added", before + b"\xff"
            path.write_bytes(after)
            size = len(after)
        missing = {"nothing": ("no run", "is missing", "No such file", "no snapshot")}.get(what, ())
        if what == "nothing" and path.name in ("best.safetensors", "metrics.jsonl"):
            return Case(f"{name}, {path.relative_to(run)}: {what}, {command}", self.ask(name, run, command), "either")
        if what == "nothing" and path.name.startswith("step-"):
            return Case(f"{name}, {path.relative_to(run)}: {what}, {command}", self.ask(name, run, command), "either")
        tail = (
            path.name == "metrics.jsonl" and size and after.startswith(before)
        )  # lines after the last snapshot are left out
        what = f"{name}, {path.relative_to(run)}: {what}, {command}"
        expect = "either" if tail else "refused"
        return Case(what, self.ask(name, run, command), expect, names=(path.name, *missing), size=size)

    def exchanged(self, draw: random.Random, name: str, run: Path) -> Case:
        """A file of the run is replaced by a file of another run."""
        path = draw.choice(files(run))
        other = draw.choice([one for one in SIZES if one != name])
        found = [p for p in files(self.runs[other]) if path.suffix == p.suffix]
        foreign = draw.choice(found or files(self.runs[other]))
        if path.name.startswith("step-") and draw.random() < 0.5:
            path = path.with_name("step-foreign.safetensors")
        shutil.copy(foreign, path)
        command = draw.choice([command for command in readers(name, path) if command != PLOT])
        what = f"{name}, {path.relative_to(run)}: {foreign.name} of {other}, {command}"
        names = {
            "settings.json": (
                "--resume",
                *(file.name for file in files(run)),
            ),  # which do not fit these settings
            "last.safetensors": ("the last snapshot",),
            "best.safetensors": ("cannot generate text",),
        }.get(path.name, ())
        return Case(what, self.ask(name, run, command), names=(path.name, *names), size=path.stat().st_size)

    def settings(self, draw: random.Random, name: str, run: Path) -> Case:
        """Settings of another type, out of range or of absurd size, with a right checksum."""
        path = run / "settings.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        own = [key for key in found if key not in ("sha256", "version", "files")]
        key, wrong = draw.choice(own), draw.choice(WRONG)
        if draw.random() < 0.1:
            key = draw.choice(["out", "save", "state", "", "__class__", "resume", "given", "sha257"])
        number = type(found.get(key)) in (int, float) and wrong[:1] in '[{"tf'
        text = type(found.get(key)) is str and wrong[:1] not in '"n'
        if key == "steps" and wrong in ("0.5",):
            wrong = "-3"
        write_settings(path, found | {key: HOLE}, wrong)
        command = draw.choice(readers(name, path))
        expect = "refused" if (number or text) and command in (RESUME, EVALUATE) else "either"
        what = f"{name}, settings: {key!r} is {wrong[:20]}, {command}"
        return Case(what, self.ask(name, run, command), expect, ("settings.json",) * (expect == "refused"))

    def linked(self, draw: random.Random, name: str, run: Path) -> Case:
        """A link, a second name of a file, or a FIFO where a command may write; what is outside must not change."""
        outside, known = run.parent / "outside", files(run)
        outside.mkdir()
        more = ("run.lock", "no-snapshot-yet", "plots", "plots/curves.png", "tensorboard", "average.safetensors")
        unfinished = [path.with_name(path.name + ".unfinished") for path in known]
        stages = [path for path in run.iterdir() if path.is_dir()]
        path = draw.choice([*known, *unfinished, *(folder / other for folder in (run, *stages) for other in more)])
        path = draw.choice(stages) if stages and draw.random() < 0.2 else path
        path.parent.mkdir(exist_ok=True)
        kind = draw.choice(["file", "folder", "second name", "FIFO"]) if not path.is_dir() else "folder"
        victim = outside / "victim"
        victim.write_bytes(path.read_bytes() if path.is_file() else b"precious")
        if path.is_dir():
            shutil.copytree(path, outside, dirs_exist_ok=True)
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "second name":
            path.hardlink_to(victim)
        else:
            path.symlink_to(outside if kind == "folder" else victim)
        before = {file: file.read_bytes() for file in files(outside)}

        def check() -> None:
            assert {file: file.read_bytes() for file in files(outside)} == before, "a file outside was written"

        command = draw.choice(commands(name))
        more = ("--steps", str(STEPS + 1)) if command == RESUME and draw.random() < 0.5 else ()
        asked = self.ask(name, run, command, *more)
        return Case(f"{name}, {path.relative_to(run)}: {kind}, {command}", checked(asked, check), "either")

    def texts(self, draw: random.Random, name: str, run: Path) -> Case:
        """A text or a key in a file names code, or has control characters, which must not be run or printed."""
        trap, executed = run / "trap.py", run.parent / "executed"
        trap.write_text(f"open({str(executed)!r}, 'w')")
        sys.path.insert(0, str(run))
        text = draw.choice(["\x1b]0;x\x07\n\x1b[31m$x^$\x9b2J"] * 3 + ["trap:Model", "trap", str(trap)])
        path = draw.choice([path for path in files(run) if path.suffix != ".py" and path.name != "vocabulary.json"])
        where = replace_text(draw, path, text)

        def check() -> None:
            assert not executed.exists(), "code of the folder was executed"

        command = draw.choice(commands(name))
        what = f"{name}, {path.relative_to(run)}: {where} is {text!r}, {command}"
        return Case(what, checked(self.ask(name, run, command), check), "either")

    def metrics(self, draw: random.Random, name: str, run: Path) -> Case:
        """Values of another type in metrics, with a right checksum, or without one, as in an earlier version."""
        path = draw.choice([path for path in files(run) if path.name == metrics.METRICS])
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            line.pop("crc32", None)
        line = draw.choice(lines)
        key, wrong = draw.choice([key for key in line if key != "validation_loss"]), draw.choice(WRONG)
        line[key] = HOLE
        write_metrics(path, lines, wrong, sealed=draw.random() < 0.5)
        number = wrong[:1] in "-0123456789nNI" and wrong not in ("NaN", "Infinity", "1e400", "-1e400")
        expect = "either" if number and (key != "step") else "refused"
        if key == "step" and wrong in ("0", str(2**31)):
            expect = "either"
        command = draw.choice([RESUME, PLOT]) if expect == "refused" else RESUME
        what = f"{name}, {path.relative_to(run)}: {key!r} is {wrong[:20]}, {command}"
        return Case(
            what, self.ask(name, run, command), expect, (path.name,) * (expect == "refused"), path.stat().st_size
        )

    def snapshot(self, draw: random.Random, name: str, run: Path) -> Case:
        """A snapshot whose checksum is right but whose content is wrong."""
        path = draw.choice([path for path in files(run) if path.suffix == ".safetensors"])
        with safe_open(path, framework="numpy") as file:
            header = {key: value for key, value in file.metadata().items() if key != "sha256"}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        expect, wrong, part = "either", draw.choice(WRONG), draw.choice(["model", "state", "tensor"])
        if part == "tensor":
            key = draw.choice(list(tensors))
            what, tensors[key] = wrong_tensor(draw, tensors[key])
            if tensors[key] is None:
                del tensors[key]
            what = f"{key} {what}"
        else:
            described = json.loads(header[part])
            where = described if part == "state" or draw.random() < 0.3 else described["config"]
            key = draw.choice(list(where)) if where else "x"
            what = f"{part} {key!r}"
            if draw.random() < 0.2:
                where.pop(key, None)
                what += " missing"
                expect = "refused" if (key in ("class", "config", "step", "best")) else "either"
            else:
                if draw.random() < 0.1:
                    key = draw.choice(["", "width", "self", "key", "lora"])
                where[key] = HOLE
                what += f" is {wrong[:20]}"
            header[part] = json.dumps(described).replace(json.dumps(HOLE), wrong)
        save_file(tensors, path, header | {"sha256": checksum(header, tensors)})
        command = draw.choice(readers(name, path))
        expect = expect if command == RESUME and path.name == "last.safetensors" else "either"
        what = f"{name}, {path.relative_to(run)}: {what}, {command}"
        return Case(
            what, self.ask(name, run, command), expect, (path.name,) * (expect == "refused"), path.stat().st_size
        )


class quiet:
    """A context in which nothing is printed."""

    def __enter__(self) -> None:
        self.saved = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in self.saved:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)

    def __exit__(self, *_: object) -> None:
        for number, copy in self.saved:
            os.dup2(copy, number)


def checked(asked: Callable[[], None], check: Callable[[], None]) -> Callable[[], None]:
    """A function that calls another, and then `check`; it fails if control characters are printed."""

    def call() -> None:
        said, ended = io.StringIO(), ""
        try:
            with redirect_stdout(said), redirect_stderr(said):
                asked()
        except SystemExit as error:
            ended = str(error.code or "")
        check()
        found = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", said.getvalue() + ended)
        assert found is None, f"printed {found[0]!r}"
        if ended:
            sys.exit(ended)

    return call


def replace_text(draw: random.Random, path: Path, text: str) -> str:
    """Put a text in place of one in a file of a run, or of a key, with right checksums. Returns where."""
    tensors: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        with safe_open(path, framework="numpy") as file:
            header = {key: value for key, value in file.metadata().items() if key != "sha256"}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        found: Any = {key: json.loads(header[key]) for key in ("model", "state")} | {"tensors": dict.fromkeys(tensors)}
    elif path.suffix == ".jsonl":
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in found:
            line.pop("crc32", None)
    else:
        found = json.loads(path.read_text(encoding="utf-8"))
    owner, key = draw.choice([*inside(found)])
    of_tensors = isinstance(found, dict) and owner is found.get("tensors")
    if of_tensors or draw.random() < 0.5 or not isinstance(owner[key], str | None):
        owner[text] = owner.pop(key)
    else:
        owner[key] = text
    if path.suffix == ".safetensors":
        header |= {part: json.dumps(found[part]) for part in ("model", "state")}
        changed = {text if of_tensors and name == key else name: array for name, array in tensors.items()}
        save_file(changed, path, header | {"sha256": checksum(header, changed)})
    elif path.suffix == ".jsonl":
        write_metrics(path, found, "", sealed=True)
    else:
        write_settings(path, found, "")
    return repr(key)


def inside(found: Any) -> Iterator[tuple[Any, Any]]:
    """Each dict in JSON with each of its keys, except the first level of a snapshot's header."""
    for owner in found if isinstance(found, list) else [found]:
        if isinstance(owner, dict):
            yield from ((owner, key) for key in owner if key not in ("model", "state", "tensors"))
            for part in owner.values():
                yield from inside(part)


def files(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and path.name != "run.lock")


def commands(name: str) -> list[str]:
    own = {"plain": GENERATE, "xl": GENERATE, "translate": TRANSLATE}.get(name)
    return [RESUME, EVALUATE, PLOT, *([own] if own else [])]


def readers(name: str, path: Path) -> list[str]:
    """The commands that read this file of a run."""
    kind, folder = path.name, path.parent.name
    if kind == "settings.json":
        return [RESUME, EVALUATE, PLOT, *([TRANSLATE] if name == "translate" else [])]
    if kind == "metrics.jsonl":
        return [RESUME, PLOT]
    if kind.startswith("vocabulary"):
        return [RESUME, EVALUATE, *([TRANSLATE, PLOT] if name == "translate" else [])]
    if kind == "average.safetensors":
        return [EVALUATE, TRANSLATE]
    if kind == "best.safetensors" and name in ("plain", "xl"):
        return [RESUME, EVALUATE, GENERATE, PLOT]
    if kind == "best.safetensors" and folder in ("finetune", "scratch"):
        return [RESUME, EVALUATE]
    return [RESUME]


def damage(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Bytes flipped, zeroed, inserted, deleted, swapped, doubled or cut off."""
    n = len(content)
    kind = draw.choice(["flip"] * 6 + ["byte", "insert", "delete", "swap", "double", "cut", "zeros", "append", "empty"])
    edges = [0, 8, 9, 20, n - 1, n - 2, n // 2]
    place = draw.choice(edges) if draw.random() < 0.1 else draw.randrange(min(n, 3000) if draw.random() < 0.5 else n)
    place, length = max(0, min(place, n - 1)), draw.choice([1, 2, 8, 100, 1000])
    part = content[place : place + length]
    if kind == "flip":
        bit = draw.randrange(8)
        return f"bit {bit} of byte {place} flipped", content[:place] + bytes([content[place] ^ 1 << bit]) + content[
            place + 1 :
        ]
    if kind == "byte":
        new = draw.randrange(256)
        return f"byte {place} made {new}", content[:place] + bytes([new]) + content[place + 1 :]
    if kind == "insert":
        return f"{length} bytes inserted at {place}", content[:place] + draw.randbytes(length) + content[place:]
    if kind == "delete":
        return f"{length} bytes deleted at {place}", content[:place] + content[place + length :]
    if kind == "swap":
        half = content[place + length : place + 2 * length]
        return f"{length} bytes at {place} swapped", content[:place] + half + part + content[place + 2 * length :]
    if kind == "double":
        return f"{length} bytes at {place} doubled", content[:place] + part + content[place:]
    if kind == "cut":
        return f"cut at {place}", content[:place]
    if kind == "zeros":
        return f"{length} bytes at {place} zeroed", content[:place] + bytes(len(part)) + content[place + length :]
    if kind == "append":
        return f"{length} bytes added", content + draw.randbytes(length)
    return "empty", b""


def cut_like_a_kill(path: Path, before: bytes, after: bytes) -> bool:
    """Whether only the end of the metrics is missing, as a killed run may leave them."""
    return path.name == "metrics.jsonl" and before.startswith(after)


def replace(draw: random.Random, path: Path) -> str:
    """Replace a file by something else. Returns by what."""
    path.unlink()
    kind = draw.choice(["a FIFO", "a folder", "a link to itself", "a link to nothing", "a device", "nothing"])
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "a link to nothing":
        path.symlink_to("nowhere")
    elif kind == "a device":
        path.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/dev/random"]))
    return kind


def wrong_tensor(draw: random.Random, array: Any) -> tuple[str, Any]:
    import numpy as np

    kind = draw.choice(
        ["missing", "NaN", "int", "bool", "float64", "float16", "empty", "longer", "flat", "huge", "negative"]
    )
    with np.errstate(all="ignore"):
        changed = {
            "missing": lambda: None,
            "NaN": lambda: np.full_like(array, np.nan) if array.dtype.kind == "f" else array - 2**62,
            "int": lambda: array.astype(np.int64) + 2**40,
            "bool": lambda: array.astype(bool),
            "float64": lambda: array.astype(np.float64),
            "float16": lambda: array.astype(np.float16),
            "empty": lambda: array.reshape(-1)[:0],
            "longer": lambda: np.concatenate([array.reshape(-1), array.reshape(-1)]),
            "flat": lambda: array.reshape(-1),
            "huge": lambda: np.full_like(array, 2**62 if array.dtype.kind == "i" else 1e38),
            "negative": lambda: np.full_like(array, -7),
        }[kind]()
    return kind, None if changed is None else np.ascontiguousarray(changed).reshape(changed.shape)


def write_settings(path: Path, found: dict[str, Any], wrong: str) -> None:
    """Write settings with the JSON text `wrong` in the HOLE, and with their checksum if this version has checksums."""
    for key in ("sha256", "version"):
        found.pop(key, None)
    text = json.dumps(found, indent=2).replace(json.dumps(HOLE), wrong) + "\n"
    seal = getattr(settings, "seal", None)
    path.write_text(text if seal is None else seal(text), encoding="utf-8")


def write_metrics(path: Path, lines: list[dict[str, Any]], wrong: str, sealed: bool) -> None:
    before, written = 0, []
    seal = getattr(metrics, "seal", None) if sealed else None
    for line in lines:
        text = json.dumps(line).replace(json.dumps(HOLE), wrong)
        if seal is not None:
            text, before = seal(text, before)
        written.append(text + "\n")
    path.write_text("".join(written), encoding="utf-8")
