"""ONNX in, ONNX out: finds subgraphs, plans their precision and replaces them."""
