"""Command lines: limits of numbers, empty values, options in any place."""

import argparse
from pathlib import Path

import pytest

from scratchformer.commands.cli import make_parser
from scratchformer.shell.options import INT64_MAX, CommandLine
from scratchformer.training import settings
from scratchformer.training.snapshot import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
FOR_STUDY = {"tensor_parallel"}  # it has no options


def all_parsers():
    """The parsers of all commands and programs, by name."""
    found = {"scratchformer": make_parser()}
    for name, parser in list(found.items()):
        found |= commands_of(name, parser)
    for path in sorted(EXAMPLES.rglob("*.py")):
        if path.stem not in FOR_STUDY:
            program = load_file(path)
            found[path.stem] = settings.parser("", program.PRESETS, getattr(program, "OPTIONS", {}))
    return found


def commands_of(name, parser):
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, own in action.choices.items():
                found |= {f"{name} {command}": own} | commands_of(f"{name} {command}", own)
    return found


def test_every_option_has_a_help_and_every_number_has_limits():
    parsers = all_parsers()
    assert len(parsers) > 20
    for name, parser in parsers.items():
        assert type(parser) is CommandLine, name
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), (name, action.dest)
            if action.type in (int, float):
                for value in "nan", "1e400", str(INT64_MAX + 1), str(-INT64_MAX - 1):
                    with pytest.raises((ValueError, SystemExit)) as refused:
                        parser.parse_args([f"{action.option_strings[-1]}={value}"])
                    if refused.type is ValueError:
                        assert f"{action.option_strings[-1]}: expected at " in str(refused.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--precision", "int8", "RUN", "a b", "c"],
        ["RUN", "--precision=int8", "a b", "c"],
        ["RUN", "a b", "--precision", "int8", "c"],
        ["RUN", "a b", "c", "--precision", "int8"],
        ["RUN", "--precision", "int8", "--", "a b", "c"],
    ],
)
def test_options_stand_anywhere(argv):
    args = make_parser().parse_args(["translate", *argv])
    assert (args.run_folder, args.precision, args.sentences) == ("RUN", "int8", ["a b", "c"])


def test_an_option_after_a_name():
    args = make_parser().parse_args(["check", "linear", "--derivations", "relu"])
    assert args.derivations and args.names == ["linear", "relu"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plot", ""], "RUN: expected at least one character"),
        (["learn", "--dir="], "--dir: expected at least one character"),
        (
            ["generate", "RUN", "--tokens", "1" + "0" * 30],
            "--tokens: expected at most 9,223,372,036,854,775,807, got 1",
        ),
    ],
)
def test_values_out_of_range(argv, message):
    with pytest.raises(ValueError) as refused:
        make_parser().parse_args(argv)
    assert str(refused.value).startswith(message)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("scratchformer ")
