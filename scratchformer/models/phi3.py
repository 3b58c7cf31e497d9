"""The published decoder Phi-3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .llama import Llama
from .pretrained import Folder, PretrainedError
from .published import Kind, PublishedDecoder


class Phi3(Llama):
    """The language model that Microsoft published in 2024; Phi-4 is one too.

    What differs from `Llama`, and why:
    - In the smallest model a position sees only the last W (window), as in Mistral.
    - Files store queries, keys and values side by side in one matrix, and the two inputs of SwiGLU in another. One
      product of wide matrices is faster than several. Here they are separate, and computed together where that is
      faster; only the reading of weights differs.

    All arguments are those of `Llama`. Models for 128,000 positions, whose angles have a factor for each pair
    ("longrope"), are not read.

    Source: Abdin et al., "Phi-3 technical report", 2024, section 2.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {
        "phi3": Kind("Phi3ForCausalLM", {"original_max_position_embeddings": ()}, eps=1e-5)
    }
    layers: ClassVar[Mapping[str, str]] = {
        **PublishedDecoder.layers,
        "attention.query": "self_attn.qkv_proj",
        "attention.key": "self_attn.qkv_proj",
        "attention.value": "self_attn.qkv_proj",
        "feedforward.gate": "mlp.gate_up_proj",
        "feedforward.up": "mlp.gate_up_proj",
    }

    @classmethod
    def arguments(cls, folder: Folder) -> dict[str, Any]:
        arguments = super().arguments(folder)
        if scaling := arguments["scaling"]:  # the library reads "yarn" as longrope, and no other
            raise PretrainedError(f"{folder}: config.json: rope_type: expected default, got {scaling['rope_type']}")
        return arguments
