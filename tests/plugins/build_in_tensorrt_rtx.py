"""Run as a program: builds a model of one plugin node with TensorRT-RTX on the CPU, and prints what it came to as JSON.

Its own process: the registry is one per process, and the parser's library has to be on the loader's path at start.
"""

import argparse
import json
from typing import Any

import numpy as np
import onnx
import op_inputs
import tensorrt_rtx as trt
import torch
from onnx import TensorProto, helper

from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS

_ONNX_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int8: TensorProto.INT8,
}


class Log(trt.ILogger):  # type: ignore[misc]
    """Keeps errors, and the message that lists the engine's layers."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []
        self.layers = ""

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            self.errors.append(message)
        elif message.startswith("Layers:"):
            self.layers = message


def random_case(op: str, dtype: torch.dtype) -> op_inputs.Case:
    rng = np.random.default_rng()
    return {
        "NVFP4Linear": lambda: op_inputs.linear(rng, 8, 40, 64, dtype),
        "NVFP4GatedMLP": lambda: op_inputs.gated_mlp(rng, 8, 64, 48, 40, dtype),
        "NVFP4PersistentMLP": lambda: op_inputs.persistent_mlp(rng, 2, 8, 64, 48, 64, dtype, gated=1),
        "NVFP4Quantize": lambda: op_inputs.quantize(rng, 8, 64, dtype),
    }[op]()


def constant(name: str, x: torch.Tensor) -> onnx.TensorProto:
    raw = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, _ONNX_TYPES[x.dtype], x.shape, raw, raw=True)


def model(op: str, case: op_inputs.Case, attributes: dict[str, int | float]) -> bytes:
    """The node with a symbolic number of rows; NVFP4Quantize's residual is x itself."""
    definition = OPS[op]
    names = [formal.name for formal in definition.inputs]
    x, dtype = case.inputs[0], _ONNX_TYPES[case.inputs[0].dtype]
    constants = [constant(n, t) for n, t in zip(names, case.inputs, strict=True) if n not in ("x", "residual")]
    node_inputs = ["x" if name == "residual" else name for name in names]
    outputs = [formal.name for formal in definition.outputs]
    node = helper.make_node(op, node_inputs, outputs, name="the_plugin", domain="trt_nvfp4", **attributes)
    types = {"T": dtype, "tensor(int8)": TensorProto.INT8, "tensor(float)": TensorProto.FLOAT}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", dtype, [*x.shape[:-2], "rows", x.shape[-1]])],
        [helper.make_tensor_value_info(formal.name, types[formal.type], None) for formal in definition.outputs],
        constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("trt_nvfp4", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def build(library: str, op: str, dtype: torch.dtype, attributes: dict[str, int | float]) -> dict[str, Any]:
    case = random_case(op, dtype)
    log = Log()
    trt.get_plugin_registry().load_library(library)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse(model(op, case, attributes))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.plugins_to_serialize = [library]
    profile = builder.create_optimization_profile()
    shape = tuple(case.inputs[0].shape)
    profile.set_shape("x", *((*shape[:-2], rows, shape[-1]) for rows in (1, 8, 300)))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config) if parsed else None
    return {
        "parsed": parsed,
        "engine_bytes": engine.nbytes if engine else 0,
        "layers": log.layers,
        "errors": log.errors,
        "plugin_error": PluginHost(library).take_error(),
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    for name in ("library", "op", "dtype", "attributes"):
        arguments.add_argument(name)
    given = arguments.parse_args()
    print(json.dumps(build(given.library, given.op, getattr(torch, given.dtype), json.loads(given.attributes))))
