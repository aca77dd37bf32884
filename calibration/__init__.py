"""NVFP4 and FP8 numbers, checkpoints, samples, activation statistics, and the recipes that quantize weights."""
