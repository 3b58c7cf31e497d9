"""benchmarks/baselines.py on hand examples."""

import random
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from scratchformer.training.snapshot import load_file

for name in "pyppmd", "sklearn", "PIL":
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
FILE = Path(__file__).parents[2] / "benchmarks" / "baselines.py"


@pytest.fixture(scope="module")
def baselines():
    return load_file(FILE)


def test_log_ratios_on_a_hand_example(baselines):
    from scipy.sparse import csr_matrix

    x = csr_matrix(np.array([[1, 0, 1], [1, 1, 0], [0, 1, 0]], np.float32))
    p, q = np.array([2, 1, 2]) / 5, np.array([2, 3, 1]) / 6  # class 1 has counts 1, 0, 1; class 0 has 1, 2, 0
    np.testing.assert_allclose(baselines.log_ratios(x, np.array([1, 0, 0])), np.log(p / q))


@pytest.mark.parametrize("name", ["logistic regression, words", "naive Bayes weights, bigrams"])
def test_only_bigrams_tell_these_reviews_apart(baselines, name):
    """The same words in another order: a model of words has what guessing has, one of bigrams is always right."""
    texts, labels = ["not good but bad", "good but not bad"] * 4, np.array([0, 1] * 4)
    parts = [baselines.LabelledTexts(texts, labels)] * 3
    row = baselines.score_linear(baselines.LINEAR[name], *parts)
    expected = 1.0 if "bigrams" in name else 0.5
    assert (row.validation, row.test, row.after_both) == (expected,) * 3


def test_what_only_validation_shows_counts_after_both(baselines):
    part = baselines.LabelledTexts
    train = part(["a good film", "a bad film"], np.array([1, 0]))
    validation = part(["superb", "superb", "awful", "awful"], np.array([1, 1, 0, 0]))
    test = part(["awful", "superb"], np.array([0, 1]))
    row = baselines.score_linear(baselines.LINEAR["logistic regression, words"], train, validation, test)
    assert (row.validation, row.test, row.after_both) == (0.5, 0.5, 1.0)


def test_a_validation_part_has_whole_groups(baselines):
    labels = np.repeat([0, 1], 1000)
    blocks = baselines.blocks_of(baselines.LabelledTexts([], labels))
    assert np.unique(blocks, return_counts=True)[1].tolist() == [250] * 8 and blocks[999] != blocks[1000]
    folds = baselines.folds_of(blocks, 4)
    assert (
        all(len(set(folds[blocks == block])) == 1 for block in set(blocks)) and np.bincount(folds).tolist() == [500] * 4
    )
    chosen = baselines.drawn(blocks, 501, 0)
    assert len(chosen) == 750 and len(np.unique(blocks[chosen])) == 3


def test_bits_of_a_part_given_what_comes_before(baselines):
    """Random bytes cost 8 bits each, and next to none when the bytes before them contain them."""
    part = random.Random(0).randbytes(10_000)
    for settings in baselines.COMPRESSORS.values():
        compress = next(iter(settings.values()))
        assert baselines.bits_per_byte(compress, b"", part) == pytest.approx(8, abs=0.4)
    xz = baselines.COMPRESSORS["xz, extreme"][9]
    assert baselines.bits_per_byte(xz, part, part) < 0.2
    assert baselines.bits_per_byte(lambda data: data[::2], b"1234", b"56") == 8 * 1 / 2


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyppmd", None)
    with pytest.raises(SystemExit, match=r"pyppmd.*: pip install 'scratchformer\[baselines\]'$"):
        load_file(FILE)


@pytest.mark.parametrize("form", ["PNG", "WebP, lossless"])
def test_images_hold_the_lines_of_the_photographs(baselines, form):
    from PIL import Image

    lines = np.random.default_rng(0).integers(0, 256, (4, 3, 640), dtype=np.uint8)
    (save,) = baselines.IMAGES[form].values()
    with Image.open(baselines.io.BytesIO(save(lines.tobytes()))) as image:
        np.testing.assert_array_equal(np.asarray(image), lines.transpose(0, 2, 1))


def test_the_harmonic_function_on_a_hand_example(baselines):
    """A chain of four members with its ends labelled: those between are nearer to one of the ends."""
    networkx = pytest.importorskip("networkx")
    for clubs, right in ([0, 0, 1, 1], 1.0), ([0, 1, 1, 1], 0.5), ([0, 1, 0, 1], 0.0):
        assert baselines.harmonic_clubs(networkx.path_graph(4), np.array([0, 3]), np.array(clubs)) == right


def test_simple_methods_on_the_digits(baselines):
    assert baselines.on_images() == {
        "logistic regression": pytest.approx(0.9083, abs=1e-4),
        "SVM": pytest.approx(0.9583, abs=1e-4),
    }
