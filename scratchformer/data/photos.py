"""Real photographs as sequences of bytes: the two of 640 × 427 pixels that scikit-learn ships.

scikit-learn and Pillow are optional dependencies: pip install 'scratchformer[units]'.
"""

from __future__ import annotations

import numpy as np

from .enwik8 import Corpus

WIDTH, COLORS = 640, 3
LINES = (363, 395)  # of 427: where the validation part and the test part of each photograph begin


def load_photos() -> Corpus:
    """A temple and a flower, line by line from the top: each line as 640 reds, then 640 greens, then 640 blues.

    This order is called "band interleaved by line"; scanners and satellites store images in it. The byte for the color
    before, of the same pixel, is 640 bytes back, and that for the pixel above 1,920. Of both photographs the first 363
    lines are for training, 32 for validation, and the last 32 for testing. Raises ImportError, which says what to
    install, if scikit-learn or Pillow is missing.
    """
    try:
        import PIL  # noqa: F401 (by which scikit-learn reads them)
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("the photographs come with scikit-learn: pip install 'scratchformer[units]'") from error
    photos = [photo.transpose(0, 2, 1) for photo in datasets.load_sample_images().images]  # (lines, colors, width)
    parts = zip(*(np.split(photo, LINES) for photo in photos), strict=True)
    return Corpus("photographs", *(np.concatenate([lines.reshape(-1) for lines in part]) for part in parts))
