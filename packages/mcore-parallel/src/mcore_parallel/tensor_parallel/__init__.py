"""Layers whose weights are split over tensor ranks, and the losses over a split vocabulary."""
