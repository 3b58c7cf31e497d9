"""Runs of an earlier version, and the memory of a process."""

import json
import re
import shutil

from scratchformer.dispatch import fast
from scratchformer.parallel.memory import resident_bytes
from scratchformer.training.start import run_main


def test_a_program_of_the_checkout_is_found_by_its_name(call, fail, enwik8_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(enwik8_run.folder, run)
    settings = json.loads((run / "settings.json").read_text())
    del settings["made_by"]
    (run / "settings.json").write_text(json.dumps(settings | {"sha256": None}))
    assert re.search(r"test: loss \d", call("scratchformer", "evaluate", run, "--device", "cpu").stdout)
    for name in ("nothing", "../tests/conftest", "__init__"):
        (run / "settings.json").write_text(json.dumps(settings | {"sha256": None, "program": name}))
        assert "does not say in which file its program" in fail("scratchformer", "evaluate", run)


def test_the_estimate_counts_the_process_without_the_model(example, text_file, tmp_path, capsys):
    """Python and the libraries alone take more than 25 MB, and the model is not subtracted from them."""
    options = ("--preset", "tutorial", "--data", text_file, "--out", tmp_path / "run", "--device", "cpu", "--estimate")
    with fast():  # which imports the libraries of the extra `fast`
        before = resident_bytes() / 1e6
    run_main(example("enwik8").main, [str(option) for option in options])
    told = float(re.search(r"Python, libraries and data +([\d.]+) MB", capsys.readouterr().out)[1])
    assert abs(told - before) < 15
