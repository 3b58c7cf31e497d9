"""Files are written as the safetensors library reads them."""

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from scratchformer.data.tensorfile import CODES, save_file


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    tensors = {f"{name} ü": np.arange(6).reshape(2, 3).astype(name) for name in CODES}
    tensors |= {"single": np.array(3), "empty": np.zeros((0, 4), np.float32), "big": np.arange(3, dtype=">f8")}
    path = tmp_path / "file"
    save_file(tensors, path, {"state": '{"best": "é"}'})
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"state": '{"best": "é"}'}
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype.newbyteorder("=")
        assert found[name].shape == array.shape
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert start % 8 == 0
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(SafetensorError, match=r"c: expected one of .*float32.*, got complex64"):
        save_file({"c": np.zeros(2, np.complex64)}, path, {})
