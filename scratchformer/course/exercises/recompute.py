"""Gradient checkpointing: forget the cache, run forward again

The caches of a deep model take most of its memory. A layer wrapped in `Recompute` keeps only its inputs, and runs its
forward a second time when its backward needs the cache. This costs one more forward.

Nothing may differ in the second forward: with dropout, it must draw the same mask. Here the mask depends only on
`key`, one of the options.
"""


class Recompute:
    """Behaves like `layer`. y, cache = layer.forward(*inputs, **options); dx = layer.backward(dy, cache)."""

    def __init__(self, layer):
        self.layer = layer

    def forward(self, *inputs, **options):
        # TODO: y, and a cache that holds no more than backward needs. Keep nothing in self.
        y, _ = self.layer.forward(*inputs, **options)
        cache = (inputs, options)
        # END
        return y, cache

    def backward(self, dy, cache):
        # TODO: dx, as the layer's own backward gives it.
        inputs, options = cache
        _, inner = self.layer.forward(*inputs, **options)
        dx = self.layer.backward(dy, inner)
        # END
        return dx


# The student's file ends here.

import numpy as np

from scratchformer import Key, nn

from ..grading import Wrong, expect_close, normal, numbers_in

HINTS = (
    "backward needs what forward was given: the inputs and the options, and the layer, which is in self.",
    "In backward, run self.layer.forward on the same inputs and options. It returns a y, which you do not need.",
    "cache = (inputs, options), and later _, inner = self.layer.forward(*inputs, **options).",
)
LIBRARY = nn.Recompute
MISTAKES = (
    (
        "y, _ = self.layer.forward(*inputs, **options)\n        cache = (inputs, options)",
        "y, inner = self.layer.forward(*inputs, **options)\n        cache = (inputs, options, inner)",
        "cache holds .* numbers",
    ),
    (
        "        _, inner = self.layer.forward(*inputs, **options)\n",
        "        _, inner = self.layer.forward(*inputs)\n",
        "key for dropout",
        "the second forward runs without the options, and so without dropout",
    ),
    ("cache = (inputs, options)", "cache = None\n        self.kept = (inputs, options)", "keeps"),
    (
        "dx = self.layer.backward(dy, inner)",
        "self.layer.backward(dy, inner)\n        dx = self.layer.backward(dy, inner)",
        "Run the layer's backward once",
        "the layer's backward runs twice: each time adds to the parameters' gradients",
    ),
)


def check(student):
    block = nn.TransformerBlock(6, 2, dropout=0.3, key=Key(0)).to(dtype=np.float64)
    recompute = student.Recompute(block)
    before = set(vars(recompute))
    x, other, dy = normal(0, 2, 5, 6), normal(1, 2, 5, 6), normal(2, 2, 5, 6)
    expected = plain(block, x, dy, Key(3))
    y, cache = recompute.forward(x, key=Key(3))
    if set(vars(recompute)) != before:
        kept = ", ".join(sorted(set(vars(recompute)) - before))
        raise Wrong(f"the layer keeps self.{kept}: when it is used twice, the second use overwrites the first's")
    if (count := numbers_in(cache)) >= 2 * x.size:
        raise Wrong(f"the cache holds {count} numbers; the input has {x.size}, and nothing else is needed")
    recompute.forward(other, key=Key(4))  # backward must not depend on the latest forward
    block.zero_grad()
    dx = recompute.backward(dy, cache)
    expect_close("y", y, expected[0], "It differs from the y of the layer itself.")
    expect_close("dx", dx, expected[1], "Does the second forward have the same inputs, and the same key for dropout?")
    expect_close("the gradient of the parameters", block.flat.grad, expected[2], "Run the layer's backward once.")


def plain(layer, x, dy, key):
    layer.zero_grad()
    y, cache = layer.forward(x, key=key)
    dx = layer.backward(dy, cache)
    return y, dx, layer.flat.grad.copy()
