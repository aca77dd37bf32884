"""Decides the precision of every subgraph; the plan file."""
