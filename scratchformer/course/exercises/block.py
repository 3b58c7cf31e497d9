"""A transformer block

A block is two residual branches. In pre-norm order, as in GPT-2:

    h = x + attention(norm1(x))        y = h + feedforward(norm2(h))

Each sum uses its input twice: directly, and through the branch. So its gradient is a sum of two terms.

The four layers are the library's: y, cache = layer.forward(x), and dx = layer.backward(dy, cache), which also adds the
gradients of the layer's parameters.
"""

from scratchformer import Key, nn


class Block(nn.Layer):
    """x, y: (B, T, C)."""

    def __init__(self, d_model, heads, key=Key(0)):
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = nn.SelfAttention(d_model, heads, causal=True, key=key.fold("attention"))
        self.feedforward = nn.FeedForward(d_model, key=key.fold("feedforward"))

    def forward(self, x):
        n, norm1 = self.norm1.forward(x)
        f, attention = self.attention.forward(n)
        h = x + f
        n, norm2 = self.norm2.forward(h)
        f, feedforward = self.feedforward.forward(n)
        return h + f, (norm1, attention, norm2, feedforward)

    def backward(self, dy, cache):
        norm1, attention, norm2, feedforward = cache
        # TODO: dh, then dx. Call the backward of each layer once, the last one first.
        dh = dy + self.norm2.backward(self.feedforward.backward(dy, feedforward), norm2)
        dx = dh + self.norm1.backward(self.attention.backward(dh, attention), norm1)
        # END
        return dx


# The student's file ends here.

from scratchformer import Key, nn
from scratchformer.testing import check_layer

from ..grading import expect_close, normal

HINTS = (
    "y = h + f: dy goes to h as it is, and to f, which passes it back through the feed-forward layer, then norm2.",
    "The gradient of h is dy plus what norm2 passes back. The first sum is the same again, with dh in place of dy.",
    "dh = dy + self.norm2.backward(...): the second branch passes "
    "self.norm2.backward(self.feedforward.backward(dy, feedforward), norm2) back to h.",
)
LIBRARY = nn.TransformerBlock
MISTAKES = (
    ("dh = dy + self.norm2", "dh = self.norm2", "gradient", "the second sum's direct term is left out"),
    ("dx = dh + self.norm1", "dx = dy + self.norm1", "gradient", "dy skips the second branch"),
    (
        "self.attention.backward(dh, attention)",
        "self.attention.backward(dy, attention)",
        "gradient",
        "attention gets dy, not dh",
    ),
    (
        "dh = dy + self.norm2",
        "self.feedforward.backward(dy, feedforward)\n        dh = dy + self.norm2",
        "gradient",
        "the feed-forward layer's backward runs twice: each time adds to its parameters' gradients",
    ),
    ("dx = dh + self.norm1", "dx = self.norm1", "gradient", "the first sum's direct term is left out"),
    (
        "self.norm2.backward(self.feedforward.backward(dy, feedforward), norm2)",
        "self.feedforward.backward(self.norm2.backward(dy, norm2), feedforward)",
        "gradient",
        "norm2 and the feed-forward layer are in the order of the forward",
    ),
    (
        "dx = dh + self.norm1.backward(self.attention.backward(dh, attention), norm1)",
        "dx = dh + self.attention.backward(dh, attention)",
        "gradient",
        "norm1 is left out",
    ),
)


def check(student):
    block = student.Block(4, 2, Key(5))
    check_layer(block, normal(0, 2, 3, 4), max_elements=5, directions=1)
    right = nn.TransformerBlock(4, 2, norm="pre", causal=True, key=Key(5)).to(dtype=float)
    x = normal(1, 2, 5, 4)
    expect_close("y", block.to(dtype=float)(x), right(x), "The forward was right; leave it as it was.")
