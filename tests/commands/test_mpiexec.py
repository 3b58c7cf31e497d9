"""Starting ranks again: with mpiexec replaced by a list of exit statuses."""

import signal
import sys

import pytest

from scratchformer.commands import mpiexec as launch
from scratchformer.parallel.ranks import LOST

KILLED = 128 + signal.SIGKILL


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """ended([statuses], restarts=2, ...): the status of `launch`, and the arguments of each start of mpiexec."""

    def ended(statuses, restarts=2, options=(), stopped=False, saving=False):
        statuses, started = iter(statuses), []

        def run(command):
            started.append(command[1:])
            if saving:
                (tmp_path / "last.safetensors").write_text(str(len(started)))
            return next(statuses), stopped

        monkeypatch.setattr(launch, "run", run)
        monkeypatch.setattr(launch.shutil, "which", lambda *_args, **_options: "mpiexec")
        monkeypatch.setattr(launch, "last_snapshot", lambda folder: [path.read_text() for path in folder.iterdir()])
        monkeypatch.setattr(launch, "answers", lambda host: host != "b")
        arguments = [*options, "-n", "3", "python", "poems.py", "--out", str(tmp_path)]
        return launch.launch(arguments, restarts), started

    return ended


@pytest.mark.parametrize("status", [KILLED, 128 + signal.SIGSEGV, LOST])
def test_lost_ranks_are_started_again(ended, status, capsys):
    found, (first, second) = ended([status, 0])
    assert found == 0 and second == [*first, "--continue"]
    assert capsys.readouterr().err == "\na rank was lost: starting again (1 restarts left)\n"


@pytest.mark.parametrize("status", [0, 1, 2, *(128 + n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))])
def test_an_error_or_a_request_to_end_ends_the_run(ended, status):
    assert ended([status]) == (status, [ended([0])[1][0]])


def test_a_run_that_is_stopped_ends(ended):
    assert len(ended([KILLED], stopped=True)[1]) == 1


def test_one_rank_less_if_ranks_are_lost_twice_without_a_snapshot(ended):
    status, started = ended([KILLED] * 4, restarts=3)
    assert status == KILLED and [a[a.index("-n") + 1] for a in started] == ["3", "3", "2", "1"]
    status, started = ended([KILLED] * 4, restarts=3, saving=True)
    assert status == KILLED and [a[a.index("-n") + 1] for a in started] == ["3"] * 4


@pytest.mark.parametrize(
    ("arguments", "own", "count", "folder"),
    [
        ("-n 2 python p.py -n 7 --out d", "-n 2", 2, "d"),
        ("--np 4 --map-by node /venv/bin/python3 -m p -c 3 --out=d", "--np 4 --map-by node", 4, "d"),
        ("-n auto ./p.py --resume=d", "-n auto", None, "d"),
        ("scratchformer evaluate run -n 3", "", None, None),
        ("--wdir a/scratchformer -n 4 python p.py", "--wdir a/scratchformer -n 4", 4, None),
        (
            "--hostfile python-hosts --x pythonpath -n 2 python3.12 p.py",
            "--hostfile python-hosts --x pythonpath -n 2",
            2,
            None,
        ),
        ("-n 2 -hostfile p.py", "-n 2 -hostfile p.py", 2, None),
    ],
)
def test_options_of_mpiexec_and_of_the_program(arguments, own, count, folder):
    before, program = launch.divided(arguments.split())
    assert " ".join(before) == own and before + program == arguments.split()
    assert (launch.count_of(before), launch.value_of(program, "--out", "--resume")) == (count, folder)


def test_hosts_that_do_not_answer_are_left_out(ended, capsys):
    _, started = ended([KILLED, 0], options=["--host", "a:2,b:2"])
    assert started[1][:4] == ["--host", "a:2", "-n", "2"]
    assert "without b:2, which does not answer, with 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--host", "a:2,b:2", "-n", "4"], ["--host=a:2,b:2", "-n", "4"], ["-host", "a:2,b:2", "--np=4"]], ids=str
)
def test_both_forms_of_an_option_are_changed(monkeypatch, given):
    monkeypatch.setattr(launch, "answers", lambda host: host == "a")
    assert launch.without_silent_hosts(given) == " without b:2, which does not answer, with 2 ranks"
    assert (launch.value_of(given, *launch.HOSTS), launch.count_of(given)) == ("a:2", 2)


def test_a_host_may_have_any_number_of_slots(monkeypatch):
    monkeypatch.setattr(launch, "answers", lambda host: host != "b")
    given = ["--host", "localhost:*,b:2"]
    assert launch.without_silent_hosts(given) == " without b:2, which does not answer, with 1 ranks"
    assert given == ["--host", "localhost:*"]


def test_restarts_need_the_folder_of_the_run(monkeypatch):
    monkeypatch.setattr(launch.shutil, "which", lambda *_args, **_options: "mpiexec")
    with pytest.raises(ValueError, match="--out"):
        launch.launch(["-n", "2", "python", "poems.py"], 1)
    monkeypatch.setattr(launch.shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(FileNotFoundError, match="mpiexec is not installed"):
        launch.launch(["-n", "2", "python", "poems.py"])


@pytest.mark.usefixtures("default_signals")
def test_a_signal_is_passed_on_and_stops_the_run():
    child = "import os, signal; signal.signal(10, lambda *_: os._exit(7)); os.kill(os.getppid(), 15); signal.pause()"
    assert launch.run([sys.executable, "-c", child]) == (128 + signal.SIGTERM, True)
    assert launch.run([sys.executable, "-c", "raise SystemExit(3)"]) == (3, False)


def test_a_lost_host_is_an_error_though_mpiexec_reports_none(capfd):
    said = "PRTE has lost communication with a remote daemon."
    assert launch.run([sys.executable, "-c", f"import sys; print({said!r}, file=sys.stderr)"]) == (LOST, False)
    assert capfd.readouterr().err == f"{said}\n"
