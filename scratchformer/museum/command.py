"""The command `scratchformer museum`."""

from __future__ import annotations

import argparse
import sys

from .exhibits import GROUPS, NAMES, check, exhibit

_WIDTH = 110  # of a line of the list


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `museum` to the parser of `scratchformer`."""
    command = commands.add_parser("museum", help="check gradients that were wrong in well-known code, re-enacted")
    command.add_argument(
        "name", nargs="?", metavar="NAME", help="an exhibit, with its story (default: a line for each)"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.name is not None:
        show(args.name)
        return
    found = 0
    for group, names in GROUPS.items():
        print(f"\n{group}")
        for name in names:
            shown, verdict = exhibit(name), check(exhibit(name))
            found += bool(verdict.message)
            print(f"  {name:<28} {shown.source:<50} {'yes' if verdict.message else 'no':<4}{verdict.seconds:5.2f} s")
            print(f"      {shortened(verdict.words)}")
    print(f"\n{found} of {len(NAMES)} found")
    if found < len(NAMES):
        sys.exit(1)


def shortened(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1].rsplit(" ", 1)[0] + " …"


def show(name: str) -> None:
    """The story of an exhibit, and the report of the check."""
    shown = exhibit(name)
    print(f"{shown.story}\n\nSource: {shown.source}.", end=" ")
    print(f"The derivation is on the page of ops.{shown.operation}.\n" if shown.operation else "\n")
    print(check(shown).message or "The check finds nothing.")
