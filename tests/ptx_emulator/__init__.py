"""A functional emulator of the PTX that nvcc emits for NVIDIA GPUs, Blackwell's tensor cores included."""
