"""`inspect-engine MODEL --why NAME`: which matcher gave up, where and why; `dump-passes`: what the graph became."""

import json
from pathlib import Path

import onnx
import onnx.parser
import pytest
from click.testing import CliRunner
from command_lines import invoked

from onnx_models.graphs import parsed
from trt_nvfp4.builder.cli.build_engine import app as build_engine
from trt_nvfp4.builder.cli.inspect_engine import app
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.report.why import explain
from trt_nvfp4.graph_passes.load.by_hand import REWRITTEN

K, N = 32, 48
_NODES = """
    first = MatMul(x, up)
    odd = {activation}(first)
    second = MatMul(odd, down)
    scores = MatMul(x, second)
    y = Identity(scores)
"""


def model(folder: Path, activation: str = "Relu") -> Path:
    text = f"g (float[{K}, {K}] x) => (float[{K}, {K}] y) {{{_NODES.format(activation=activation)}}}"
    proto = parsed(text, {"up": (K, N), "down": (N, K)})
    for number, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type.lower()}_{number}"
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx"


def test_a_node_that_is_replaced(tmp_path: Path) -> None:
    found = explain(model(tmp_path), "relu_1")
    assert [(each.kind, each.op, each.why) for each in found.subgraphs] == [("mlp", "NVFP4PersistentMLP", "")]


def test_a_product_with_what_is_computed(tmp_path: Path) -> None:
    (noted,) = explain(model(tmp_path), "matmul_3").gave_up
    assert (noted.matcher, noted.node) == ("linear", "matmul_3")
    assert noted.why == "its second operand is computed, not a constant: 'second' of node 'matmul_2' (MatMul)"
    assert explain(tmp_path / "model.onnx", "scores").gave_up == (noted,)  # by the tensor


def test_an_activation_that_nobody_knows(tmp_path: Path) -> None:
    """Asked of the second linear, or of the node that is in the way."""
    path = model(tmp_path, "LogSoftmax<axis = -1>")
    for name in ("matmul_2", "logsoftmax_1"):
        noted = [each for each in explain(path, name).gave_up if each.matcher == "mlp" and each.node == "matmul_2"]
        (why,) = [each.why for each in noted]
        assert why.startswith("node 'logsoftmax_1' (LogSoftmax) is neither an elementwise function")


def test_a_refused_subgraph(tmp_path: Path) -> None:
    path = model(tmp_path)
    proto = onnx.load(path)
    proto.graph.output.append(onnx.helper.make_tensor_value_info("odd", onnx.TensorProto.FLOAT, [K, N]))
    onnx.save(proto, path)
    found = explain(path, "relu_1")
    assert any("its tensor 'odd' is also an output of the graph" in each.why for each in found.subgraphs)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'matmul_3'"):
        explain(model(tmp_path), "matmul3")


def test_on_the_command_line(tmp_path: Path) -> None:
    path = model(tmp_path)
    shown = invoked(app, [path, "--why", "matmul_3"])
    assert "linear" in shown.output
    data = json.loads(CliRunner().invoke(app, [str(path), "--why", "matmul_3", "--json"]).stdout)
    assert data["kind"] == "why"
    assert data["gave_up"][0]["node"] == "matmul_3"


def test_the_graph_after_each_pass(tmp_path: Path) -> None:
    path, folder = model(tmp_path), tmp_path / "passes"
    options = ["--target", "thor", "-o", str(tmp_path / "o.engine"), "--stop-after", "rewrite"]
    invoked(build_engine, [path, *options, "--set", f"dump-passes={folder}"])
    names = sorted(file.name for file in folder.iterdir())
    assert names[0] == "01-normalize.onnx"
    assert names[-1].endswith("-name-nodes.onnx")
    graphs = {name.split("-", 1)[1]: onnx.load(folder / name, load_external_data=False).graph for name in names}
    assert "NVFP4PersistentMLP" not in {node.op_type for node in graphs["choose-types.onnx"].node}
    assert "NVFP4PersistentMLP" in {node.op_type for node in graphs["lower-subgraphs.onnx"].node}
    again = invoked(build_engine, [path, *options, "--set", f"dump-passes={folder}"], 2)
    assert "exists already" in again.output


def test_a_model_that_has_been_rewritten(tmp_path: Path) -> None:
    """The original's nodes are not in it."""
    path = model(tmp_path)
    rewritten = onnx.load(path)
    rewritten.metadata_props.add(key=REWRITTEN, value="{}")
    onnx.save(rewritten, path)
    with pytest.raises(UsageError, match=r"model\.onnx: has been rewritten already; --why explains the original"):
        explain(path, "relu_1")
