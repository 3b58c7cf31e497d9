import sys

import numpy as np
import pytest

from scratchformer.data import load_photos
from scratchformer.data.photos import COLORS, WIDTH


@pytest.fixture(scope="module")
def photos():
    for module in "sklearn", "PIL":
        pytest.importorskip(module)
    return load_photos()


def test_three_parts_cover_both_photographs(photos):
    from sklearn import datasets

    whole = datasets.load_sample_images().images
    parts = [part.reshape(2, -1, COLORS, WIDTH) for part in photos[1:]]
    assert [part.shape[1] for part in parts] == [369, 26, 32] and parts[0].dtype == np.uint8
    np.testing.assert_array_equal(np.concatenate(parts, axis=1).transpose(0, 1, 3, 2), whole)


def test_where_the_color_before_and_the_pixel_above_are(photos):
    from sklearn import datasets

    line, above = datasets.load_sample_images().images[0][[5, 4]]  # (WIDTH, COLORS) each
    for color, before in enumerate([above[7, 2], line[7, 0], line[7, 1]]):
        place = (5 * COLORS + color) * WIDTH + 7
        back = [int(photos.train[place - n]) for n in (0, 1, 640, 1920)]
        assert back == [line[7, color], line[6, color], before, above[7, color]]


@pytest.mark.parametrize("missing", ["sklearn", "PIL"])
def test_without_scikit_learn_or_pillow_it_says_what_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'scratchformer\[units\]'"):
        load_photos()
