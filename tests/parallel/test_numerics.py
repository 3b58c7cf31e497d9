"""The libraries and the processor on which the bits of a run depend are in its snapshots, and are kept or named."""

import json
import threading
from contextlib import nullcontext

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.dispatch import twins_of
from scratchformer.optim import Adam, Constant
from scratchformer.parallel import numerics as numerics_module
from scratchformer.parallel.numerics import PRODUCTS, changes, numerics
from scratchformer.training import Replicas, folder, load_snapshot
from scratchformer.training import run as run_module
from scratchformer.training.snapshot import save_snapshot

from ..training.test_train import Stop, assert_same, crash_at, everything
from ..training.visible_loop import train
from .ranks_in_threads import run_ranks

mkl_products = pytest.importorskip("scratchformer.kernels.mkl_products")
LIBRARIES = [*mkl_products.libraries()]
several = pytest.mark.skipif(len(LIBRARIES) < 2, reason="there is one library for products alone")
SAYS = "from here on, the bits differ from those of an uninterrupted run"


@pytest.fixture
def choose(monkeypatch):
    """choose(library) changes the choice that is kept in the cache folder, as a new measurement would."""

    def choose(library):
        monkeypatch.setattr(mkl_products, "_kept", lambda: mkl_products.Choice(library, "float32", {}))
        forget()

    def forget():
        mkl_products.choice.cache_clear()
        mkl_products.products.cache_clear()

    yield choose
    monkeypatch.undo()
    forget()


def noting(used):
    """Batches that note the function for products at each step."""

    def noted(batches, model):
        batch = batches.batch
        batches.batch = lambda step: (used.append(mkl_products.products().float32), batch(step))[1]
        return batches

    return noted


def test_a_snapshot_says_what_its_bits_depend_on(tmp_path, train_tiny):
    train_tiny("LanguageModel", tmp_path, 4)
    found = load_snapshot(tmp_path).state["numerics"]
    assert found["NumPy"].startswith(np.__version__ + " with ") and len(json.dumps(found)) < 500
    assert (PRODUCTS in found) == bool(twins_of(ops.linear, fast=True))


@several
def test_a_resumed_run_keeps_the_library_that_it_began_with(tmp_path, train_tiny, choose, capsys):
    """Also when it is resumed twice. A new run takes the library that is chosen."""
    first, second = LIBRARIES[:2]
    addresses = {name: library.float32 for name, library in mkl_products.libraries().items()}
    choose(first)
    _, *straight = train_tiny("LanguageModel", tmp_path / "straight", 9)
    with pytest.raises(Stop):
        train_tiny("LanguageModel", tmp_path / "run", 9, batches=crash_at(5))
    choose(second)
    used = []
    train_tiny("LanguageModel", tmp_path / "run", 7, batches=noting(used), resume=True)
    _, *resumed = train_tiny("LanguageModel", tmp_path / "run", 9, batches=noting(used), resume=True)
    assert set(used) == {addresses[first]} and len(used) >= 6
    assert_same(everything(*resumed), everything(*straight))
    assert load_snapshot(tmp_path / "run").state["numerics"][PRODUCTS].startswith(first)
    assert SAYS not in capsys.readouterr().err
    assert mkl_products.products().float32 == addresses[second]
    used.clear()
    train_tiny("LanguageModel", tmp_path / "new", 2, batches=noting(used))
    assert set(used) == {addresses[second]}


def test_a_library_that_is_gone_is_named(tmp_path, train_tiny, monkeypatch, capsys):
    train_tiny("LanguageModel", tmp_path, 4)
    record = load_snapshot(tmp_path).state["numerics"]
    monkeypatch.setattr(
        folder, "is_record", lambda found: found.update({PRODUCTS: "Gone 1\n\x1b[1m", "old": "x"}) is None
    )
    train_tiny("LanguageModel", tmp_path, 6, resume=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if SAYS in line]
    assert line.startswith(f"{tmp_path}: ") and "\x1b" not in line
    assert rf"library for products: 'Gone 1\n\x1b[1m' before, {record.get(PRODUCTS)!r} now" in line
    monkeypatch.undo()
    train_tiny("LanguageModel", tmp_path, 8, resume=True)
    assert SAYS not in capsys.readouterr().err  # the snapshot says what was used last


def test_without_the_fast_twins_a_resumed_run_says_so(tmp_path, train_tiny, monkeypatch, capsys):
    train_tiny("LanguageModel", tmp_path, 4)
    monkeypatch.setattr(numerics_module, "is_fast", lambda: False)
    train_tiny("LanguageModel", tmp_path, 6, resume=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if SAYS in line]
    assert "setting of the fast twins: 'on, by Numba " in line and "' before, 'off' now" in line


@pytest.mark.parametrize("record", [None, 3, {"NumPy": 3}])
def test_a_snapshot_without_a_record_is_resumed_without_a_claim(tmp_path, train_tiny, capsys, record):
    """Those of earlier versions have none."""
    _, model, optimizer = train_tiny("LanguageModel", tmp_path, 4)
    state = dict(load_snapshot(tmp_path).state)
    state.pop("numerics") if record is None else state.update(numerics=record)
    save_snapshot(tmp_path / "last.safetensors", model, optimizer, **state)
    train_tiny("LanguageModel", tmp_path, 6, resume=True)
    assert SAYS not in capsys.readouterr().err
    assert load_snapshot(tmp_path).state["numerics"]["NumPy"].startswith(np.__version__)


def ranks_train(ranks, out, make_model, make_batches):
    model = make_model("LanguageModel")
    with Replicas(model, 1, micro_batch=3, ranks=ranks) as replicas:
        train(replicas, Adam(model.parameters(), 0.01), Constant(0.01), make_batches("LanguageModel"), 2, out)


def test_ranks_that_compute_other_bits_are_refused(tmp_path, make_model, make_batches, monkeypatch):
    """Before anything is written."""
    here = threading.local()
    kinds = lambda *given: numerics(*given) | {"kind of processor": ("AVX2", "AVX-512")[here.rank // 2]}  # noqa: E731
    monkeypatch.setattr(run_module, "numerics", kinds)

    def run(ranks):
        here.rank = ranks.rank
        ranks_train(ranks, tmp_path / "run", make_model, make_batches)

    with pytest.raises(ValueError, match=r"^rank 2 on .* has another kind of processor: 'AVX-512', rank 0 has 'AVX2'$"):
        run_ranks(3, run)
    assert not (tmp_path / "run").exists()


def test_all_ranks_use_the_library_of_the_first(tmp_path, make_model, make_batches, monkeypatch):
    taken = []
    monkeypatch.setattr(run_module, "with_libraries_of", lambda record: taken.append(record) or nullcontext())
    run_ranks(3, lambda ranks: ranks_train(ranks, tmp_path / "run", make_model, make_batches))
    assert len(taken) == 3 and taken[0] == taken[1] == taken[2] == load_snapshot(tmp_path / "run").state["numerics"]


@pytest.mark.parametrize("name", numerics_module.SETTINGS)
def test_settings_that_change_bits_are_in_the_record(monkeypatch, name):
    before = numerics()
    monkeypatch.setenv(name, "AVX2")
    assert changes(before, numerics()).startswith("setting of the libraries: ")


def test_what_has_changed_is_named():
    assert changes({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b: '2' before, '3' now"
    assert changes({"a": "1"}, {"c": "\x1b"}) == r"a: '1' before, None now; c: None before, '\x1b' now"
