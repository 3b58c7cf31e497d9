"""The page of a user's operation, in one file that needs nothing else: derivation, live numbers, code, mistakes."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import escape
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ..catalogue import OperationCase
from ..compiler import CompileError
from ..compiler.show import shown as shown_loops
from ..notation import DerivationReport, NotationError, plant_mistakes
from ..notation.check import read_and_run
from ..notation.consequences import Consequences, changed_part
from ..notation.grammar import canonical
from ..notation.mistakes import in_words, mistakes
from ..notation.spelling import spelled
from ..notation.walk import Walk
from ..testing.mutate.run import MutationResult
from ..version import __version__
from .live import FILES, STATIC, bound, mistake_data, page_data, section
from .loops import loops
from .mathml import mathml, of_equation
from .passages import (
    CheckedItem,
    Passage,
    before_derivation,
    equation_id,
    items_of,
    label,
    names_of,
    passages,
    source_without_docstring,
    spans,
)
from .step_curves import step_curve
from .user_operation import UserOperation

GENERATOR = '<meta name="generator" content="scratchformer page">'
VISIBLE = 1e-6  # a change of a value, relative to its largest number, that is no rounding
MAX_LISTED = 20  # mistakes that are listed


def page(user: UserOperation, report: DerivationReport, outcomes: Sequence[MutationResult] | str) -> str:
    """The page, as HTML. No text of the file is markup or a script in it, and the browser may load nothing.

    outcomes: of the mistakes planted in the code, or why there are none.
    """
    items, known = items_of([report]), names_of([report])
    parts = passages(items)
    start = before_derivation(parts)
    begin_with = {name: report.values[name] for name in bound(user.case) if name in report.values}
    dy = canonical(next(iter(signature(user.op_backward).parameters)))
    begin_with |= {dy: np.array(1.0)} if not report.values[dy].ndim else {}
    data = page_data(user.name, user.case, report, planted(user), begin_with, user.ranges)
    curve, words = step_curve(OperationCase(user.op, user.op_backward, user.args))
    body = [
        f"<h1>{escape(user.name)}</h1>",
        *shown(parts[:start], items, known, user.name),
        "<h2>Derivation</h2>",
        "<p>To the right of each equation is its measured error: the two sides are evaluated on the arrays below, and "
        "compared. Derivatives and gradients are compared with numerical ones.</p>",
        *shown(parts[start:], items, known, user.name),
        loops(user.op, user.op_backward, items) or without_loops(user),
        "<h2>Try it</h2>",
        section(user.name, [data]),
        "<h2>The code</h2>",
        *(f"<pre>{escape(source_without_docstring(f))}</pre>" for f in (user.op, user.op_backward)),
        "<h2>How small should h be?</h2>",
        curve,
        paragraph(words),
        "<h2>Mistakes that the checks miss</h2>",
        *missed_in_equations(user),
        *missed_in_code(user, outcomes),
        f"<footer>{escape(user.file.name)}, a page by scratchformer {__version__}</footer>",
    ]
    return document(user.name, "\n".join(part for part in body if part))


def document(title: str, body: str) -> str:
    """A document that needs nothing else. Its policy lets no script run but those of this package."""
    scripts = [(STATIC / file).read_text(encoding="utf-8") for file in ("site.js", *FILES)]
    styles = [(STATIC / file).read_text(encoding="utf-8") for file in ("page.css", "site.css", "live/live.css")]
    font = b64encode((STATIC / "fonts/STIXTwoMath.woff2").read_bytes()).decode()
    style = "\n".join(styles).replace("url(fonts/STIXTwoMath.woff2)", f"url(data:font/woff2;base64,{font})")
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; font-src data:; base-uri 'none'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            GENERATOR,
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style></head>",
            f'<body><main class="content">{body}</main>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def shown(parts: Sequence[Passage], items: Sequence[CheckedItem], known: frozenset[str], name: str) -> Iterator[str]:
    """Passages as HTML; items of a list that follow one another are one list."""
    for is_item, group in groupby(parts, lambda part: part.kind == "prose" and part.text.startswith("- ")):
        if is_item:
            rows = (f"<li>{inline(part.text.removeprefix('- '), known)}</li>" for part in group)
            yield f"<ul>{''.join(rows)}</ul>"
        else:
            yield from (passage(part, items, known, name) for part in group)


def passage(part: Passage, items: Sequence[CheckedItem], known: frozenset[str], name: str) -> str:
    if part.kind == "prose":
        return paragraph(part.text, known)
    code = f"<pre>{escape(part.text)}</pre>"
    if part.row is None:
        return code
    equation = items[part.item][0].equation if part.item is not None else None
    anchor = f' id="{escape(equation_id(name, part.item))}"' if part.item is not None else ""
    content = f'<div class="math">{of_equation(equation)}</div>' if equation else code
    comment = f'<p class="comment">({inline(part.comment, known)})</p>' if part.comment else ""
    error = f'<p class="error">{escape(label(part.row))}</p>'
    return f'<div class="checked checked-{part.kind}"{anchor}>{content}{comment}{error}</div>'


def paragraph(text: str, known: frozenset[str] = frozenset()) -> str:
    return f"<p>{inline(text, known)}</p>"


def inline(text: str, known: frozenset[str] = frozenset()) -> str:
    """Prose as HTML, with mathematics in `known` names."""
    parts = {
        "text": escape,
        "code": lambda code: f"<code>{escape(code)}</code>",
        "math": lambda expression: mathml(expression, known),
    }
    return "".join(parts[kind](part) for kind, part in spans(text, known))


def without_loops(user: UserOperation) -> str:
    """Why no loops are made of the equations."""
    try:
        shown_loops(user.op, user.op_backward, "numba")
    except CompileError as error:
        return f"<p>No loops are made from these equations. {escape(str(error))}</p>"
    return ""


def planted(user: UserOperation) -> list[dict[str, Any]]:
    """Mistakes to plant in the live part: for each equation, the first of each kind that changes the output or a
    gradient.
    """
    run, text = read_and_run(user.op, user.op_backward, *user.args)
    walk = Walk(run)
    walk.prepare(text)
    walk.items(run.name, text.items)
    derivation = Consequences(walk, [item.equation for item in text.equations if item.equation])
    results = {*run.outputs, *(f"d{name}" for name in run.arguments)}
    found = list[dict[str, Any]]()
    for place, equation in enumerate(derivation.equations):
        kinds = set[str]()
        for what, wrong in mistakes(equation):
            last = changed_part(equation, wrong) == len(equation.parts) - 1
            if equation.parts[0][0] != "name" or what in kinds or not last:
                continue
            try:
                with np.errstate(all="ignore"):
                    changed = derivation.of(place, wrong)
            except (NotationError, ValueError):
                continue
            wrong_now = [n for n in changed if n in results and differs(changed[n], derivation.values[n])]
            if wrong_now:
                kinds.add(what)
                title = f"{spelled(equation.parts[0])}: {in_words(what, equation, wrong)}"
                found.append(mistake_data(title, f"This changes {', '.join(wrong_now)}.", place, wrong))
    return found


def differs(a: np.ndarray, b: np.ndarray) -> bool:
    return not np.abs(a - b).max() <= VISIBLE * np.abs(b).max()


def missed_in_equations(user: UserOperation) -> Iterator[str]:
    tried = list(plant_mistakes(user.op, user.op_backward, *user.args))
    missed = [mistake for mistake in tried if not mistake.caught]
    yield (
        f"<p>Of {len(tried)} mistakes that were planted in the equations, one at a time, the check of the derivation "
        f"finds {len(tried) - len(missed)}.{' It does not find these:' if missed else ''}</p>"
    )
    rows = (f"<li>{escape(m.what)}: <code>{escape(m.wrong)}</code></li>" for m in missed[:MAX_LISTED])
    if missed:
        yield f"<ul>{''.join(rows)}</ul>{more(missed)}"
        yield "<p>They may be mistakes that change no result. If one does change a result, other arrays show it.</p>"


def missed_in_code(user: UserOperation, outcomes: Sequence[MutationResult] | str) -> Iterator[str]:
    if isinstance(outcomes, str):
        yield paragraph(outcomes)
        return
    missed = [outcome.job for outcome in outcomes if not outcome.killed]
    tests = [Path(test).name for test in outcomes[0].job.tests]
    shown_tests = " and ".join(f"<code>{escape(test)}</code>" for test in tests)
    yield (
        f"<p>Of {len(outcomes)} mistakes that were planted in <code>{escape(user.op_backward.__name__)}</code>, one at "
        f"a time, the tests in {shown_tests} find {len(outcomes) - len(missed)}."
        f"{' They miss these:' if missed else ''}</p>"
    )
    for job in missed[:MAX_LISTED]:
        before, after = job.mutant.difference(job.target.source)
        lines = [*(f"- {line}" for line in before), *(f"+ {line}" for line in after)]
        yield f"<p>{escape(job.mutant.what)}, in line {job.mutant.line}:</p><pre>{escape(chr(10).join(lines))}</pre>"
    yield more(missed)


def more(missed: Sequence[Any]) -> str:
    return f"<p>and {len(missed) - MAX_LISTED} more</p>" if len(missed) > MAX_LISTED else ""
