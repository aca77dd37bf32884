"""`--kinds all`, and what is said where no kind is found."""

import json
from pathlib import Path

import onnx
from click.testing import CliRunner, Result

from onnx_models.graphs import mlp_model, parsed, spec
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
        assert any("--kinds names" in reason for reason in reasons) == are_left_out


def test_a_network_of_convolutions(tmp_path: Path) -> None:
    text = "g (float[batch, 3, 8, 8] x) => (float[batch, 3, 6, 6] y) { h = Conv(x, w)  y = Relu(h) }"
    result = planned(parsed(text, {"w": (3, 3, 3, 3)}), tmp_path)
    assert result.exit_code == MODEL_AT_FAULT
    assert "its 1 convolutions stay as they are: no Conv is replaced" in " ".join(result.stderr.split())
