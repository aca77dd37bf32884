"""Checks that operators get operands of types that belong together, before TensorRT reads a rewritten model."""

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.nodes import is_op
from trt_nvfp4.graph_passes.load.by_hand import is_plugin
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.plugins.ops import OPS


def check_types(model: ir.Model) -> None:
    """Infers the types of the main graph's values by the operators' schemas, plugins included.

    Raises ModelError, naming node and tensors, where an operator takes one type and gets several.
    """
    known = {value: value.dtype for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph:
        schema = _schema(node, model.opset_imports[""])
        types = {} if schema is None else _bound(node, schema, known)
        for index, value in enumerate(node.outputs):
            variable = None if schema is None else _variable(schema.outputs, index)
            known[value] = types.get(variable or "", value.dtype)
        if is_op(node, "Cast"):
            known[node.outputs[0]] = ir.DataType(node.attributes["to"].as_int())


def _bound(
    node: ir.Node, schema: onnx.defs.OpSchema, known: dict[ir.Value, ir.DataType | None]
) -> dict[str, ir.DataType]:
    """The type of each of the schema's type variables."""
    types: dict[str, ir.DataType] = {}
    first: dict[str, ir.Value] = {}
    for index, value in enumerate(node.inputs):
        variable = _variable(schema.inputs, index)
        dtype = None if value is None else known.get(value, value.dtype)
        if variable is None or value is None or dtype is None:
            continue
        if types.setdefault(variable, dtype) != dtype:
            other = first[variable]
            raise ModelError(
                f"node '{node.name}' ({node.op_type}) of the rewritten model reads tensor '{other.name}' of type "
                f"{types[variable].name.lower()} and '{value.name}' of type {dtype.name.lower()}, and takes one type; "
                "leave its subgraph out with --exclude, and report this model"
            )
        first.setdefault(variable, value)
    return types


def _variable(formals: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> str | None:
    """The type variable of a node's input or output; None where it has a type of its own."""
    if not formals or (
        index >= len(formals) and formals[-1].option != onnx.defs.OpSchema.FormalParameterOption.Variadic
    ):
        return None
    formal = formals[min(index, len(formals) - 1)]
    return None if "(" in formal.type_str or not formal.is_homogeneous else formal.type_str


def _schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    if is_plugin(node):
        return OPS[node.op_type].schema()
    if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return None
    return onnx.defs.get_schema(node.op_type, max_inclusive_version=opset)
