"""The published decoder SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..checks import expect_positive
from ..shell.text import shown
from .llama import Llama
from .pretrained import PretrainedError
from .published import Kind, windows

INTERVAL = 4  # every fourth block


class SmolLM3(Llama):
    """The language model that Hugging Face published in 2025.

    What differs from `Llama`, and why:
    - In every fourth block queries and keys are not rotated: rotary_width is 0. A score there depends only on the
      contents of the two positions, at any distance, while the other blocks still know the order. In texts longer than
      those of training, fewer scores depend on angles that never occurred there.
    - The output is tied to the table of tokens, which saves V C weights (tied).

    All arguments are those of `Llama`. by_block, or rotary_width for all blocks, can choose other blocks to rotate.

    Source: Bakouch et al., "SmolLM3: smol, multilingual, long-context reasoner", 2025; Yang et al., "RoPE to NoPE and
    back again: a new hybrid attention strategy", 2025, section 4.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {
        "smollm3": Kind(
            "SmolLM3ForCausalLM",
            {
                "attention_bias": (False, True),
                "mlp_bias": (False, True),
                "tie_word_embeddings": (True, False),
                "use_sliding_window": (False, True),
            },
            needed=["num_key_value_heads"],
            base=2e6,
        )
    }

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        heads: int,
        depth: int,
        context: int,
        tied: bool = True,
        by_block: Mapping[str, Sequence[Any]] | None = None,
        **options: Any,
    ) -> None:
        if by_block is None and "rotary_width" not in options:
            expect_positive(depth=depth)
            by_block = {"rotary_width": rotary_widths(depth)}
        super().__init__(vocab_size, d_model, heads, depth, context, tied, by_block=by_block, **options)

    def settings(self, kind: str) -> dict[str, Any]:
        rotated = [int(block.attention.rotary_width != 0) for block in self.body.blocks]
        return super().settings(kind) | {"no_rope_layers": rotated}

    @classmethod
    def by_block(cls, path: Path, config: Mapping[str, Any], kind: Kind) -> dict[str, list]:
        """As for `Llama`. Unless config.json says otherwise, the blocks with a window are those without a rotation."""
        depth, interval = config["num_hidden_layers"], config.get("no_rope_layer_interval", INTERVAL)
        rotated = config.get("no_rope_layers")
        if rotated is not None and not (isinstance(rotated, list) and len(rotated) >= depth and {*rotated} <= {0, 1}):
            raise PretrainedError(f"{path}: no_rope_layers: expected {depth} numbers 0 or 1, got {shown(rotated)}")
        if type(interval) is not int or interval < 1:
            raise PretrainedError(f"{path}: no_rope_layer_interval: expected a number >= 1, got {shown(interval)}")
        if rotated is None:
            widths = rotary_widths(depth, interval)
        else:
            widths = [None if each else 0 for each in rotated[:depth]]
        return {"window": windows(path, config, kind, [width == 0 for width in widths]), "rotary_width": widths}


def rotary_widths(depth: int, interval: int = INTERVAL) -> list[int | None]:
    """How much of each head is rotated in each block: nothing in the last of every `interval`, all in the others."""
    return [None if (i + 1) % interval else 0 for i in range(depth)]
