"""What exercises.js calls: the check of an exercise, and an answer typeset."""

import json
import re

import numpy as np
from browser import window

from scratchformer.course.equations import Wrong, check_text, docstring_in, findings, in_docstring, judge
from scratchformer.notation.grammar import NotationError, parse
from scratchformer.notation.layout import DEFINED
from scratchformer.notation.walk import DerivationError
from scratchformer.pages.mathml import expression, wrapped

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Run:
    """A forward and a backward as docs/_ext/exercises.py gives it; see `notation.run.Execution`."""

    def __init__(self, data):
        self.values = {name: np.made(x["shape"], x["kind"], x["data"]) for name, x in data["values"].items()}
        self.name, self.names = data["name"], list(data["values"])
        self.arguments, self.outputs, self.gradients = (data[key] for key in ("arguments", "outputs", "gradients"))
        self.code, self.locals, self.functions = frozenset(), {}, {}


class Exercise:
    def __init__(self, text):
        self.data = json.loads(text)
        self.runs = [Run(each) for each in self.data["runs"]]
        self.names = [*self.runs[0].names, *(match[1] for match in DEFINED.finditer(self.data["start"]))]

    def grade(self, text):
        """The verdict as JSON: passed, message, the number of the line that it is about, and whether those above it are
        right.
        """
        docstring, above = docstring_in(text)
        start, solution, restricted = (self.data[key] for key in ("start", "solution", "restricted"))
        reached = True
        try:
            verdict = judge(start, solution, text, lambda: check_text(text, docstring, restricted, self.runs))
            passed, message = verdict.passed, verdict.message
        except (Wrong, DerivationError, NotationError) as error:
            passed, message = False, in_docstring(error, str(error), above)
            reached = not isinstance(error, Wrong)
            what = self.what_gives(message)
            message += f"\nThis is what one gets when {what}." if what else ""
        line = re.search(r"line (\d+)", message)
        found = {"passed": passed, "message": message.strip(), "line": int(line[1]) if line else 0, "reached": reached}
        return json.dumps(found)

    def what_gives(self, message):
        """The name of the known mistake with these numbers, or ""."""
        head, numbers = findings(self.data["start"], message)
        return next((w for h, n, w in self.data["mistakes"] if h == head and same_numbers(n, numbers)), "")

    def preview(self, head, answer):
        """An answer as MathML, or "" if it cannot be read."""
        try:
            return wrapped(expression(parse(f"{head} {answer}", self.names).parts[-1]), True)
        except NotationError:
            return ""


def same_numbers(a, b):
    """Whether two texts are the same, with numbers that differ by round-off."""
    if NUMBER.split(a) != NUMBER.split(b):
        return False
    pairs = [(float(x), float(y)) for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True)]
    return all(abs(x - y) <= 1e-8 * max(abs(x), abs(y)) + 1e-12 for x, y in pairs)


def begin(text):
    each = Exercise(text)
    return {"grade": each.grade, "preview": each.preview}


window.beginExercise = begin
