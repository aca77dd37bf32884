"""Finds mixtures of experts: router, experts and how they are combined."""
