"""Run as a program: builds a model of one CachedAttention with TensorRT-RTX on the CPU, and prints a JSON report.

The caches are inputs and outputs of the network; there are two profiles, prefill and decode."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import tensorrt_rtx as trt
import torch
from attention_cases import Shape, inputs
from build_in_tensorrt_rtx import Log, constant
from onnx import TensorProto, helper

from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS

SHAPE = Shape(8, 2, 64, 128, 1, (0,), 64, {"qk_norm": 1})
BATCHES, NEW = (1, 2, 4), {"prefill": (1, 32, 128), "decode": (1, 1, 1)}
_TYPES = {torch.float16: TensorProto.FLOAT16, torch.int8: TensorProto.INT8, torch.int64: TensorProto.INT64}


def model(fp8: bool) -> bytes:
    op = OPS["CachedAttention"]
    tensors = inputs(np.random.default_rng(), SHAPE, torch.float16, fp8)
    names = [formal.name for formal in op.inputs]
    outputs = [formal.name for formal in op.outputs]
    shapes = [["batch", "new", *tensors[0].shape[2:]], *(["batch", *x.shape[1:]] for x in tensors[1:4])]
    given = [
        helper.make_tensor_value_info(name, _TYPES[x.dtype], shape)
        for name, x, shape in zip(names, tensors, shapes, strict=False)
    ]
    types = [TensorProto.FLOAT16, *[_TYPES[tensors[1].dtype]] * 2]
    graph = helper.make_graph(
        [op.node(names, outputs, "the_plugin", **SHAPE.attributes(fp8))],
        "g",
        given,
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(outputs, types, strict=True)],
        [constant(name, x) for name, x in zip(names[4:], tensors[4:], strict=True)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("trt_nvfp4", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def build(library: str, fp8: bool) -> dict[str, Any]:
    log = Log()
    trt.get_plugin_registry().load_library(library)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse(model(fp8))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.plugins_to_serialize = [library]
    for new in NEW.values():
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            shapes = [[batch, *tuple(tensor.shape)[1:]] for batch in BATCHES]
            if tensor.name == "qkv":
                shapes = [[shape[0], tokens, shape[2]] for shape, tokens in zip(shapes, new, strict=True)]
            profile.set_shape(tensor.name, *map(tuple, shapes))
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config) if parsed else None
    return {
        "engine_bytes": engine.nbytes if engine else 0,
        "layers": log.layers,
        "errors": log.errors,
        "plugin_error": PluginHost(library).take_error(),
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("library")
    arguments.add_argument("fp8", type=int)
    given = arguments.parse_args()
    print(json.dumps(build(given.library, bool(given.fp8))))
