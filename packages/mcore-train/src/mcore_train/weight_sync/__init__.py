"""Weights of a run, sent to engines that generate: mcore-infer, vLLM, SGLang, folders."""
