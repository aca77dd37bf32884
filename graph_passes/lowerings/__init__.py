"""Replaces a planned subgraph by plugin nodes or by standard operators."""
