"""Plugin nodes put in by hand, with onnx-graphsurgeon: for MLPs that no pattern knows.

    import trt_nvfp4.surgeon as surgeon

    graph = surgeon.to_gs("model.onnx")
    tensors = graph.tensors()
    graph.replace_with_nvfp4_gated_mlp(tensors["x"], tensors["y"], gate=gate, up=up, down=down, activation="gelu")
    surgeon.save(graph, "model.by_hand.onnx")

Importing this module gives `gs.Graph` two methods for every op of the domain `trt_nvfp4`, in snake case:
`graph.nvfp4_gated_mlp(x, ...)` adds a node and returns its output (several: a list), and
`graph.replace_with_nvfp4_gated_mlp(x, y, ...)` puts it in the place of what computes `y`. Inputs and attributes are
given by their names (docs/ops.md). Float weights [out_features, in_features] (arrays, Torch tensors, gs.Constant) are
quantized: `weight` of NVFP4Linear; `gate`, `up` and `down` of NVFP4GatedMLP, with `gate_bias`, `up_bias`, `down_bias`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch

from trt_nvfp4.calibration.recipes import WeightQuantizer, parse
from trt_nvfp4.errors import TrtNvfp4Error
from trt_nvfp4.plugins.ops import DOMAIN, OPS, VERSION, Activation, OpDefinition, OpError
from trt_nvfp4.plugins.ops.number_formats import BLOCK, tile_scales

try:
    import onnx_graphsurgeon as gs
except ImportError as error:
    raise ImportError(f"{error}; install it: pip install 'trt-nvfp4[surgeon]'") from error

__all__ = ["from_gs", "save", "to_gs"]

_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class SurgeonError(TrtNvfp4Error, ValueError):
    """A node was asked for that the op does not allow."""


def to_gs(model: str | Path | onnx.ModelProto) -> Any:
    """The model as a gs.Graph; weights are converted when they are used."""
    return gs.import_onnx(model if isinstance(model, onnx.ModelProto) else onnx.load(model))


def from_gs(graph: Any) -> onnx.ModelProto:
    """The graph, without what nothing uses, as a model that ONNX Runtime runs, too: the ops' functions are in it."""
    model: onnx.ModelProto = gs.export_onnx(graph.cleanup().toposort())
    return model


def save(graph: Any, path: str | Path) -> None:
    """Write the graph as from_gs makes it; weights beside it, in PATH.data, where they are too large for one file."""
    model, path = from_gs(graph), Path(path)
    large = model.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF
    onnx.save(model, path, save_as_external_data=large, location=f"{path.name}.data")


def method(graph: Any, name: str) -> Callable[..., Any]:
    """The graph's method for `name`: an op, or replace_with_ and an op, such as "replace_with_NVFP4Linear"."""
    start = "replace_with_" if name.startswith("replace_with_") else ""
    found: Callable[..., Any] = getattr(graph, start + _method_name(name.removeprefix(start)))
    return found


def _method_name(op: str) -> str:
    """nvfp4_gated_mlp of NVFP4GatedMLP."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", op.replace("MoE", "Moe")).lower()


def _add(
    graph: Any, definition: OpDefinition, x: Any, outputs: Sequence[Any] | None, name: str, given: dict[str, Any]
) -> Any:
    """The node's outputs: the one, or a list of several."""
    name = name or _free_name(graph, definition.name)
    if not isinstance(x, gs.Tensor) or x.dtype is None or np.dtype(x.dtype) not in _TYPES:
        raise SurgeonError(
            f"{definition.name} {name!r}: x must be a tensor of float32, float16 or bfloat16, found {x!r}; infer types "
            "first (onnx.shape_inference), or set x.dtype"
        )
    dtype = np.dtype(x.dtype)
    attributes = {key: given.pop(key) for key in list(given) if key in definition.attributes}
    if isinstance(attributes.get("activation"), str):
        attributes["activation"] = _activation(attributes["activation"])
    operands = {"x": x, **_projections(definition, name, dtype, given)}
    formals = [formal.name for formal in definition.inputs]
    missing = [formal for formal in formals if formal not in operands and formal not in given]
    for formal in [formal for formal in missing if formal.endswith("tensor_scale")]:
        operands[formal] = gs.Constant(f"{name}/{formal}", np.zeros((), np.float32))  # computed at run time
        missing.remove(formal)
    unknown = [key for key in given if key not in formals]
    if missing or unknown:
        text = f"lacks {', '.join(missing)}" if missing else f"has no {', '.join(unknown)}"
        raise SurgeonError(f"{definition.name} {name!r} {text}; its inputs are {', '.join(formals)}")
    operands |= {
        key: value if isinstance(value, gs.Tensor) else _constant(name, key, value) for key, value in given.items()
    }
    inputs = [operands[formal] for formal in formals]
    try:
        complete = definition.complete_attributes(**attributes)
        shapes = [tuple(tensor.shape) if tensor.shape is not None else (None,) for tensor in inputs]
        found = definition.output_shapes(shapes, **complete)
    except OpError as error:
        raise SurgeonError(f"{name!r}: {error}") from error
    _bring_function(graph, definition)
    if outputs is None:
        made = zip(definition.outputs, found, strict=True)
        outputs = [gs.Variable(f"{name}/{formal.name}", dtype, list(shape)) for formal, shape in made]
    for output, shape in zip(outputs, found, strict=True):
        if output.dtype is None:  # for the next node by hand, which reads it
            output.dtype, output.shape = dtype, list(shape)
    graph.nodes.append(
        gs.Node(definition.name, name, attrs=complete, inputs=inputs, outputs=list(outputs), domain=DOMAIN)
    )
    return outputs[0] if len(outputs) == 1 else list(outputs)


def _bring_function(graph: Any, definition: OpDefinition) -> None:
    """Put what computes the op where it is no plugin into the graph."""
    if any((function.domain, function.name) == (DOMAIN, definition.name) for function in graph.functions):
        return
    try:
        proto = definition.function(graph.opset)
    except OpError as error:
        raise SurgeonError(str(error)) from error
    opsets = [onnx.helper.make_opsetid("", graph.opset), onnx.helper.make_opsetid(DOMAIN, VERSION)]
    empty = onnx.helper.make_graph([], "functions", [], [])
    carrier = onnx.helper.make_model(empty, functions=[proto], opset_imports=opsets)
    graph.functions.extend(gs.import_onnx(carrier).functions)


def _projections(definition: OpDefinition, name: str, dtype: np.dtype, given: dict[str, Any]) -> dict[str, Any]:
    """Inputs made of float weights and biases, which are taken out of `given`."""
    recipe, transposed = given.pop("recipe", "mse"), given.pop("transposed", False)
    if definition.name == "NVFP4Linear" and _is_float(given.get("weight")):
        parts = {"weight": ("weight", "weight_scales", "weight_tensor_scale", "bias", [("weight", "bias")])}
    elif definition.name == "NVFP4GatedMLP" and "gate" in given:
        parts = {
            key: (f"{key}_weight", f"{key}_scales", f"{key}_tensor_scale", f"{key}_bias", of)
            for key, of in {
                "gate_up": [("gate", "gate_bias"), ("up", "up_bias")],
                "down": [("down", "down_bias")],
            }.items()
        }
    else:
        return {}
    made: dict[str, Any] = {}
    for values_name, scales_name, scale_name, bias_name, sources in parts.values():
        if absent := [weight for weight, _ in sources if weight not in given]:
            raise SurgeonError(f"{definition.name} {name!r} lacks {', '.join(absent)}")
        weights = [_matrix(name, weight, given.pop(weight), transposed) for weight, _ in sources]
        rows = _interleaved(name, weights)
        biases = [given.pop(bias, None) for _, bias in sources]
        vectors = [
            torch.zeros(len(weight)) if bias is None else _torch(bias).float().reshape(-1)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        chosen = parse(recipe)
        scale = chosen.tensor_scale(rows.abs().max())
        values, scales = WeightQuantizer(chosen, None, "cpu")(rows, scale)
        made |= {
            values_name: _constant(name, values_name, values.view(torch.int8)),
            scales_name: _constant(name, scales_name, tile_scales(scales).view(torch.int8)),
            scale_name: _constant(name, scale_name, scale.reshape(())),
            bias_name: gs.Constant(f"{name}/{bias_name}", _interleaved(name, vectors).numpy().astype(dtype)),
        }
    return made


def _matrix(name: str, key: str, value: Any, transposed: bool) -> torch.Tensor:
    """[out_features, in_features] in float32."""
    weight = _torch(value).float()
    if weight.ndim != 2:
        raise SurgeonError(f"{name!r}: {key} must be a matrix, found shape {list(weight.shape)}")
    weight = weight.T.contiguous() if transposed else weight
    if weight.shape[1] % BLOCK:
        raise SurgeonError(
            f"{name!r}: {key} must have a multiple of {BLOCK} in_features, found shape {list(weight.shape)} of "
            "[out_features, in_features]; transposed=True takes [in_features, out_features], as MatMul has it"
        )
    if not torch.isfinite(weight).all():
        raise SurgeonError(f"{name!r}: {key} holds NaN or Inf")
    return weight


def _interleaved(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Row 0 of each, row 1 of each, ..."""
    if len({tuple(part.shape) for part in parts}) > 1:
        raise SurgeonError(f"{name!r}: gate and up must have one shape, found {[list(part.shape) for part in parts]}")
    return torch.stack(list(parts), dim=1).reshape(-1, *parts[0].shape[1:]) if len(parts) > 1 else parts[0]


def _is_float(value: Any) -> bool:
    if value is None or (isinstance(value, gs.Tensor) and not isinstance(value, gs.Constant)):
        return False
    dtype = value.dtype
    return bool(dtype.is_floating_point) if isinstance(dtype, torch.dtype) else np.dtype(dtype) in _TYPES


def _torch(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    array = np.asarray(value.values if isinstance(value, gs.Constant) else value)
    return torch.from_numpy(np.array(array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array))


def _constant(name: str, key: str, value: Any) -> Any:
    return gs.Constant(f"{name}/{key}", _torch(value).contiguous().numpy())


def _activation(name: str) -> int:
    try:
        return int(Activation[name.upper()])
    except KeyError:
        known = ", ".join(each.name.lower() for each in Activation)
        raise SurgeonError(f"activation must be one of {known}; found {name!r}") from None


def _free_name(graph: Any, op: str) -> str:
    taken = {node.name for node in graph.nodes}
    return next(name for number in range(len(taken) + 1) if (name := f"{op}_{number}") not in taken)


def _replace(graph: Any, definition: OpDefinition, x: Any, y: Any, name: str, given: Mapping[str, Any]) -> Any:
    """Nothing is changed where the node cannot be made."""
    outputs = list(y) if isinstance(y, (list, tuple)) else [y]
    count = len(graph.nodes)
    try:
        made = _add(graph, definition, x, outputs, name, dict(given))
    except BaseException:
        del graph.nodes[count:]
        raise
    for output in outputs:
        for producer in [node for node in list(output.inputs) if node is not graph.nodes[-1]]:
            producer.outputs = [tensor for tensor in producer.outputs if tensor is not output]
    graph.cleanup().toposort()
    return made


def _register(definition: OpDefinition) -> None:
    name = _method_name(definition.name)

    def add(graph: Any, x: Any, *, name: str = "", **given: Any) -> Any:
        return _add(graph, definition, x, None, name, given)

    def replace_with(graph: Any, x: Any, y: Any, *, name: str = "", **given: Any) -> Any:
        return _replace(graph, definition, x, y, name, given)

    methods: dict[str, Callable[..., Any]] = {name: add, f"replace_with_{name}": replace_with}
    for method, function in methods.items():
        function.__name__, function.__doc__ = method, definition.doc
        gs.Graph.register()(function)


for _definition in OPS.values():
    _register(_definition)
