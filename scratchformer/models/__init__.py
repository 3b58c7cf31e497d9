"""The models, each readable in one sitting."""

from .adapters import load_adapter as load_adapter  # not in __all__, the list of models
from .bert import Bert, BertClassifier, BertPretraining
from .bert_heads import MaskedPrediction
from .body import Body
from .classifier import Classifier
from .encoder_decoder import EncoderDecoder
from .families import from_pretrained as from_pretrained  # not in __all__, the list of models
from .gemma3 import Gemma3
from .gpt2 import GPT2
from .language_model import LanguageModel
from .llama import Llama, LlamaBlock
from .model import Model
from .olmo2 import Olmo2
from .phi3 import Phi3
from .pretrained import PretrainedError as PretrainedError  # not in __all__, the list of models
from .pythia import Pythia
from .qwen3 import Qwen3
from .smollm3 import SmolLM3
from .sparse_transformer import SparseTransformer
from .transformer_xl import TransformerXL

__all__ = [
    "GPT2",
    "Bert",
    "BertClassifier",
    "BertPretraining",
    "Body",
    "Classifier",
    "EncoderDecoder",
    "Gemma3",
    "LanguageModel",
    "Llama",
    "LlamaBlock",
    "MaskedPrediction",
    "Model",
    "Olmo2",
    "Phi3",
    "Pythia",
    "Qwen3",
    "SmolLM3",
    "SparseTransformer",
    "TransformerXL",
]
