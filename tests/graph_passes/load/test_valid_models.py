"""Valid models of rarer kinds keep what they compute: local functions, inputs that are outputs, sparse weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_models.passes import rewritten
from trt_nvfp4.graph_passes.load.source import ModelError, load
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan

K, M = 32, 64


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: (rng.normal(size=shape) / 6).astype(np.float32) for name, shape in (("up", (K, M)), ("down", (M, K)))}


def mlp(extra: list[onnx.NodeProto], output: str = "y") -> onnx.GraphProto:
    """An MLP of x whose result is `mlp`, then the nodes `extra`, which make `output`."""
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "down"], ["mlp"]),
        *extra,
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", K]) for name in ("x", output))
    return helper.make_graph(nodes, "g", [x], [y])


def kept(path: Path) -> Path:
    """The model at `path`, loaded and written with every subgraph as it is."""
    source = load(path)
    plan = make_plan(source, find_subgraphs(source), Capabilities("nothing", bf16=False))
    return rewritten(source, plan).path


def check_same(path: Path, rng: np.random.Generator) -> None:
    x = rng.normal(size=(5, K)).astype(np.float32)
    expected = onnxruntime.InferenceSession(path).run(None, {"x": x})
    found = onnxruntime.InferenceSession(kept(path)).run(None, {"x": x})
    for theirs, ours in zip(expected, found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def saved(graph: onnx.GraphProto, path: Path, arrays: dict[str, np.ndarray], opset: int = 17, **extra: object) -> Path:
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8, **extra), path)
    return path


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize(
    ("of_function", "node", "computes"),
    [
        (13, helper.make_node("Relu", ["v"], ["w"]), lambda v: np.maximum(v, 0)),
        (
            11,
            helper.make_node("Softmax", ["v"], ["w"], axis=-1),
            lambda v: np.exp(v) / np.exp(v).sum(-1, keepdims=True),
        ),
        (11, helper.make_node("ReduceSum", ["v"], ["w"], axes=[1], keepdims=1), lambda v: v.sum(1, keepdims=True)),
        (9, helper.make_node("Clip", ["v"], ["w"], min=-0.5, max=0.5), lambda v: np.clip(v, -0.5, 0.5)),
    ],
    ids=["Relu", "Softmax", "ReduceSum", "Clip"],
)
def test_functions_of_another_opset(
    of_function: int,
    node: onnx.NodeProto,
    computes: Callable[[np.ndarray], np.ndarray],
    opset: int,
    tmp_path: Path,
    seed: int,
) -> None:
    """ONNX Runtime does not run all such models itself."""
    rng = np.random.default_rng(seed)
    arrays = weights(rng)
    function = helper.make_function("local", "Act", ["v"], ["w"], [node], [helper.make_opsetid("", of_function)])
    graph = mlp([helper.make_node("Act", ["mlp"], ["y"], domain="local")])
    graph.output[0].type.tensor_type.ClearField("shape")
    path = kept(saved(graph, tmp_path / "model.onnx", arrays, opset, functions=[function]))
    x = rng.normal(size=(5, K)).astype(np.float32)
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    expected = computes(np.maximum(x @ arrays["up"], 0) @ arrays["down"])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def halves(path: Path, parts: int, seed: int) -> Path:
    """The two halves of what an MLP makes change places, by a function whose caller says how many parts there are."""
    split = helper.make_node("Split", ["v"], ["left", "right"], name="split", axis=-1)
    split.attribute.add(name="num_outputs", type=onnx.AttributeProto.INT, ref_attr_name="parts")
    nodes = [split, helper.make_node("Concat", ["right", "left"], ["w"], axis=-1)]
    function = helper.make_function("local", "Turn", ["v"], ["w"], nodes, [helper.make_opsetid("", 18)], ["parts"])
    graph = mlp([helper.make_node("Turn", ["mlp"], ["y"], domain="local", parts=parts)])
    return saved(graph, path, weights(np.random.default_rng(seed)), opset=18, functions=[function])


def test_attributes_of_a_functions_caller(tmp_path: Path, seed: int) -> None:
    check_same(halves(tmp_path / "model.onnx", 2, seed), np.random.default_rng(seed))
    with pytest.raises(ModelError, match=r"\(Split\): num_outputs is 3, but it has 2"):
        load(halves(tmp_path / "three.onnx", 3, seed))
    gather = helper.make_node("GatherND", ["v", "i"], ["w"], name="gather")
    gather.attribute.add(name="batch_dims", type=onnx.AttributeProto.INT, ref_attr_name="b")
    function = helper.make_function("local", "Some", ["v", "i"], ["w"], [gather], [helper.make_opsetid("", 17)], ["b"])
    graph = mlp([helper.make_node("Some", ["mlp", "i"], ["y"], domain="local", b=-2)])
    arrays = weights(np.random.default_rng(seed)) | {"i": np.zeros((1, 1), np.int64)}
    path = saved(graph, tmp_path / "negative.onnx", arrays, functions=[function])
    with pytest.raises(ModelError, match=r"\(GatherND\): batch_dims is -2"):
        load(path)


def test_functions_that_cannot_be_converted(tmp_path: Path, seed: int) -> None:
    """Softmax of opset 11 works on all axes from its own on."""
    node = helper.make_node("Softmax", ["v"], ["w"], axis=1)
    function = helper.make_function("local", "Act", ["v"], ["w"], [node], [helper.make_opsetid("", 11)])
    graph = mlp([helper.make_node("Act", ["mlp"], ["y"], domain="local")])
    path = saved(graph, tmp_path / "model.onnx", weights(np.random.default_rng(seed)), functions=[function])
    with pytest.raises(ModelError, match="function 'Act' has a Softmax of opset 11"):
        load(path)


@pytest.mark.parametrize("shape", [None, ["p", "q"], "untyped"], ids=str)
def test_an_input_that_is_an_output(shape: list[str] | str | None, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = mlp([helper.make_node("Neg", ["mlp"], ["y"])])
    untyped = helper.make_empty_tensor_value_info("x")
    graph.output.append(untyped if shape == "untyped" else helper.make_tensor_value_info("x", TensorProto.FLOAT, shape))
    path = saved(graph, tmp_path / "model.onnx", weights(rng))
    check_same(path, rng)
    (x,) = onnx.load(kept(path)).graph.input
    assert x.type.tensor_type.elem_type == TensorProto.FLOAT
    assert [dim.dim_param or dim.dim_value for dim in x.type.tensor_type.shape.dim] == ["batch", K]


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("as_node", [False, True], ids=["initializer", "Constant"])
@pytest.mark.parametrize("indices", ["flat", "by axis"])
def test_sparse_weights(indices: str, as_node: bool, opset: int, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = weights(rng)
    up = arrays.pop("up")
    up[rng.random(up.shape) < 0.7] = 0
    places = np.flatnonzero(up) if indices == "flat" else np.argwhere(up)
    values = numpy_helper.from_array(up[up != 0], "up")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places.astype(np.int64), "places"), up.shape)
    graph = mlp([helper.make_node("Neg", ["mlp"], ["y"])])
    if as_node:
        graph.node.insert(0, helper.make_node("Constant", [], ["up"], sparse_value=sparse))
    else:
        graph.sparse_initializer.append(sparse)
    path = saved(graph, tmp_path / "model.onnx", arrays, opset)
    check_same(path, rng)
    np.testing.assert_array_equal(load(path).tensor("up"), up)
    if not as_node:
        assert [subgraph.kind for subgraph in find_subgraphs(load(path))] == ["mlp"]


@pytest.mark.parametrize(
    ("dims", "places"), [([4, 4], [16]), ([4, 4], [-1]), ([4, 4], [0, 1]), ([1 << 20, 1 << 20], [0]), ([-4, -4], [0])]
)
def test_damaged_sparse_weights(dims: list[int], places: list[int], tmp_path: Path) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    indices = numpy_helper.from_array(np.array(places, np.int64), "places")
    graph = mlp([helper.make_node("Neg", ["mlp"], ["y"])])
    graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, indices=indices, dims=dims))
    path = saved(graph, tmp_path / "model.onnx", weights(np.random.default_rng(0)))
    with pytest.raises(ModelError, match=r"sparse tensor 'sparse' of shape .* is damaged"):
        load(path)


@pytest.mark.parametrize("rows_of_weight", [1, K])
@pytest.mark.parametrize("columns_of_x", [1, K])
def test_einsums_that_broadcast(columns_of_x: int, rows_of_weight: int, tmp_path: Path, seed: int) -> None:
    """An operand of 1 along K is repeated, which MatMul does not do."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows_of_weight, M)).astype(np.float32)
    node = helper.make_node("Einsum", ["x", "w"], ["y"], equation="bk,kn->bn")
    shapes = {"x": ["batch", columns_of_x], "y": ["batch", M]}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    path = saved(helper.make_graph([node], "g", [x], [y]), tmp_path / "model.onnx", {"w": weight})
    values = rng.normal(size=(3, columns_of_x)).astype(np.float32)
    (found,) = onnxruntime.InferenceSession(kept(path)).run(None, {"x": values})
    expected = np.einsum("bk,kn->bn", values, weight)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
