"""SkipLayerNormalization of ONNX Runtime, as onnxruntime-genai exports LayerNorms, by operators of ONNX."""

import onnx
from onnx import helper

from trt_nvfp4.common.nested_graphs import nested

#: The default of https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.SkipLayerNormalization
_EPSILON = 1e-12


def is_skip_norm(node: onnx.NodeProto) -> bool:
    """Whether `split_skip_norms` can split the node: one whose mean or deviation is read cannot be."""
    return node.domain == "com.microsoft" and node.op_type == "SkipLayerNormalization" and not any(node.output[1:3])


def split_skip_norms(graph: onnx.GraphProto) -> None:
    """Each becomes an Add, another one where it has a bias, and a LayerNormalization; in bodies of control flow too."""
    for each in nested(graph):
        nodes = [part for node in each.node for part in (_split(node) if is_skip_norm(node) else [node])]
        del each.node[:]
        each.node.extend(nodes)


def _split(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    x, skip, weight, norm_bias, bias = [*node.input, "", ""][:5]
    total = node.output[3] if len(node.output) > 3 and node.output[3] else f"{node.output[0]}/sum"
    parts = []
    if bias:
        parts.append(helper.make_node("Add", [x, bias], [f"{total}/bias"], f"{node.name}/Bias"))
        x = f"{total}/bias"
    parts.append(helper.make_node("Add", [x, skip], [total], f"{node.name}/Add"))
    epsilon = next((attribute.f for attribute in node.attribute if attribute.name == "epsilon"), _EPSILON)
    inputs = [total, weight, norm_bias] if norm_bias else [total, weight]
    parts.append(
        helper.make_node(
            "LayerNormalization", inputs, [node.output[0]], f"{node.name}/LayerNorm", axis=-1, epsilon=epsilon
        )
    )
    return parts
