"""Quantized weights of subgraphs, computed or taken from a checkpoint."""
