"""A rewritten decoder with two caches a layer again, for ONNX Runtime: as the original has them."""

import onnx
from onnx import helper

from trt_nvfp4.common.cache_names import layer_names, stacked_layers, stacked_names


def with_layer_caches(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, changed: caches that several layers have together are cut into the layers' own, with copies that no GPU
    should make. Others are left as they are."""
    graph = model.graph
    for given in list(graph.input):
        layers = stacked_layers(given.name)
        if layers is None:
            continue
        present = next(value for value in graph.output if value.name == stacked_names(*layers)[1])
        pasts, presents = _cut(graph, given, present, *layers)
        for values, old, new in ((graph.input, given, pasts), (graph.output, present, presents)):
            kept = [value for value in values if value.name != old.name]
            at = [value.name for value in values].index(old.name)
            del values[:]
            values.extend([*kept[:at], *new, *kept[at:]])
    return model


def _cut(
    graph: onnx.GraphProto, given: onnx.ValueInfoProto, present: onnx.ValueInfoProto, first: int, last: int
) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    """Nodes that stack the layers' inputs and cut the outputs; returns these inputs and outputs."""
    element = given.type.tensor_type.elem_type
    shape = [dim.dim_param or dim.dim_value for dim in given.type.tensor_type.shape.dim][2:]
    front: list[onnx.NodeProto] = []
    pasts, presents, layers = [], [], []

    def index(at: int, *shape: int) -> str:
        name = f"{given.name}/{at}{'x' * len(shape)}"
        if all(tensor.name != name for tensor in graph.initializer):
            graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, shape, [at]))
        return name

    for number in range(first, last + 1):
        inputs, outputs = layer_names(number)
        pair, layer = f"{given.name}/pair_{number}", f"{given.name}/layer_{number}"
        cut = f"{present.name}/layer_{number}"
        for name in inputs:
            front.append(helper.make_node("Unsqueeze", [name, index(0, 1)], [f"{name}/one"]))
        front.append(helper.make_node("Concat", [f"{name}/one" for name in inputs], [pair], axis=0))
        front.append(helper.make_node("Unsqueeze", [pair, index(0, 1)], [layer]))
        graph.node.append(helper.make_node("Gather", [present.name, index(number - first)], [cut]))
        for part, name in enumerate(outputs):
            graph.node.append(helper.make_node("Gather", [cut, index(part)], [name]))
        layers.append(layer)
        pasts += [helper.make_tensor_value_info(name, element, shape) for name in inputs]
        presents += [helper.make_tensor_value_info(name, element, shape) for name in outputs]
    front.append(helper.make_node("Concat", layers, [given.name], axis=0))
    nodes = [*front, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return pasts, presents
