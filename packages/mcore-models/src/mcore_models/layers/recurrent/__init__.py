"""Layers with a recurrent state: Mamba-2 (SSD), gated delta nets, and their parts."""
