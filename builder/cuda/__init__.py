"""Calls of CUDA's driver and runtime."""
