"""HTTP server of one engine, with Megatron's and OpenAI's interfaces."""
