"""What differs between Linux, macOS and Windows: encodings and ends of lines, and what only some systems have."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    *(ROOT / "scratchformer").rglob("*.py"),
    *(file for folder in ("examples", "benchmarks", ".ci") for file in (ROOT / folder).rglob("*.py")),
]

# What Windows lacks, or macOS.
MODULES = "fcntl grp posix pty pwd readline resource syslog termios tty".split()
OF_OS = """
fork forkpty geteuid getloadavg getpgid getuid killpg mkfifo nice O_NOFOLLOW O_NONBLOCK register_at_fork
sched_getaffinity sched_setaffinity setsid statvfs sysconf wait WNOHANG
""".split()
OF_SIGNAL = "SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGALRM SIGCHLD SIGPIPE setitimer pthread_kill pthread_sigmask".split()

WITHOUT = f"""
import os
os.supports_dir_fd = set()  # what shutil looks at when it is imported
import asyncio, multiprocessing, selectors, signal, subprocess, sys, tarfile, tempfile, threading
import numpy, pooch, rich.console, scipy.special, threadpoolctl, tqdm, watchfiles  # these know each system
for name in {MODULES}:
    sys.modules[name] = None
for name in {OF_OS}:
    vars(os).pop(name, None)
for name in {OF_SIGNAL}:
    vars(signal).pop(name, None)
class Msvcrt:
    LK_NBLCK = 1
    locking = staticmethod(lambda *_: None)
sys.modules["msvcrt"] = Msvcrt
"""


def without_encoding(tree):
    """The calls that open a text file in the encoding of the system, or write to one with its ends of lines."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if method else getattr(call.func, "id", "")
        keywords = {each.arg: each.value for each in call.keywords}
        if name == "open" and not (method and not call.args and "mode" not in keywords):
            at = 0 if method else 1
            mode = call.args[at] if len(call.args) > at else keywords.get("mode", ast.Constant("r"))
            mode = mode.value if isinstance(mode, ast.Constant) else ""
            if not re.fullmatch(r"[rwax]\+?", str(mode)):  # of bytes, or no mode: os.open, webbrowser.open
                continue
            writes = mode == "a"
        elif method and name in ("read_text", "write_text"):
            writes = name == "write_text"
        else:
            continue
        if "encoding" not in keywords:
            yield call.lineno, "encoding"
        if writes and "newline" not in keywords:
            yield call.lineno, "newline"


def test_text_files_have_the_same_bytes_on_every_system():
    """Windows would write another encoding, and carriage returns, which our checksums do not expect."""
    bad = []
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        package = name.startswith("scratchformer/")
        text = file.read_text(encoding="utf-8")
        lacks = without_encoding(ast.parse(text)) if "open(" in text or "_text(" in text else ()
        bad += [f"{name}:{line} has no {what}" for line, what in lacks if package or what == "encoding"]
    assert len(FILES) > 300 and not bad


def test_a_file_without_encoding_is_noticed():
    text = 'open("x")\nopen("x", "a", encoding="utf-8")\np.read_text()\nopen("x", "rb")\np.write_text("")'
    assert list(without_encoding(ast.parse(text))) == [
        (1, "encoding"), (2, "newline"), (3, "encoding"), (5, "encoding"), (5, "newline"),
    ]  # fmt: skip


def sorted_paths(tree):
    """The lines that call `sorted` to compare paths, which Windows compares without regard to case."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "id", "") == "sorted" and "key" not in {each.arg for each in call.keywords}:
            (what,) = call.args
            if isinstance(what, ast.GeneratorExp):
                what = what.generators[0].iter if isinstance(what.elt, ast.Name) else None
            if getattr(getattr(what, "func", None), "attr", "") in ("glob", "iterdir", "rglob"):
                yield call.lineno


def test_files_have_the_same_order_on_every_system():
    calls = "p.iterdir()", "x for x in p.glob(y)", "x.name for x in p.glob(y)", "p.glob(y), key=str"
    text = "\n".join(f"sorted({each})" for each in calls)
    assert [*sorted_paths(ast.parse(text))] == [1, 2]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
    assert not [f"{file}:{line}" for file, tree in trees.items() for line in sorted_paths(tree)]


def test_a_function_checks_for_what_some_systems_lack():
    """The exception is runner.py, which plants mistakes: it needs fork, and says so where there is none."""
    lacking, bad = {("os", name) for name in OF_OS} | {("signal", name) for name in OF_SIGNAL}, []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        if (
            file.name == "runner.py"
            or not file.is_relative_to(ROOT / "scratchformer")
            or not re.search("os|signal", text)
        ):
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef) or re.search("hasattr|AttributeError", ast.unparse(function)):
                continue
            bad += [
                f"{file}:{node.lineno}"
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and (getattr(node.value, "id", ""), node.attr) in lacking
            ]
    assert not bad


def test_a_run_where_nothing_of_posix_exists(tmp_path):
    """A run is trained and continued, in a folder with spaces and other letters."""
    code = f"""{WITHOUT}
import scratchformer.commands.cli, scratchformer.commands.doctor, scratchformer.course.command
import scratchformer.course.child, scratchformer.parallel.ranks, scratchformer.testing.mutate.command
sys.path.append({str(ROOT / "examples")!r})
import enwik8
enwik8.PRESETS["small"] |= dict(model="plain", d_model=8, heads=2, depth=1, context=8, batch_size=2, bytes=60000)
for options in (["--data", "stdlib", "--out", "a run ≤ θ", "--steps", "2"], ["--resume", "a run ≤ θ", "--steps", "3"]):
    sys.argv = ["enwik8.py", *options]
    enwik8.start(enwik8.main)
"""
    run = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"SCRATCHFORMER_FAST": "0", "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert b"\r" not in (tmp_path / "a run ≤ θ" / "metrics.jsonl").read_bytes()


def test_the_public_ci_calls_pieces_that_exist():
    """It runs all pieces of .ci/run, tests every Python that setup.cfg names, and has no secrets."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text(encoding="utf-8"))
    assert {*named} == {*jobs["python"]["strategy"]["matrix"]["python"]} - {"3.14t"}
    pieces = re.findall(r"^#     (\w+)  ", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    matrix = jobs["piece"]["strategy"]["matrix"]
    assert len(pieces) > 5 and matrix["piece"] == pieces
    assert {each["piece"] for each in matrix["include"]} <= {*pieces}
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert [step["run"] for step in steps if ".ci/run" in step.get("run", "")] == ["bash .ci/run ${{ matrix.piece }}"]
    paths = [word for step in steps for word in step.get("run", "").split() if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)
    assert "secrets" not in text


def test_the_public_ci_uses_one_fixed_version_of_each_action():
    files = (ROOT / ".github" / "workflows").glob("*.yml")
    used = [each for file in files for each in re.findall(r"uses: (.*)", file.read_text(encoding="utf-8"))]
    assert len(used) > 4 and all(re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", each) for each in used)
    assert len({*used}) == len({each.partition("@")[0] for each in used})
