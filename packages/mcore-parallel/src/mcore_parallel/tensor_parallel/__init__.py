"""Layers whose weights are split over tensor ranks, and the losses behind them."""
