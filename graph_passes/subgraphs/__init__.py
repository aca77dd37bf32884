"""Subgraphs as they are found, their weights and biases."""
