"""Models of transformers, exported, become verified engines with one plugin layer per MLP: TensorRT-RTX for SM120."""

import json
from itertools import cycle
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from command_lines import invoked

from onnx_models.zoo import DTYPES, ZOO, build, export, exportable
from trt_nvfp4.builder.cli.build_engine import app

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")

NAMES = ("llama", "gemma2", "qwen3", "modernbert", "bert", "vit")
# One of each type, between them both exporters, gated and plain, with and without calibration; the rest is slow.
CORE = {("llama", "dynamo", "bf16", True), ("bert", "torchscript", "fp32", False), ("vit", "dynamo", "fp16", True)}
# Dynamo's exports: here in one type each, calibrated; in another, from directories and not, in test_huggingface.py.
CASES = [
    (name, "torchscript", dtype, False) for name in NAMES for dtype in DTYPES if exportable(name, "torchscript", dtype)
]
CASES += [(name, "dynamo", dtype, True) for name, dtype in zip(NAMES, cycle(("bf16", "fp32", "fp16")), strict=False)]


def float32_products(path: Path) -> set[str]:
    """The matrix products that an exported model computes in float32, by their names."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    types = {value.name: value.type.tensor_type.elem_type for value in [*graph.input, *graph.value_info]}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    products = (node for node in graph.node if node.op_type in ("MatMul", "Gemm"))
    return {node.name for node in products if types.get(node.input[0]) == onnx.TensorProto.FLOAT}


@pytest.mark.parametrize(
    ("name", "exporter", "dtype", "calibrated"),
    [
        pytest.param(
            *case,
            id="-".join((*case[:3], "calibrated" if case[3] else "uncalibrated")),
            marks=[] if case in CORE else [pytest.mark.slow] if case[3] else [pytest.mark.slow, pytest.mark.nightly],
        )
        for case in CASES
    ],
)
def test_one_plugin_layer_per_mlp(
    name: str, exporter: str, dtype: str, calibrated: bool, tmp_path: Path, seed: int
) -> None:
    entry = ZOO[name]
    model, draw = build(name, DTYPES[dtype], seed)
    path = tmp_path / "model.onnx"
    export(model, draw(seed), path, exporter)
    options = [
        str(path),
        "-o",
        str(tmp_path / "out.engine"),
        "--target",
        "rtx-blackwell",
        "--require",
        "nvfp4",
        "--json",
    ]
    if not entry.vision:
        options += ["--max-shapes", "x:2x16"]
    if calibrated:
        samples = tmp_path / "samples"
        samples.mkdir()
        for number in range(2):
            x = draw(number)
            # NumPy's files have no bfloat16: samples of such inputs are float32.
            np.savez(samples / f"{number}.npz", x=(x.float() if x.dtype == torch.bfloat16 else x).numpy())
        options += ["--calib-data", str(samples)]

    result = invoked(app, options)
    report = json.loads(result.stdout)
    mlps = [subgraph for subgraph in report["subgraphs"] if subgraph["kind"] != "linear"]
    assert [(mlp["kind"], mlp["realized"]) for mlp in mlps] == [(entry.kind, "nvfp4 plugin")] * entry.mlps
    assert {mlp["decision"] for mlp in mlps} == {"nvfp4_w4a4" if calibrated else "nvfp4_w4a16"}
    assert report["plugin_layers"] == entry.mlps
    # Some of TorchScript's FP16 exports hold float32 products of their own; a float32 model is converted.
    own = set() if dtype == "fp32" else float32_products(path)
    assert set(report["network"]["float32_products"]) <= own
    assert (tmp_path / "out.engine").stat().st_size == report["engine_bytes"]
