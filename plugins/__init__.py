"""The ops, their CUDA kernels and TensorRT adapters, and the host that drives them without TensorRT."""
