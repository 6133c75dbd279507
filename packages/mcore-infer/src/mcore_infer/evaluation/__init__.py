"""Evaluation of models: perplexity of texts, WikiText-103, LAMBADA, lm-evaluation-harness."""
