"""The key-value cache: what generation need not compute again."""

from __future__ import annotations

from ..backend import Array, array_module
from ..models import LanguageModel


class KeyValueCache:
    """The keys and values of a language model's past tokens, for each layer, in arrays allocated once.

    In a causal model the vectors at past positions do not depend on what comes later, so a new token needs only its
    own query, and its own key and value stored behind the others. `logits` gives the very numbers of the full forward.

    When the context is full it slides: the later half of the tokens is kept and computed anew, at positions from 0,
    since positions are absolute. So a token is computed twice on average, the second time in a batch with others, and
    every prediction sees at least half a context.
    """

    def __init__(self, model: LanguageModel, batch_size: int) -> None:
        """Room for `batch_size` sequences of the model's context; batch_size: B."""
        self.model, self.ids, self.length = model, None, 0
        table, attention = model.body.tokens.table.data, model.body.blocks[0]
        attention = getattr(attention, "layer", attention).attention
        head_width = attention.query.w.data.shape[1] // attention.heads
        shape = (batch_size, attention.heads, model.context, head_width)  # (B, H, S, D)
        xp = array_module(table)
        self.keys = [xp.empty(shape, table.dtype) for _ in model.body.blocks]
        self.values = [xp.empty(shape, table.dtype) for _ in model.body.blocks]

    def logits(self, ids: Array) -> Array:
        """Append the tokens ids (B, T) and return the logits (B, V) of what follows the last of them."""
        xp = array_module(ids)
        self.ids = ids if self.ids is None else xp.concatenate([self.ids, ids], axis=1)
        if self.ids.shape[1] > self.model.context:
            kept = max(1, self.model.context // 2)
            self.ids, self.length = self.ids[:, -max(kept, min(ids.shape[1], self.model.context)) :], 0
        new = self.ids[:, self.length :]
        logits = self.model.extend(new, self.keys, self.values, self.length)
        self.length = self.ids.shape[1]
        return logits[:, -1]
