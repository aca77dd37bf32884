"""Layers that keep a state of fixed size in place of every token's keys and values, for export."""
