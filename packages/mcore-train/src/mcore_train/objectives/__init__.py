"""Objectives of a run: pretraining, fine-tuning, preferences, distillation, rewards."""
