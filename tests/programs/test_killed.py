"""A run that is killed, interrupted, out of disk space or diverged keeps its last snapshot and continues exactly."""

import os
import random
import resource
import signal

import numpy as np
import pytest

from scratchformer.shell.process import run_program
from scratchformer.training import load_model, load_snapshot, read_metrics

from .conftest import PATIENCE

STEPS = 80


def last_step(run):
    """The last step in a run's metrics file."""
    return max(r["step"] for r in read_metrics(run / "metrics.jsonl"))


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name, strict=True)


def assert_same_runs(first, second):
    """The same parameters, moments, step counts, best models and metrics, bit for bit."""
    for name in "last", "best":
        one, other = (load_snapshot(run / f"{name}.safetensors") for run in (first, second))
        assert one.state == other.state
        assert_same(one.model, other.model)
        assert_same(one.optimizer, other.optimizer)
    records = [
        [
            {name: value for name, value in r.items() if name != "tokens_per_second"}
            for r in read_metrics(run / "metrics.jsonl")
        ]
        for run in (first, second)
    ]
    assert records[0] == records[1]


@pytest.fixture(scope="module")
def uninterrupted(call, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert call("tiny", folder, STEPS).stdout == "finished\n"
    assert load_snapshot(folder).state["step"] == STEPS
    return folder


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_like_an_uninterrupted_one(
    start, call, environment, tmp_path, uninterrupted, thorough
):
    """Bit for bit. Each kill comes a random number of steps after resuming: every third while a snapshot is being
    written, the others at a random moment within a step.
    """
    run, draw, kills = tmp_path / "run", random.Random(0), 10 if thorough else 3
    unfinished = run / "last.safetensors.unfinished"
    left_by_kill = []
    for kill in range(kills):
        target = (left_by_kill[-1] if left_by_kill else 0) + draw.randint(4, STEPS // kills - 4)
        size = (before := run / "last.safetensors").exists() and before.stat().st_size
        saving = kill % 3 == 2
        event = f"{target} write {draw.randrange(size // 10, size)}" if saving else f"{target} kill {draw.random()}"
        process = start("tiny", run, STEPS, env=environment | {"TINY_EVENT": event})
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == -(signal.SIGXFSZ if saving else signal.SIGPROF), err
        assert unfinished.exists() or not saving
        for path in run.glob("*.safetensors"):
            model, _ = load_model(path)
            assert all(np.isfinite(a).all() for a in model.state_dict().values())
        left_by_kill.append(load_snapshot(run).state["step"])
    assert left_by_kill == sorted({*left_by_kill}) and 0 < left_by_kill[0] <= left_by_kill[-1] < STEPS
    assert call("tiny", run, STEPS).stdout == "finished\n"
    assert_same_runs(run, uninterrupted)
    assert not unfinished.exists()


def test_ctrl_c_saves_and_the_run_continues_exactly(start, call, environment, tmp_path, uninterrupted):
    run = tmp_path / "run"
    process = start("tiny", run, STEPS, env=environment | {"TINY_EVENT": "10 stop"})
    ended = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert ended.si_code == os.CLD_STOPPED, process.communicate()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT
    assert err.strip().splitlines()[-1] == (
        f"interrupted; step {last_step(run)} is saved in {run / 'last.safetensors'}: continue with --resume"
    )
    assert "Traceback" not in err
    assert load_snapshot(run).state["step"] == last_step(run) < STEPS
    call("tiny", run, STEPS)
    assert_same_runs(run, uninterrupted)


@pytest.mark.parametrize("saved", [(), ("step 3 is saved in run/last.safetensors",)])
def test_ctrl_c_reports_a_snapshot_only_if_one_was_saved(saved, capsys):
    def program():
        raise KeyboardInterrupt(*saved)

    with pytest.raises(SystemExit) as raised:
        run_program(program)
    assert raised.value.code == 128 + signal.SIGINT
    said = "".join(f"; {text}: continue with --resume" for text in saved)
    assert capsys.readouterr().err == f"interrupted{said}\n"


def test_a_full_disk_ends_the_run_with_one_line_and_leaves_the_last_snapshot(call, tmp_path, uninterrupted):
    """After step 12 no file may be larger than half a snapshot."""
    run = tmp_path / "run"
    call("tiny", run, 12)
    before = {path.name: path.read_bytes() for path in run.glob("*.safetensors")}
    limit = len(before["last.safetensors"]) // 2

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = call("tiny", run, STEPS, status=1, preexec_fn=limited)
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith(f"error: cannot save {run / 'last.safetensors'}: ")
    assert line.endswith("; the last good snapshot is kept")
    assert {path.name: path.read_bytes() for path in run.glob("*.safetensors")} == before
    assert not list(run.glob("*.unfinished"))
    call("tiny", run, STEPS)
    one, other = load_snapshot(run), load_snapshot(uninterrupted)
    assert_same(one.model, other.model)
    assert_same(one.optimizer, other.optimizer)


def test_a_diverged_run_names_the_layer_and_leaves_the_last_good_snapshot(call, tmp_path):
    run = tmp_path / "run"
    result = call("tiny", run, 20, 10, status=1)
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: step 11: loss nan")
    assert "the first that is not finite is the output of output (Linear)" in line
    assert f"The last good snapshot is {run / 'last.safetensors'}" in line
    model, state = load_model(run)
    assert state["step"] == 9
    assert all(np.isfinite(a).all() for a in model.state_dict().values())
    call("tiny", run, 20)
    assert load_snapshot(run).state["step"] == 20
