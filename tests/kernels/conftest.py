"""What the tests of the twins for one new token share."""

import importlib

import numpy as np
import pytest

from scratchformer.dispatch import fast
from scratchformer.nn.block import extend_block
from scratchformer.nn.decoder_block import extend_decoder_block
from scratchformer.nn.embedding import extend_output


@pytest.fixture
def compiled(monkeypatch):
    """The module of the compiled twins, which may leave nothing to those of NumPy."""
    pytest.importorskip("numba")
    pytest.importorskip("scratchformer.kernels", reason="no kernels")
    with fast():
        module = importlib.import_module("scratchformer.kernels.numba_extend")
    for operation in extend_block, extend_decoder_block, extend_output:
        twin = operation.chosen[True][np.ndarray][0]
        assert twin.forward.__module__ == module.__name__

        def fits(*args, twin=twin, **options):
            assert twin.fits(*args, **options), "it did not run"
            return True

        monkeypatch.setitem(operation.chosen[True], np.ndarray, [twin._replace(fits=fits)])
    return module
