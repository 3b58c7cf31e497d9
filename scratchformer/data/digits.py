"""Small real images: the handwritten digits that scikit-learn ships, 1,797 images of 8 × 8 pixels in 17 grey levels.

They are the test set of Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI repository, 1998.
scikit-learn is an optional dependency: pip install 'scratchformer[units]'.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

SIDE, GREYS, CLASSES = 8, 17, 10


class Images(NamedTuple):
    """Pixels (n, SIDE, SIDE) uint8, from 0 (white) to GREYS − 1 (black), and labels (n,) int64, the digits."""

    pixels: np.ndarray
    labels: np.ndarray


class Digits(NamedTuple):
    """The images in their original order, in three consecutive parts."""

    train: Images
    validation: Images
    test: Images

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all pixels and labels, in hexadecimal."""
        digest = hashlib.sha256()
        for part in self:
            digest.update(np.ascontiguousarray(part.pixels).data)
            digest.update(np.ascontiguousarray(part.labels).data)
        return digest.hexdigest()


def load_digits() -> Digits:
    """The first 70% of the images for training, the next 10% for validation, the last 20% for testing.

    Neighbouring images are often by the same writer, so consecutive parts share few writers; parts drawn at random
    would share most. Raises ImportError, which says what to install, if scikit-learn is missing.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'scratchformer[units]'") from error
    digits = datasets.load_digits()
    pixels, labels = digits.images.astype(np.uint8), digits.target.astype(np.int64)
    cuts = [len(labels) * share // 100 for share in (70, 80)]
    return Digits(*map(Images, np.split(pixels, cuts), np.split(labels, cuts)))
