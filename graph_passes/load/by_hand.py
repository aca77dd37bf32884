"""Plugin nodes that a model already holds, put in by hand: with trt_nvfp4.surgeon, Polygraphy or another program.

Their ONNX functions are those of the ops, whatever the model brings under these names.
"""

import onnx
import onnx_ir as ir

from trt_nvfp4.plugins.ops import DOMAIN, OPS, VERSION, OpError

# What a rewritten model's metadata says about the plan that it follows; by subgraph, its decisions and what became of
# them.
REWRITTEN = "trt_nvfp4.plan"


def is_plugin(node: ir.Node) -> bool:
    """Whether it is an op of ours."""
    return node.domain == DOMAIN


def check_plugin_nodes(proto: onnx.ModelProto) -> None:
    """Checks the ops' nodes in `proto`, which `node_checks` has passed.

    Raises:
        ValueError: a rewritten model, or another version of the ops.
    """
    nodes = [node for part in (proto.graph, *proto.functions) for node in part.node if node.domain == DOMAIN]
    if not nodes:
        return
    if any(entry.key == REWRITTEN for entry in proto.metadata_props):
        raise ValueError(f"node '{nodes[0].name}' ({nodes[0].op_type}): the model has been rewritten already")
    for entry in proto.opset_import:
        if entry.domain == DOMAIN and entry.version != VERSION:
            raise ValueError(
                f"it imports version {entry.version} of the operators of domain '{DOMAIN}', and this program has "
                f"version {VERSION}; make the model anew with this version"
            )


def drop_functions(proto: onnx.ModelProto) -> None:
    """Takes the ops' functions out."""
    kept = [function for function in proto.functions if function.domain != DOMAIN]
    del proto.functions[:]
    proto.functions.extend(kept)


def complete_plugin_nodes(graph: ir.Graph) -> None:
    """Writes out every attribute of the ops' nodes, and checks their inputs.

    Raises:
        ValueError: shapes, types or attributes that do not fit the op; a node in the body of control flow.
    """
    for node in filter(is_plugin, graph.all_nodes()):
        if node.graph is not graph:
            raise ValueError(
                f"node '{node.name}' ({node.op_type}) lies in the body of control flow; plugins put in by hand "
                "belong into the main graph"
            )
        definition = OPS[node.op_type]
        given = {name: attribute.value for name, attribute in node.attributes.items()}
        shapes = [_shape(value) for value in node.inputs]
        types = [f"tensor({_type(value)})" for value in node.inputs]
        try:
            definition.check(shapes, types, **given)
            complete = definition.complete_attributes(**given)
        except OpError as error:
            raise ValueError(f"node '{node.name}': {error}") from error
        for name, value in complete.items():
            node.attributes[name] = (ir.AttrInt64 if isinstance(value, int) else ir.AttrFloat32)(name, value)


def _shape(value: ir.Value | None) -> tuple[int | str | None, ...]:
    if value is None or value.shape is None:
        return (None,)
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _type(value: ir.Value | None) -> str:
    return "unknown" if value is None or value.dtype is None else value.dtype.name.lower()
