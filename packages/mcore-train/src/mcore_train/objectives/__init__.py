"""What a run minimizes: pretraining, fine-tuning, preferences, distillation, rewards."""
