"""Attention over a cache, as exporters write it."""
