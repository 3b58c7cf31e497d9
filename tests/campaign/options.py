"""Valid and wrong command lines of all programs and commands: values out of range, empty or misspelt, in any order."""

from __future__ import annotations

import importlib
import io
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from area import Area, Case
from runs import SIZES, command, make_data, tiny

from scratchformer.commands import cli
from scratchformer.training import start

IMDB = dict(d_model=8, heads=2, depth=1, max_length=16, vocabulary=100, batch_size=8)
TINY = {
    "enwik8": SIZES["plain"],
    "translate": SIZES["translate"],
    "bert": SIZES["bert"],
    "imdb": IMDB,
    "records/enwik8": dict(d_model=16, heads=2, depth=2, context=32, batch_size=8),
    "records/imdb": IMDB,
    "records/reviews": IMDB | dict(vocabulary=60, batch_size=4, tuning_batch_size=8, epochs=1),
    "records/translate": SIZES["translate"],
    "gpt2": dict(vocabulary=300, d_model=8, heads=2, depth=1, context=16, batch_size=4),
    "sparse": dict(d_model=8, heads=2, depth=2, context=64, stride=8, batch_size=2),
    "digits": dict(d_model=8, heads=2, depth=1, batch_size=8),
    "units": dict(d_model=8, heads=2, depth=1, batch_size=8),
}
HUGE = ["2147483648", "9223372036854775808", "18446744073709551616", "1" + "0" * 40, "9" * 5000]
NO_WHOLE = [
    "",
    "-1",
    "nan",
    "inf",
    "1e400",
    "1e3",
    "1.5",
    "0x10",
    "one",
    "None",
    "[1]",
    "--",
    "-",
    "1 2",
    "½",
    "\udcff",
]
NO_NUMBER = ["", "-1", "-inf", "nan", "one", "None", "--", "1,5", "1e", "\udcff"]
NO_TEXT = [""]
NO_DEVICE = [
    "",
    "--",
    "tpu",
    "CPU",
    "cpu:0",
    "cpu:",
    "gpu:-1",
    "gpu:x",
    "gpu:" + "9" * 50,
    "gpu:½",
    "auto:1",
    ":",
    " cpu",
]
NO_PATH = ["", "nowhere", "a/b/c", "x" * 300, "x" * 5000, "/dev/null/x", "\n", "\udcff", "loop", "~nobody", "--"]


NO_DATA = [*NO_PATH, "/dev/null", ".", "zero-bytes", "noise"]
NO_FOLDER = ["", "precious", "/dev/null", "precious/run", "x" * 300, "loop"]
# The options of a run that a resumed run keeps.
KEPT = {"--preset": "small", "--seed": "1", "--out": "elsewhere", "--micro-batch": "3", "--micro-batches": "3"}


class Option(NamedTuple):
    """An option, values that must be refused, and values that are right."""

    name: str
    wrong: list[str]
    right: list[str]


def whole(name: str, *right: int, least: int = 1, most: str = "") -> Option:
    below = [str(least - 1), str(least - 2), str(-(2**63))]
    return Option(name, NO_WHOLE + below + HUGE * (most == "bounded") + HUGE[3:], list(map(str, right)))


def choice(name: str, *right: str) -> Option:
    return Option(name, ["", "none of these", "--", right[0].upper(), right[0] + " ", "\udcff"], list(right))


DEVICE = Option("--device", NO_DEVICE, ["cpu"])
SEED = whole("--seed", 0, 1, 2**31, 2**32, 2**62, least=0)
PROGRAM = Option("--program", ["", "nowhere.py", "/", "x" * 300], [])
RESUME = Option("--resume", [*NO_PATH, "/", "precious", "noise", "run/settings.json"], [])
COMMON = [
    DEVICE,
    whole("--steps", 1, 2, 3, most="bounded"),
    SEED,
    whole("--replicas", 1, 2, 3, most="bounded"),
    whole("--micro-batch", 3, 8, 1000),
    choice("--preset", "small"),
    Option("--out", NO_FOLDER, ["run", "a/b/run", "läufe 中", "-run", " "]),
    Option("--data", NO_DATA, []),
]
MUON = [choice("--optimizer", "muon"), Option("--muon-lr", [*NO_NUMBER, "0", "inf", "1e400"], ["0.1", "1e-5"])]
OWN = {
    "enwik8": [choice("--model", "xl", "llama"), choice("--schedule", "constant"), *MUON],
    "bert": [choice("--stage", "pretrain"), choice("--tune", "head"), Option("--pretrained", NO_PATH, [])],
    "gpt2": [Option("--pretrained", NO_PATH, [])],
    "sparse": [Option("--minutes", [*NO_NUMBER, "0", "inf", "1e400", "1e300"], [])],
    "records/imdb": [whole("--models", 1), choice("--evidence", "1", "3")],
    "records/reviews": [choice("--stage", "pretrain", "finetune", "selftrain")],
    "records/translate": [whole("--backwards", 0, least=0), whole("--neighbours", 0, 3, least=0)],
}
GENERATE = [
    Option("--prompt", NO_TEXT, ["a", "\n", "--", "-x", "中", "\udcff", "x" * 5000]),
    whole("--tokens", 0, 1, 5, least=0),
    Option("--temperature", [*NO_NUMBER, "inf", "1e400"], ["0", "0.5", "1e-320", "1e18"]),
    whole("--top-k", 1, 3, 10**6),
    Option("--top-p", [*NO_NUMBER, "2", "0", "inf", "1e400"], ["0.5", "1", "1e-9"]),
    Option("--repetition-penalty", [*NO_NUMBER, "0", "inf", "1e400"], ["1", "1.2", "1e-320", "1e300"]),
    Option("--stop", [""], ["a", "\n", "中", "--"]),
    Option("--prompts", ["", "nothing.txt", "."], []),
    SEED,
    DEVICE,
    PROGRAM,
]
TRANSLATE = [
    whole("--beam", 1, 2, 5, most="bounded"),
    Option("--length-penalty", [*NO_NUMBER, "inf", "1e400", "1e300"], ["0", "0.6", "2"]),
    DEVICE,
    PROGRAM,
]
EVALUATE = [choice("--part", "validation", "test"), DEVICE, PROGRAM, Option("--data", NO_DATA, [])]
CHECK = [choice("--only", "reference"), DEVICE, SEED, choice("--dtype", "float32"), Option("--details", [], [])]
MUTATE = [
    whole("--jobs", 1, 2, most="bounded"),
    whole("--limit", 1, 3, 10**6),
    SEED,
    Option("--json", ["", "o.json"], []),  # with --list nothing is run, of which it could be written
]
PLOT = [Option("--text", NO_TEXT, ["a film", "--", "中"]), Option("--out", NO_FOLDER, ["plots", "a/b"]), PROGRAM]


UNKNOWN = ["--nonsense", "--steppps", "-q", "--device-of-mine", "--\udcff", "---", "--=", "-" * 3000]
PATHS = ("--data", "--resume", "--pretrained", "--out", "--program")
RUNS = {"enwik8": "plain", "translate": "translate"}  # the run of a program


class Options(Area):
    name = "options"

    def prepare(self, folder: Path) -> None:
        importlib.import_module("matplotlib.pyplot")  # once rather than in every case
        self.data = make_data(folder)
        self.data["tiny"] = folder / "tiny.txt"
        self.data["tiny"].write_text("a good film " * 1500)
        self.runs = {name: folder / name for name in ("plain", "translate")}
        for name, run in self.runs.items():
            options = [
                "--data",
                self.data[name],
                "--out",
                run,
                "--steps",
                3,
                "--device",
                "cpu",
            ]
            subprocess.run(command(name, *options), check=True, capture_output=True)
        self.programs = {name: tiny(name, sizes) for name, sizes in TINY.items()}

    def case(self, draw: random.Random, folder: Path) -> Case:
        make_things(folder)
        kind = draw.choices([self.program_case, self.resumed_case, self.command_case], [4, 2, 5])[0]
        return kind(draw)

    def program_case(self, draw: random.Random) -> Case:
        name = draw.choice(list(TINY))
        texts = dict.fromkeys(("enwik8", "gpt2", "sparse"), "tiny") | dict.fromkeys(("imdb", "reviews"), "bert")
        data = texts.get(stem := name.removeprefix("records/"), stem)
        given = {"--device": "cpu", "--steps": "1", "--replicas": "2"}
        if data in self.data:
            given["--data"] = str(self.data[data])
        options = [*COMMON, *OWN.get(name, [])]
        if "--data" not in given:
            options = [option for option in options if option.name != "--data"]
        return varied(
            draw, name, [], given, options, partial(call_program, self.programs[name]), slow=name in ("digits", "units")
        )

    def resumed_case(self, draw: random.Random) -> Case:
        """--resume with a wrong path, with the run of another program, or with a real run and any options."""
        name = draw.choice(["enwik8", "translate"])
        shutil.copytree(self.runs[RUNS[name]], "run")
        call, kind = partial(call_program, self.programs[name]), draw.choice(["wrong", "foreign", "kept", "other"])
        if kind == "wrong":
            name = draw.choice(list(TINY))
            return wrong_value(draw, name, [], {"--device": "cpu"}, RESUME, partial(call_program, self.programs[name]))
        given = {"--resume": "run", "--device": "cpu"}
        if kind == "foreign":
            program = draw.choice([program for program in TINY if program.removeprefix("records/") != name])
            argv = written(draw, [], given)
            return Case(shown(program, argv), partial(call_program, self.programs[program], argv), names=("--resume",))
        if kind == "kept":
            kept = KEPT | {option.name: option.right[0] for option in OWN.get(name, [])}
            option = draw.choice(list(kept))
            argv = written(draw, [], given | {option: kept[option]})
            return Case(shown(name, argv), partial(call, argv), names=(option,))
        steps = Option("--steps", [*NO_WHOLE, "0", "1", "2", *HUGE], ["3", "4"])
        options = [DEVICE, steps, Option("--data", NO_DATA, [str(self.data[RUNS[name]])])]
        return varied(draw, name, [], given, options, call, slow=False)

    def command_case(self, draw: random.Random) -> Case:
        plain, translate = str(self.runs["plain"]), str(self.runs["translate"])
        name, positional, options, right = draw.choice(
            [
                ("generate", [plain], GENERATE, {"--tokens": "3", "--device": "cpu"}),
                ("generate", [plain], GENERATE, {"--tokens": "3", "--device": "cpu"}),
                ("translate", [translate, "a film", "x", "good and bad"], TRANSLATE, {"--device": "cpu"}),
                ("translate", [translate], TRANSLATE, {"--device": "cpu"}),
                ("evaluate", [plain], EVALUATE, {"--device": "cpu"}),
                ("check", ["relu", "linear, no bias"], CHECK, {}),
                ("mutate", ["my_ops.py::double_backward"], MUTATE, {"--list": ""}),
                ("plot", [draw.choice([plain, translate])], PLOT, {"--out": "plots"}),
                ("doctor", [], [], {}),
                ("learn", ["start", draw.choice(["softmax", "", "nothing"])], [Option("--nonsense", ["x"], [])], {}),
            ]
        )
        run = partial(
            call_command, name, stdin=draw.choice(["", "a film\n\nbad\n", "\n\n", "\0\x1b[31m\n", "x " * 200])
        )
        if positional and draw.random() < 0.15:
            return wrong_position(draw, name, right, run)
        case = varied(draw, name, positional, right, options, run, slow=name == "evaluate")
        if name == "learn" or (name == "translate" and len(positional) == 1):
            return case._replace(expect="refused" if case.expect == "refused" else "either", check=None)
        return case


def make_things(folder: Path) -> None:
    """Make the files that wrong paths refer to."""
    (folder / "precious").write_text("a text")
    (folder / "zero-bytes").write_bytes(b"")
    (folder / "noise").write_bytes(random.Random(0).randbytes(300))
    (folder / "loop").symlink_to("loop")
    (folder / "my_ops.py").write_text(
        "def double(x):\n    return 2 * x, x\n\n\ndef double_backward(dy, x):\n    return 2 * dy\n"
    )


def varied(
    draw: random.Random,
    name: str,
    positional: list[str],
    given: dict[str, str],
    options: list[Option],
    run: Callable,
    slow: bool,
) -> Case:
    """A valid command line to which one option is added: wrong, valid, unknown, or without its value."""
    kind = draw.choices(["wrong", "right", "unknown", "bare", "twice"], [12, 0 if slow else 4, 1, 1, 0 if slow else 1])[
        0
    ]
    option = draw.choice(options) if options else Option("", [], [])
    given = dict(given)
    if kind == "wrong" and option.wrong:
        return wrong_value(draw, name, positional, given, option, run)
    if kind == "right" and option.right:
        given[option.name] = draw.choice(option.right)
    elif kind == "bare" and option.name and option.name != "--details":
        others = (part for pair in given.items() if pair[0] != option.name for part in pair if part)
        argv = [*positional, *others, option.name]
        return Case(shown(name, argv), partial(run, argv), names=(option.name,) * (option.name != "--nonsense"))
    elif kind == "unknown":
        unknown = draw.choice(UNKNOWN)
        argv = [*positional, *(part for pair in given.items() for part in pair if part), unknown]
        return Case(shown(name, argv), partial(run, argv), names=(unknown,) * (unknown in UNKNOWN[:4]))
    argv = written(draw, positional, given)
    return Case(shown(name, argv), partial(run, argv), expect="accepted")


def wrong_value(
    draw: random.Random, name: str, positional: list[str], given: dict[str, str], option: Option, run: Callable
) -> Case:
    """A command line with a wrong value of an option, which the message names. For a path it may also name that."""
    value = draw.choice(option.wrong)
    argv = written(draw, positional, given | {option.name: value})
    names = [option.name, option.name.strip("-").replace("-", "_") + ":"]
    if option.name in PATHS:
        names = [option.name, *([".:", os.path.abspath(".")] if value == "." else [value] if value.strip() else [])]
    if option.name == "--device":
        names.append("CuPy")
    return Case(shown(name, argv), partial(run, argv), names=tuple(names) * (option.name != "--nonsense"))


def wrong_position(draw: random.Random, name: str, given: dict[str, str], run: Callable) -> Case:
    """A command line whose only argument besides options is wrong."""
    value = draw.choice([*NO_PATH[:6], "precious", "zero-bytes", "noise", "/dev/null", "::", "my_ops.py::nothing"])
    argv = ["--", value] if value.startswith("-") else written(draw, [value], given)
    value = value.removesuffix("::nothing")
    names = (value, os.path.abspath(value), {"check": "NAME", "mutate": "FILE", "learn": "COMMAND"}.get(name, "RUN"))
    return Case(shown(name, argv), partial(run, argv), names=names[not value.strip() :])


def written(draw: random.Random, positional: list[str], given: dict[str, str]) -> list[str]:
    """A command line with the options in any order and any place, each as two words or with "="."""
    parts: list[list[str]] = []
    for option, value in given.items():
        if not value and option in ("--list", "--details"):
            parts.append([option])
        elif value.startswith("-") or draw.random() < 0.5:
            parts.append([f"{option}={value}"])
        else:
            parts.append([option, value])
    draw.shuffle(parts)
    for place, argument in zip(sorted(draw.choices(range(len(parts) + 1), k=len(positional))), positional, strict=True):
        parts.insert(place + positional.index(argument), [argument])
    return [word for part in parts for word in part]


def shown(name: str, argv: list[str]) -> str:
    words = (word if len(word) < 60 else f"{word[:20]}... ({len(word)} characters)" for word in map(ascii, argv))
    return f"{name} {' '.join(words)}"


def call_program(program: ModuleType, argv: list[str]) -> None:
    sys.argv = [str(program.__file__), *argv]
    start(program.main, argv)


def call_command(name: str, argv: list[str], stdin: str) -> None:
    sys.argv = ["scratchformer", name, *argv]
    sys.stdin = io.TextIOWrapper(io.BytesIO(os.fsencode(stdin)), encoding="utf-8")
    cli.main([name, *argv])
