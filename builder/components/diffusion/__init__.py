"""Diffusers pipelines: their modules as parts, which diffusers' own pipeline calls."""
