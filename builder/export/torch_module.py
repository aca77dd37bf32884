"""A Torch module becomes an ONNX file, by torch.onnx's dynamo exporter."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from trt_nvfp4.builder.export.dynamic_sizes import dynamic_sizes
from trt_nvfp4.builder.export.exact_constants import exact_constants
from trt_nvfp4.builder.export.onnx_arithmetic import complex_as_pairs, onnx_arithmetic
from trt_nvfp4.builder.export.recurrent import ops as recurrent
from trt_nvfp4.builder.export.single_precision import to_single_precision
from trt_nvfp4.builder.export.stand_ins import optimize, stand_ins
from trt_nvfp4.common.collectives import function, is_collective
from trt_nvfp4.common.replacing import scratch
from trt_nvfp4.graph_passes.ir.computed_tensor import ComputedTensor

# Above this many bytes of weights they go to a file beside the ONNX (a protobuf ends at 2 GiB).
EXTERNAL_DATA_BYTES = 256 << 20
# Smaller tensors stay in the model file, where shape inference sees them.
INLINE_BYTES = 4096
_NO_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"


def traced(
    module: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    dynamic: Any,
    opset: int,
    translations: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> torch.onnx.ONNXProgram:
    """The module as an ONNX program; `dynamic` as torch.export's dynamic_shapes. Deferred weights stay so. Raises
    whatever torch.onnx raises."""
    with (
        torch.no_grad(),
        _without_checks(),
        onnx_arithmetic(),
        complex_as_pairs(module),
        dynamic_sizes(module),
        stand_ins(module) as weights,
    ):
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            dynamo=True,
            opset_version=opset,
            input_names=list(inputs),
            dynamic_shapes=dynamic,
            custom_translation_table=dict(translations or {}),
            optimize=False,
            verbose=False,
        )
        assert program is not None
        with exact_constants(program.model):
            if weights:
                optimize(program, weights)
            else:
                program.optimize()
        to_single_precision(program.model)
    return program


@contextmanager
def _without_checks() -> Iterator[None]:
    """Within, transformers' modeling code does not compare values of tensors, which no graph can."""
    before = os.environ.get(_NO_CHECKS)
    os.environ[_NO_CHECKS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_CHECKS]
        else:
            os.environ[_NO_CHECKS] = before


def save(
    program: torch.onnx.ONNXProgram,
    module: torch.nn.Module,
    outputs: Sequence[str],
    metadata: Mapping[str, str],
    destination: Path,
    by_reference: bool = False,
) -> dict[str, ir.TensorProtocol]:
    """Write the program with names of its outputs; weights go beside it when they are large.

    `by_reference`: where deferred weights are large, they are not written, and returned by their names: the file beside
    the model has holes in their places.
    """
    for value, name in zip(program.model.graph.outputs, outputs, strict=True):
        value.name = name
    program.model.metadata_props.update(metadata)
    if any(map(recurrent.is_one, program.model.graph)):
        # The exporter stops before this opset, up to which its operators only got more types.
        program.model.opset_imports[""] = recurrent.OPSET
    if any(map(is_collective, program.model.graph)):
        body = ir.serde.deserialize_function(function(program.model.opset_imports[""]))
        program.model.functions[body.identifier()] = body
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    left: dict[str, ir.TensorProtocol] = {
        name: tensor for name, tensor in _initializers(program.model) if isinstance(tensor, ComputedTensor)
    }
    if not by_reference or sum(tensor.nbytes for tensor in left.values()) <= EXTERNAL_DATA_BYTES:
        left = {}
    # The weights' file is named inside the ONNX file, so both are written under their final names, elsewhere.
    with scratch(destination.parent) as folder:
        if left:
            _save_with_holes(program.model, left, folder / destination.name)
        else:
            program.save(str(folder / destination.name), external_data=size > EXTERNAL_DATA_BYTES)
        # An earlier export beside new weights would pass for whole.
        destination.unlink(missing_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == destination.name):
            os.replace(file, destination.parent / file.name)
    return left


def _initializers(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            yield name, value.const_value


def _save_with_holes(model: ir.Model, left: Mapping[str, ir.TensorProtocol], path: Path) -> None:
    """Write `path` and `<path>.data`, which takes no disk where the tensors `left` out would lie."""
    data = path.with_name(f"{path.name}.data")
    outside = {name: tensor for name, tensor in _initializers(model) if tensor.nbytes > INLINE_BYTES}
    with data.open("wb") as file:
        for name, tensor in outside.items():
            offset = file.tell()
            if name in left:
                file.truncate(offset + tensor.nbytes)
            else:
                file.write(tensor.tobytes())
            file.seek(offset + tensor.nbytes)
            model.graph.initializers[name].const_value = ir.ExternalTensor(
                data.name,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                base_dir=data.parent,
            )
    try:
        ir.save(model, path)
    finally:
        for name, tensor in outside.items():
            model.graph.initializers[name].const_value = tensor
