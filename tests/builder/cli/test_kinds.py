"""`--kinds all`, and what is said where no kind is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from click.testing import Result
from onnx import numpy_helper, parser
from typer.testing import CliRunner

from onnx_models.graphs import mlp_model, spec
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.errors import MODEL_AT_FAULT


def planned(model: onnx.ModelProto, folder: Path, *options: str) -> Result:
    onnx.save(model, folder / "m.onnx")
    common = [str(folder / "m.onnx"), "-o", str(folder / "o.engine"), "--target", "ada", "--stop-after", "plan"]
    return CliRunner().invoke(app, [*common, "--json", *options])


def test_all(tmp_path: Path) -> None:
    model, _ = mlp_model(spec())
    model.graph.node.append(onnx.helper.make_node("MatMul", ["x", "gate"], ["z"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    for options, are_left_out in ((["--kinds", "all"], False), ([], True)):
        result = planned(model, tmp_path, *options, "--precision", "nvfp4", "--max-shapes", "x:1x4x32")
        assert result.exit_code == 0, result.output
        reasons = [entry["reason"] for entry in json.loads(result.stdout)["subgraphs"] if entry["kind"] == "linear"]
        assert reasons
        assert any("is not among those to replace" in reason for reason in reasons) == are_left_out


def test_a_network_of_convolutions(tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 3, 8, 8] x) => (float[batch, 3, 6, 6] y) {'
        " h = Conv(x, w)  y = Relu(h) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 3, 3, 3), np.float32), "w"))
    result = planned(model, tmp_path)
    assert result.exit_code == MODEL_AT_FAULT
    assert "its 1 convolutions stay as they are: no Conv is replaced" in " ".join(result.stderr.split())
