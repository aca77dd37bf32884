"""Builds, verifies and loads engines; the only room that knows TensorRT."""
