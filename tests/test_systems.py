"""What differs between Linux, macOS and Windows: encodings and ends of lines, and what only some systems have."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

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
