"""Fine-tuning of few parameters beside a frozen model: LoRA and DoRA."""
