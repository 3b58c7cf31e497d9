"""Layers that own parameters. See `layer.Layer` for what they have in common."""

from .attention import CrossAttention, SelfAttention
from .block import Block, TransformerBlock
from .decoder_block import DecoderBlock
from .dropout import Dropout
from .embedding import EmbeddingBag, GridPositions, PositionEmbedding, SinusoidalPositions, TiedOutput, TokenEmbedding
from .embedding_sum import EmbeddingSum
from .feedforward import FeedForward
from .frozen import Frozen
from .layer import FlatParameters, Layer, Param
from .layernorm import LayerNorm
from .linear import Linear
from .lora import LoRA, add_lora, merge_lora
from .recompute import Recompute, recompute_blocks
from .relative_attention import RelativeSelfAttention
from .residual import Residual
from .rmsnorm import RMSNorm
from .rotary_attention import RotarySelfAttention
from .self_attention_steps import BasicSelfAttention, MultiHeadLoop, SingleHeadAttention
from .stack import Stack
from .swiglu import SwiGLU

__all__ = [
    "BasicSelfAttention",
    "Block",
    "CrossAttention",
    "DecoderBlock",
    "Dropout",
    "EmbeddingBag",
    "EmbeddingSum",
    "FeedForward",
    "FlatParameters",
    "Frozen",
    "GridPositions",
    "Layer",
    "LayerNorm",
    "Linear",
    "LoRA",
    "MultiHeadLoop",
    "Param",
    "PositionEmbedding",
    "RMSNorm",
    "Recompute",
    "RelativeSelfAttention",
    "Residual",
    "RotarySelfAttention",
    "SelfAttention",
    "SingleHeadAttention",
    "SinusoidalPositions",
    "Stack",
    "SwiGLU",
    "TiedOutput",
    "TokenEmbedding",
    "TransformerBlock",
    "add_lora",
    "merge_lora",
    "recompute_blocks",
]
