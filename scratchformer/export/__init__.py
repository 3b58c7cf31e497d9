"""Trained models in the files of other programs: Hugging Face folders, GGUF and ONNX."""
