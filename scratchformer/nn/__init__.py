"""Layers that own parameters. See `layer.Layer` for what they have in common."""

from .attention import CrossAttention, SelfAttention
from .block import TransformerBlock
from .dropout import Dropout
from .embedding import PositionEmbedding, SinusoidalPositions, TokenEmbedding
from .feedforward import FeedForward
from .layer import FlatParameters, Layer, Param
from .layernorm import LayerNorm
from .linear import Linear
from .recompute import Recompute
from .self_attention_steps import BasicSelfAttention, MultiHeadLoop, SingleHeadAttention

__all__ = [
    "BasicSelfAttention",
    "CrossAttention",
    "Dropout",
    "FeedForward",
    "FlatParameters",
    "Layer",
    "LayerNorm",
    "Linear",
    "MultiHeadLoop",
    "Param",
    "PositionEmbedding",
    "Recompute",
    "SelfAttention",
    "SingleHeadAttention",
    "SinusoidalPositions",
    "TokenEmbedding",
    "TransformerBlock",
]
