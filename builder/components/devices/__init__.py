"""Where the parts of a model run: ONNX Runtime, Torch, or engines of TensorRT."""
