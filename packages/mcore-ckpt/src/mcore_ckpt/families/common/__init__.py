"""Shared by families: fields, rotary positions, rules of decoders and experts, shapes."""
