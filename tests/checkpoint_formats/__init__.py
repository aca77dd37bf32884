"""Weights in the formats that checkpoints are published in."""
