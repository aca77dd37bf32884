"""Finds linears, MLPs, norms and activations in a graph."""
