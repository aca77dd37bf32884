"""ONNX's operators over states, which the plugin library has kernels for: here by their definition in Torch."""

from trt_nvfp4.plugins.ops import STANDARD_OPS

from .registry import operator

for _name, _op in STANDARD_OPS.items():
    operator(_name)(_op.reference)
