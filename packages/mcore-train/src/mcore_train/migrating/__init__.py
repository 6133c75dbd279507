"""Translate launch scripts and configs of other trainers into recipes, a line for each flag."""
