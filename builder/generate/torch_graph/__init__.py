"""An ONNX graph computed by Torch, node by node: standard operators by Torch, this project's ops by their plugins."""
