"""Benchmarks engines and subgraphs."""
