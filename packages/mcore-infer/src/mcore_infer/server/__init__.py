"""Text over HTTP: one engine behind Megatron's and OpenAI's interfaces."""
