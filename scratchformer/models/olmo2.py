"""The published decoder OLMo 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .llama import Llama
from .published import NO_WINDOW, Kind, PublishedDecoder


class Olmo2(Llama):
    """The language model that the Allen Institute for AI published in 2024, with all its data.

    What differs from `Llama`, and why:
    - A norm follows each branch, before the sum, and none precedes it: h = x + norm(attention(x)). So the branches add
      vectors whose size is learned, γ, and the residual path stays a plain sum. The loss then has fewer spikes in
      training.
    - The queries of all heads together are divided by their root mean square before they are rotated, and so are the
      keys, each with a γ for every number (`NormedLinear`). Scores can then grow only
      through γ, not through the weights of the projections.

    All arguments are those of `Llama`.

    Source: OLMo team, "2 OLMo 2 furious", 2024, sections 2.1 and 3.2.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {
        "olmo2": Kind("Olmo2ForCausalLM", NO_WINDOW | {"attention_bias": (False, True)}, eps=1e-5)
    }
    layers: ClassVar[Mapping[str, str]] = {
        **PublishedDecoder.layers,
        "after1": "post_attention_layernorm",
        "after2": "post_feedforward_layernorm",
    }
    defaults: ClassVar[Mapping[str, Any]] = {"norms": "after", "query_key_norm": "all"}
