"""The families of published decoders, and the model in a folder of any of them."""

from __future__ import annotations

from typing import Any

from .gemma3 import Gemma3
from .gpt2 import GPT2
from .llama import Llama
from .olmo2 import Olmo2
from .phi3 import Phi3
from .pretrained import Folder, read_config
from .published import PublishedDecoder
from .pythia import Pythia
from .qwen3 import Qwen3
from .smollm3 import SmolLM3

FAMILIES: dict[str, type[PublishedDecoder]] = {
    kind: family for family in (GPT2, Gemma3, Llama, Olmo2, Phi3, Pythia, Qwen3, SmolLM3) for kind in family.kinds
}


def family(folder: Folder) -> type[PublishedDecoder]:
    """The class of the model in a Hugging Face folder. Raises PretrainedError if it is of another kind."""
    return FAMILIES[read_config(folder, tuple(FAMILIES))["model_type"]]


def from_pretrained(folder: Folder, **options: Any) -> PublishedDecoder:
    """The model in a Hugging Face folder, of the class for its model_type. options: see `from_pretrained` of the class,
    such as dropout and recompute. Raises PretrainedError.
    """
    return family(folder).from_pretrained(folder, **options)
