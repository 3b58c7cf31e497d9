"""Trained models in the files of other programs: Hugging Face folders, GGUF and ONNX."""

from .command import export_model

__all__ = ["export_model"]
