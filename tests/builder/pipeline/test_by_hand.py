"""Plugins put in by hand: planned, verified and compared like those that build-engine puts in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from command_lines import invoked

surgeon = pytest.importorskip("trt_nvfp4.surgeon", exc_type=ImportError)

import trt_nvfp4  # noqa: E402
from trt_nvfp4.builder.cli.build_engine import app  # noqa: E402
from trt_nvfp4.builder.errors import UsageError  # noqa: E402
from trt_nvfp4.graph_passes.load.source import ModelError, load  # noqa: E402

K, N = 64, 96
_SCRIPT = """
def surgery(graph):
    t = graph.tensors()
    weights = {name: t[name] for name in ("gate", "up", "down")}
    graph.replace_with_nvfp4_gated_mlp(t["x"], t["z"], name="mine", activation="silu", transposed=True, **weights)
def nothing(graph):
    return 3
def fails(graph):
    raise KeyError("gone")
def refused(graph):
    graph.nvfp4_linear(graph.inputs[0], weight=graph.tensors()["gate"])
def untyped(graph):
    graph.outputs[0].dtype = None
"""


@pytest.fixture
def model(tmp_path: Path, seed: int) -> Path:
    """An MLP that no pattern knows: a function of a foreign domain computes a weight; a known one behind it."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21, "house": 1]>
        odd (float[tokens, {K}] x) => (float[tokens, {K}] y) {{
            g = MatMul(x, gate)
            w = house.Restore(up, x)
            u = MatMul(x, w)
            s = Sigmoid(g)
            a = Mul(g, s)
            h = Mul(a, u)
            z = MatMul(h, down)
            first = MatMul(z, one)
            bent = Relu(first)
            y = MatMul(bent, two)
        }}
        <opset_import: ["": 21], domain: "house"> Restore (v, x) => (r) {{
            index = Constant<value = int64 {{0}}>()
            row = Gather(x, index)
            nothing = Sub(row, row)
            zero = ReduceSum<keepdims = 0>(nothing)
            r = Add(v, zero)
        }}""")
    rng = np.random.default_rng(seed)
    shapes = {"gate": (K, N), "up": (K, N), "down": (N, K), "one": (K, N), "two": (N, K)}
    for name, shape in shapes.items():
        values = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(proto, tmp_path / "odd.onnx")
    np.savez(tmp_path / "samples.npz", x=rng.standard_normal((16, K)).astype(np.float32))
    (tmp_path / "script.py").write_text(_SCRIPT)
    return tmp_path / "odd.onnx"


@pytest.fixture
def by_hand(model: Path) -> onnx.ModelProto:
    graph = surgeon.to_gs(model)
    tensors = graph.tensors()
    weights = {name: tensors[name] for name in ("gate", "up", "down")}
    graph.replace_with_nvfp4_gated_mlp(tensors["x"], tensors["z"], name="mine", transposed=True, **weights)
    return surgeon.from_gs(graph)


def decisions(report: Any) -> dict[str, str]:
    return {entry["name"]: entry["decision"] for entry in report.subgraphs}


@pytest.mark.slow
def test_surgery_makes_an_engine(model: Path) -> None:
    """One plugin layer for the node put in by hand, one for the other MLP; compared with the model before surgery."""
    out, samples = model.with_name("out.engine"), model.with_name("samples.npz")
    options = ["--target", "rtx-blackwell", "--calib-data", str(samples), "--max-shapes", f"x:64x{K}", "--json"]
    surgery = ["--set", f"surgery={model.with_name('script.py')}:surgery"]
    invoked(app, [model, "-o", out, *options, *surgery])
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert report["plugin_layers"] == 2
    assert {entry["name"]: entry["realized"] for entry in report["subgraphs"]} == {
        "mine": "plugin, put in by hand",
        "mlp_0": "nvfp4 plugin",
    }
    # The error of four bits, and not none: the model before surgery is what it is compared with.
    shown = {row["name"]: row["cosine"] for row in report["accuracy"]["tensors"]}
    assert 0.9 < shown["mine"] < 0.9999
    assert 0.85 < shown["y"] < 0.9999


def test_a_model_with_a_plugin_is_planned_and_rewritten(model: Path, by_hand: onnx.ModelProto, tmp_path: Path) -> None:
    path, out = tmp_path / "hand.onnx", tmp_path / "out.engine"
    # Whatever the functions of the model do: those of the ops are taken.
    del by_hand.functions[:]
    del by_hand.graph.value_info[:]
    onnx.save(by_hand, path)
    result = trt_nvfp4.rewrite(path, target="rtx-blackwell", output=out, calib_data=model.with_name("samples.npz"))
    assert decisions(result.report) == {"mine": "by_hand", "mlp_0": "nvfp4_w4a4"}
    rewritten = onnx.load(result.files["rewritten model"])
    assert [node.op_type for node in rewritten.graph.node if node.domain] == ["NVFP4GatedMLP", "NVFP4PersistentMLP"]
    # The rest of the network is in BF16, and so are the node's activations; its weights are as they were.
    before = {tensor.name: tensor for tensor in by_hand.graph.initializer}
    after = {tensor.name: tensor for tensor in rewritten.graph.initializer}
    assert after["mine/gate_up_weight"].raw_data == before["mine/gate_up_weight"].raw_data
    assert after["mine/down_bias"].data_type == onnx.TensorProto.BFLOAT16
    shown = {row["name"]: row["cosine"] for row in result.report.accuracy["tensors"]}
    assert shown["mine"] > 0.9999
    plan = result.files["plan"].read_text()
    edited = tmp_path / "edited.yaml"
    edited.write_text(plan.replace("decision: by_hand", "decision: keep"))
    with pytest.raises(ModelError, match=r"it cannot be keep: .* this is of kind by_hand"):
        trt_nvfp4.rewrite(path, target="rtx-blackwell", output=tmp_path / "again.engine", plan=edited)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda node: setattr(node, "op_type", "NVFP4Gated"), "unknown operator 'NVFP4Gated' .* its operators are"),
        (lambda node: node.input.pop(), "has 10 inputs, expected 11"),
        (lambda node: node.attribute[0].CopyFrom(onnx.helper.make_attribute("activation", "silu")), "expected INT"),
        (lambda node: node.attribute[0].CopyFrom(onnx.helper.make_attribute("activation", 77)), "must be one of"),
        (lambda node: node.input.__setitem__(1, node.input[5]), "gate_up_weight must have shape"),
        (lambda node: node.input.__setitem__(3, node.input[4]), "gate_up_tensor_scale"),
    ],
)
def test_nodes_that_are_wrong(by_hand: onnx.ModelProto, tmp_path: Path, change: Any, message: str) -> None:
    (node,) = [node for node in by_hand.graph.node if node.name == "mine"]
    change(node)
    onnx.save(by_hand, tmp_path / "wrong.onnx")
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "wrong.onnx")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "has no function 'absent'; name another"),
        ("nothing", "returns int; expected the gs.Graph"),
        ("fails", "fails: KeyError: 'gone'"),
        ("refused", "must have a multiple of 16|in_features|must have shape"),
        ("untyped", "leaves a graph that is not a model"),
    ],
)
def test_surgery_that_fails(model: Path, function: str, message: str) -> None:
    script = model.with_name("script.py")
    with pytest.raises(UsageError, match=message):
        trt_nvfp4.build(model, target="ada", output=model.with_name("out.engine"), surgery=f"{script}:{function}")
    assert not list(model.parent.glob("out*"))
