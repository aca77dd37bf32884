"""A recurrence that no plugin computes: the nodes that ONNX defines LinearAttention by."""

import onnx
import onnx_ir as ir
from onnx import helper

from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.subgraphs.recurrent import OP, RecurrentSubgraph


def lower_to_definition(context: LoweringContext, subgraph: RecurrentSubgraph) -> list[str]:
    """Puts the standard's function body, a Scan over the tokens, in the place of the node."""
    graph = context.graph
    node = next(node for node in graph if node.name == subgraph.nodes[0])
    body = _body(node, context.model.opset_imports[""])
    inner = list(body.graph)
    for value, given in zip(body.graph.inputs, node.inputs, strict=False):
        if given is not None:
            ir.convenience.replace_all_uses_with(value, given)
    made = list(body.graph.outputs)
    body.graph.outputs.clear()
    body.graph.remove(inner)
    _rename(inner, subgraph.name)
    graph.insert_before(node, inner)
    for old, new in zip(node.outputs, made, strict=True):
        name, new.type, new.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}/replaced", name
    graph.remove(node, safe=True)
    return []


def _body(node: ir.Node, opset: int) -> ir.Function:
    schema = onnx.defs.get_schema(OP, max_inclusive_version=opset)
    types = [
        b""
        if value is None
        else helper.make_tensor_type_proto(int(value.dtype or 1), [None] * len(value.shape or ())).SerializeToString()
        for value in node.inputs
    ]
    proto, written = onnx.FunctionProto(), ir.serde.serialize_node(node).SerializeToString()
    # Not in onnx's type stubs.
    proto.ParseFromString(schema.get_context_dependent_function(written, types))  # type: ignore[attr-defined]
    return ir.serde.deserialize_function(proto)


def _rename(nodes: list[ir.Node], prefix: str) -> None:
    """Names that no other node or value of the model has, in the Scan's body too."""
    for node in nodes:
        node.name = f"{prefix}/{node.name or node.outputs[0].name}"
        for value in node.outputs:
            value.name = f"{prefix}/{value.name}"
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                body = attribute.as_graph()
                for value in body.inputs:
                    value.name = f"{prefix}/{value.name}"
                _rename(list(body), prefix)
