"""Texts that grow token by token, for models with recall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class RecalledTexts:
    """B texts, and for each new token what followed earlier n-grams in its text: the rows of `data.recalling`.

    orders: the model's `recall`. before: the tokens (n,) with which each text begins. Tokens are kept as characters of
    a string, which Python searches fast from its end.
    """

    def __init__(self, orders: Sequence[int], before: Sequence[np.ndarray]) -> None:
        self.orders = list(orders)
        made: dict[int, str] = {}  # one string for all that begin with the same array
        self.texts = [made.setdefault(id(tokens), "".join(map(chr, tokens.tolist()))) for tokens in before]

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
        found = dict.fromkeys(range(len(self.orders)), 0)
        for n in sorted({*self.orders}):
            ngram, start = text[-n:], len(text) - n
            for i in (i for i, m in enumerate(self.orders) if m == n):
                start = text.rfind(ngram, 0, start + n - 1) if start > 0 else -1
                if start < 0:
                    break
                found[i] = 1 + ord(text[start + n])
            if not any(found[i] for i, m in enumerate(self.orders) if m == n):
                break  # nor has any longer n-gram
        return [found[i] for i in range(len(self.orders))]
