import sys

import numpy as np
import pytest

from scratchformer.data import load_photos
from scratchformer.data.photos import COLORS, WIDTH


@pytest.fixture(scope="module")
def photos():
    pytest.importorskip("PIL")
    return load_photos()


def test_three_parts_cover_both_photographs(photos):
    whole = pytest.importorskip("sklearn.datasets").load_sample_images().images
    parts = [part.reshape(2, -1, COLORS, WIDTH) for part in photos[1:]]
    assert [part.shape[1] for part in parts] == [363, 32, 32] and parts[0].dtype == np.uint8
    np.testing.assert_array_equal(np.concatenate(parts, axis=1).transpose(0, 1, 3, 2), whole)


def test_where_the_color_before_and_the_pixel_above_are(photos):
    image = pytest.importorskip("sklearn.datasets").load_sample_images().images[0]
    place = (5 * COLORS + 2) * WIDTH + 7  # line 5, blue, column 7
    back = [int(photos.train[place - n]) for n in (0, 1, 640, 1920)]
    assert back == [image[5, 7, 2], image[5, 6, 2], image[5, 7, 1], image[4, 7, 2]]


@pytest.mark.parametrize("missing", ["sklearn", "PIL"])
def test_without_scikit_learn_or_pillow_it_says_what_to_install(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'scratchformer\[units\]'"):
        load_photos()
