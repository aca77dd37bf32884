"""NVFP4 engines for TensorRT."""
