"""Deferred weights while a model is exported: fake tensors in their place, and what the graph then reads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from trt_nvfp4.builder.export.deferred import DeferredTensor, deferred_weights, replace_weight
from trt_nvfp4.graph_passes.ir.computed_tensor import ComputedTensor
from trt_nvfp4.graph_passes.ir.nodes import ints_attribute, is_op


@contextmanager
def stand_ins(module: torch.nn.Module) -> Iterator[Mapping[str, DeferredTensor]]:
    """Within, the module's deferred weights are fake tensors, which exporters know; yields the weights by name."""
    weights = {id(weight): weight for _, _, weight in deferred_weights(module)}
    named = {
        name: weight
        for name, weight in module.named_parameters(remove_duplicate=False)
        if isinstance(weight, DeferredTensor)
    }
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes: dict[int, torch.nn.Parameter] = {}
    try:
        for key, weight in weights.items():
            with mode:
                fakes[key] = torch.nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), requires_grad=False)
            replace_weight(module, weight, fakes[key])
        yield named
    finally:
        for key, fake in fakes.items():
            replace_weight(module, fake, weights[key])


def optimize(program: torch.onnx.ONNXProgram, weights: Mapping[str, DeferredTensor]) -> None:
    """Optimize a graph as the exporter does at its end, with functions inlined, where `weights` have no values:
    transposed ones stay deferred."""
    from onnxscript import optimizer
    from onnxscript.rewriter import onnx_fusions

    model = program.model
    for name, value in list(model.graph.initializers.items()):
        if isinstance(getattr(value.const_value, "raw", None), FakeTensor):
            value.const_value = _computed(name, weights[name])
            _transpose(model.graph, value, weights[name])
    optimizer.optimize_ir(model, should_fold=lambda node: False if any(map(_is_computed, node.inputs)) else None)
    onnx_fusions.fuse(model)


def _transpose(graph: ir.Graph, value: ir.Value, weight: DeferredTensor) -> None:
    """Put what a Transpose makes of a weight that nothing else reads in the place of both, as the exporter does."""
    nodes = [node for node, _ in value.uses()]
    if len(nodes) != 1 or not is_op(node := nodes[0], "Transpose") or node.outputs[0].is_graph_output():
        return
    axes = ints_attribute(node, "perm") or list(reversed(range(weight.dim())))
    output = node.outputs[0]
    name = output.name or f"{value.name}.transposed"
    made = ir.val(name, dtype=value.dtype, shape=ir.Shape([weight.shape[axis] for axis in axes]))
    made.const_value = _computed(name, weight.permute(axes))
    output.name = f"{name}.replaced"
    graph.register_initializer(made)
    ir.convenience.replace_all_uses_with(output, made)
    graph.remove(node, safe=True)
    del graph.initializers[value.name or ""]


def _computed(name: str, weight: torch.Tensor) -> ComputedTensor:
    assert isinstance(weight, DeferredTensor)
    return ComputedTensor(name, from_torch_dtype(weight.dtype), tuple(weight.shape), weight.read, weight.part)


def _is_computed(value: ir.Value | None) -> bool:
    return value is not None and isinstance(value.const_value, ComputedTensor)
