"""Norms of ONNX Runtime that TensorRT has not, by those of ONNX."""

import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import operand


def lower_norms(graph: ir.Graph) -> None:
    """SimplifiedLayerNormalization and SkipSimplifiedLayerNormalization become RMSNormalization, with an Add."""
    for node in list(graph):
        if node.op_type not in ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"):
            continue
        skips = node.op_type.startswith("Skip")
        nodes: list[ir.Node] = []
        x, weight = operand(node, 0), operand(node, 2 if skips else 1)
        if skips:
            addends = [operand(node, 1), *(value for value in node.inputs[3:4] if value is not None)]
            for addend in addends:
                add = ir.node("Add", [x, addend], name=f"{node.name}/Add.{len(nodes)}")
                add.outputs[0].type, add.outputs[0].shape = x.type, x.shape
                nodes.append(add)
                x = add.outputs[0]
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        norm = ir.node("RMSNormalization", [x, weight], {"axis": -1, "epsilon": epsilon}, name=f"{node.name}/RMSNorm")
        norm.outputs[0].type, norm.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        graph.insert_before(node, [*nodes, norm])
        node.outputs[0].replace_all_uses_with(norm.outputs[0])
        if skips and len(node.outputs) > 3:
            node.outputs[3].replace_all_uses_with(x)
        graph.remove(node, safe=True)
