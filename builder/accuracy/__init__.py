"""Compares models and engines; searches precisions within an accuracy budget."""
