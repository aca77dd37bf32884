"""Files of other versions: they load, or one message says what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import trt_nvfp4
from trt_nvfp4.builder.model.onnx_file import rewritten_by
from trt_nvfp4.builder.tensorrt.bundle import planned_nodes
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.errors import TrtNvfp4Error
from trt_nvfp4.graph_passes.load.by_hand import REWRITTEN
from trt_nvfp4.graph_passes.planning.plan import Plan


@pytest.fixture
def rewritten(gated_mlps: Path, tmp_path: Path) -> trt_nvfp4.BuildResult:
    out = tmp_path / "made" / "model.engine"
    return trt_nvfp4.rewrite(gated_mlps, target="thor", output=out)


def changed(file: Path, folder: Path, change: Callable[[onnx.ModelProto], object]) -> Path:
    model = onnx.load(file)
    change(model)
    onnx.save(model, folder / "older.onnx")
    return folder / "older.onnx"


def note(model: onnx.ModelProto, **values: object) -> None:
    """Sets values of what the rewrite noted; None takes one out."""
    (entry,) = [entry for entry in model.metadata_props if entry.key == REWRITTEN]
    entry.value = json.dumps({k: v for k, v in (json.loads(entry.value) | values).items() if v is not None})


def bundled(model: Path, result: trt_nvfp4.BuildResult, folder: Path) -> trt_nvfp4.BuildResult:
    return trt_nvfp4.build(model, target="thor", bundle=folder / "bundle", plan=result.files["plan"])


def test_a_rewritten_model_without_later_notes(rewritten: trt_nvfp4.BuildResult, tmp_path: Path) -> None:
    older = changed(
        rewritten.files["rewritten model"], tmp_path, lambda model: note(model, activations=None, quantized=None)
    )
    nodes = planned_nodes(Plan.load(rewritten.files["plan"]), older)
    assert [node.engine_nodes for node in nodes]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.graph.node[0].input.pop(), r"has \d+ inputs, expected \d+"),
        (lambda model: setattr(model.graph.node[0], "op_type", "NVFP4Mlp"), "unknown operator 'NVFP4Mlp'"),
        (
            lambda model: model.graph.node[0].attribute.append(onnx.helper.make_attribute("fast", 1)),
            "it has no attribute 'fast'",
        ),
    ],
)
def test_plugin_nodes_that_ops_have_otherwise(
    rewritten: trt_nvfp4.BuildResult, tmp_path: Path, change: Callable[[onnx.ModelProto], object], message: str
) -> None:
    older = changed(rewritten.files["rewritten model"], tmp_path, change)
    with pytest.raises(TrtNvfp4Error, match=f"{message}.*; if another version made the model, rewrite") as failure:
        bundled(older, rewritten, tmp_path)
    assert failure.value.exit_code == 3
    assert not (tmp_path / "bundle").exists()


def test_a_rewritten_model_with_former_names_of_decisions(rewritten: trt_nvfp4.BuildResult, tmp_path: Path) -> None:
    model = rewritten.files["rewritten model"]
    older = changed(model, tmp_path, lambda model: note(model, decisions={"moe": "native"}))
    assert rewritten_by(OnnxFile.of(older))["decisions"] == {"moe": "trt_moe"}


def test_a_rewritten_model_without_its_note(rewritten: trt_nvfp4.BuildResult, tmp_path: Path) -> None:
    older = changed(rewritten.files["rewritten model"], tmp_path, lambda model: note(model, decisions=None))
    with pytest.raises(TrtNvfp4Error, match="rewrite the original model again"):
        bundled(older, rewritten, tmp_path)


def test_statistics_of_an_older_format(tmp_path: Path) -> None:
    file = tmp_path / "o.statistics.json"
    file.write_text(json.dumps({"format": "trt-nvfp4 activation statistics 3", "amax": {"x": 1.0}}))
    with pytest.raises(CalibrationError, match=r"its format is .* 3', expected .*: calibrate again"):
        Statistics.load(file, tmp_path / "model.onnx")


def test_reports(rewritten: trt_nvfp4.BuildResult, tmp_path: Path) -> None:
    """Of before reasons had codes and layers residual channels they load; without a field of today they are refused."""
    content = json.loads(rewritten.files["report"].read_text())
    older = tmp_path / "o.report.json"
    for entry in content["subgraphs"]:
        del entry["reason_code"], entry["residual_channels"]
    content |= {"budget": {}, "accuracy": {}}  # which are None today
    older.write_text(json.dumps(content))
    found = trt_nvfp4.inspect(older)
    assert found.kind == "report"
    assert (found.report.budget, found.report.accuracy) == (None, None)
    assert [entry["name"] for entry in found.report.subgraphs] == [entry.name for entry in rewritten.subgraphs]
    del content["token_bytes"]
    older.write_text(json.dumps(content))
    with pytest.raises(TrtNvfp4Error, match="it lacks token_bytes; build again to have one"):
        trt_nvfp4.inspect(older)


def test_a_plan_without_later_keys(rewritten: trt_nvfp4.BuildResult, gated_mlps: Path, tmp_path: Path) -> None:
    lines = rewritten.files["plan"].read_text().splitlines()
    older = tmp_path / "o.plan.yaml"
    later = ("  reason_code:", "  kernels:", "activations:", "  type:")
    older.write_text("\n".join(line for line in lines if not line.startswith(later)) + "\n")
    again = trt_nvfp4.rewrite(gated_mlps, target="thor", output=tmp_path / "o.engine", plan=older)
    assert [each.decision for each in again.subgraphs] == [each.decision for each in rewritten.subgraphs]
