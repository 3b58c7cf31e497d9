"""check with functions of TensorFlow. test_libraries.py runs this in a process of its own, as TensorFlow and PyTorch's
compiler end a process that imports both.
"""

import numpy as np
import pytest

from scratchformer import check
from scratchformer.testing import GradientError


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 3))


def complaint(*args, **options):
    with pytest.raises(GradientError) as caught:
        check(*args, **options)
    return str(caught.value)


def names(report):
    return [row.tensor for row in report]


@pytest.fixture
def tf(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    return pytest.importorskip("tensorflow")


def test_tensorflow_a_custom_gradient(tf, x):
    def cube_of(factor):
        @tf.custom_gradient
        def cube(x):
            return x**3, lambda dy: factor * 3 * x**2 * dy

        return cube

    assert names(check(cube_of(1.0), tf.constant(x))) == ["x"]
    said = complaint(cube_of(1.0001), tf.constant(x, tf.float32), seed=3)
    assert said.startswith("cube: wrong gradient at x[") and said.endswith("check(cube, ..., seed=3)")


def test_tensorflow_functions_as_they_are_written(tf, x):
    def function(a, ids, *, axis):
        return {"sum": tf.reduce_sum(tf.gather(a["x"], ids), axis), "at": tf.argmax(a["x"])}

    assert names(check(function, {"x": tf.constant(x)}, tf.constant([0, 1, 1]), axis=1)) == ["a['x']"]
    assert names(check(tf.function(tf.nn.gelu), tf.constant(x))) == ["features"]
    z = tf.complex(tf.constant(x), tf.constant(x[::-1]))
    assert names(check(lambda z: z * tf.math.conj(z) * z, z)) == ["z.real", "z.imag"]
    assert "no gradient reaches x: look for tf.stop_gradient" in complaint(
        lambda x: x + tf.stop_gradient(x) - x, tf.constant(x)
    )


def test_tensorflow_variables(tf, x):
    w = tf.Variable(x.T, name="w")
    assert names(check(lambda x: x @ w, tf.constant(x))) == ["x", "w"]
    assert np.array_equal(w.numpy(), x.T)
    layers, rows = tf.keras.layers, tf.constant(np.random.default_rng(1).normal(size=(5, 3)))
    wide = [
        kind(dtype="float64") for kind in (layers.BatchNormalization, lambda dtype: layers.Dropout(0.5, dtype=dtype))
    ]
    model = tf.keras.Sequential([layers.Dense(4, dtype="float64"), *wide])
    model(rows)
    report = check(model, rows, training=True)
    assert [name.split("/")[-1] for name in names(report)] == ["inputs", "kernel", "bias", "gamma", "beta"]
    assert not model.layers[1].moving_mean.numpy().any()
    assert check(layers.Dense(2), rows).notes == (
        "y is computed in float32: compared to within its round-off, which may hide derivatives below 0.001",
    )
