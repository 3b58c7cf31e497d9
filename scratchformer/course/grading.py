"""The check of a student's file: what `check` of an exercise calls, and the verdict."""

from __future__ import annotations

import ast
import io
import linecache
import re
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..notation import DerivationError, NotationError
from ..notation.grammar import parse
from ..notation.layout import normal as normal_space
from ..notation.mistakes import in_words, mistakes
from ..notation.ratios import Compared, explanations, factor_everywhere, other_shape, sizes, times
from ..notation.run import Execution, run
from ..notation.spelling import spelled
from ..rng import Key
from ..shell.reading import expect_file
from ..shell.source import syntax_tree
from ..shell.text import apart
from ..testing import GradientError, check_gradients
from ..testing.contracts import HOUSE
from ..testing.diagnosis import paragraph, without_diagnosis
from ..testing.mutate.mutants import mutants
from .equations import (
    Restricted,
    Verdict,
    Wrong,
    blanks_left,
    check_text,
    findings,
    first_blank,
    in_docstring,
    judge,
)
from .exercise import Exercise

SETS = re.compile(r"( *(\w+) = )([^#]*[^#,(\s])")  # a line of code that sets one variable
SECONDS = 2.0  # that the search for the name of a mistake may take


@np.errstate(all="ignore")  # if a wrong answer overflows, the check of its result says so
def grade(exercise: Exercise, path: Path) -> Verdict:
    """Check the student's file, and say what is right or wrong."""
    expect_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # as Python reads it, without a byte-order mark
    except UnicodeDecodeError as error:
        return Verdict(False, f"{path.name} is not in UTF-8, see its byte {error.start}: save it as UTF-8")
    try:
        # in a derivation "\frac" is no escape sequence, but LaTeX, which gets a message of its own
        student = load(path, text if exercise.kind == "code" else text.replace("\\", r"\\"))
        student.__dict__["__source__"] = text
        expect_functions(exercise, text)
        if exercise.kind == "derivation":
            return judge(exercise.start, exercise.solution, text, lambda: exercise.check(student))
        try:
            with without_diagnosis():
                return Verdict(True, exercise.check(student) or "")
        except Exception:
            if left := blanks_left(text, exercise.kind):  # a blank that the answer does without is none
                return Verdict(False, first_blank(text, left))
            raise
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""  # text with a null byte has none
        return Verdict(False, f"{line}{error.msg}: {(error.text or '').strip()}".removesuffix(": "))
    except GradientError as error:
        message = explained(exercise, student, text) or in_file(error, text)
        return Verdict(False, recognised(exercise, path, error, text) or slip(exercise, path, error, message))
    except (DerivationError, NotationError, Wrong) as error:
        named = recognised(exercise, path, error, text)
        return Verdict(False, named or slip(exercise, path, error, in_file(error, text)))
    except (Exception, SystemExit) as error:
        return Verdict(False, where(error, path))


def load(path: Path, text: str) -> ModuleType:
    """Run a student's file as a module. No bytecode is kept: two saves within a second would look alike."""
    lines = io.StringIO(text).readlines()
    linecache.cache[str(path)] = len(text), None, lines, str(path)  # the text need not be that on the disk
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    module.__dict__["__source__"] = text
    exec(compile(text, str(path), "exec", optimize=0), module.__dict__)  # -OO would drop derivations
    return module


def recognised(exercise: Exercise, path: Path, error: Exception, text: str) -> str:
    """The message with the name of a mistake that leads to the same one, numbers included, if one does.

    The mistakes are the exercise's own; then, for a derivation, those that `notation.mistakes` plants in its equation.
    """
    message = in_file(error, text)
    named = ((each.what, exercise.solution.replace(each.right, each.wrong)) for each in exercise.mistakes if each.what)
    head, _ = findings(exercise.start, message)
    what = same_mistake(exercise, path, error, message, chain(named, planted(exercise, head)))
    return f"{message}\nThis is what one gets when {what}." if what else ""


def same_mistake(
    exercise: Exercise, path: Path, error: Exception, message: str, mistakes: Iterable[tuple[str, str]]
) -> str:
    """The name of the first of the mistakes, each with the text of its file, that gives the same numbers; or ""."""
    wanted, start, values = findings(exercise.start, message), time.thread_time(), getattr(error, "values", None)
    for what, wrong in mistakes:
        other = finding(exercise, path.name, wrong)
        if other and other[0] == wanted and alike(values, other[1]):
            return what
        if time.thread_time() - start > SECONDS:
            break
    return ""


@lru_cache(maxsize=10_000)  # every wrong answer is compared with the same mistakes
def finding(exercise: Exercise, file: str, text: str) -> tuple[tuple[str, str], np.ndarray | None] | None:
    """What the check says of this text of the exercise, and the array that is wrong; None if it passes."""
    try:
        with without_diagnosis():
            exercise.check(load(Path(file), text))
    except Exception as error:
        return findings(exercise.start, in_file(error, text)), getattr(error, "values", None)
    return None


def alike(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Whether two wrong arrays are equal to round-off."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


def slip(exercise: Exercise, path: Path, error: Exception, message: str) -> str:
    """The message, and if nothing has a name for the numbers in it, the slip in the solution's code that gives them."""
    unknown = paragraph([])[0]
    if exercise.kind != "code" or not (unknown in message or getattr(error, "values", None) is not None):
        return message
    short = in_file(error, "")
    what = same_mistake(exercise, path, error, short, slips(exercise))
    return message.replace(unknown, "").rstrip() + f"\n{what}" if what else message


def slips(exercise: Exercise) -> Iterator[tuple[str, str]]:
    """The solution with one slip in a line of code that the student has to write, in all ways, each with its name."""
    solution, answers = exercise.solution, exercise.answers
    lines = solution.split("\n")
    said = "One slip{} gives exactly these numbers: {}."
    for number, line in enumerate(lines):
        if line in answers and (match := SETS.fullmatch(line)):
            for what, wrong in ("the sign", f"-({match[3]})"), ("a factor of 2", f"2 * ({match[3]})"):
                text = "\n".join([*lines[:number], match[1] + wrong, *lines[number + 1 :]])
                yield said.format(f" in {match[2]}", what), text
    for name in functions(solution):
        for mutant in mutants(solution, name):
            if (line := lines[mutant.line - 1]) in answers:
                target = re.match(r" *(\w+) [-+*/]?= ", line)
                yield said.format(f" in {target[1]}" if target else "", mutant.what), mutant.plant(solution)


def planted(exercise: Exercise, head: str) -> Iterator[tuple[str, str]]:
    """The solution with one mistake in the equation that begins so, in all ways, each with its name."""
    if not head:
        return
    line = next(line for line in exercise.solution.splitlines() if normal_space(line).startswith(head))
    right = parse(line.strip())
    opposite = right._replace(parts=(*right.parts[:-1], ("neg", ("group", right.parts[-1]))))
    named = ((in_words(what, right, wrong), wrong) for what, wrong in mistakes(right))
    for name, wrong in chain([("the sign is wrong", opposite)], named):
        if wrong.parts[:-1] == right.parts[:-1]:
            kept, last = line.strip().rpartition(" = ")[0], spelled(wrong).rpartition(" = ")[2]
            yield name, exercise.solution.replace(line.strip(), f"{kept} = {last}", 1)


def explained(exercise: Exercise, student: ModuleType, text: str) -> str:
    """The message with a diagnosis, if a gradient is wrong."""
    try:
        exercise.check(student)
    except GradientError as error:
        return in_file(error, text)
    except Exception:  # it is not about a gradient, so there is no diagnosis
        pass
    return ""


def expect_functions(exercise: Exercise, text: str) -> None:
    """Raise Wrong if a function is gone, or if one that has no blank was changed. Prints may be added."""
    written, solved = functions(text), functions(exercise.solution)
    for name, given in functions(exercise.start).items():
        if name not in written:
            raise Wrong(f"{name} is gone: the check calls it")
        if statements(given) == statements(solved[name]) != statements(written[name]):
            raise Wrong(
                f"line {written[name].lineno}: {name} is given and was changed. Put it back: "
                "`scratchformer learn reset` writes a new file and keeps yours"
            )


def functions(text: str) -> dict[str, ast.FunctionDef]:
    """The functions of a module and the methods of its classes, by name."""
    tree = syntax_tree(text)
    bodies = [("", tree.body), *((f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef))]
    return {scope + node.name: node for scope, body in bodies for node in body if isinstance(node, ast.FunctionDef)}


def statements(function: ast.FunctionDef) -> str:
    """What a function computes: all but its docstring, and calls whose result is not used, such as prints."""
    parts = (ast.dump(node) for node in [function.args, *function.body] if not isinstance(node, ast.Expr))
    return "\n".join(parts)


def in_file(error: Exception, text: str) -> str:
    """The message with line numbers of the file, not of the docstring, and without how to repeat the check or change
    it.
    """
    message = re.sub(r" rules=\{.*?\} switches this rule off\.", "", str(error).partition("\nRepeat with")[0])
    for node in ast.walk(syntax_tree(text)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            return in_docstring(error, message, node.body[0].lineno - 1)
    return message


def where(error: BaseException, path: Path) -> str:
    """The error, with the line of the student's file that it comes from and the shapes of the arrays in that line."""
    text = f"{type(error).__name__}: {error}"
    steps = [step for step in traceback.walk_tb(error.__traceback__) if step[0].f_code.co_filename == str(path)]
    if not steps:
        return text
    frame, number = steps[-1]
    line = linecache.getline(str(path), number).strip()
    if match := re.search(r"gufunc signature \(n\?,k\).*size (\d+) is different from (\d+)", text):
        text = (
            "matmul: a @ b sums over the last axis of a and the last but one of b, which must be equal: they are "
            f"{match[2]} and {match[1]}. Is one of the two to be transposed, or are they to be exchanged?"
        )
    if not isinstance(error, ValueError | IndexError | TypeError):
        return f"line {number}: {line}\n    {text}"
    arrays = {name: each for name, each in frame.f_locals.items() if isinstance(each, np.ndarray)}
    shapes = [f"{name} {each.shape}" for name, each in arrays.items() if re.search(rf"\b{name}\b", line)]
    return f"line {number}: {line}\n    {text}" + (f"\n    The shapes: {', '.join(shapes)}" if shapes else "")


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal numbers."""
    return Key(seed).fold("exercise").generator().standard_normal(shape)


RULES = dict.fromkeys(HOUSE, True) | {"layouts": False, "empty": False}
FLOAT32 = """
The check repeats everything in float32, and every result must stay float32. NumPy gives float64 when booleans or
integers are divided, for np.sqrt of an integer, and for np.zeros or np.eye without a dtype."""


def check_pair(student: Any, name: str, *args: Any, **options: Any) -> None:
    """`check_gradients`, for a student's operation of this name and its backward. They need not work for empty arrays,
    or in every layout.
    """
    try:
        check_gradients(*pair(student, name), *args, rules=RULES, **options)
    except GradientError as error:
        if "inputs are float32" not in str(error):
            raise
        raise Wrong("The values are right in float64. " + in_file(error, "") + FLOAT32) from error


def pair(student: Any, name: str) -> tuple[Callable, Callable]:
    return getattr(student, name), getattr(student, f"{name}_backward")


def variables_of(student: Any, name: str, *args: Any) -> dict[str, np.ndarray]:
    """The arrays of one run of a student's pair, by name: arguments, dy, gradients and local variables."""
    ran = run(*pair(student, name), *args)
    return {name: value for variables in ran.locals.values() for name, value in variables.items()} | ran.values


def peak_memory(call: Callable[[], Any]) -> int:
    """The most bytes that a call takes at once."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def numbers_in(cache: Any) -> int:
    """How many numbers the arrays in nested tuples, lists and dictionaries hold."""
    if isinstance(cache, dict):
        cache = list(cache.values())
    if isinstance(cache, tuple | list):
        return sum(map(numbers_in, cache))
    return cache.size if isinstance(cache, np.ndarray) else 0


def expect_no_jacobian(student: Any, name: str, *args: Any) -> None:
    """Raise Wrong if the backward of an operation on rows builds a table with a row and a column for each number."""
    op, op_backward = pair(student, name)
    y, cache = op(*args)
    n, peak = y.shape[-1], peak_memory(lambda: op_backward(y, cache))
    if peak > 8 * n * n // 2:
        raise Wrong(
            f"With rows of {n} numbers the backward takes {peak // 1000} kB at once, a row only {8 * n // 1000} kB: "
            f"is there a Jacobian, with {n}·{n} numbers for each row? Simplify the sum first"
        )


@contextmanager
def expect_unchanged(**arrays: np.ndarray) -> Iterator[None]:
    """Raise Wrong if the student's code writes to one of the arrays."""
    before = {name: x.copy() for name, x in arrays.items()}
    yield
    for name, x in arrays.items():
        if not np.array_equal(x, before[name]):
            raise Wrong(f"{name} is changed in place; make a new array")


class Derivation(NamedTuple):
    """What the check of a derivation runs: an op and its backward on several arguments; names for the equations.

    restricted: see `equations.expect_without`.
    """

    op: Callable
    op_backward: Callable
    runs: Sequence[tuple]
    names: Mapping[str, Any] | None = None
    restricted: Restricted = ()

    def executions(self) -> Iterator[Execution]:
        for seed, args in enumerate(self.runs):
            yield run(self.op, self.op_backward, *args, names=self.names, seed=seed)

    def check(self, text: str) -> str:
        """Check the derivation in the docstring of the op of a file with this text; see `check_text`."""
        return check_text(text, self.op.__doc__ or "", self.restricted, self.executions())


def expect_close(name: str, actual: Any, expected: Any, why: str = "", rtol: float = 1e-9) -> None:
    """Raise Wrong, naming the worst element, unless two arrays (or numbers) are equal to rounding."""
    if actual is None:
        raise Wrong(f"{name}: expected an array, got None")
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        hint = other_shape(expected.shape, actual.shape)
        raise Wrong(
            ". ".join(filter(None, (f"{name}: expected shape {expected.shape}, got {actual.shape}", hint, why)))
        )
    difference = np.abs(actual - expected)
    if np.all(difference <= rtol * max(np.abs(expected).max(initial=0), 1e-300)):
        return
    at = np.unravel_index(int(np.argmax(np.nan_to_num(difference, nan=np.inf))), expected.shape)
    index = f"[{', '.join(map(str, map(int, at)))}]" if at else ""
    right, wrong = apart(expected[at] + 0, actual[at])
    numbers = sizes({name: expected})
    compared = Compared(actual, expected)
    factor = factor_everywhere(compared, numbers)
    text = next(explanations(compared, {}, numbers), ("", ""))[0] if factor is None else times(factor, numbers, "it")
    ratio = f"{name} is {text.rstrip('.')}" if text else ""
    message = ". ".join(filter(None, (f"{name}{index}: expected {right}, got {wrong}", ratio, why)))
    raise Wrong(message, actual)
