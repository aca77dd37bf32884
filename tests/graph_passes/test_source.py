"""Loading: weights stay on disk, and every kind of broken model gets one clear message."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnx_models.graphs import mlp_model, spec
from trt_nvfp4.graph_passes.source import ModelError, load


@pytest.fixture
def external(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A model whose weights lie in external data, and those weights."""
    model, graph = mlp_model(spec(dtype="bfloat16"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path, graph.weights


def test_external_tensors_are_mapped(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, weights = external
    model = load(path)
    for name, expected in weights.items():
        found = model.tensor(name)
        assert found.dtype == ml_dtypes.bfloat16
        assert isinstance(found.base if found.base is not None else found, np.memmap)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("constant_nodes", [False, True])
def test_inline_tensors(dtype: str, constant_nodes: bool, tmp_path: Path) -> None:
    model, graph = mlp_model(spec(dtype=dtype, constant_nodes=constant_nodes, k=64, intermediate=256))
    onnx.save(model, tmp_path / "model.onnx")
    source = load(tmp_path / "model.onnx")
    for name, expected in graph.weights.items():
        np.testing.assert_array_equal(source.tensor(name), expected)


def test_no_such_tensor(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    with pytest.raises(ModelError, match="no constant named 'nothing'"):
        load(external[0]).tensor("nothing")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load(tmp_path / "absent.onnx")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 100, b"PK\x03\x04 zip"])
def test_not_onnx(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.onnx.*not an ONNX"):
        load(path)


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.0, 0.999))
def test_truncated(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cut anywhere, a model is refused and never half-read."""
    data = mlp_model(spec())[0].SerializeToString()
    path = tmp_path_factory.mktemp("cut") / "model.onnx"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"model\.onnx"):
        load(path)


def test_external_data_missing(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    external[0].with_name("weights.bin").unlink()
    with pytest.raises(ModelError, match=r"external data file 'weights\.bin' of tensor '\w+' is missing"):
        load(external[0])


def test_external_data_too_short(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    data = external[0].with_name("weights.bin")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"'weights\.bin' is too short: tensor 'down'"):
        load(external[0])


def test_external_data_outside(external: tuple[Path, dict[str, np.ndarray]]) -> None:
    model = onnx.load(external[0], load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../elsewhere.bin"
    onnx.save(model, external[0])
    with pytest.raises(ModelError, match="outside the model's folder"):
        load(external[0])


def broken(path: Path, *nodes: onnx.NodeProto, opset: int = 21) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y])
    domains = {"": opset} | {node.domain: 1 for node in nodes if node.domain}
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    path = path / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    return path


@pytest.mark.parametrize(("op", "domain"), [("Unheard", ""), ("Relu", "of.nobody"), ("Gelu", "")])
def test_unknown_operator(op: str, domain: str, tmp_path: Path) -> None:
    path = broken(tmp_path, helper.make_node(op, ["x"], ["y"], name="culprit", domain=domain), opset=17)
    with pytest.raises(ModelError, match=f"unknown operator '{op}' .*'culprit'"):
        load(path)


def test_unsorted(tmp_path: Path) -> None:
    path = broken(tmp_path, helper.make_node("Relu", ["a"], ["y"], name="early"), helper.make_node("Neg", ["x"], ["a"]))
    with pytest.raises(ModelError, match=r"node 'early' \(Relu\) reads 'a'"):
        load(path)


def test_defined_twice(tmp_path: Path) -> None:
    path = broken(tmp_path, helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"], name="again"))
    with pytest.raises(ModelError, match=r"'y' is defined twice \(by node 'again'"):
        load(path)


def test_output_without_producer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing produces the graph output 'y'"):
        load(broken(tmp_path, helper.make_node("Relu", ["x"], ["z"])))


def test_functions_are_inlined(tmp_path: Path) -> None:
    """A model-local function, as dynamo can write them, hides nothing from the passes."""
    text = """<ir_version: 10, opset_import: ["": 21, "local": 1]>
    g (float[2, 16] x) => (float[2, 16] y) { a = local.dense(x, w1)  r = Relu(a)  y = local.dense(r, w2) }
    <domain: "local", opset_import: ["": 21]> dense (x, w) => (y) {
        t = Transpose<perm = [1, 0]>(w)  y = MatMul(x, t) }"""
    model = onnx.parser.parse_model(text)
    for name in ("w1", "w2"):
        weights = np.random.default_rng(0).random((16, 16), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weights, name))
    onnx.save(model, tmp_path / "model.onnx")
    source = load(tmp_path / "model.onnx")
    assert sorted(node.op_type for node in source.graph) == ["MatMul", "MatMul", "Relu", "Transpose", "Transpose"]
    assert all(node.name for node in source.graph)
