"""Real photographs as sequences of bytes: the two of 640 × 427 pixels that scikit-learn ships.

They are a temple by the Flickr user danielbuechele and a flower by vultilion, under CC BY 2.0, decoded from JPEG.
scikit-learn and Pillow are optional dependencies: pip install 'scratchformer[units]'.
"""

from __future__ import annotations

import numpy as np

from .enwik8 import Corpus

WIDTH, COLORS = 640, 3
LINES = (369, 395)  # of 427: where the validation part and the test part of each photograph begin


def load_photos() -> Corpus:
    """Both photographs, line by line from the top: each line as 640 reds, then 640 greens, then 640 blues.

    This order is called "band interleaved by line"; scanners and satellites store images in it. The same colour of the
    pixel above is 1,920 bytes back. 640 back is the red of a green's pixel and the green of a blue's. Of each
    photograph, the first 369 lines are in the training part, 26 in the validation part, and the last 32 in the test
    part. Raises ImportError, which says what to install, if scikit-learn or Pillow is missing.
    """
    try:
        import PIL  # noqa: F401 (by which scikit-learn reads them)
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("the photographs need scikit-learn and Pillow: pip install 'scratchformer[units]'") from error
    photos = [photo.transpose(0, 2, 1) for photo in datasets.load_sample_images().images]  # (lines, colors, width)
    parts = zip(*(np.split(photo, LINES) for photo in photos), strict=True)
    return Corpus("photographs", *(np.concatenate([lines.reshape(-1) for lines in part]) for part in parts))
