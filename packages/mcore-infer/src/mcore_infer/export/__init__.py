"""Checkpoints for other engines: TensorRT-LLM's rank files, and Hugging Face folders."""
