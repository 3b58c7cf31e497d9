"""A page for each group of exhibits of the museum, written into docs/museum/ before the build."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from textwrap import dedent

from docstrings import block, directive, heading, prose
from levels import levels
from live import live_data
from operations import joined, write_page
from sphinx.application import Sphinx

from scratchformer.catalogue import Mistake
from scratchformer.museum.exhibits import GROUPS, Exhibit, check, exhibit
from scratchformer.notation import NotationError
from scratchformer.pages.live import section
from scratchformer.pages.mathml import mathml
from scratchformer.pages.passages import paragraphs

LEAD = re.compile(r"^(What was wrong|Why its tests passed|What finds it|How to derive it)\. ")
REPORT = "\nRepeat"


def page(group: str) -> str:
    return joined([heading(group, "="), *(part for name in GROUPS[group] for part in shown(exhibit(name)))])


def shown(exhibit: Exhibit) -> list[str]:
    """The story, the code and the report of the check."""
    _, _, story = exhibit.story.partition("\n")
    parts = [f".. _museum-{exhibit.name}:", heading(exhibit.title), f"Source: {link(exhibit.source)}."]
    for text in paragraphs(story.strip("\n").splitlines()):
        lead = LEAD.match(text)
        if lead:
            parts.append(f"**{lead[1]}.** {prose(text[lead.end() :])}")
        else:
            parts.append(equations(dedent(text)))
    if exhibit.operation:
        parts.append(
            f"The gradient is derived, and its numbers can be changed, on the page of "
            f":doc:`/operations/{exhibit.operation}`."
        )
    if exhibit.planted:
        parts.append("Here is this derivation with the mistake planted in one line. What it makes wrong is marked:")
        parts.append(directive("raw", "html", planted_html(exhibit)))
    functions = (exhibit.forward, exhibit.wrong, exhibit.right)
    parts.append(block("python", "\n\n".join(inspect.getsource(function).rstrip() for function in functions)))
    parts.append(f"``scratchformer museum {exhibit.name}`` prints:")
    parts.append(block("text", check(exhibit).message.partition(REPORT)[0]))
    return parts


def planted_html(exhibit: Exhibit) -> str:
    """The live part of the operation, at the first level of its derivation that has the line with the mistake."""
    mistake = Mistake(exhibit.title, "", *exhibit.planted, operation=exhibit.operation)
    each = (live_data(exhibit.operation, [mistake], left_out) for left_out in levels(exhibit.operation))
    return section(exhibit.operation, [next(data for data in each if data["mistakes"])], planted=True)


def equations(text: str) -> str:
    """Equations typeset, each by itself; as they are, if one is not in the notation of derivations."""
    each = [part for line in text.splitlines() for part in re.split(r", so |; ", line.strip())]
    try:
        for part in each:
            mathml(part)
    except NotationError:
        return block("text", text)
    return joined([directive("math", "", part) for part in each])


def link(source: str) -> str:
    """ "owner/project 12 (a note)" with a link to the issue or pull request."""
    place, number, note = re.fullmatch(r"([\w./-]+) (\d+)(.*)", source).groups()
    return f"`{place} {number} <https://github.com/{place}/issues/{number}>`__{note}"


def page_name(group: str) -> str:
    return group.lower().replace(" ", "_")


def write(app: Sphinx) -> None:
    for group in GROUPS:
        write_page(Path(app.srcdir) / "museum" / f"{page_name(group)}.rst", page(group))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
