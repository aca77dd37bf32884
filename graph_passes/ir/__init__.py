"""Nodes, tensors and shapes of ONNX graphs; knows nothing of MLPs."""
