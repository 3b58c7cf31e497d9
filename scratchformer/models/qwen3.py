"""The published decoder Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .llama import Llama
from .published import Kind


class Qwen3(Llama):
    """The language model that Alibaba's Qwen team published in 2025.

    What differs from Qwen2, which is a `Llama` with a setting, and why:
    - Each head of the queries and keys is divided by its root mean square before it is rotated, and scaled by learned
      numbers γ, the same for all heads (`NormedLinear`). A score is then at most √D times the product of
      the largest γ of the queries and that of the keys. Without the norms, scores can grow in training until the
      softmax sees one position only.
    - Queries, keys and values have no biases.
    - A head is 128 wide (head_width), however many there are, so H D may be more than C.

    All arguments are those of `Llama`.

    Source: Qwen team, "Qwen3 technical report", 2025, section 2.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {
        "qwen3": Kind(
            "Qwen3ForCausalLM",
            {"attention_bias": (False, True), "use_sliding_window": (False, True)},
            needed=["num_key_value_heads", "head_dim"],
            window=4096,
        )
    }
    defaults: ClassVar[Mapping[str, Any]] = {"query_key_norm": "heads"}
