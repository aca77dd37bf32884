"""Plugins on this machine's GPU against their ONNX function bodies, through the plugin host.

For machines with a GPU and no TensorRT: the real library computes each plugin node of a rewritten model on the inputs
that ONNX Runtime gave to its body.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import torch

from trt_nvfp4.builder.accuracy.metrics import Agreement
from trt_nvfp4.builder.model.onnx_file import opened
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.graph_passes.subgraphs.values import as_torch
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import DOMAIN, OPS


def compare_plugins(
    model: Path | OnnxFile, samples: Iterable[Mapping[str, np.ndarray]], host: PluginHost, device: str = "cuda"
) -> list[Agreement]:
    """One agreement per plugin node of `model`: body in ONNX Runtime (expected) and plugin on `device` (actual).

    A node's inputs are constants or computed before it: its activations, and an MoE block's router logits.
    Raises HostError when a plugin call fails.
    """
    file = opened(model)
    proto = file.proto
    nodes = [node for node in proto.graph.node if node.domain == DOMAIN]
    constant = {tensor.name for tensor in proto.graph.initializer}
    computed = [name for node in nodes for name in (*node.input, node.output[0]) if name not in constant]
    bodies = session(file, dict.fromkeys(computed))
    names = [output.name for output in bodies.get_outputs()]
    rows = [Agreement(node.name, "plugin") for node in nodes]
    for sample in samples:
        values = {**sample, **dict(zip(names, bodies.run(None, dict(sample)), strict=True))}
        for node, row in zip(nodes, rows, strict=True):
            inputs = [tensor.to(device) for tensor in _inputs_of(node, proto, file.path.parent, values)]
            attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
            with host.session(node.op_type, inputs, attributes) as plugin:
                actual = plugin.run(inputs)[0]
            row.add(values[node.output[0]], actual.float().cpu().numpy())
    return rows


def _inputs_of(
    node: onnx.NodeProto, model: onnx.ModelProto, folder: Path, values: Mapping[str, np.ndarray]
) -> list[torch.Tensor]:
    """All inputs of a plugin node, those that are not constant from `values`, in the types that the op asks for."""
    constants = constants_of(node, model, folder)
    # Whatever is neither packed weight nor scale has the activations' type: a bias or a norm's weight.
    types = [tensor.dtype for tensor in constants.values() if tensor.dtype not in (torch.int8, torch.float32)]
    activations = types[0] if types else torch.float32
    return [
        constants[name]
        if name in constants
        else torch.from_numpy(values[name]).to(activations if formal.type == "T" else torch.float32)
        for name, formal in zip(node.input, OPS[node.op_type].inputs, strict=True)
    ]


def constants_of(node: onnx.NodeProto, model: onnx.ModelProto, folder: Path) -> dict[str, torch.Tensor]:
    """The constant inputs of a plugin node by name, in their order; external data lies in `folder`."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    return {
        name: as_torch(onnx.numpy_helper.to_array(tensors[name], str(folder))) for name in node.input if name in tensors
    }
