"""Sends the weights of a run to inference engines: mcore-infer, vLLM, SGLang, folders."""
