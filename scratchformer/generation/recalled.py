"""Texts that grow token by token, for models with recall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def recall_orders(model: Any) -> Sequence[int]:
    """The lengths of n-grams of a model with recall; () for any other model."""
    return getattr(getattr(model, "body", None), "recalls", ())


class RecalledTexts:
    """B texts, and for each new token what followed earlier n-grams in its text: the rows of `data.recalling`.

    orders: the model's `recall`. before: the tokens (n,) with which each of the B texts begins. Tokens are kept as
    characters of a string, which Python searches fast from its end.
    """

    def __init__(self, orders: Sequence[int], before: Sequence[np.ndarray]) -> None:
        self.orders = list(orders)
        self.texts = ["".join(map(chr, tokens.tolist())) for tokens in before]

    def append(self, ids: np.ndarray) -> np.ndarray:
        """Append the tokens ids (B, T), and return their rows, int32 (B, T, 1 + len(orders))."""
        rows = np.zeros((*ids.shape, 1 + len(self.orders)), np.int32)
        rows[:, :, 0] = ids
        for b, new in enumerate(ids.tolist()):
            for t, token in enumerate(new):
                self.texts[b] += chr(token)
                rows[b, t, 1:] = self._followed(self.texts[b])
        return rows

    def _followed(self, text: str) -> list[int]:
        """For each order, 1 + the token that followed the previous occurrence of the last n-gram of a text, or 0."""
        found = [0] * len(self.orders)
        for n in sorted({*self.orders}):
            ngram, start = text[-n:], len(text) - n
            places = [i for i, order in enumerate(self.orders) if order == n]
            for i in places:
                start = text.rfind(ngram, 0, start + n - 1) if start > 0 else -1
                if start < 0:
                    break
                found[i] = 1 + ord(text[start + n])
            if not found[places[0]]:
                break  # a longer n-gram has not occurred either
        return found
