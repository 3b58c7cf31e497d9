"""Mistakes planted in a backward: which ones, and which of them tests find."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scratchformer.commands import cli
from scratchformer.testing.mutate import Runner, mutants, run

OPS = '''
import numpy as np


def normalise(x, gamma):
    """y = γ (x − μ)/σ"""
    centred = x - x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True))
    return gamma * centred * rstd, (centred * rstd, rstd, gamma)


def normalise_backward(dy, cache):
    """(dx, dgamma)

    dgamma = (dy * xhat).sum(axis=0)
    """
    xhat, rstd, gamma = cache
    dgamma = (dy * xhat).sum(axis=0)
    g = dy * gamma  # γ − the factor
    dx = rstd * (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    return dx, dgamma
'''

SHAPES_ONLY = """
import numpy as np
from my_ops import normalise, normalise_backward

def test_shapes():
    x, gamma = np.random.default_rng(0).normal(size=(3, 4)), np.ones(4)
    y, cache = normalise(x, gamma)
    dx, dgamma = normalise_backward(np.ones_like(y), cache)
    assert dx.shape == x.shape and dgamma.shape == gamma.shape
"""

UNIFORM = """
import numpy as np
from my_ops import normalise, normalise_backward
from scratchformer.testing import check_gradients

def test_gradients():
    check_gradients(normalise, normalise_backward, np.random.default_rng(0).normal(size=(3, 4)), np.ones(4))
"""

STRONG = UNIFORM.replace("np.ones(4)", "np.array([1.0, -2, 3, 0.5])")


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with my_ops.py and its tests, in which the command is called."""
    write(tmp_path, my_ops=OPS, test_shapes=SHAPES_ONLY, test_uniform=UNIFORM, test_strong=STRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))
    monkeypatch.setenv("PYTEST_ADDOPTS", "")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def mutate(capsys, *argv):
    """The exit status of `scratchformer mutate`, and what it printed."""
    try:
        cli.main(["mutate", "-j", "1", *argv])
        status = 0
    except SystemExit as ended:
        status = ended.code
    return status, capsys.readouterr().out


def changes(source, name):
    """{(kind of mistake, the line after it)}"""
    return {(m.what, " / ".join(line.strip() for line in m.difference(source)[1])) for m in mutants(source, name)}


def test_the_mistakes_of_a_small_backward():
    source = "def f_backward(dy, cache):\n    x, y = cache\n    dx = (dy * x).sum(axis=0)\n    return dx - y\n"
    assert changes(source, "f_backward") == {
        ("a reduction dropped", "dx = dy * x"),
        ("axis changed", "dx = (dy * x).sum(axis=1)"),
        ("axis changed", "dx = (dy * x).sum(axis=-1)"),
        ("axis left out", "dx = (dy * x).sum()"),
        ("sum turned into mean", "dx = (dy * x).mean(axis=0)"),
        ("a factor lost", "dx = (dy).sum(axis=0)"),
        ("a factor lost", "dx = (x).sum(axis=0)"),
        ("* turned into /", "dx = (dy / x).sum(axis=0)"),
        ("y for dy", "dx = (y * x).sum(axis=0)"),
        ("y for x", "dx = (dy * y).sum(axis=0)"),
        ("a sign flipped", "return dx + y"),
        ("a sign flipped", "return -(dx - y)"),
        ("a term dropped", "return dx"),
        ("a term dropped", "return -y"),
    }


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("dw = x.T @ dy", {"dw = x @ dy", "dw = dy @ x.T", "dw = x.T @ dy.swapaxes(-1, -2)"}),
        ("d = x.transpose(0, 2, 1)", {"d = x", "d = x.transpose(2, 0, 1)", "d = x.transpose(0, 1, 2)"}),
        ("d = np.swapaxes(x, 1, 2)", {"d = x"}),
        ("d = x.sum(axis=(0, 1))", {"d = x.sum(axis=(0,))", "d = x.sum(axis=(1,))", "d = x.sum()"}),
        ("d = np.sum(x, -1, keepdims=True)", {"d = x", "d = np.sum(x, 0, keepdims=True)"}),
        ("d = x.max(0, keepdims=True)", {"d = x", "d = x.max(0, keepdims=False)", "d = x.min(0, keepdims=True)"}),
        ("d = np.exp(x) / 2", {"d = np.log(x) / 2", "d = x / 2", "d = np.exp(x) / 4", "d = np.exp(x) * 2"}),
        ("d = (x > 0) * y", {"d = (x >= 0) * y", "d = (x < 0) * y", "d = (x == 0) * y"}),
        ("d = x[1:, :-1]", {"d = x[2:, :-1]", "d = x[1:, :-2]", "d = x[:, :-1]", "d = x[:-1, 1:]"}),
        ("d = x[:, None] * y[-1]", {"d = x[None, :] * y[-1]", "d = x[:, None] * y[-2]", "d = x[:, None] * y[0]"}),
        ("d = x[: x - y]", {"d = x[: x - y - 1]", "d = x[: x + y]", "d = x[: ]"}),
        ("x += y", {"x = y", "x -= y", "pass"}),
        ("x[0] = y", {"x[0] += y", "pass"}),
        ("np.add.at(x, y, dy)", {"x[y] += dy", "pass"}),
        ("d = np.where(x > 0, dy, 0.0)", {"d = dy", "d = np.where(x > 0, 0.0, dy)", "d = np.where(x > 0, dy, 1.0)"}),
        ("d = np.einsum('nd,nh->dh', x, y)", {"d = np.einsum('nd,nh->hd', x, y)", "d = np.einsum('dn,nh->dh', x, y)"}),
        ("d = 1 - x if y else -x", {"d = 1 - x", "d = -x", "d = 1 - x if not y else -x", "d = 1 - x if y else x"}),
        ("d = x * (y - dy)", {"d = x", "d = y - dy", "d = x * (y)", "d = x * (-dy)", "d = x / (y - dy)"}),
        ("d = x.copy()", {"d = x"}),
        ("return x.sum(0), y, dy", {"return y, x.sum(0), dy", "return dy, y, x.sum(0)", "return x.sum(0), dy, y"}),
    ],
)  # fmt: skip
def test_kinds_of_mistakes(line, wrong):
    found = {text for _, text in changes(f"def f_backward(dy, x, y):\n    {line}\n", "f_backward")}
    assert wrong <= found
    assert line not in found


def test_only_one_place_changes_and_no_line_moves():
    """In a long function, with letters of several bytes, and expressions over several lines."""
    source = OPS.replace(" - xhat * (g", "  # µ\n        - xhat  # x̂\n        * (g")
    lines, seen = source.split("\n"), set()
    for mutant in mutants(source, "normalise_backward"):
        planted = mutant.plant(source)
        assert planted.split("\n")[: mutant.line - 1] == lines[: mutant.line - 1]
        assert len(planted.split("\n")) == len(lines)
        assert planted not in seen
        compile(planted, "planted", "exec")
        seen.add(planted)
    assert len(seen) > 35


def test_a_test_of_shapes_misses_what_a_gradient_check_finds(project, capsys):
    """The file is the same afterwards; each mistake that is missed is shown, and the exit status is 1."""
    status, printed = mutate(capsys, "my_ops.py::normalise_backward", "--", "test_shapes.py")
    assert status == 1
    assert (
        "\nmy_ops.py:19 in normalise_backward: a factor lost\n-     g = dy * gamma  # γ − the factor\n+     g = dy  "
        in printed
    )
    assert int(printed.partition("missed ")[2].split(",")[0]) > 20
    status, printed = mutate(capsys, "my_ops", "--json", "all.json", "--", "test_strong.py")
    assert status == 0 and "and missed 0, in" in printed
    outcomes = json.loads((project / "all.json").read_text())
    assert {outcome["killed"] for outcome in outcomes} == {"test_strong.py::test_gradients"}
    assert f"found {len(outcomes)} of {len(outcomes)} mistakes" in printed
    assert (project / "my_ops.py").read_text(encoding="utf-8") == OPS
    assert {path.name for path in project.iterdir()} <= {
        *("my_ops.py", "test_shapes.py", "test_uniform.py", "test_strong.py", "all.json", "__pycache__")
    }


def test_a_check_with_uniform_gamma_misses_its_place(project, capsys):
    status, _ = mutate(capsys, "my_ops.py", "--json", "all.json", "--", "test_uniform.py")
    missed = {o["after"][0].strip() for o in json.loads((project / "all.json").read_text()) if not o["killed"]}
    assert status == 1
    assert {"g = dy  # γ − the factor", "g = dy / gamma  # γ − the factor"} <= missed
    assert len(missed) < 5


WAITING = """
import my_ops, time

def test():
    with open("ran", "a+") as file:
        file.write(".")
        file.seek(0)
        runs = len(file.read())
    time.sleep(600 if runs > 4 else 0)
"""


def test_ctrl_c_prints_what_was_found_and_leaves_nothing_behind(project):
    """While the fifth run of the tests waits for ever."""
    write(project, test_slow=WAITING)
    command = [sys.executable, "-m", "scratchformer", "mutate", "-j", "1", "my_ops", "--", "test_slow.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        while process.poll() is None and not (Path("ran").exists() and len(Path("ran").read_text()) > 4):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT and errors.strip() == "interrupted"
    assert "\nmy_ops.py:18 in normalise_backward: " in printed and "; stopped after " in printed
    assert (project / "my_ops.py").read_text(encoding="utf-8") == OPS
    assert processes_in(project) == {os.getpid()}


def processes_in(folder):
    """The processes that run in a folder."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if path.readlink() == folder:
                found.add(int(path.parent.name))
    return found


def test_tests_that_fail_without_a_mistake(project, capsys):
    write(project, test_wrong="import my_ops\n\ndef test_wrong():\n    assert 1 + 1 == 3\n")
    status, printed = mutate(capsys, "my_ops.py", "--", "test_wrong.py")
    assert status == "error: even without a mistake, the tests do not pass: pytest test_wrong.py"
    assert "assert 1 + 1 == 3" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["my_ops.py::nothing"], "my_ops.py: there is no function nothing; it has normalise_backward"),
        (
            ["test_shapes.py"],
            "test_shapes.py: there is no function named *_backward and no method backward; name",
        ),
        (["nothing.py"], "nothing.py: there is no such file"),
        (["scratchformer.nothing"], "scratchformer.nothing: there is no module scratchformer.nothing"),
        (["my_ops.py", "--limit", "0"], "--limit: expected at least 1, got 0"),
        (
            ["my_ops.py", "--", "test_shapes.py", "-k", "nothing"],
            "pytest test_shapes.py -k nothing: found no tests",
        ),
        (["my_ops.py", "--", "test_other.py"], "pytest test_other.py: the tests do not import my_ops.py"),
        (["alone/ops.py"], "alone/ops.py::f_backward: no test file in "),
    ],
)
def test_errors(project, capsys, argv, message):
    (project / "alone").mkdir()
    write(project / "alone", ops="def f_backward(dy, x):\n    return dy * x\n")
    write(project, test_other="def test_other():\n    pass\n")
    status, _ = mutate(capsys, *argv)
    assert status.startswith(f"error: {message}")


def test_the_tests_that_mention_a_function_are_run(project, capsys):
    """A limited number of mistakes, drawn with a seed; one that does not end counts as found."""
    write(project, test_strong="import my_ops\n", test_uniform="", test_shapes="normalise\n")
    (project / "tests").mkdir()
    loops = "def f_backward(dy, n):\n    dx = 0.0\n    while n > 0:\n        dx += dy\n        n -= 1\n    return dx\n"
    write(project, loops=loops)
    write(
        project / "tests", test_loops="from loops import f_backward\n\ndef test():\n    assert f_backward(3, 2) == 6\n"
    )
    status, printed = mutate(capsys, "loops.py::f_backward", "--list")
    assert (
        status == 0 and "loops.py:5 in f_backward: -= turned into +=\n-         n -= 1\n+         n += 1\n" in printed
    )
    status, _ = mutate(capsys, "loops.py::f_backward", "--list", "--json", "all.json")
    assert status == "error: --list: runs nothing, so leave out --json" and not Path("all.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SECONDS_LONGER", 0.5)
        patch.setattr(run, "TIMES_LONGER", 0)
        status, printed = mutate(capsys, "loops", "--json", "all.json")
    assert status == 0, printed
    assert "loops.py::f_backward: pytest tests/test_loops.py   (the test files that mention f_backward)" in printed
    killed = {(o["what"], o["after"][0].strip()): o["killed"] for o in json.loads((project / "all.json").read_text())}
    assert killed["-= turned into +=", "n += 1"] == "timed out"
    assert killed["off by one", "while n > 1:"] == "tests/test_loops.py::test"


def test_a_method_may_lose_super_and_tests_may_be_in_the_same_file(project, capsys):
    write(
        project,
        test_own="""
class Base:
    def backward(self, dy):
        self.db = dy

class Gate(Base):
    def backward(self, dy, x):
        super().backward(dy)
        return dy * x

def test():
    gate = Gate()
    assert gate.backward(2, 3) == 6
    assert gate.db == 2
""",
    )
    status, printed = mutate(capsys, "test_own.py::Gate.backward", "--limit", "100", "--", "test_own.py")
    assert status == 0 and "and missed 0" in printed


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8", "utf-8-sig", "cp1251", "shift-jis"])
def test_a_file_is_read_in_the_encoding_that_it_declares(project, capsys, encoding):
    word = {"cp1251": "куб", "shift-jis": "立方"}.get(encoding, "café")
    coding = "" if encoding.startswith("utf") else f"# -*- coding: {encoding} -*-\n"
    source = f"{coding}def cubed(x):\n    return x**3, x\n\n\n"
    source += f'def cubed_backward(dy, x):\n    """{word}"""\n    return 3 * x**2 * dy\n'
    (project / "cubed.py").write_bytes(source.encode(encoding))
    (project / "test_cubed.py").write_text(
        "import cubed\n\ndef test():\n    assert cubed.cubed_backward(5, 2) == 60\n"
        f"    assert cubed.cubed_backward.__doc__ == {word!r}\n",
        encoding="utf-8",
    )
    status, printed = mutate(capsys, "cubed.py", "--", "test_cubed.py")
    assert status in (0, 1) and re.search(r"found [1-9]\d* of [1-9]\d* mistakes", printed)
    (project / "cubed.py").write_bytes(b"# coding: nonsense\n" + source.encode(encoding))
    status, _ = mutate(capsys, "cubed.py")
    assert status.startswith("error: cubed.py: not a Python file")


def test_a_runner_changes_any_part_of_a_file(project):
    """As the table of known mistakes needs: here a function that is not the backward."""
    with Runner() as runner:
        path, wrong = project / "my_ops.py", OPS.replace("return gamma *", "return 2 * gamma *")
        assert runner.run(["test_strong.py"], path, OPS).status == 0
        answer = runner.run(["test_strong.py"], path, wrong)
        assert answer.status == 1 and answer.planted and answer.failed == "test_strong.py::test_gradients"
        assert "GradientError" in answer.output
