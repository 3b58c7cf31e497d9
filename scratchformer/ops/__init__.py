"""The mathematics: each operation is a pair of pure functions, forward and backward, with its derivation.

    y, cache = op(x, ...)          # cache: what the backward needs and no more
    dx, ... = op_backward(dy, cache)

The backward is the exact vector-Jacobian product: for a scalar loss L and dy = ∂L/∂y it gives dx = ∂L/∂x, one gradient
for each differentiable argument, in the order of the arguments. No operation holds state or writes to its arguments.
A cache may hold the arguments themselves and the result y: do not write to any of them before the backward has run.

Arrays are floating-point; ids, targets, places and lengths are integers. Anything else raises TypeError, since the
softmax or mean of an integer array would be rounded to integers.

Letters, the same in every module:

    B batch            T query length     S key length      M memory length
    C model width      H heads            D head width (C = H D)
    G heads of keys and values (G divides H)
    F feed-forward width                  V vocabulary      N tokens (N = B T)
    I input width      O output width     R distances (R = S + T − 1)

The gradient of an array is named d and its name: dx is ∂L/∂x and has the shape of x.
"""

from .activations import (
    ACTIVATIONS,
    Activation,
    activation_pair,
    gelu,
    gelu_backward,
    relu,
    relu_backward,
    silu,
    silu_backward,
    tanh,
    tanh_backward,
)
from .add import add, add_backward
from .attention import attention, attention_backward
from .cross_entropy import IGNORED, cross_entropy, cross_entropy_backward
from .dropout import dropout, dropout_backward
from .dropout_add import dropout_add, dropout_add_backward
from .embedding import embedding, embedding_backward
from .gather import gather, gather_backward
from .geglu import geglu, geglu_backward
from .layernorm import layernorm, layernorm_backward
from .linear import dense, dense_backward, linear, linear_backward
from .patterns import BlockEnds, Causal, Edges, Full, Heads, Local, Padding, Pattern, SameBlock, Strided
from .pooling import max_pool, max_pool_backward, mean_pool, mean_pool_backward
from .positions import sinusoidal_positions
from .relative import relative_attention, relative_attention_backward, relative_shift, relative_shift_backward
from .rmsnorm import rmsnorm, rmsnorm_backward
from .rotary import rotary, rotary_backward, rotary_frequencies
from .softmax import log_softmax, log_softmax_backward, softmax, softmax_backward
from .swiglu import swiglu, swiglu_backward

__all__ = [
    "ACTIVATIONS",
    "IGNORED",
    "Activation",
    "BlockEnds",
    "Causal",
    "Edges",
    "Full",
    "Heads",
    "Local",
    "Padding",
    "Pattern",
    "SameBlock",
    "Strided",
    "activation_pair",
    "add",
    "add_backward",
    "attention",
    "attention_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "dense",
    "dense_backward",
    "dropout",
    "dropout_add",
    "dropout_add_backward",
    "dropout_backward",
    "embedding",
    "embedding_backward",
    "gather",
    "gather_backward",
    "geglu",
    "geglu_backward",
    "gelu",
    "gelu_backward",
    "layernorm",
    "layernorm_backward",
    "linear",
    "linear_backward",
    "log_softmax",
    "log_softmax_backward",
    "max_pool",
    "max_pool_backward",
    "mean_pool",
    "mean_pool_backward",
    "relative_attention",
    "relative_attention_backward",
    "relative_shift",
    "relative_shift_backward",
    "relu",
    "relu_backward",
    "rmsnorm",
    "rmsnorm_backward",
    "rotary",
    "rotary_backward",
    "rotary_frequencies",
    "silu",
    "silu_backward",
    "sinusoidal_positions",
    "softmax",
    "softmax_backward",
    "swiglu",
    "swiglu_backward",
    "tanh",
    "tanh_backward",
]
