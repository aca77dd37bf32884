"""Run as a program: builds a model of one CachedAttention, or of ONNX's recurrent operators, with TensorRT-RTX on the
CPU, and prints a JSON report.

The caches or states are inputs and outputs of the network; there are two profiles, prefill and decode."""

import argparse
import json
from typing import Any

import numpy as np
import tensorrt_rtx as trt
import torch
from attention_cases import Shape, inputs
from build_in_tensorrt_rtx import Log, constant
from onnx import TensorProto, helper, numpy_helper

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


def recurrent_model() -> bytes:
    """A short convolution whose channels are queries, keys and values of gated delta heads; opset 27."""
    heads, key_dim, value_dim, width, half = 2, 16, 32, 4, TensorProto.FLOAT16
    channels, rng = heads * (2 * key_dim + value_dim), np.random.default_rng()
    conv_state, state = ["batch", channels, width - 1], ["batch", heads, key_dim, value_dim]
    given = {"x": (half, ["batch", channels, "new"]), "past_conv": (half, conv_state)}
    given |= {"past_state": (TensorProto.FLOAT, state)} | dict.fromkeys(("g", "b"), (half, ["batch", "new", heads]))
    outputs = {"y": (half, None), "present_conv": (half, None), "present_state": (TensorProto.FLOAT, None)}
    sizes = np.array([heads * key_dim, heads * key_dim, heads * value_dim])
    weights = {"w": (channels, 1, width), "bias": (channels,)}
    graph = helper.make_graph(
        [
            helper.make_node(
                "CausalConvWithState", ["x", "w", "bias", "past_conv"], ["c", "present_conv"], activation="silu"
            ),
            helper.make_node("Transpose", ["c"], ["by_token"], perm=[0, 2, 1]),
            helper.make_node("Split", ["by_token", "sizes"], ["q", "k", "v"], axis=2),
            helper.make_node(
                "LinearAttention", ["q", "k", "v", "past_state", "g", "b"], ["y", "present_state"],
                q_num_heads=heads, kv_num_heads=heads, update_rule="gated_delta",
            ),
        ],
        "g",
        *([helper.make_tensor_value_info(n, *of) for n, of in values.items()] for values in (given, outputs)),
        [numpy_helper.from_array(rng.standard_normal(shape).astype(np.float16), n) for n, shape in weights.items()]
        + [numpy_helper.from_array(sizes, "sizes")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)], ir_version=13).SerializeToString()


def build(library: str, model: bytes) -> dict[str, Any]:
    log = Log()
    trt.get_plugin_registry().load_library(library)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse(model)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.plugins_to_serialize = [library]
    for new in NEW.values():
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            profile.set_shape(
                tensor.name,
                *(
                    (batch, *(tokens if size < 0 else size for size in tuple(tensor.shape)[1:]))
                    for batch, tokens in zip(BATCHES, new, strict=True)
                ),
            )
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
    arguments.add_argument("model", choices=["T", "E4M3", "recurrent"])
    given = arguments.parse_args()
    built = recurrent_model() if given.model == "recurrent" else model(given.model == "E4M3")
    print(json.dumps(build(given.library, built)))
