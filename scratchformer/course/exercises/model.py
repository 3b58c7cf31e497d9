"""A model, trained

Everything comes together: a model that reads bytes and predicts the next one, with a backward of its own, and the
training step that makes it learn from real text.

    x = embedding(ids) + positions        n blocks, one after the other        logits = output(norm(x))

`forward` of the positions adds them: x, cache = self.positions.forward(x). ops.cross_entropy(logits, targets) gives the
loss and a cache, and ops.cross_entropy_backward(1.0, cache) gives dlogits.

The check compares your gradients with numerical ones first. Then it trains your model for 80 steps on the sources of
Python's standard library. A model that knows nothing needs 8 bits for each byte.
"""

from scratchformer import Key, nn, ops, optim


class Model(nn.Layer):
    def __init__(self, vocab_size, d_model, heads, depth, context, key=Key(0)):
        self.embedding = nn.TokenEmbedding(vocab_size, d_model, std=0.1, key=key.fold("embedding"))
        self.positions = nn.PositionEmbedding(context, d_model, std=0.1, key=key.fold("positions"))
        self.blocks = [
            nn.TransformerBlock(d_model, heads, norm="pre", causal=True, key=key.fold("block", i)) for i in range(depth)
        ]
        self.norm = nn.LayerNorm(d_model)
        self.output = nn.Linear(d_model, vocab_size, key=key.fold("output"))

    def forward(self, ids):
        """Logits (B, T, V) of ids (B, T), and the cache."""
        # TODO: logits, and cache: all that backward needs.
        x, embedding = self.embedding.forward(ids)
        x, positions = self.positions.forward(x)
        blocks = []
        for block in self.blocks:
            x, cache = block.forward(x)
            blocks.append(cache)
        x, norm = self.norm.forward(x)
        logits, output = self.output.forward(x)
        cache = embedding, positions, blocks, norm, output
        # END
        return logits, cache

    def backward(self, dlogits, cache):
        # TODO: the backward of each layer, the last one first. The ids get no gradient, so there is nothing to return.
        embedding, positions, blocks, norm, output = cache
        dx = self.norm.backward(self.output.backward(dlogits, output), norm)
        for block, block_cache in zip(reversed(self.blocks), reversed(blocks), strict=True):
            dx = block.backward(dx, block_cache)
        dx = self.embedding.backward(self.positions.backward(dx, positions), embedding)
        # END


def train_step(model, adam, ids, targets, max_norm=1.0):
    """One step of training on ids (B, T), with the bytes after them as targets (B, T). Returns the loss before it."""
    # TODO: loss. Forward, cross_entropy, zero_grad, backward, clip_by_global_norm on model.flat.grad, adam.step.
    logits, cache = model.forward(ids)
    loss, cross_entropy = ops.cross_entropy(logits, targets)
    model.zero_grad()
    model.backward(ops.cross_entropy_backward(1.0, cross_entropy), cache)
    optim.clip_by_global_norm(model.flat.grad, max_norm)
    adam.step()
    # END
    return loss


# The student's file ends here.

import math

import numpy as np
from threadpoolctl import threadpool_limits

from scratchformer import Key, models, ops, optim
from scratchformer.data import load_standard_library
from scratchformer.testing import check_layer

from ..grading import Wrong, expect_close

HINTS = (
    "In forward, each layer's output is the next one's input; keep every cache. In backward, go the same way back.",
    "backward: output, norm, the blocks in reverse, positions, embedding. Each gets what the one after it passes back.",
    "The step: forward, loss, zero_grad, backward of the loss (1.0) and of the model, clip, adam.step().",
)
LIBRARY = models.LanguageModel
MISTAKES = (
    (
        "zip(reversed(self.blocks), reversed(blocks), strict=True)",
        "zip(self.blocks, blocks, strict=True)",
        "gradient",
        "the blocks' backwards run first to last",
    ),
    ("    model.zero_grad()\n", "", "zero_grad"),
    ("    adam.step()\n", "", "adam"),
    (
        "self.norm.backward(self.output.backward(dlogits, output), norm)",
        "self.output.backward(dlogits, output)",
        "gradient",
        "the backward of the last norm is left out",
    ),
    ("    optim.clip_by_global_norm(model.flat.grad, max_norm)\n", "", "clip it before"),
    (
        "    optim.clip_by_global_norm(model.flat.grad, max_norm)\n    adam.step()\n",
        "    adam.step()\n    optim.clip_by_global_norm(model.flat.grad, max_norm)\n",
        "clip it before",
    ),
    ("cross_entropy_backward(1.0, cross_entropy)", "cross_entropy_backward(2.0, cross_entropy)", "pass 1.0"),
    ("    return loss\n", "    return 1.0\n", "cross-entropy of the logits"),
    (
        "            x, cache = block.forward(x)\n",
        "            _, cache = block.forward(x)\n",
        "gradient",
        "forward drops the blocks' output, and each block reads the embeddings",
    ),
)

IDS = np.array([[0, 3, 3, 1, 2, 2]])
V, C, H, DEPTH, T = 256, 32, 2, 2, 32


def check(student):
    check_small(student)
    check_step(student)
    return trained(student)


def check_small(student):
    """The gradients of a small model, and its logits beside the library's."""
    model = student.Model(5, 4, 2, 2, 6, Key(1))
    ids = np.array([[0, 3, 3, 1], [4, 2, 0, 3]])
    check_layer(model, ids, max_elements=1, directions=1, together=8)
    why = "Expected is what the library's model gives with the same parameters"
    for depth in 2, 3:
        model, right = student.Model(5, 4, 2, depth, 6, Key(1)), models.LanguageModel(5, 4, 2, depth, 6, norm="pre")
        right.load_state_dict(dict(zip(right.state_dict(), model.state_dict().values(), strict=True)))
        expect_close(f"with {depth} blocks, logits", model.forward(ids)[0], right.forward(ids)[0], why, rtol=1e-5)


def check_step(student):
    """A step from zero gradients, the same with what another batch has left in them, and one that is not clipped."""
    stepped = [stepped_once(student, left) for left in (0.0, 1e3)]
    before = student.Model(5, 4, 2, 1, 6, Key(1)).flat.data
    if np.array_equal(stepped[0].data, before):
        raise Wrong("train_step changes no parameter: is adam.step() called?")
    if not np.allclose(stepped[0].grad, stepped[1].grad, rtol=1e-3, atol=1e-6):
        raise Wrong("train_step adds to the gradients of the step before: model.zero_grad() belongs before backward")
    model, free = student.Model(5, 4, 2, 1, 6, Key(1)), stepped_once(student, 0.0, max_norm=1e9)
    logits, cache = model.forward(IDS[:, :-1])
    model.backward(ops.cross_entropy_backward(1.0, ops.cross_entropy(logits, IDS[:, 1:])[1]), cache)
    why = "A gradient below max_norm is that of the loss: pass 1.0 to cross_entropy_backward"
    expect_close("model.flat.grad", free.grad, model.flat.grad, why, rtol=1e-5)


def stepped_once(student, left, max_norm=1e-3):
    """The parameters after a step whose loss and clipping are checked."""
    model, ids, targets, norms = student.Model(5, 4, 2, 1, 6, Key(1)), IDS[:, :-1], IDS[:, 1:], []
    expected, _ = ops.cross_entropy(model.forward(ids)[0], targets)
    adam = optim.Adam(model.parameters(), lr=1e-2)
    step = adam.step

    def observed():
        norms.append(float(np.linalg.norm(model.flat.grad)))
        step()

    adam.step = observed
    model.flat.grad[...] = left
    loss = student.train_step(model, adam, ids, targets, max_norm=max_norm)
    expect_close("loss", loss, expected, "It is the cross-entropy of the logits before the step", rtol=1e-5)
    if left == 0 and norms and norms[0] > 1.01 * max_norm:
        raise Wrong(f"with max_norm={max_norm} the gradient has norm {norms[0]:.3g} at adam.step(): clip it before")
    return model.flat


def trained(student):
    text = load_standard_library().train[:200_000]
    model = student.Model(V, C, H, DEPTH, T, Key(0))
    adam = optim.Adam(model.parameters(), lr=1e-2)
    rng, bits = np.random.default_rng(0), []
    with threadpool_limits(1, "blas"):  # the arrays are small
        for _ in range(80):
            starts = rng.integers(0, len(text) - T - 1, 8)
            rows = np.stack([text[start : start + T + 1] for start in starts])
            bits.append(float(student.train_step(model, adam, rows[:, :-1], rows[:, 1:])) / math.log(2))
    first, last = bits[0], sum(bits[-10:]) / 10
    if not last < 4.6:
        raise Wrong(
            f"after 80 steps the model needs {last:.2f} bits per byte, at first {first:.2f}; expected below 4.6"
        )
    return f"from {first:.2f} to {last:.2f} bits per byte in 80 steps"
