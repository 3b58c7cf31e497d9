"""`scratchformer learn`, as a student types it."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from scratchformer.commands.cli import main
from scratchformer.course.command import check_one
from scratchformer.course.course import NAMES, exercise
from scratchformer.course.record import find


@pytest.fixture
def learn(tmp_path, monkeypatch, capsys):
    """learn("check", "softmax") gives what the command printed; the folder is empty at first."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        try:
            main(["learn", *words])
        except SystemExit as end:
            if isinstance(end.code, str):
                return end.code
        return capsys.readouterr().out

    return run


def solve(name, **replaced):
    path = Path("exercises", f"{name}.py")
    path.write_text(exercise(name).solution, encoding="utf-8")
    return path


def test_the_list_shows_progress_that_survives(learn):
    first, second = NAMES[:2]
    rows = learn().splitlines()
    assert sum(any(f" {name} " in row for row in rows) for name in NAMES) == len(NAMES)
    assert rows[-1] == f"0 of {len(NAMES)} done; next: scratchformer learn start {first}"
    learn("start")
    learn("hint")
    solve(first)
    assert learn("check").startswith(f"✓ {first}")
    rows = learn().splitlines()
    assert re.search(rf"^ ✓ +1  {first} .*\(1 hint\)$", "\n".join(rows), re.MULTILINE)
    assert rows[-1] == f"1 of {len(NAMES)} done; next: scratchformer learn start {second}"


def test_one_may_start_anywhere_and_go_on_from_there(learn):
    assert "exercises/softmax.py" in learn("start", "softmax")
    solve("softmax")
    assert f"next: scratchformer learn start {NAMES[NAMES.index('softmax') + 1]}" in learn("check")


def test_next_is_said_once_and_is_the_file_where_there_is_one(learn):
    learn("start", "all")
    solve("chain_rule")
    solve("relu")
    assert learn("check", "chain_rule").splitlines()[-1] == "  next: exercises/linear_equations.py"
    printed = learn("check", "all")
    assert printed.count("✓") == 2
    assert [row for row in printed.splitlines() if "next:" in row] == ["  next: exercises/softmax_equations.py"]
    assert learn().endswith("; next: exercises/softmax_equations.py\n")


def test_all_can_be_started_elsewhere_and_checked(learn):
    learn("start", "all", "elsewhere")
    assert {path.stem for path in Path("elsewhere").glob("*.py")} == set(NAMES)
    assert learn("check", "all", "--dir", "elsewhere").count("still blank") == len(NAMES)
    assert learn("--dir", "elsewhere").count("…") == len(NAMES)


@pytest.mark.parametrize("words", [("--dir", "my own", "start", "relu"), ("start", "relu", "--dir", "my own")])
def test_the_folder_may_be_named_in_any_place(learn, words):
    assert "scratchformer learn check --dir 'my own'" in learn(*words)
    assert Path("my own/relu.py").exists() and not Path("exercises").exists()
    assert "exercises: start one with" in learn("check", "all")


def test_what_another_command_noted_meanwhile_is_kept(learn):
    learn("start", "softmax")
    open_longer = find()
    learn("hint", "softmax")
    solve("relu")
    assert check_one(open_longer, "relu")
    found = find()
    assert found.of("softmax").hints == 1 and found.of("relu").passed


def test_a_file_with_a_byte_order_mark(learn):
    learn("start", "softmax")
    solve("softmax").write_text(exercise("softmax").solution, encoding="utf-8-sig")
    assert "✓ softmax" in learn("check")


def test_a_file_in_another_encoding(learn):
    learn("start", "relu")
    Path("exercises/relu.py").write_bytes((exercise("relu").solution + "# déjà vu\n").encode("latin-1"))
    assert re.search(r"✗ relu\n  relu\.py is not in UTF-8, see its byte \d+: save it as UTF-8", learn("check"))


def test_a_file_is_never_overwritten(learn):
    learn("start", "softmax")
    path = solve("softmax")
    assert "exists already" in learn("start", "softmax")
    assert path.read_text() == exercise("softmax").solution
    learn("check")
    for old in ("softmax.old1", "softmax.old2"):
        assert f"exercises/{old}" in learn("reset", "softmax")
    assert path.read_text() == exercise("softmax").start
    assert Path("exercises/softmax.old1").read_text() == exercise("softmax").solution
    assert learn().splitlines()[-1].startswith("0 of")


def test_check_takes_the_file_that_was_saved_last(learn):
    learn("start", "softmax")
    learn("start", "adam")
    os.utime("exercises/softmax.py", (2e9, 2e9))
    assert "✗ softmax" in learn("check")
    os.utime("exercises/adam.py", (3e9, 3e9))
    assert "✗ adam" in learn("check")


def test_a_wrong_answer_ends_with_status_1(learn):
    learn("start", "softmax")
    with pytest.raises(SystemExit) as end:
        main(["learn", "check"])
    assert end.value.code == 1


def test_hints_say_more_and_more(learn):
    learn("start", "softmax")
    printed = [learn("hint", "softmax") for _ in range(4)]
    assert [text.count("hint") for text in printed] == [1, 2, 3, 3]
    assert "(3 hints)" in learn()


def test_the_solution_is_remembered_as_seen(learn):
    learn("start", "softmax")
    text = learn("solution", "softmax")
    assert "dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))" in text
    assert "∂y_i/∂z_k = (δ_ik exp(z_i) Z − exp(z_i) exp(z_k)) / Z²" in text  # the library's derivation
    assert "(solution seen)" in learn()
    learn("reset", "softmax")
    assert "(solution seen)" in learn()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["start", "sotfmax"], "unknown exercise 'sotfmax'; did you mean softmax"),
        (["check"], "no exercises in exercises: start one with"),
        (["check", "softmax"], "softmax.py does not exist"),
        (["watch"], "no exercises in exercises: start one with"),
    ],
)
def test_what_cannot_be_done(learn, words, message):
    assert message in learn(*words)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("    dz = (", "line 22: '(' was never closed"),
        ("    dz = nothing", "line 22: dz = nothing\n      NameError: name 'nothing' is not defined"),
        ("    raise SystemExit", "line 22: raise SystemExit"),
        ("    dz = None", "softmax_backward returned 0 gradient(s) for 1 floating-point argument(s): z"),
        ("    dz = dy[0]", "gradient of z: expected shape (3, 4), got (4,)"),
        ("    dz = y; dz -= 1", "it does not depend on dy"),
    ],
)
def test_any_answer_gets_a_message_with_its_line(learn, code, message):
    learn("start", "softmax")
    path = Path("exercises/softmax.py")
    path.write_text(path.read_text().replace("    dz = ...", code))
    printed = learn("check")
    assert "✗ softmax" in printed
    assert any(part in printed for part in message.split("|")), printed


def test_watch_checks_at_every_save(learn, tmp_path):
    learn("start", "softmax")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "scratchformer", "learn", "watch"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, **pipes) as process:
        try:
            assert "Watching" in process.stdout.readline()
            assert "✗ softmax" in process.stdout.readline()
            assert "still blank" in process.stdout.readline()
            assert f"░ 0 of {len(NAMES)} · n next · h hint" in process.stdout.readline()
            print("h", file=process.stdin, flush=True)
            assert "hint 1 of 3" in process.stdout.readline()
            path = solve("softmax")
            while "✓ softmax" not in (line := process.stdout.readline()):
                assert line and process.poll() is None  # it may see the file before it is written to its end
            assert "next:" in process.stdout.readline()
            assert f"█░ 1 of {len(NAMES)}".replace("█░", "█" + "░" * (len(NAMES) - 1)) in process.stdout.readline()
            path.write_text(path.read_text().replace("    dz = ", "    import os; os._exit(0)\n    dz = "))
            assert "✗ softmax" in process.stdout.readline()
            assert "it ended with status 0" in process.stdout.readline()
            path.with_stem(NAMES[0]).mkdir()  # no file, so there is nothing to check
            path.write_bytes(b"\0")
            while "null bytes" not in (line := process.stdout.readline()):
                assert line and process.poll() is None
            assert "None" not in line
            print("q", file=process.stdin, flush=True)
            assert process.wait() == 0
        finally:
            process.kill()


def test_watch_does_what_keys_ask_for_in_a_terminal(learn, tmp_path):
    """n begins the next exercise, l lists all, c checks all, r starts over, and the screen is cleared for a check."""
    learn("start", NAMES[0])
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm", "COLUMNS": "200"}
    child, terminal = pty.fork()
    if not child:
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-m", "scratchformer", "learn", "watch"], env)
    try:

        def until(text):
            seen = ""
            while text not in seen:
                assert select.select([terminal], [], [], 60)[0], seen
                seen += os.read(terminal, 4096).decode(errors="replace")
            return seen

        assert "\x1b[2J" in until("q quit")
        following = exercise(NAMES[1])
        for key, expected in (
            ("n", f"exercises/{NAMES[1]}.py"),
            ("h", "hint 1 of 3"),
            ("l", f"0 of {len(NAMES)} done"),
            ("c", "q quit"),
            ("r", f"{NAMES[1]}.old1"),
        ):
            os.write(terminal, key.encode())
            printed = until(expected)
            assert key != "n" or following.title in printed
            assert key != "c" or printed.count("still blank") == 2
        solve(NAMES[1])
        assert "✓" in until(f" 1 of {len(NAMES)} ")
        os.write(terminal, b"q")
        assert os.waitpid(child, 0)[1] == 0
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(terminal)
