"""Sums, affine maps, activations and the softmax."""

from __future__ import annotations

from .. import ops
from ..testing.draw import Sizes
from .entry import SAME_SHAPE, Arguments, OperationEntry, given, normal

ACTIVATIONS = {name: float(number) for number, name in enumerate(ops.ACTIVATIONS)}
GELU = "dx_i = dy_i ∂y_i/∂x_i = dy_i (Φ_i + x_i φ_i)"
SOFTMAX = "dz_k = Σ_i dy_i ∂y_i/∂z_k = Σ_i dy_i y_i (δ_ik − y_k) = y_k (dy_k − Σ_i dy_i y_i)"
SILU = "dx_i = dy_i ∂y_i/∂x_i = dy_i s_i (1 + x_i (1 − s_i))"
GATE = "dg_i = dy_i ∂y_i/∂g_i = dy_i u_i s_i (1 + g_i (1 − s_i))"


def with_kink(d: Sizes) -> Arguments:
    x = d("B T C")
    x[0, 0, 0] = 0
    return given(x)


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
    .derive_all()
    .mistake(
        "The activation is skipped on the way back",
        "Units that are switched off get a gradient too, and pass one on.",
        equation="dh_no = dy_no ∂y_no/∂h_no",
        wrong="dh_no = dy_no",
        code="dh = dy",
        replace={
            (
                "dh = cache.activation_backward(dy, cache.activated)\n"
                "    dx, dw, db = linear_backward(dh, cache.linear)"
            ): ("dh = dy\n    dx, dw, db = linear_backward(dh, cache.linear)")
        },
        tests="tests/ops/test_linear.py -k affine",
    )
    .mistake(
        "A bias of one number is spread over all columns",
        "A bias of the wrong shape is accepted.",
        file="kernels/numba_linear.py",
        replace={" and (b is None or b.shape == w.shape[1:])": ""},
        tests="tests/kernels/test_twins.py -k bias",
    ),
    OperationEntry("relu")
    .case("", normal("B T F"))
    .derivation("", with_kink)
    .mistake(
        "The result is compared with ≥",
        "y is never negative, so every element passes its gradient on, even where forward gave 0.",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i positive_i",
        wrong="dx_i = dy_i [y_i ≥ 0]",
        code="dx = dy * (y >= 0)",
    ),
    OperationEntry(
        "gelu", names=lambda x, approximate="none": {"none": 0.0, "approximate": float(approximate != "none")}
    )
    .case("", normal("B T F"))
    .case("tanh", normal("B T F", approximate="tanh"))
    .derive_all()
    .mistake(
        "The product rule has two terms",
        "Without x φ(x) the gradient is too small where x is positive and too large where it is negative: near x = ±1 "
        "the slope is off by 0.24.",
        equation=GELU,
        wrong="dx_i = dy_i Φ_i",
        code="dx = dy * cdf",
    )
    .mistake(
        "Constants are typed in decimal",
        "The gradient of the tanh form is right to three digits. A tolerance of 1e-3 hides this; a check in float64 "
        "does not.",
        equation="w_i := ∂u_i/∂x_i = √(2/π) (1 + 3·0.044715 x_i²)",
        wrong="w_i := ∂u_i/∂x_i = 0.798 (1 + 3·0.044715 x_i²)",
        replace={"slope = math.sqrt(2 / math.pi) * (1": "slope = 0.798 * (1"},
    ),
    OperationEntry("silu")
    .case("", normal("B T F"))
    .mistake(
        "The factor x is left out of the second term",
        "The slope is then positive everywhere, but silu falls to the left of x = −1.28.",
        equation=SILU,
        wrong="dx_i = dy_i s_i (1 + (1 − s_i))",
    )
    .mistake(
        "The slope of the sigmoid is left out",
        "The product rule has two terms. With the first alone the slope is never negative.",
        equation=SILU,
        wrong="dx_i = dy_i s_i",
        replace={"dx = dy * (s * (1 + x * (1 - s)))\n    return": "dx = dy * s\n    return"},
        tests="tests/ops/test_activations.py -k silu",
    ),
    OperationEntry("swiglu")
    .case("", normal("B T F", "B T F"))
    .mistake(
        "The gate gets no factor from the other branch",
        "Each factor of a product gets the other one. Here dgate has the wrong size, and the wrong sign where u is "
        "negative.",
        equation=GATE,
        wrong="dg_i = dy_i s_i (1 + g_i (1 − s_i))",
    )
    .mistake(
        "The sigmoid is taken for the slope of silu",
        "silu(g) = g s is a product of two functions of g. Only one of them is differentiated.",
        equation=GATE,
        wrong="dg_i = dy_i u_i s_i",
        replace={
            "dgate = dy * up * (s * (1 + gate * (1 - s)))\n    dup = dy * (gate * s)": (
                "dgate = dy * up * s\n    dup = dy * (gate * s)"
            )
        },
    )
    .survivors(
        "swiglu_backward",
        {'expect_like("dy", dy, cache.gate.shape) -> expect_like("dy", dy, cache.up.shape)': SAME_SHAPE},
    ),
    OperationEntry("geglu")
    .case("", normal("B T F", "B T F"))
    .mistake(
        "Φ is taken for the slope of gelu",
        "gelu(g) = g Φ is a product of two functions of g. Only one of them is differentiated.",
        equation="dg_i = dy_i ∂y_i/∂g_i = dy_i u_i (Φ_i + g_i φ_i)",
        wrong="dg_i = dy_i u_i Φ_i",
    )
    .survivors(
        "geglu_backward",
        {'expect_like("dy", dy, cache.gate.shape) -> expect_like("dy", dy, cache.up.shape)': SAME_SHAPE},
    ),
    OperationEntry("tanh", analytic=True)
    .case("", normal("B T F"))
    .mistake(
        "x is used in place of y",
        "Nearly right for small x, where y is nearly x, and far off for large ones, where it even turns negative.",
        equation="dx_i = dy_i ∂y_i/∂x_i = dy_i (1 − y_i²)",
        wrong="dx_i = dy_i (1 − x_i²)",
    ),
    OperationEntry("softmax", analytic=True)
    .extension("safe from overflow and rounding", "overflow|round")
    .case("", normal("B T V"))
    .mistake(
        "Only the diagonal of the Jacobian is used",
        "Every score changes the sum Z, and with it every probability. The right dz sums to 0 in each row; this one "
        "does not.",
        equation=SOFTMAX,
        wrong="dz_k = dy_k y_k (1 − y_k)",
    )
    .mistake(
        "It is divided by the size of the batch",
        "A mean belongs to the loss, which has divided already. All gradients further back are too small by the same "
        "factor.",
        equation=SOFTMAX,
        wrong="dz_nk = 1/N y_nk (dy_nk − Σ_i dy_ni y_ni)",
        code="return dz / len(y)",
        replace={
            "    dz = from_others(dz, y)\n    return": "    dz = from_others(dz, y) / y.shape[0]\n    return",
        },
    ),
    OperationEntry("log_softmax", analytic=True)
    .extension("safe from overflow and rounding", "overflow|round")
    .case("", normal("B T V"))
    .mistake(
        "y is taken for a probability",
        "y is the logarithm of a probability, which is negative: every score gets a gradient of the wrong sign for the "
        "other classes.",
        equation="dz_k = Σ_i dy_i ∂y_i/∂z_k = Σ_i dy_i (δ_ik − exp(y_k)) = dy_k − exp(y_k) Σ_i dy_i",
        wrong="dz_k = dy_k − y_k Σ_i dy_i",
    ),
]
