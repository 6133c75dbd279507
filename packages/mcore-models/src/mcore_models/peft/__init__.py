"""Fine-tuning of a frozen model by adapters with few parameters: LoRA and DoRA."""
