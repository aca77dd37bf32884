"""Decoders that come as ONNX, made into the one form that engines generate with."""
