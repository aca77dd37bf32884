"""A model's file, its decoder contract, and the ONNX Runtime session that runs it."""
