"""From logits to the next token

A model gives a score for each token. How the next token is drawn from the scores z decides whether the text is dull or
wild:

    temperature τ    p = softmax(z/τ): sharper for τ < 1, flatter for τ > 1. τ = 0 always takes the likeliest token
    top_k            only the k likeliest tokens may be drawn
    top_p            only the smallest set of likeliest tokens whose probabilities add up to at least top_p may be drawn

The probabilities of the tokens that are left are divided by their sum. Both limits are applied after the temperature,
first top_k, then top_p, to the probabilities that top_k left.
"""

import numpy as np


def probabilities(z, temperature=1.0, top_k=None, top_p=None):
    """The probabilities (V,) of the next token, from logits z (V,), all different."""
    # TODO: p. np.argsort(-z) gives the tokens, the likeliest first.
    if temperature == 0:
        temperature, top_k = 1.0, 1
    p = np.exp((z - z.max()) / temperature)
    order = np.argsort(-z)
    if top_k is not None:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p is not None:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    # END
    return p


# The student's file ends here.

import numpy as np

from scratchformer.generation.sampling import probabilities as library

from ..grading import expect_close, normal

HINTS = (
    "You cannot divide by τ = 0, but it means the same as top_k = 1. Subtract the maximum before the exponential.",
    "Sort the tokens by their scores; those after the first k get probability 0. Divide by the sum again.",
    "A token stays in the set of top_p if the sum of the likelier ones is below top_p: np.cumsum(p) - p < top_p.",
)
LIBRARY = library
MISTAKES = (
    (
        "(z - z.max()) / temperature",
        "(z - z.max()) * temperature",
        "temperature=0.5",
        "the scores are multiplied by τ",
    ),
    (
        "before = np.cumsum(p[order]) - p[order]",
        "before = np.cumsum(p[order])",
        "top_p",
        "the token with which the sum reaches top_p is left out",
    ),
    (
        "p[order[top_k:]] = 0",
        "p[order[:top_k]] = 0",
        "temperature=0",
        "the k likeliest tokens are left out, not the others",
    ),
    (
        "    if top_k is not None:\n"
        "        p[order[top_k:]] = 0\n"
        "    p /= p.sum()\n"
        "    if top_p is not None:\n"
        "        before = np.cumsum(p[order]) - p[order]\n"
        "        p[order[before >= top_p]] = 0\n"
        "        p /= p.sum()\n",
        "    p /= p.sum()\n"
        "    if top_p is not None:\n"
        "        before = np.cumsum(p[order]) - p[order]\n"
        "        p[order[before >= top_p]] = 0\n"
        "    if top_k is not None:\n"
        "        p[order[top_k:]] = 0\n"
        "    p /= p.sum()\n",
        "top_k=5, top_p=0.8",
        "top_p is applied before top_k",
    ),
    ("        p /= p.sum()\n    return", "    return", "top_p", "what is left after top_p does not sum to 1"),
    (
        "    if temperature == 0:\n        temperature, top_k = 1.0, 1\n",
        "",
        "temperature=0",
        "the scores are divided by a temperature of 0",
    ),
    ("np.exp((z - z.max()) / temperature)", "np.exp(z / temperature)", "1000", "the exponentials overflow"),
)


def check(student):
    z = normal(0, 9)
    cases = [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 0},
        {"top_k": 3},
        {"top_k": 20},
        {"top_p": 0.7},
        {"top_p": 1.0},
        {"top_p": 0.01},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
        {"temperature": 0.01},
    ]
    for logits, of in (z, ""), (z + 1000, " of logits near 1000"):
        for case in cases:
            settings = ", ".join(f"{name}={value}" for name, value in case.items())
            with np.errstate(all="ignore"):
                p = student.probabilities(logits.copy(), **case)
            expect_close("p", p, library(logits[None], **case)[0], f"This is with {settings}{of}")
