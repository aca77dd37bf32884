"""A Torch module becomes an ONNX file, by torch.onnx's dynamo exporter."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from trt_nvfp4.builder.export.onnx_arithmetic import onnx_arithmetic
from trt_nvfp4.common.collectives import function, is_collective
from trt_nvfp4.common.replacing import scratch

# Above this many bytes of weights they go to a file beside the ONNX (a protobuf ends at 2 GiB).
EXTERNAL_DATA_BYTES = 256 << 20


def traced(
    module: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    dynamic: Any,
    opset: int,
    translations: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> torch.onnx.ONNXProgram:
    """The module as an ONNX program; `dynamic` as torch.export's dynamic_shapes. Raises whatever torch.onnx raises."""
    with torch.no_grad(), onnx_arithmetic():
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            dynamo=True,
            opset_version=opset,
            input_names=list(inputs),
            dynamic_shapes=dynamic,
            custom_translation_table=dict(translations or {}),
            verbose=False,
        )
    assert program is not None
    return program


def save(
    program: torch.onnx.ONNXProgram,
    module: torch.nn.Module,
    outputs: Sequence[str],
    metadata: Mapping[str, str],
    destination: Path,
) -> None:
    """Write the program with names of its outputs; weights go beside it when they are large."""
    for value, name in zip(program.model.graph.outputs, outputs, strict=True):
        value.name = name
    program.model.metadata_props.update(metadata)
    if any(map(is_collective, program.model.graph)):
        body = ir.serde.deserialize_function(function(program.model.opset_imports[""]))
        program.model.functions[body.identifier()] = body
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    # The weights' file is named inside the ONNX file, so both are written under their final names, elsewhere.
    with scratch(destination.parent) as folder:
        program.save(str(folder / destination.name), external_data=size > EXTERNAL_DATA_BYTES)
        # An earlier export beside new weights would pass for whole.
        destination.unlink(missing_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == destination.name):
            os.replace(file, destination.parent / file.name)
