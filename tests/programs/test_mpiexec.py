"""Programs as several processes. Skipped without mpi4py and an MPI: pip install 'scratchformer[distributed]'."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from scratchformer.training import load_snapshot

from .conftest import EXAMPLES, PATIENCE, TINY
from .test_own_program import POEMS

MPIEXEC = Path(sys.executable).with_name("mpiexec")
# Both ranks wait before their thirteenth step, in the first run, until a file `go` exists.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists(), reason="mpi4py or mpiexec is not installed"
)


@pytest.fixture
def start(tmp_path, text_file):
    """start(("--seed", 1), ...): a process for mpiexec, with a rank for each list of options. own: settings in the
    environment of each rank.
    """

    def start(*ranks, own=()):
        (tmp_path / "poems.py").write_text(POEMS)
        command = [str(MPIEXEC), "--allow-run-as-root", "--oversubscribe"]
        for rank, options in enumerate(ranks):
            arguments = ["poems.py", "--data", text_file, "--device", "cpu", *options]
            command += ["-n", "1", "env", *own[rank : rank + 1], sys.executable, *map(str, arguments), ":"]
        paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        environment = os.environ | {"PYTHONPATH": paths}
        return subprocess.Popen(command[:-1], cwd=tmp_path, env=environment, start_new_session=True, **pipes)

    return start


def test_two_processes_give_the_bits_of_one(start, tmp_path):
    found = []
    for size, shard in (1, []), (2, []), (2, ["--shard"]):
        out = tmp_path / f"run{len(found)}"
        told, _ = start(*size * [("--steps", 3, "--out", out, *shard)]).communicate(timeout=PATIENCE)
        assert told.count("poems: preset small") == 1  # rank 0 alone prints
        assert (f"{size} ranks, each with" in told) == (size > 1)
        found.append(load_snapshot(out))
    for other in found[1:]:
        for name, array in (found[0].model | found[0].optimizer).items():
            np.testing.assert_array_equal((other.model | other.optimizer)[name], array)


def test_ranks_with_other_options_are_refused(start, tmp_path):
    process = start(*[("--steps", 3, "--out", tmp_path / "run", "--seed", seed) for seed in (0, 1)])
    told, _ = process.communicate(timeout=PATIENCE)
    (line,) = (line for line in told.splitlines() if line.startswith("error:"))
    assert re.fullmatch(r"error: rank 1 on \S+ has another argument 10: '1', rank 0 has '0'", line)
    assert process.returncode != 0 and not (tmp_path / "run").exists()


def test_ranks_with_and_without_fast_twins_are_refused(start, tmp_path):
    """Their bits would differ, except with --bits portable."""
    pytest.importorskip("numba")
    ranks = 2 * [("--steps", 3, "--out", tmp_path / "run")]
    settings = ["SCRATCHFORMER_FAST=1", "SCRATCHFORMER_FAST=0"]
    told, _ = start(*ranks, own=settings).communicate(timeout=PATIENCE)
    (line,) = (line for line in told.splitlines() if line.startswith("error:"))
    setting = r"another library 2: 'fast twins off', rank 0 has 'fast twins by Numba [^']+'"
    assert re.fullmatch(rf"error: rank 1 on \S+ has {setting}", line)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    told, _ = start(*[(*ranks[0], "--bits", "portable")] * 2, own=settings).communicate(timeout=PATIENCE)
    assert told.count("SHA-256 of the parameters after step 3: ") == 1, told


def test_a_rank_that_is_killed_ends_the_others(start, tmp_path):
    run = tmp_path / "run"
    process = start(*2 * [("--steps", 100_000, "--out", run)])
    wait_for(run / "metrics.jsonl", process)
    os.kill(rank_1(run), signal.SIGKILL)
    told, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0 and "rank 1" in told


def test_two_processes_score_classifiers_as_one_does(reviews_folder, tmp_path):
    script, found = tmp_path / "small.py", []
    sizes = f"import imdb\nimdb.PRESETS['small'] |= {TINY['imdb']}"
    script.write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n{sizes}\nimdb.start(imdb.main)\n")
    for size in 1, 2:
        options = ["--data", reviews_folder, "--out", tmp_path / f"run{size}", "--device", "cpu"]
        command = [MPIEXEC, "--allow-run-as-root", "--oversubscribe", "-n", size, sys.executable, script, *options]
        done = subprocess.run([*map(str, command)], text=True, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(re.findall(r"^.*accuracy.*%$", done.stdout, re.M))
    assert len(found[0]) == 1 and found[0] == found[1]


def wait_for(path, process):
    """Wait until a file has content: of a run, the metrics of its first steps."""
    deadline = time.monotonic() + PATIENCE
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def rank_1(run):
    (pid,) = (int(pid) for pid in os.listdir("/proc") if pid.isdigit() and rank_of(pid, run) == "1")
    return pid


def rank_of(pid, run):
    """The rank of a process that trains in the folder `run`; None for any other."""
    try:
        if (
            str(run) not in Path(f"/proc/{pid}/cmdline").read_text()
            or "mpiexec" in Path(f"/proc/{pid}/cmdline").read_text()
        ):
            return None
        return dict(e.partition("=")[::2] for e in Path(f"/proc/{pid}/environ").read_text().split("\0")).get(
            "PMIX_RANK"
        )
    except OSError:
        return None
