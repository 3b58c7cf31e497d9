"""examples/sparse.py, digits.py and units.py end to end on small data."""

import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, to_cpu
from scratchformer.data import TextBatches
from scratchformer.models import Classifier, LanguageModel, SparseTransformer
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT, traffic
from scratchformer.training import Replicas, Run, load_model, load_snapshot
from scratchformer.training.settings import read_settings
from scratchformer.training.snapshot import load_file
from scratchformer.training.start import run_main


@pytest.fixture(scope="module")
def sparse_run(call, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sparse"
    output = call("sparse", "--data", text_file, "--out", folder, "--steps", 1, "--device", "cpu").stdout
    return folder, output


@pytest.fixture(scope="module")
def digits_run(call, tmp_path_factory):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return folder, call("digits", "--out", folder, "--steps", 2, "--device", "cpu").stdout


def test_sparse_prints_its_score_and_a_sample(sparse_run, text_file):
    folder, output = sparse_run
    score = re.search(r"text.txt: ([0-9.]+) bits per byte on the last 5%, strided attention, context 64", output)
    assert 2 < float(score[1]) < 9
    assert "after 1 steps, 128 bytes read" in output
    prompt = text_file.read_bytes()[28_500 : 28_500 + 32].decode(errors="ignore")
    assert len(output.partition(f"{prompt}|")[2].partition("\n---\nfor more")[0]) > 100
    model, _ = load_model(folder)
    assert type(model) is SparseTransformer and model.context == 64


def test_sparse_resumes_and_the_commands_work_on_its_run(call, sparse_run, tmp_path):
    folder = shutil.copytree(sparse_run[0], tmp_path / "run")
    found = call("scratchformer", "evaluate", folder, "--device", "cpu").stdout
    told = re.search(r"([0-9.]+) bits per byte", sparse_run[1])[1]
    assert float(re.search(r"bits_per_byte ([0-9.]+)", found)[1]) == pytest.approx(float(told), abs=1.01e-4)
    assert call("scratchformer", "generate", folder, "--prompt", "the ", "--tokens", 3).stdout.startswith("the ")
    output = call("sparse", "--resume", folder, "--steps", 2, "--device", "cpu").stdout
    assert "after 2 steps" in output and load_snapshot(folder).optimizer["steps"] == 2


def test_minutes_set_the_number_of_steps(call, text_file, tmp_path):
    """Full attention, for next to no time: one step, which is saved in the run's settings."""
    options = ("--preset", "full", "--minutes", 1e-6, "--device", "cpu")
    output = call("sparse", "--data", text_file, "--out", tmp_path / "run", *options).stdout
    assert re.search(r"^[0-9.]+ s a step: 1 steps in 1e-06 minutes$", output, re.MULTILINE)
    assert "full attention, context 64" in output and "after 1 steps, 128 bytes read" in output
    assert read_settings(tmp_path / "run")["steps"] == 1
    assert type(load_model(tmp_path / "run")[0]) is LanguageModel


def test_timed_steps_wait_for_a_gpu_and_leave_the_model_as_it_was(example, monkeypatch):
    """By a clock that moves on by 8 s with each look."""
    model = LanguageModel(31, 8, 2, 1, 6, key=Key(0)).to(STRICT)
    before = to_cpu(model.flat.data).copy()
    batches = TextBatches(np.arange(100, dtype=np.uint8) % 31, 2, 6, Key(1))
    run = SimpleNamespace(optimizer="adam", lr=0.1, key=lambda *parts: Key(2))
    seconds_per_step = example("sparse").seconds_per_step
    clock = itertools.count(0, 8)
    monkeypatch.setitem(seconds_per_step.__globals__, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with traffic() as found:
        assert seconds_per_step(run, Replicas(model, 1), batches) == 8 / seconds_per_step.__globals__["MEASURED"]
    assert sum("to the host" in entry and "sparse.py" in entry for entry in found) == 6
    np.testing.assert_array_equal(to_cpu(model.flat.data), before)


@pytest.mark.parametrize("preset", ["photos", "photos-full"])
def test_sparse_reads_photographs(call, preset, tmp_path):
    pytest.importorskip("PIL")
    pytest.importorskip("sklearn")
    folder = tmp_path / "run"
    output = call("sparse", "--preset", preset, "--out", folder, "--steps", 1, "--device", "cpu").stdout
    kind = "full" if preset == "photos-full" else "strided"
    score = r"^photographs: ([0-9.]+) bits per byte on the first [0-9,]+ of 122,880 bytes of the last 32 lines"
    assert 6 < float(re.search(score, output, re.MULTILINE)[1]) < 9 and f"{kind} attention, context 64" in output
    assert "a text it has not seen" not in output
    found = call("scratchformer", "evaluate", folder, "--device", "cpu").stdout
    assert 6 < float(re.search(r"test: .*bits_per_byte ([0-9.]+)", found)[1]) < 9
    output = call("sparse", "--resume", folder, "--steps", 2, "--device", "cpu").stdout
    assert "after 2 steps" in output


def test_digits_prints_its_score_and_draws(digits_run):
    folder, output = digits_run
    told = re.search(r"^([0-9.]+) bits per pixel on 360 test images, the best of 2 steps$", output, re.MULTILINE)
    score = float(told[1])
    found = re.search(r"^([0-9.]+) by each pixel's frequencies, ([0-9.]+) if all", output, re.MULTILINE)
    baseline, blind = map(float, found.groups())
    assert baseline < score < 7 and blind == pytest.approx(np.log2(17), abs=1e-4)
    assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_digits_takes_no_data(fail, digits_run):
    line = fail("scratchformer", "evaluate", digits_run[0], "--data", "pixels")
    assert line == "error: --data: digits takes none, so leave it out"


def test_digits_resumes(call, digits_run, tmp_path):
    folder = shutil.copytree(digits_run[0], tmp_path / "run")
    (folder / "digits.png").unlink()
    output = call("digits", "--resume", folder, "--steps", 3, "--device", "cpu").stdout
    assert "the best of 3 steps" in output and load_snapshot(folder).optimizer["steps"] == 3
    assert (folder / "digits.png").is_file()


def test_only_greys_are_drawn():
    """Even by a model that prefers digit tokens: every grey, and each about equally often."""
    digits = module_of("digits")
    model = SparseTransformer(digits.GREYS + digits.CLASSES, 8, 2, 1, digits.SIDE**2, digits.SIDE)
    model.output.w.data[...] = 0
    model.output.b.data[...] = 20 * (np.arange(digits.GREYS + digits.CLASSES) >= digits.GREYS)
    prompts = np.full((40, 3), digits.GREYS)
    prompts[:, 1:] = [5, 7]
    images = digits.draw(model, prompts, Key(0))
    assert images.shape == (40, 8, 8) and (images[:, 0, :2] == [5, 7]).all()
    counts = np.bincount(images.reshape(40, -1)[:, 2:].ravel())
    assert len(counts) == digits.GREYS and counts.min() > 0.7 * counts.mean() and counts.max() < 1.3 * counts.mean()


def module_of(name):
    """A program of examples/, as a module."""
    return load_file(Path(__file__).parents[2] / "examples" / f"{name}.py")


@pytest.fixture(scope="module")
def units():
    pytest.importorskip("sklearn")
    pytest.importorskip("networkx")
    return module_of("units")


def test_units_prints_both_scores_and_resumes(call, units, tmp_path):
    first = call("units", "--out", tmp_path / "run", "--steps", 1, "--device", "cpu").stdout
    assert re.search(r"^images: [0-9.]+% of 360 test images right$", first, re.MULTILINE)
    line = r"^graph: (.*), [0-9.]+% of the other 32 right; mean of 10 models, lowest [0-9.]+%, all together [0-9.]+%$"
    told = re.findall(line, first, re.MULTILINE)
    assert told == ["along the edges", "all to all"]
    model, _ = load_model(tmp_path / "run")
    assert type(model) is Classifier and model.config["units"] == 16
    again = call("units", "--resume", tmp_path / "run", "--steps", 2, "--device", "cpu").stdout
    assert "2 steps" in again and load_snapshot(tmp_path / "run").optimizer["steps"] == 2
    told = float(re.search(r"images: ([0-9.]+)% of 360", again)[1])
    found = call("scratchformer", "evaluate", tmp_path / "run", "--device", "cpu").stdout
    accuracy = float(re.search(r"^test: loss [0-9.]+, accuracy ([0-9.]+)$", found, re.MULTILINE)[1])
    assert 100 * accuracy == pytest.approx(told, abs=0.011)


def test_the_edges_of_the_graph_help(units):
    """Two models with the edges, and two without, which can only guess."""
    edges, known, clubs = units.load_club()
    assert (edges.sum() - 34) // 2 == 78 and (edges == edges.T).all() and clubs[known].tolist() == [0, 1]
    run = SimpleNamespace(device=CPU, total=200, graph=units.PRESETS["small"]["graph"])
    for pattern, least, most in (ops.Edges(edges), 0.8, 1.1), (None, 0, 0.7):
        found = [units.predict_clubs(run, pattern, known, clubs, Key(0).fold("graph", seed)) for seed in range(2)]
        for p in found:
            assert p.shape == (34, 2)
            np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-6)
        assert least < np.mean([units.accuracy(p, known, clubs) for p in found]) < most


def test_the_labelled_members_do_not_count(units):
    p = np.array([[0.1, 0.9], [0.6, 0.4], [0.6, 0.4], [0.6, 0.4]])
    assert units.accuracy(p, np.array([0]), np.array([0, 0, 0, 1])) == 2 / 3


def test_patches_are_squares_of_the_image(units):
    pixels = np.arange(2 * 64, dtype=np.uint8).reshape(2, 8, 8)
    batch = units.as_patches(units.Images(pixels, np.array([3, 4])))
    assert batch.ids.shape == (2, 25, 16)
    np.testing.assert_allclose(16 * batch.ids[1, 7], pixels[1, 1:5, 2:6].ravel())


def test_the_models_of_the_graph_are_counted_alone_and_together(units, monkeypatch, capsys):
    """Three models: two are unsure and wrong of each of two members, and one is sure and right."""
    edges, clubs, known = np.eye(4, dtype=bool), np.array([0, 1, 0, 1]), np.array([0, 1])
    wrong = [[1, 0], [0, 1], [0.4, 0.6], [0.6, 0.4]]
    predictions = iter([np.array(wrong), np.array(wrong), np.eye(2)[clubs]] * 2)
    monkeypatch.setattr(units, "load_club", lambda: (edges, known, clubs))
    monkeypatch.setattr(units, "predict_clubs", lambda *arguments: next(predictions))
    units.train_on_graph(SimpleNamespace(seed=0, device=CPU, graph={"seeds": 3}))
    told = "33.3% of the other 2 right; mean of 3 models, lowest 0.0%, all together 100.0%"
    assert capsys.readouterr().out.count(told) == 2


@pytest.fixture
def moments_of_copies(units, monkeypatch):
    """A function of the bounds that are not 0: how far they change the moments of the copies of a bar.

    The moments are the center (2,), and the covariance of the places of the pixels (2, 2), down and across, each
    weighed by its grey value. Returned are the largest change of each, and all 21 images.
    """

    def changes(**bounds):
        for name in ("TURN", "STRETCH", "SLANT", "MOVE"):
            monkeypatch.setattr(units, name, bounds.get(name, 0.0))
        pixels = np.zeros((1, 8, 8), np.uint8)
        pixels[0, 1:7, 3:5] = 16
        images = units.with_changed_copies(units.Images(pixels, np.array([7])), Key(0).generator()).pixels
        weights = images / images.sum(axis=(1, 2), keepdims=True)
        places = np.stack(np.indices((8, 8)), axis=-1)
        centers = np.einsum("nyx,yxi->ni", weights, places)
        away = places - centers[:, None, None]
        spread = np.einsum("nyx,nyxi,nyxj->nij", weights, away, away)
        return np.abs(centers - centers[0]).max(axis=0), np.abs(spread - spread[0]).max(axis=0), images

    return changes


def test_without_changes_copies_are_the_image(moments_of_copies):
    *changes, images = moments_of_copies()
    assert max(map(np.max, changes)) == 0 and images.shape == (21, 8, 8) and images.dtype == np.uint8
    assert (images == images[0]).all()


@pytest.mark.parametrize(
    ("bound", "center", "spread"),
    [
        ("TURN", (0, 0), ((0.1, 0.46), (0.46, 0.27))),
        ("STRETCH", (0, 0), ((0.93, 0), (0, 0.23))),
        ("SLANT", (0, 0), ((0, 0.36), (0.36, 0.19))),
        ("MOVE", (0.84, 1.0), ((0.27, 0.02), (0.02, 0.25))),
    ],
)
def test_each_bound_changes_copies_in_its_own_way(units, moments_of_copies, bound, center, spread):
    found = moments_of_copies(**{bound: getattr(units, bound)})
    np.testing.assert_allclose(found[0], center, atol=0.05)
    np.testing.assert_allclose(found[1], spread, atol=0.05)
    assert len(np.unique(found[2], axis=0)) > 5


def test_the_grey_values_of_copies_are_rounded(moments_of_copies):
    """Interpolation keeps the sum of a bar that stays in the image, 12 × 16; if cut off, each pixel would lose 1/2."""
    *_, images = moments_of_copies(MOVE=1.0)
    assert abs(images[1:].sum(axis=(1, 2)).mean() - 192) < 2


def test_copies_are_white_outside_of_the_image(units):
    """A black image, changed: white enters at its edges, and the middle stays black."""
    images = units.Images(np.full((1, 8, 8), 16, np.uint8), np.array([5]))
    copies = units.with_changed_copies(images, Key(0).generator())
    assert copies.labels.tolist() == [5] * 21
    assert (copies.pixels[1:].min(axis=(1, 2)) < 16).all() and (copies.pixels[:, 2:6, 2:6] == 16).all()


def test_units_learns_from_the_copies_too(units, monkeypatch, tmp_path):
    class Captured(Exception):
        pass

    def steps(run, replicas, optimizer, batches):
        raise Captured([batches.batch(step).ids for step in range(2)])

    digits = units.load_digits()
    few = units.Images(*(part[:3] for part in digits.train))
    monkeypatch.setattr(units, "load_digits", lambda: digits._replace(train=few))
    monkeypatch.setattr(Run, "steps", steps)
    with pytest.raises(Captured) as captured:
        run_main(units.main, ["--device", "cpu", "--out", str(tmp_path / "run")])
    seen, originals = np.concatenate(captured.value.args[0]), units.as_patches(few).ids
    assert len(np.unique(seen, axis=0)) > 20
    assert not all((unit == originals).all(axis=(1, 2)).any() for unit in seen)


def test_a_resumed_run_does_not_take_minutes(fail, sparse_run):
    line = fail("sparse", "--resume", sparse_run[0], "--minutes", 1)
    assert line == "error: --resume: the run keeps its settings, so leave out --minutes"


def test_a_text_shorter_than_the_context(fail, tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 40)
    line = fail("sparse", "--data", tmp_path / "short", "--out", tmp_path / "run")
    assert line.startswith("error: corpus: 36 tokens are fewer than context + 1 = 65")
