"""Sums and affine maps."""

from __future__ import annotations

from .. import ops
from .entry import OperationEntry, normal

DENSE = {
    "": normal("B T I", "I O", "O"),
    "gelu": normal("B T I", "I O", "O", activation="gelu"),
    "gelu_tanh": normal("B T I", "I O", "O", activation="gelu_tanh"),
    "silu": normal("B T I", "I O", "O", activation="silu"),
}
ACTIVATIONS = {name: float(number) for number, name in enumerate(ops.ACTIVATIONS)}

ENTRIES = [
    OperationEntry("add", analytic=True).case("", normal("B T C", "B T C")),
    OperationEntry("linear", analytic=True)
    .case("", normal("B T I", "I O", "O"))
    .case("no bias", normal("B T I", "I O"))
    .mistake(
        "The bias gets the mean over the rows",
        "The gradient of the bias is N times too small. Adam divides each gradient by its own size, so training looks "
        "normal.",
        equation="db_o = Σ_n dy_no",
        wrong="db_o = mean_n(dy_no)",
        code="db = dy.mean(axis=0)",
    )
    .mistake(
        "The weights' gradient is divided by the number of rows",
        "dy already contains the 1/N of the loss. Divided twice, dw is N times too small, while dx is right.",
        equation="dw_io = Σ_n x_ni dy_no",
        wrong="dw_io = 1/N Σ_n x_ni dy_no",
        code="dw = x.T @ dy / len(x)",
    ),
    OperationEntry(
        "dense", names=lambda x, w, b, activation="relu": ACTIVATIONS | {"activation": ACTIVATIONS[activation]}
    )
    .case("", normal("B T I", "I O", "O"))
    .case("gelu", normal("B T I", "I O", "O", activation="gelu"))
    .case("gelu_tanh", normal("B T I", "I O", "O", activation="gelu_tanh"))
    .case("silu", normal("B T I", "I O", "O", activation="silu"))
    .derivation("")
    .derivation("gelu")
    .derivation("gelu_tanh")
    .derivation("silu")
    .mistake(
        "The activation is skipped on the way back",
        "Units that are switched off get a gradient too, and pass one on.",
        name="an activation: its backward is left out",
        equation="dh_no = dy_no ∂y_no/∂h_no",
        wrong="dh_no = dy_no",
        code="dh = dy",
        replace={
            (
                "dh = cache.activation_backward(dy, cache.activated)\n"
                "    dx, dw, db = linear_backward(dh, cache.linear)"
            ): ("dh = dy\n    dx, dw, db = linear_backward(dh, cache.linear)")
        },
        tests="tests/ops/test_dense.py -k affine",
    )
    .mistake(
        "A bias of one number is spread over all columns",
        "A bias of the wrong shape is accepted.",
        name="a kernel: a bias of one number is spread over all columns",
        file="kernels/numba_linear.py",
        replace={" and (b is None or b.shape == w.shape[1:])": ""},
        tests="tests/kernels/test_twins.py -k bias",
    ),
]
