import numpy as np

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device


def test_gradients(case, check_gradients):
    check_gradients(case)


def test_squared_relu(device):
    x = to_device(np.array([-2.0, -0.0, 0.0, 0.5, 3.0]), device)
    y, cache = ops.squared_relu(x)
    assert to_cpu(y).tolist() == [0, 0, 0, 0.25, 9]
    assert to_cpu(ops.squared_relu_backward(device.xp.ones_like(x), cache)).tolist() == [0, 0, 0, 1, 6]
