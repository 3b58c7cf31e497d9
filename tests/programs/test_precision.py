"""Programs with --precision and --bits."""

import json

import numpy as np

from scratchformer.training import load_model


def test_a_run_keeps_its_precision_and_its_model_is_in_float32(call, fail, text_file, tmp_path):
    """A Transformer-XL, whose memory goes from step to step, and through a snapshot."""
    options = ("--model", "xl", "--data", text_file, "--out", tmp_path, "--steps", 2, "--precision", "float16")
    told = call("enwik8", *options, "--device", "cpu").stdout
    assert told.count(", in float16") == 1
    assert json.loads((tmp_path / "settings.json").read_text())["precision"] == "float16"
    refused = fail("enwik8", "--resume", tmp_path, "--precision", "float32")
    assert "the run keeps its settings, so leave out --precision" in refused
    assert "in float16" in call("enwik8", "--resume", tmp_path, "--steps", 3, "--device", "cpu").stdout
    model, state = load_model(tmp_path)
    assert model.flat.data.dtype == np.float32 and state["step"] == 3 and state["precision"] == "float16"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (last,) = (line for line in lines if line["step"] == 3 and "loss" in line)
    assert last["loss_scale"] == 2**15 and last["skipped_batches"] == 0
    assert "bits_per_byte" in call("scratchformer", "evaluate", tmp_path, "--device", "cpu").stdout


def test_a_precision_that_cannot_be_had_is_refused(fail, text_file, tmp_path):
    options = ("--data", text_file, "--out", tmp_path, "--device", "cpu", "--precision")
    assert "precision: tf32 is for products on a GPU" in fail("enwik8", *options, "tf32")
    assert not list(tmp_path.iterdir())


def test_portable_bits_and_half_precision_exclude_each_other(fail, text_file, tmp_path):
    options = ("--data", text_file, "--out", tmp_path, "--device", "cpu", "--precision", "bfloat16")
    line = fail("enwik8", *options, "--bits", "portable")
    assert line.startswith("error: bits: portable bits are those of float32 on a CPU (--device cpu), got --precision ")
    assert not list(tmp_path.iterdir())
