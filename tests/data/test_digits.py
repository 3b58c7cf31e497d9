import sys

import numpy as np
import pytest

from scratchformer.data import load_digits
from scratchformer.data.digits import CLASSES, GREYS, SIDE


def test_three_consecutive_parts_cover_all_images():
    datasets = pytest.importorskip("sklearn.datasets")
    whole, digits = datasets.load_digits(), load_digits()
    assert [len(part.labels) for part in digits] == [1257, 180, 360]
    np.testing.assert_array_equal(np.concatenate([part.pixels for part in digits]), whole.images)
    np.testing.assert_array_equal(np.concatenate([part.labels for part in digits]), whole.target)
    for pixels, labels in digits:
        assert pixels.shape[1:] == (SIDE, SIDE) and pixels.dtype == np.uint8
        assert pixels.min() == 0 and pixels.max() == GREYS - 1
        assert set(labels.tolist()) == set(range(CLASSES))


def test_the_fingerprint_depends_on_images_and_labels():
    pytest.importorskip("sklearn")
    first, again, other, labelled = (load_digits() for _ in range(4))
    assert first.fingerprint == again.fingerprint
    other.test.pixels[0, 0, 0] += 1
    labelled.train.labels[0] += 1
    assert len({first.fingerprint, other.fingerprint, labelled.fingerprint}) == 3


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'scratchformer\[units\]'"):
        load_digits()
