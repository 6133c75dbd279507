"""Checkpoints for other engines: TensorRT-LLM's rank files, and the folders vLLM loads."""
