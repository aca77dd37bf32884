"""Computes a float32 network in 16 bits, but for nodes that stay float32: Casts between both, constants converted."""

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor
from onnx_ir.passes import common as passes

from trt_nvfp4.common.cache_names import is_past, is_present
from trt_nvfp4.graph_passes.ir.nodes import insert_behind, is_op, register
from trt_nvfp4.graph_passes.load.activation_types import Activations
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.mixed_precision.float32_nodes import is_float32, opset_for, takes
from trt_nvfp4.graph_passes.subgraphs.parts import OBSERVED
from trt_nvfp4.graph_passes.subgraphs.values import ConvertedTensor

# Attributes that name the type of an output.
_TYPE_ATTRIBUTES = ("to", "dtype")


def convert(model: SourceModel, activations: Activations) -> SourceModel:
    """A copy of `model` that computes as `activations` says; inputs and outputs keep their types, but for caches and
    states that are updated in place: a Cast between the two would copy them at every step.

    A tensor that is there in both types has its own name in 16 bits and `<name>.float32` in float32, so that the names
    of the original stay with what is computed in most of the network. Inputs and outputs of the model keep theirs: in
    16 bits they are `<name>.bf16` or `<name>.fp16`, and their `meta` names the original.
    """
    dtype = activations.dtype
    if dtype is None:
        return replace(model, activations=activations)
    copy = model.ir_model.clone()
    stays = activations.float32_nodes
    narrow = {
        node
        for node in copy.graph
        if node.name not in stays
        and not is_op(node, "Constant")
        and any(map(is_float32, (*node.inputs, *node.outputs)))
    }
    copy.opset_imports[""] = opset_for(copy, dtype)
    conversion = _Conversion(copy, dtype, narrow)
    constants = [value for value in copy.graph.initializers.values() if is_float32(value)]
    constants += [node.outputs[0] for node in copy.graph if is_op(node, "Constant") and is_float32(node.outputs[0])]
    values = [value for value in copy.graph.inputs if is_float32(value)]
    values += [v for node in copy.graph if not is_op(node, "Constant") for v in node.outputs if is_float32(v)]
    for value in constants:
        conversion.constant(value)
    made = {value for value in values if conversion.computes(value)}
    for node in narrow:
        _name_type(node, dtype)
    caches = _caches(narrow)
    for value in values:
        if value in caches:
            conversion.cache(value)
        else:
            conversion.computed(value, value in made)
    passes.RemoveUnusedNodesPass()(copy)
    return replace(model, ir_model=copy, activations=activations)


def _caches(narrow: Collection[ir.Node]) -> set[ir.Value]:
    """Inputs and outputs of the model that TensorScatter nodes update in place, and states of convolutions."""
    found = set()
    for node in narrow:
        if is_op(node, "TensorScatter") and (past := node.inputs[0]) is not None and past.is_graph_input():
            found |= {past, node.outputs[0]}
        if is_op(node, "GatherElements") and is_present(node.outputs[0].name or ""):
            before = None if node.inputs[0] is None else node.inputs[0].producer()
            sources = () if before is None else before.inputs
            found |= {node.outputs[0], *(past for past in sources if past is not None and is_past(past.name or ""))}
    return found


class _Conversion:
    """Gives each reader of a float32 value of `model` the type that it takes; `narrow` are the nodes that compute in
    `dtype`."""

    def __init__(self, model: ir.Model, dtype: ir.DataType, narrow: Collection[ir.Node]) -> None:
        self._graph, self._opset, self._dtype, self._narrow = model.graph, model.opset_imports[""], dtype, narrow
        self._suffix = {ir.DataType.BFLOAT16: "bf16", ir.DataType.FLOAT16: "fp16"}[dtype]

    def computes(self, value: ir.Value) -> bool:
        """Whether what produces `value` does so in 16 bits."""
        node, index = value.producer(), value.index()
        if node is None or index is None or node not in self._narrow:
            return False
        return takes(node, index, self._dtype, self._opset, is_output=True)

    def constant(self, value: ir.Value) -> None:
        """Converts a constant for the nodes that read it in 16 bits."""
        narrow, wide = self._readers(value)
        tensor = get_const_tensor(value)
        assert tensor is not None
        if not narrow:
            return
        name = value.name or ""
        if wide or value.is_graph_output():
            name = f"{name}.{self._suffix}"
        elif value.is_initializer():
            value.const_value, value.type = ConvertedTensor(name, tensor, self._dtype), ir.TensorType(self._dtype)
            return
        made = ir.val(name, const_value=ConvertedTensor(name, tensor, self._dtype))
        if name == value.name:
            value.name = f"{name}.float32"
        register(self._graph, made)
        for node, index in narrow:
            node.replace_input_with(index, made)

    def computed(self, value: ir.Value, in_16_bits: bool) -> None:
        """Gives a value that is computed the type of its producer, and the readers of the other type a Cast."""
        narrow, wide = self._readers(value)
        is_interface, name = value.is_graph_output() or value.producer() is None, value.name or ""
        # A shape is that of either; of an input it is known without a value.
        other = [use for use in (wide if in_16_bits else narrow) if not is_op(use[0], "Shape", "Size")]
        if in_16_bits:
            value.type = ir.TensorType(self._dtype)
        if not other and not (in_16_bits and value.is_graph_output()):
            return
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT if in_16_bits else self._dtype)})
        made = cast.outputs[0]
        made.shape, made.type = value.shape, ir.TensorType(ir.DataType.FLOAT if in_16_bits else self._dtype)
        narrow_value, wide_value = (value, made) if in_16_bits else (made, value)
        if is_interface:
            narrow_value.name = f"{name}.{self._suffix}"
            narrow_value.meta[OBSERVED] = wide_value.name = name
        else:
            wide_value.name = f"{name}.float32"
            narrow_value.name = name
        cast.name = f"{made.name}/cast"
        insert_behind(self._graph, value, [cast])
        for node, index in other:
            node.replace_input_with(index, made)
        if in_16_bits and value.is_graph_output():
            for index, output in enumerate(self._graph.outputs):
                if output is value:
                    self._graph.outputs[index] = made

    def cache(self, value: ir.Value) -> None:
        """Gives a cache the type of the network, under its own name; nodes that stay float32 read a Cast."""
        _, wide = self._readers(value)
        value.type = ir.TensorType(self._dtype)
        if wide:
            cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)}, name=f"{value.name}.float32/cast")
            made = cast.outputs[0]
            made.name, made.shape, made.type = f"{value.name}.float32", value.shape, ir.TensorType(ir.DataType.FLOAT)
            insert_behind(self._graph, value, [cast])
            for node, index in wide:
                node.replace_input_with(index, made)

    def _readers(self, value: ir.Value) -> tuple[list[tuple[ir.Node, int]], list[tuple[ir.Node, int]]]:
        """Who reads a value in 16 bits, and who in float32: bodies of control flow too."""
        uses = [(use.node, use.idx) for use in value.uses()]
        narrow = [
            (node, index)
            for node, index in uses
            if node in self._narrow and takes(node, index, self._dtype, self._opset)
        ]
        return narrow, [use for use in uses if use not in narrow]


def _name_type(node: ir.Node, dtype: ir.DataType) -> None:
    """Attributes that say what type the output has."""
    for name in _TYPE_ATTRIBUTES:
        if (attribute := node.attributes.get(name)) is not None and attribute.as_int() == ir.DataType.FLOAT:
            node.attributes[name] = ir.AttrInt64(name, int(dtype))
    if is_op(node, "ConstantOfShape"):
        value = node.attributes.get("value")
        tensor = ir.tensor([0.0], ir.DataType.FLOAT) if value is None else value.as_tensor()
        node.attributes["value"] = ir.AttrTensor("value", ConvertedTensor(tensor.name or "", tensor, dtype).evaluated())
