"""Every mistake of the catalogue that makes a gradient wrong, as code, and what the diagnosis should name first.

    python -m tests.testing.known_mistakes

prints what it names with the catalogue, and with general forms and derivations alone. Takes half a minute.
"""

from __future__ import annotations

import re
import sys

import numpy as np

from scratchformer import ops
from scratchformer.testing import GradientError, check_gradients, check_layer, mistakes
from scratchformer.testing.cases import LAYERS, OPERATIONS, Draw
from scratchformer.testing.diagnosis import layers_in
from scratchformer.testing.mistakes import MISTAKES, Mistake

# The code of those that the catalogue has as equations: a line of the backward, and what it becomes.
CODE = {
    "linear: the bias gets the mean over the rows": ("widen(dy).sum(axis=0)", "widen(dy).mean(axis=0)"),
    "linear: the weights' gradient is divided by the number of rows": ("    dw = x.T @ dy\n", "    dw = x.T @ dy / len(x)\n"),
    "relu: the result is compared with ≥": ("    dx = dy * positive\n", "    dx = dy * (positive >= 0)\n"),
    "gelu: the product rule has two terms": ("    dx = dy * (cdf + x * density)\n", "    dx = dy * cdf\n"),
    "silu: the factor x is left out of the second term": ("dy * (s * (1 + x * (1 - s)))", "dy * (s * (1 + (1 - s)))"),
    "tanh: x is used in place of y": ("    y = array_module(x).tanh(x)\n    return y, y\n", "    y = array_module(x).tanh(x)\n    return y, x.copy()\n"),
    "swiglu: the gate gets no factor from the other branch": ("    dgate = dy * up * (s", "    dgate = dy * (s"),
    "softmax: only the diagonal of the Jacobian is used": ("    dz = y * (dy - (dy * y).sum(axis=-1, keepdims=True))\n", "    dz = y * (dy - dy * y)\n"),
    "log softmax: y is taken for a probability": ("    dz = dy - xp.exp(y) * dy.sum", "    dz = dy - y * dy.sum"),
    "cross entropy: rows that do not count still pass a gradient": ("    dlogits *= counted\n", ""),
    "cross entropy: the mean is over all rows, not those that count": ("dloss / max(1, n)", "dloss / len(targets)"),
    "layernorm: the third term is forgotten": (" - xhat * (g * xhat).mean(axis=-1, keepdims=True))", ")"),
    "layernorm: β gets the mean over the rows": ("    dbeta = dy.sum(axis=rows)", "    dbeta = dy.mean(axis=rows)"),
    "gather: assigned instead of added": (
        "    dx = embedding_backward(dy, cache.rows).reshape(cache.shape)\n    return",
        "    dx = array_module(dy).zeros((cache.shape[0] * cache.shape[1], cache.shape[2]))\n"
        "    dx[cache.rows.ids] = dy\n    dx = dx.astype(dy.dtype).reshape(cache.shape)\n    return",
    ),
    "dropout: the scale is left out of backward": ("    dx = dy * cache.keep * cache.scale\n    return", "    dx = dy * cache.keep\n    return"),
    "mean pool: the padding gets a gradient": ("weights[:, :, None] * dy", "(weights.max(1)[:, None, None] + 0 * weights[:, :, None]) * dy"),
    "max pool: every element as large as the maximum gets the gradient": (("MaxPoolCache(winner, live, x", "MaxPoolCache(x >= y[:, None], live, x"), ("winner.shape)", "live.shape)"), ("steps == winner[:, None, :]", "winner")),
    "attention: the second term of the softmax is left out": ("(dp - (probabilities * dp).sum(axis=-1, keepdims=True))", "dp"),
    "attention: the sum runs over the queries": ("* dp).sum(axis=-1,", "* dp).sum(axis=-2,"),
    "attention: the scaling is used in forward only": ("    da = dz * scale\n", "    da = dz\n"),
    "relative shift: shifted the same way again": ("    dx[..., rows, columns] = dy\n    return", "    dx[..., ::-1, :][..., rows, columns] = dy[..., ::-1, :]\n    return"),
    "relative attention: q gets only one of its two gradients": ("    dq = dqu + dqw\n", "    dq = dqu\n"),
    "relative attention: the gradient of r is averaged over the sequences": ("(q + position_bias[:, None])).sum(axis=0)", "(q + position_bias[:, None])).mean(axis=0)"),
}  # fmt: skip

# A layer that has the mistake, where it makes a gradient wrong.
LAYER = {
    "encoder-decoder: the memory's gradient from one block only": "Stack, shared input, post",
    "a residual: the gradient passes through the branch only": "Residual, post",
    "encoder-decoder: the table is scaled at the input, its gradient is not": "EmbeddingSum, positions, norm, scale",
    "an output tied to the embedding: no gradient from the output": "TiedOutput",
    "recompute: another dropout mask the second time": "Recompute",
    "positions on a grid: the columns get the gradient of the rows": "GridPositions",
    "a memory: gamma gets no gradient from it": "TransformerBlock, post, relative, causal, memory",
    "BERT: the gradient of the first vector goes to all of them": "BertClassifier",
}


def first(mistake):
    """The first diagnosis of the mistaken code; None if none fails a check, "" if it is not known."""
    for check in checks(mistake):
        try:
            check()
        except GradientError as error:
            if "wrong gradient" in str(error):
                return error.diagnoses[0] if error.diagnoses else ""
        except (ValueError, IndexError, TypeError):
            continue
    return None


def checks(mistake):
    """Checks of the code with the mistake, on the arrays of the cases."""
    if mistake.operation:
        pairs = CODE.get(mistake.name, ())
        pairs = (pairs,) if pairs and isinstance(pairs[0], str) else pairs
        file = getattr(ops, mistake.operation).__module__.removeprefix("scratchformer.").replace(".", "/") + ".py"
        planted = (
            mistake
            if mistake.file
            else Mistake(mistake.name, operation=mistake.operation, file=file, replacements=pairs)
        )
        assert planted.source() != Mistake("", file=planted.file).source(), mistake.name
        names = planted.names()
        if f"{mistake.operation}_backward" not in names:
            return
        for case in OPERATIONS:
            if case.partition(",")[0] == mistake.operation:
                made = OPERATIONS[case](Draw(1))
                yield lambda made=made: check_gradients(*planted.pair(), *made.args, **made.options)
    elif mistake.file.startswith(("nn/", "models/")):
        for name in [LAYER[mistake.name]] if mistake.name in LAYER else []:
            made = LAYERS[name](Draw(1))
            for p in made.layer.parameters():
                p.data[...] = np.random.default_rng(0).standard_normal(p.data.shape)
            found = [
                x
                for x in layers_in(made.layer, {})
                if type(x).__name__ in mistake.names() and type(x).__module__ == mistake.names()["__name__"]
            ]
            if found:
                for x in found:
                    x.__class__ = mistake.names()[type(x).__name__]
                yield lambda made=made: check_layer(made.layer, *made.inputs, max_elements=40, **made.options)


def main():
    for mistake in MISTAKES:
        if sys.argv[1:] and not re.search(sys.argv[1], mistake.name):
            continue
        if not (mistake.operation or mistake.file.startswith(("nn/", "models/"))):
            continue
        every, mistakes.MISTAKES = mistakes.MISTAKES, MISTAKES
        found = first(mistake)
        mistakes.MISTAKES = ()
        mistakes.mistakes_of, of = (lambda name: ()), mistakes.mistakes_of
        alone = first(mistake)
        mistakes.MISTAKES, mistakes.mistakes_of = every, of
        if found is not None:
            print(
                mistake.name,
                "\n     ",
                found and (found.source, found.name),
                "\n     ",
                alone and (alone.source, alone.name, alone.what[:150]),
            )


if __name__ == "__main__":
    main()
