"""Layers, which hold parameters. See `layer.Layer` for what they have in common."""

from .attention import CrossAttention, SelfAttention
from .block import Block, ParallelBlock, Residual, Stack, TransformerBlock
from .decoder_block import DecoderBlock
from .embedding import EmbeddingSum, GridPositions, PositionEmbedding, SinusoidalPositions, TiedOutput, TokenEmbedding
from .frozen import Frozen
from .layer import FlatParameters, Layer, Param
from .lora import LoRA, add_lora, merge_lora
from .pointwise import Dropout, FeedForward, GeGLU, LayerNorm, Linear, NormedLinear, RMSNorm, SwiGLU
from .recompute import Recompute, recompute_blocks
from .relative_attention import RelativeSelfAttention
from .rotary_attention import RotarySelfAttention
from .self_attention_steps import BasicSelfAttention, MultiHeadLoop, SingleHeadAttention

__all__ = [
    "BasicSelfAttention",
    "Block",
    "CrossAttention",
    "DecoderBlock",
    "Dropout",
    "EmbeddingSum",
    "FeedForward",
    "FlatParameters",
    "Frozen",
    "GeGLU",
    "GridPositions",
    "Layer",
    "LayerNorm",
    "Linear",
    "LoRA",
    "MultiHeadLoop",
    "NormedLinear",
    "ParallelBlock",
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
