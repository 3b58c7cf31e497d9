"""The check of a derivation whose blanks a student filled in, from its text and the arrays of runs of its function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ..notation.grammar import NotationError, canonical, parse
from ..notation.layout import items, read
from ..notation.layout import normal as normal_space
from ..notation.walk import DerivationError, Walk, remarks

if TYPE_CHECKING:
    import numpy as np

    from ..notation.run import Execution

# A blank in a student's derivation; a comment may have a question mark.
UNFILLED = re.compile(r"=(?:(?! {3}\()[^#\n])*?(?<=[=·( ])\?(?=$|\s|[).,])", re.MULTILINE)
BLANKS = {"code": re.compile(r"^ *(?:\w+ = |return )\.\.\. *$", re.MULTILINE), "derivation": UNFILLED}
DOCSTRING = re.compile(r'^def .*:\n +"""(.*?)"""', re.MULTILINE | re.DOTALL)
LINE = re.compile(r"(?<=line )\d+(?=[:,])")
ONE_SIZE = "It is true for arrays of one size only: in place of a number write a size, such as C, or a name from above"
# The beginnings of lines, each with a pattern of what the answer must not contain, and what to say.
Restricted = tuple[tuple[str, str, str], ...]


class Wrong(AssertionError):
    """An answer is wrong; the message says what, with numbers. values: the array that is wrong, if it is one."""

    def __init__(self, message: str, values: np.ndarray | None = None) -> None:
        super().__init__(message)
        self.values = values


class Verdict(NamedTuple):
    passed: bool
    message: str


def judge(start: str, solution: str, text: str, check: Callable[[], str | None]) -> Verdict:
    """The verdict on a text, if the check raises no error. start, solution: of the exercise, as texts."""
    expect_kept(start, solution, text)
    remark = check() or ""
    if left := blanks_left(text, "derivation"):
        return Verdict(False, f"The lines above are right; {first_blank(text, left)}")
    given = {line for _, line in equations(start)}
    typed = sum(line not in given for _, line in equations(text))
    are_true = "Your equation is true" if typed == 1 else f"Your {typed} equations are true"
    return Verdict(True, "\n".join([f"{are_true}, {remark}", *marked(text)]))


def docstring_in(text: str) -> tuple[str, int]:
    """The docstring with the derivation of a file, and the number of lines above it."""
    match = DOCSTRING.search(text)
    assert match is not None, "an exercise has a function with a docstring"
    return match[1], text.count("\n", 0, match.start(1))


def blanks_left(text: str, kind: str) -> list[int]:
    """The numbers of the lines of a student's file, of an exercise of this kind, that are still blank."""
    return [text.count("\n", 0, match.end()) + 1 for match in BLANKS[kind].finditer(text)]


def check_text(text: str, docstring: str, restricted: Restricted, runs: Iterable[Execution]) -> str:
    """Check the derivation in a docstring, down to its first blank, on each run.

    text: the file. runs: with other sizes each time, or a number could pass for a size. Returns a remark on the worst
    error, or "". Raises Wrong, DerivationError, or NotationError.
    """
    expect_without(text, restricted)
    remark = ""
    for number, ran in enumerate(runs):
        try:
            remark = check_run(docstring, ran)
        except DerivationError as error:
            if not number:
                raise
            raise DerivationError(f"{error}\n    {ONE_SIZE}") from error
    return remark


def check_run(docstring: str, ran: Execution) -> str:
    """`check_text` for one run."""
    blank = UNFILLED.search(docstring)
    if blank:
        docstring = docstring[: docstring.rfind("\n", 0, blank.end()) + 1]
    derivation, walk = read(docstring, ran.names, ran.code, ran.name), Walk(ran)
    walk.prepare(derivation)
    walk.items(ran.name, derivation.items)
    if blank:
        return ""
    walk.expect_complete()
    worst = max(row.error for row in walk.rows if row.error is not None)
    return f"the worst error is {worst:.0e}"


def marked(text: str) -> list[str]:
    """What is not wrong in the equations of an answer, but would be marked on paper."""
    marks = []
    for number, line in equations(text):
        with suppress(NotationError):  # it is no equation, but a line of code
            marks += [f"line {number}: {remark}" for remark in remarks(parse(line))]
    return marks


def findings(start: str, message: str) -> tuple[str, str]:
    """What two answers with the same mistake have in common, however they are spelled.

    For an equation that is not true, its given part and the numbers. Otherwise the message as it is.
    """
    first, _, numbers = message.partition("\n")
    equation = normal_space(re.sub(r"^.*?line \d+: ", "", first))
    heads = [head for head in map(given_part, start.splitlines()) if head and equation.startswith(head)]
    if heads and "relative error" in numbers and not re.search(r"\b(nan|inf)\b", numbers):
        return max(heads, key=len), "\n".join(numbers.split("\n")[:2])  # what explains them depends on what is below
    return "", message


def first_blank(text: str, left: list[int]) -> str:
    return f"line {left[0]} is still blank: {text.splitlines()[left[0] - 1].strip()}"


def expect_kept(start: str, solution: str, text: str) -> None:
    """Raise Wrong if an equation of the exercise is gone, or if a blank was filled with what it asks for, or in part.

    A numerical derivative makes ∂y/∂x = ∂y/∂x true, and dx = dx always is; so is the detour a := dx, dx = a. An answer
    with "for" or "with" may be true of some elements only.
    """
    written, given = equations(text), equations(start)
    known = tuple(line.partition("?")[0] for _, line in given)
    added = [(number, line) for number, line in written if "=" in line and not line.startswith(known)]
    for (_, line), (_, solved) in zip(given, equations(solution), strict=True):
        if not (head := given_part(line)):
            continue
        answers = [(number, each[len(head) :]) for number, each in written if each.startswith(head)]
        if not answers:
            raise Wrong(f"a line of the exercise is missing: {head}?")
        number, answer = answers[0]
        for above, line in added:
            left, _, right = line.partition("=")
            if above < number and asked_for(head, right) and not asked_for(head, left):
                raise Wrong(f"line {above}: {line}\n    An added equation must not use what is asked for below it")
        if re.search("∂|partial", answer) and "∂" not in solved.removeprefix(head):
            raise Wrong(f"line {number}: write the right side without ∂")
        if not head.startswith("∂") and names_in(head)[0] in names_in(answer):
            raise Wrong(f"line {number}: {head.split()[0]} is on both sides")
        if (added_clause := clause(answer)) != (end := clause(solved)):
            leave_out = f'leave out "{added_clause}": the answer must hold for all indices; use δ or [...] instead'
            raise Wrong(f"line {number}: " + (f'the end is given: "{end}"' if end else leave_out))


def expect_without(text: str, restricted: Restricted) -> None:
    """Raise Wrong if an answer, even a true one, is not what is asked for, such as its left side in other words.

    restricted: the beginning of a line, a pattern of what the answer must not contain, and what to say.
    """
    for number, line in equations(text):
        for head, pattern, why in restricted:
            if line.startswith(head) and re.search(pattern, line.removeprefix(head)):
                raise Wrong(f"line {number}: {line}\n    {why}")


def equations(text: str) -> list[tuple[int, str]]:
    """The equations of a file, each with the number of its line. Lines of prose and of code may be among them."""
    parts = items(text.expandtabs().splitlines())
    return [(item.line, normal_space(item.text)) for item in parts if item.kind == "equation"]


def clause(equation: str) -> str:
    """What follows after "for" or "with", with the word itself, or "" if there is neither."""
    match = re.search(r"\b(for|with) .*", equation)
    return match[0] if match else ""


def asked_for(head: str, text: str) -> bool:
    """Whether a text has a derivative, or the gradient that an equation begins with."""
    return bool(re.search("∂|partial", text)) or (not head.startswith("∂") and names_in(head)[0] in names_in(text))


def given_part(line: str) -> str:
    """An equation of an exercise up to its blank, "dx_k =", or "" if the line has none."""
    return normal_space(line).partition("?")[0].strip() if re.search(r"= \?(?= for |$)", normal_space(line)) else ""


def names_in(text: str) -> list[str]:
    """The names in an equation, without their indices, spelled in ASCII."""
    return [canonical(name) for name in re.findall(r"(?<![_\w])[^\W\d_\u0302][^\W_\u0302]*\u0302?", text)]


def in_docstring(error: Exception, message: str, above: int) -> str:
    """The message of an error with the line number of a file that has so many lines above the docstring."""
    return message if isinstance(error, Wrong) else LINE.sub(lambda line: str(int(line[0]) + above), message, count=1)
