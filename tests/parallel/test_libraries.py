"""A snapshot names the libraries and the processor on which the bits of a run depend, and a change of them is told."""

import threading

import numpy as np
import pytest

from scratchformer.dispatch import fast, reference_only
from scratchformer.optim import Adam, Constant
from scratchformer.parallel.libraries import libraries
from scratchformer.training import Replicas, load_snapshot
from scratchformer.training import run as run_module

from ..training.visible_loop import train
from .ranks_in_threads import run_ranks

SAYS = "from here on, bits may differ from those of an uninterrupted run (before: "


def said(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if SAYS in line]


def test_a_snapshot_names_the_libraries_in_one_line(tmp_path, train_tiny):
    train_tiny("LanguageModel", tmp_path, 4)
    found = load_snapshot(tmp_path).state["libraries"]
    assert found.startswith(f"NumPy {np.__version__} with ") and found.isprintable() and len(found) < 300


def test_libraries_name_what_multiplies(monkeypatch):
    mkl_products = pytest.importorskip("scratchformer.kernels.mkl_products")
    with reference_only():
        assert libraries().endswith("; fast twins off")
    with fast():
        for name in mkl_products.libraries():
            monkeypatch.setenv(mkl_products.VARIABLE, name)
            assert f"; float32 by {name}, bfloat16 " in libraries()


def test_a_resumed_run_tells_once_that_the_libraries_have_changed(tmp_path, train_tiny, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "libraries", lambda: "before\n\x1b[1m")
    train_tiny("LanguageModel", tmp_path, 4)
    monkeypatch.setattr(run_module, "libraries", lambda: "afterwards")
    train_tiny("LanguageModel", tmp_path, 6, resume=True)
    (line,) = said(capsys)
    assert line == rf"{tmp_path}: {SAYS}before\n\x1b[1m; now: afterwards)"
    train_tiny("LanguageModel", tmp_path, 8, resume=True)
    assert not said(capsys)  # the snapshot says what was used last


def test_ranks_with_other_libraries_are_refused(tmp_path, make_model, make_batches, monkeypatch):
    """Before anything is written."""
    here = threading.local()
    monkeypatch.setattr(run_module, "libraries", lambda: f"NumPy; for {('AVX2', 'AVX-512')[here.rank // 2]}")

    def run(ranks):
        here.rank, model = ranks.rank, make_model("LanguageModel")
        with Replicas(model, 1, micro_batch=3, ranks=ranks) as replicas:
            optimizer = Adam(model.parameters(), 0.01)
            train(replicas, optimizer, Constant(0.01), make_batches("LanguageModel"), 2, tmp_path / "run")

    refused = r"^rank 2 on .* has another library 2: 'for AVX-512', rank 0 has 'for AVX2'$"
    with pytest.raises(ValueError, match=refused):
        run_ranks(3, run)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
