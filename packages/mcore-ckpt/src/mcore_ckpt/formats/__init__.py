"""Formats of others: Hugging Face, torch.distributed.checkpoint, torch files."""
