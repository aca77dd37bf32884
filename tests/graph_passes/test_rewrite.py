"""What a rewrite writes: values against independent references, all or nothing, nothing left behind."""

import errno
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnx_models.graphs import Graph, assert_same, draw, mlp_model, parsed, quantized_twin, run, spec
from onnx_models.passes import found_mlps, plan_all, rewritten
from trt_nvfp4.calibration import recipes
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.load.by_hand import REWRITTEN
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.rewrite import calibration_tensors, lower, rewrite
from trt_nvfp4.graph_passes.subgraphs import values as weights
from trt_nvfp4.plugins.ops import OPS

Load = Callable[[onnx.ModelProto], SourceModel]
BF16 = "bfloat16"


@pytest.fixture
def model_and_graph(seed: int) -> tuple[onnx.ModelProto, Graph]:
    """x -> gated MLP with biases -> head -> y."""
    graph = Graph(spec(biases=True, k=64, intermediate=80, out=48, seed=seed))
    graph.linear(graph.mlp("x", "m"), "head", 48, 24, "y")
    return graph.model(["y"]), graph


def test_linears(model_and_graph: tuple[onnx.ModelProto, Graph], loaded: Load, seed: int) -> None:
    """MLP and linear both replaced; dynamic dimensions and graph outputs kept; nothing dead stays."""
    model, graph = model_and_graph
    source = loaded(model)
    before = source.path.read_bytes()
    result = rewritten(source)
    assert source.path.read_bytes() == before
    assert [node.op_type for node in source.graph if node.op_type == "MatMul"]  # the source model is as it was
    written = onnx.load(result.path)
    assert [node.op_type for node in written.graph.node] == ["NVFP4GatedMLP", "NVFP4Linear"]
    assert [d.dim_param for d in written.graph.input[0].type.tensor_type.shape.dim] == ["d0", "d1", ""]
    read = {name for node in written.graph.node for name in node.input}
    assert {tensor.name for tensor in written.graph.initializer} <= read
    assert {f.name for f in written.functions} == {"NVFP4GatedMLP", "NVFP4Linear"}
    for node in written.graph.node:
        assert {a.name for a in node.attribute} == set(OPS[node.op_type].attributes)
    x = draw(seed, 2, 3, 64)
    assert_same(result.path, quantized_twin(graph, model), x)
    assert result.weights_bytes_before == sum(array.nbytes for array in graph.weights.values())
    assert result.weights_bytes_after == sum(numpy_helper.to_array(t).nbytes for t in written.graph.initializer)


@pytest.mark.parametrize("scale_search", [0, 1, 2])
def test_4_bit_activations(
    model_and_graph: tuple[onnx.ModelProto, Graph], loaded: Load, seed: int, scale_search: int
) -> None:
    """Tensor scales are amax / 2688, with a search of block scales amax / 1536, or 0, so computed at run time, where
    nothing is known of the range; the op's reference agrees with ONNX Runtime."""
    source = loaded(model_and_graph[0])
    plan = plan_all(source, calibrated=True, kinds=("gated_mlp",))
    plan = replace(plan, recipe=str(recipes.Recipe(scale_search=scale_search)))
    largest = 1536 if scale_search else 2688
    amax = {name: 3.5 + i for i, name in enumerate(calibration_tensors(plan))}
    for statistics, scales in (
        (Statistics(amax, 1), [3.5 / largest, 4.5 / largest]),
        (Statistics(dict.fromkeys(amax, 0.0), 1), [0.0, 0.0]),
        (Statistics(dict.fromkeys(amax, 1e-43), 1), [0.0, 0.0]),
        (None, [0.0, 0.0]),
    ):
        result = rewritten(source, plan, statistics)
        written = onnx.load(result.path)
        tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
        (node,) = [node for node in written.graph.node if node.domain]
        np.testing.assert_allclose([tensors[name] for name in node.input[-2:]], scales, rtol=1e-6)
        x = draw(seed, 2, 3, 64)
        written.graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None))
        operands = [torch.from_numpy(np.array(tensors[name])) for name in node.input[1:]]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert attributes["static_scales"] == int(all(scales))
        assert attributes["scale_search"] == scale_search
        expected = OPS["NVFP4GatedMLP"].reference(torch.from_numpy(x), *operands, **attributes)
        found = run(written, x)[1]
        # A value on the edge between two FP4 values may fall to either side.
        close = np.isclose(found, expected.numpy(), rtol=1e-3, atol=1e-4)
        assert close.mean() > 0.9
        assert np.abs(found - expected.numpy()).max() < 0.1 * np.abs(found).max()


@pytest.mark.parametrize("reason", ["activation", "output", "weight in common"])
def test_linears_of_a_refused_mlp(reason: str, loaded: Load, seed: int) -> None:
    """They are replaced one by one where the MLP cannot be."""
    changes = {"spelling": "h = Tanh(a)", "activation": "Tanh"} if reason == "activation" else {}
    model, graph = mlp_model(spec(gated=False, seed=seed, **changes))
    if reason == "output":
        model.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [None] * 3))
    if reason == "weight in common":
        negated = helper.make_node("Neg", ["x"], ["n"])
        model.graph.node.extend([negated, helper.make_node("MatMul", ["n", "up"], ["z"])])
        model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None] * 3))
    source = loaded(model)
    mlp, *linears = find_subgraphs(source)
    assert (mlp.kind, mlp.unsupported is None) == ("mlp", False)
    assert [(part.kind, part.unsupported) for part in linears] == [("linear", None)] * (3 if "common" in reason else 2)
    result = rewritten(source)
    written = onnx.load(result.path)
    assert [node.op_type for node in written.graph.node if node.domain] == ["NVFP4Linear"] * len(linears)
    x = draw(seed, 2, 3, 32)
    assert_same(result.path, quantized_twin(graph, model), x)


def test_statistics_of_another_model(
    model_and_graph: tuple[onnx.ModelProto, Graph], loaded: Load, tmp_path: Path
) -> None:
    source = loaded(model_and_graph[0])
    plan = plan_all(source, calibrated=True)
    first, second, *_ = wanted = calibration_tensors(plan)
    with pytest.raises(CalibrationError, match=rf"hold 0 of the {len(wanted)} tensors .*, and not '{first}'"):
        rewrite(source, plan, Statistics({"other": 1.0}, 1), tmp_path / "out.onnx")
    with pytest.raises(CalibrationError, match=rf"hold 1 of the {len(wanted)} tensors .*, and not '{second}'"):
        rewrite(source, plan, Statistics({first: 1.0}, 1), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_calibration_inside_local_functions(loaded: Load, seed: int) -> None:
    """MLPs written as calls of one function are found, and the tensors inside each call have statistics."""
    text = """<ir_version: 10, opset_import: ["": 21, "local": 1]>
        g (float[rows, 32] x) => (float[rows, 32] y) {
            m = local.mlp(x, gate0, up0, down0)
            n = Tanh(m)
            y = local.mlp(n, gate1, up1, down1)
        }
        <domain: "local", opset_import: ["": 21]>
        mlp (x, gate, up, down) => (y) {
            g = MatMul(x, gate) s = Sigmoid(g) a = Mul(g, s) u = MatMul(x, up) h = Mul(a, u) y = MatMul(h, down)
        }"""
    weights = {
        f"{name}{layer}": draw((seed, layer, i), *((48, 32) if name == "down" else (32, 48)))
        for layer in range(2)
        for i, name in enumerate(("gate", "up", "down"))
    }
    source = loaded(parsed(text, weights))
    plan = plan_all(source, calibrated=True)
    x = draw(seed, 5, 32)
    statistics = collect(source.path, calibration_tensors(plan), [{"x": x}])
    expected = []
    for layer in range(2):
        gate = x @ weights[f"gate{layer}"]
        hidden = gate / (1 + np.exp(-gate)) * (x @ weights[f"up{layer}"])
        expected += [np.abs(x).max(), np.abs(hidden).max()]
        x = np.tanh(hidden @ weights[f"down{layer}"])
    names = [name for entry in plan.subgraphs for name in entry.linear_inputs]
    np.testing.assert_allclose([statistics.amax[name] for name in dict.fromkeys(names)], expected, rtol=1e-4)
    rewritten(source, plan, statistics)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("linear", ["matmul", "transpose", "gemm_transposed"])
def test_fp8(linear: str, calibrated: bool, loaded: Load, seed: int) -> None:
    """Weights per output channel, inputs per tensor; the same values as FP8 casts of the weights made here."""
    model, graph = mlp_model(spec(linear=linear, biases=True, seed=seed))
    source = loaded(model)
    plan = plan_all(source, precision="fp8", calibrated=calibrated)
    statistics = Statistics(dict.fromkeys(calibration_tensors(plan), 50.0), 1) if calibrated else None
    result = rewritten(source, plan, statistics)
    written = onnx.load(result.path)
    onnx.checker.check_model(result.path)
    kinds = [node.op_type for node in written.graph.node]
    assert kinds.count("DequantizeLinear") == (5 if calibrated else 3)
    assert kinds.count("QuantizeLinear") == (2 if calibrated else 0)
    (names,) = result.realized.values()
    assert set(names) <= {node.name for node in written.graph.node if node.op_type in ("MatMul", "Gemm")}
    noted = {entry.key: entry.value for entry in written.metadata_props}[REWRITTEN]
    assert set(json.loads(noted)["quantized"]) == (set(names) if calibrated else set())
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in twin.graph.initializer}
    for name, in_out in (part for group in graph.groups for part in group):
        values = graph.weights[name]
        scale = (np.abs(values).max(0 if in_out else 1, keepdims=True) / np.float32(448)).astype(np.float32)
        rounded = np.clip(values / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
        tensors[name].CopyFrom(numpy_helper.from_array(rounded, name))
    x = draw(seed, *((5,) if linear.startswith("gemm") else (2, 3)), 32)
    (expected,), (found,) = run(twin, x), run(result.path, x)
    if calibrated:  # two roundings to three bits of mantissa: 3 to 7 % in all, some single values far more
        assert 0.01 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.12
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_a_product_whose_sign_is_turned(loaded: Load, seed: int) -> None:
    """By Gemm's alpha: scales of weights are positive all the same."""
    model, _ = mlp_model(spec(linear="gemm", gated=False, seed=seed))
    for node in model.graph.node:
        if node.op_type == "Gemm":
            node.attribute.append(helper.make_attribute("alpha", -0.5))
    x = draw(seed, 50, 32)
    (found,), (expected,) = run(rewritten(loaded(model)).path, x), run(model, x)
    assert np.linalg.norm(found - expected) < 0.25 * np.linalg.norm(expected)


def test_fp8_of_channels_of_zeros(loaded: Load, seed: int) -> None:
    """Pruned, say: their scale is not 0, which would make them NaN."""
    model, graph = mlp_model(spec(seed=seed))
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    graph.weights["down"][:, 3] = 0
    tensors["down"].CopyFrom(numpy_helper.from_array(graph.weights["down"], "down"))
    source = loaded(model)
    x = draw(seed, 2, 3, 32)
    (found,), (expected,) = run(rewritten(source, plan_all(source, precision="fp8")).path, x), run(model, x)
    assert not found[..., 3].any()
    np.testing.assert_allclose(found, expected, atol=0.15 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float16", BF16])
def test_16_bit_weights(dtype: str, loaded: Load, seed: int) -> None:
    """The packed weights of a 16-bit model are those of its values; biases keep its type."""
    model, graph = mlp_model(spec(dtype=dtype, biases=True, seed=seed))
    result = rewritten(loaded(model))
    tensors = {t.name.split("/")[-1]: t for t in onnx.load(result.path).graph.initializer}
    assert tensors["gate_up_bias"].data_type == {"float16": TensorProto.FLOAT16, BF16: TensorProto.BFLOAT16}[dtype]
    biases = np.stack([graph.weights["gate_bias"], graph.weights["up_bias"]], 1).reshape(-1)
    np.testing.assert_array_equal(numpy_helper.to_array(tensors["gate_up_bias"]), biases)
    down = torch.from_numpy(graph.weights["down"].astype(np.float32)).T.contiguous()
    from trt_nvfp4.common import nvfp4
    from trt_nvfp4.plugins.ops.number_formats import tile_scales

    packed, scales, tensor_scale = nvfp4.quantize(down)
    np.testing.assert_array_equal(numpy_helper.to_array(tensors["down_weight"]), packed.view(torch.int8))
    np.testing.assert_array_equal(
        numpy_helper.to_array(tensors["down_weight.block_scales"]), tile_scales(scales).view(torch.int8)
    )
    assert numpy_helper.to_array(tensors["down_weight.tensor_scale"]) == tensor_scale


def test_chunks_do_not_matter(
    model_and_graph: tuple[onnx.ModelProto, Graph], loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized a few rows at a time, the files are the same byte for byte."""
    source = loaded(model_and_graph[0])
    whole = rewritten(source).path
    first = whole.read_bytes(), whole.with_name(f"{whole.name}.data").read_bytes()
    monkeypatch.setattr(weights, "_CHUNK_VALUES", 200)
    small = rewritten(source).path
    assert (small.read_bytes(), small.with_name(f"{small.name}.data").read_bytes()) == first


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers(value: float, loaded: Load) -> None:
    model, graph = mlp_model(spec())
    array = graph.weights["down"].copy()
    array[3, 5] = value
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(array, "down"))
    source = loaded(model)
    for precision in ("nvfp4", "fp8"):
        with pytest.raises(ModelError, match="'down' holds NaN or Inf"):
            rewritten(source, plan_all(source, precision))
        assert [path.name for path in source.path.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("precision", ["nvfp4", "fp8"])
def test_weights_without_values(precision: str, loaded: Load) -> None:
    text = "g (float[2, 32] x) => (float[2, 32] y) { h = MatMul(x, up) a = Relu(h) y = MatMul(a, down) }"
    source = loaded(parsed(text, {"up": (32, 0), "down": (0, 32)}))
    with pytest.raises(ModelError, match=r"weight 'up' is empty, \[0, 32\]"):
        rewritten(source, plan_all(source, precision))


@pytest.mark.parametrize("decision", ["nvfp4_w4a16", "fp8", "bf16"])
def test_many_subgraphs_take_no_more_passes_than_few(
    decision: str, loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the graph's nodes or initializers; and a function that many call is parsed once."""
    calls = Counter[object]()

    def count(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any) -> Any:
            calls[owner] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counted)

    count(ir.Graph, "__iter__")
    count(type(ir.Graph([], [], nodes=[]).initializers), "__iter__")
    count(onnx.parser, "parse_function")
    found = []
    for mlps in (2, 5):
        graph = Graph(spec())
        source = loaded(graph.model([graph.mlp("x", f"y{i}", f"mlp{i}_") for i in range(mlps)]))
        plan = plan_all(source)
        for entry in plan.subgraphs:
            entry.decision, entry.op = decision, "FP8GatedMLP" if decision == "fp8" else entry.op
        assert len(plan.subgraphs) == mlps
        calls.clear()
        lower(source, plan, None)
        found.append(dict(calls))
    assert found[0] == found[1]


def test_disk_full(
    model_and_graph: tuple[onnx.ModelProto, Graph], loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails half way leaves what was there before, and nothing else."""
    source = loaded(model_and_graph[0])
    good = rewritten(source).path
    files = {path.name: path.read_bytes() for path in good.parent.iterdir()}

    def fail(self: weights.StreamedTensor, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights.StreamedTensor, "tofile", fail)
    monkeypatch.setattr(weights.StreamedTensor, "tobytes", fail, raising=False)
    monkeypatch.setattr("trt_nvfp4.graph_passes.ir.save._INLINE_BYTES", 0)
    with pytest.raises(OSError, match="No space left") as failure:
        rewritten(source)
    assert failure.value.filename == str(good)
    assert {path.name: path.read_bytes() for path in good.parent.iterdir()} == files


def test_killed_between_data_and_model(
    model_and_graph: tuple[onnx.ModelProto, Graph], loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier run's model would read the new weights, which have its sizes."""
    source = loaded(model_and_graph[0])
    monkeypatch.setattr("trt_nvfp4.graph_passes.ir.save._INLINE_BYTES", 0)
    path = rewritten(source).path

    def replace(made: str | Path, destination: str | Path) -> None:
        if Path(destination) == path:
            raise KeyboardInterrupt
        Path(made).rename(destination)

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        rewritten(source, plan_all(source, calibrated=True))
    assert {file.name for file in path.parent.iterdir()} == {"model.onnx", f"{path.name}.data"}


def test_progress(
    model_and_graph: tuple[onnx.ModelProto, Graph], loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trt_nvfp4.graph_passes.ir.save._INLINE_BYTES", 64)
    source = loaded(model_and_graph[0])
    calls: list[tuple[int, int, str]] = []
    rewrite(source, plan_all(source), None, tmp_path / "out.onnx", lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == calls[-1][1] == (tmp_path / "out.onnx.data").stat().st_size


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("a = MatMul(x, up)  r = Relu(a)  f = Reshape(r, rows)  y = Gemm(f, down)", (6, 16)),
        ("a = MatMul(x, up)  r = Relu(a)  f = Reshape(r, rows)  y = MatMul(f, down)", (6, 16)),
        (
            """x_rows = Reshape(x, rows_x)  a = MatMul(x_rows, up)  size = Shape<end = 2>(x)  n = Shape<start = -1>(up)
            a_shape = Concat<axis = 0>(size, n)  a_3d = Reshape(a, a_shape)  r = Relu(a_3d)  f = Reshape(r, rows)
            y_rows = MatMul(f, down)  m = Shape<start = -1>(down)  y_shape = Concat<axis = 0>(size, m)
            y = Reshape(y_rows, y_shape)""",
            (2, 3, 16),
        ),
    ],
    ids=["Gemm", "MatMul", "tf2onnx"],
)
def test_reshapes_around_linears(body: str, shape: tuple[int, ...], loaded: Load, seed: int) -> None:
    """Products of two dimensions among tensors of three: the rewritten model keeps the shapes of both."""
    text = f"""g (float[b, s, 16] x) => (float[{"n, " * (len(shape) - 1)}16] y)
    <int64[2] rows = {{-1, 32}}, int64[2] rows_x = {{-1, 16}}> {{ {body} }}"""
    model = parsed(text, {"up": (16, 32), "down": (32, 16)}, seed)
    graph = Graph(spec(), groups=[[("up", True)], [("down", True)]])
    graph.weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if "rows" not in t.name}
    source = loaded(model)
    assert [m.unsupported for m in found_mlps(source)] == [None]
    x = draw(seed, 2, 3, 16)
    (expected,), (found,) = run(quantized_twin(graph, model), x), run(rewritten(source).path, x)
    assert found.shape == expected.shape == shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_a_bias_for_each_row_stays_an_add(loaded: Load, seed: int) -> None:
    """A vector that is transposed to a column adds the same number to a whole row, other than a linear's bias."""
    text = """g (float[16, 32] x) => (float[16, 16] y)
        { m = MatMul(x, w)  column = Transpose<perm = [1, 0]>(row)  y = Add(m, column) }"""
    graph = Graph(spec(seed=seed))
    graph.groups.append([(graph.draw("w", 32, 16), True)])
    graph.draw("row", 1, 16)
    model = parsed(text, graph.weights)
    x = draw(seed, 16, 32)
    assert_same(rewritten(loaded(model)).path, quantized_twin(graph, model), x)


def test_written_model_is_refused_as_source(model_and_graph: tuple[onnx.ModelProto, Graph], loaded: Load) -> None:
    result = rewritten(loaded(model_and_graph[0]))
    assert "trt_nvfp4.plan" in {entry.key for entry in onnx.load(result.path).metadata_props}
    with pytest.raises(ModelError, match="rewritten already"):
        load(result.path)


@pytest.mark.parametrize(("up", "down"), [("float16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("precision", ["nvfp4", "fp8", "bf16"])
def test_linears_of_different_types(up: str, down: str, precision: str, loaded: Load, seed: int) -> None:
    """T5's `wo` stays float32 where the rest is float16: what computes MLPs in one type passes them on."""
    x_type, y_type = (name.removesuffix("32") for name in (up, down))
    code = {"float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[y_type]
    text = f"""g ({x_type}[b, 32] x) => ({y_type}[b, 16] y)
        {{ a = MatMul(x, up)  r = Relu(a)  c = Cast<to = {code}>(r)  y = MatMul(c, down) }}"""
    model = parsed(text, {"up": draw(seed, 32, 48).astype(up), "down": draw(seed, 48, 16).astype(down)})
    source = loaded(model)
    plan = plan_all(source, precision)
    (entry,) = plan.subgraphs
    assert entry.decision == ("keep" if precision == "bf16" else "fp8")
    if precision == "nvfp4":
        assert entry.reason.startswith(f"its linears multiply in different types: {up}, and ")
    x = draw(seed, 4, 32).astype(up)
    (found,) = run(rewritten(source, plan).path, x)
    for tensor in model.graph.initializer if entry.decision == "fp8" else []:
        values = numpy_helper.to_array(tensor)
        scale = (np.abs(values).max(0).astype(np.float32) / np.float32(448)).astype(values.dtype)
        codes = np.clip(values / scale.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        rounded = codes.astype(values.dtype) * scale
        tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    (expected,) = run(model, x)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("precision", ["nvfp4", "fp8", "bf16"])
def test_names_that_the_model_has_already(precision: str, loaded: Load, seed: int) -> None:
    """Initializers of the model have the names that rewriting gives to what it makes."""
    taken = ["up.bfloat16", "up.fp8", "mlp_0/up_weight"]
    products = "  ".join(f"z{i} = MatMul(x, w{i})" for i in range(len(taken)))
    text = f"""g (float[b, 32] x) => (float[b, 96] y)
        {{ a = MatMul(x, up)  r = Relu(a)  m = MatMul(r, down)  {products}  s = Sum(m, z0, z1, z2)  y = Add(s, s) }}"""
    model = parsed(text, {"up": (32, 32), "down": (32, 96)} | dict.fromkeys(taken, (32, 96)), seed)
    for node in model.graph.node:
        node.input[:] = [taken[int(name[1:])] if name in ("w0", "w1", "w2") else name for name in node.input]
    source = loaded(model)
    plan = plan_all(source, precision, kinds=("mlp",))
    x = draw(seed, 4, 32)
    (found,), (expected,) = run(widen(onnx.load(rewritten(source, plan).path)), x), run(model, x)
    np.testing.assert_allclose(found, expected, atol=0.3 * np.abs(expected).max())
    assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)
