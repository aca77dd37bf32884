"""A network that a graph calls several times, as an unrolled denoising loop does: its weights are made once."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_models.graphs import ACTIVATION_SPELLINGS, Graph, Spec, assert_same, draw, parsed, quantized_twin, run, spec
from onnx_models.passes import EVERYTHING, found_mlps, plan_all, rewritten
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.rewrite import RewriteResult, calibration_tensors, rewrite
from trt_nvfp4.graph_passes.weights.awq_folding import find_foldings
from trt_nvfp4.plugins.ops import OPS

Load = Callable[[onnx.ModelProto], SourceModel]
STEPS = 3
RELU2 = ACTIVATION_SPELLINGS["relu2"][0]


def unrolled(of: Spec, between: str | None = "Tanh") -> tuple[onnx.ModelProto, Graph]:
    """The spec's MLP, `STEPS` times over the same weights; the outputs are y0, y1, ... of every step."""
    graph = Graph(of)
    graph.mlp("x", "y0")
    once = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.nodes]
    computed = {name for node in once for name in node.output}
    for step in range(1, STEPS):
        start = graph.op(between, [f"y{step - 1}"], f"x{step}") if between else f"y{step - 1}"
        names = {name: f"{name}_{step}" for name in computed} | {"x": start, "y0": f"y{step}"}
        for node in once:
            copy = onnx.NodeProto.FromString(node.SerializeToString())
            copy.name = f"{node.name}_{step}"
            copy.input[:] = [names.get(name, name) for name in node.input]
            copy.output[:] = [names[name] for name in node.output]
            graph.nodes.append(copy)
    rank = 2 if of.linear.startswith("gemm") else 3
    return graph.model([f"y{step}" for step in range(STEPS)], rank), graph


def small(**changes: object) -> Spec:
    return spec(**{"k": 32, "intermediate": 48, "out": 32, "biases": True} | changes)


def written_bytes(model: onnx.ModelProto) -> int:
    return sum(numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer)


@pytest.mark.parametrize("linear", ["matmul", "transpose", "gemm_scaled"])
@pytest.mark.parametrize("gated", [False, True])
def test_every_step_is_replaced(linear: str, gated: bool, loaded: Load, seed: int) -> None:
    """All read one set of quantized weights; every output is that of the model with dequantized weights."""
    model, graph = unrolled(small(linear=linear, gated=gated, seed=seed))
    result = rewritten(loaded(model))
    written = onnx.load(result.path)
    plugins = [node for node in written.graph.node if node.domain]
    assert sorted(node.name for node in plugins) == sorted(result.realized)
    assert len(plugins) == STEPS
    formal = [i for i, name in enumerate(plugins[0].input) if "_weight" in name and "norm" not in name]
    assert len(formal) == 6
    for i in formal:
        assert len({node.input[i] for node in plugins}) == 1
    once = sum(array.nbytes for array in graph.weights.values())
    assert result.weights_bytes_before == once
    assert result.weights_bytes_after == written_bytes(written) < once / 2
    x = draw(seed, 5, 32) if linear.startswith("gemm") else draw(seed, 2, 5, 32)
    assert_same(result.path, quantized_twin(graph, model), x)


def test_linears(loaded: Load, seed: int) -> None:
    graph = Graph(small(biases=False, seed=seed))
    graph.linear("x", "w", 32, 32, "y0")
    for step in (1, 2):
        graph.op("MatMul", [graph.op("Softmax", [f"y{step - 1}"], f"x{step}"), "w"], f"y{step}")
    model = graph.model(["y0", "y1", "y2"])
    result = rewritten(loaded(model))
    written = onnx.load(result.path)
    plugins = [node for node in written.graph.node if node.domain]
    assert [node.op_type for node in plugins] == ["NVFP4Linear"] * 3
    assert len({node.input[1] for node in plugins}) == 1
    x = draw(seed, 2, 5, 32)
    assert_same(result.path, quantized_twin(graph, model), x)


def test_consecutive_steps_are_not_stacked(loaded: Load) -> None:
    """A persistent op of several layers would hold the same weights once per layer."""
    model, _ = unrolled(small(), between=None)
    del model.graph.output[:-1]
    mlps = found_mlps(loaded(model))
    assert [mlp.shapes["layers"] for mlp in mlps] == [1] * STEPS


def with_step_of(other: onnx.ModelProto, step: int, model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, whose weights are read by Transposes, with the matrices of `other` in one step."""
    matrices = [tensor for tensor in other.graph.initializer if len(tensor.dims) == 2]
    model.graph.initializer.extend(
        numpy_helper.from_array(numpy_helper.to_array(tensor), f"own_{tensor.name}") for tensor in matrices
    )
    suffix = f"_{step}" if step else ""
    for node in list(model.graph.node):
        if node.op_type == "Transpose" and (node.name.endswith(suffix) if step else "_" not in node.name):
            node.input[0] = f"own_{node.input[0]}"
    return model


@pytest.mark.parametrize("kept", range(STEPS))
def test_one_step_is_kept(kept: int, loaded: Load, seed: int) -> None:
    """It computes with the model's own weights, the others with the quantized ones: both are written."""
    model, graph = unrolled(small(linear="transpose", seed=seed))
    source = loaded(model)
    plan = plan_all(source)
    plan.subgraphs[kept].decision = "keep"
    result = rewritten(source, plan)
    twin = with_step_of(model, kept, quantized_twin(graph, model))
    x = draw(seed, 2, 5, 32)
    assert_same(result.path, twin, x)
    assert result.weights_bytes_after == written_bytes(onnx.load(result.path)) > result.weights_bytes_before


def test_weights_are_made_for_the_inputs_of_all_steps(loaded: Load, seed: int) -> None:
    """What a recipe knows of a weight's inputs is the mean over the steps, as if one step had seen all samples."""
    recipe = "local-hessian+gptq"
    model, graph = unrolled(small(gated=False, spelling=RELU2, activation="relu2", seed=seed))
    source = loaded(model)
    plan = plan_all(source, calibrated=True, recipe=recipe)
    samples = [{"x": draw(seed + i, 2, 32, 32)} for i in range(2)]
    statistics = collect(source.path, calibration_tensors(plan), samples)
    several = onnx.load(rewritten(source, plan, statistics).path)

    once = Graph(graph.spec)
    once.mlp("x", "y0")
    single = loaded(once.model(["y0"]))
    (entry,) = (plan_of_one := plan_all(single, calibrated=True, recipe=recipe)).subgraphs
    arrays, rows = {}, {}
    for i, tensor in enumerate(entry.linear_inputs):
        steps = [e.linear_inputs[i] for e in plan.subgraphs]
        kinds = statistics.arrays[steps[0]]
        arrays[tensor] = {
            kind: (np.max if kind == "channel_amax" else np.mean)([statistics.arrays[s][kind] for s in steps], axis=0)
            for kind in kinds
        }
        rows[tensor] = sum(statistics.rows[step] for step in steps)
    amax = dict.fromkeys(entry.linear_inputs, 1.0)
    alone = onnx.load(rewritten(single, plan_of_one, Statistics(amax, 2, arrays, rows=rows)).path)

    def weights(written: onnx.ModelProto) -> list[bytes]:
        tensors = {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in written.graph.initializer}
        node = next(node for node in written.graph.node if node.domain)
        return [tensors[name] for name in node.input if "_weight" in name and "norm" not in name]

    assert weights(several) == weights(alone)


def test_awq_leaves_them(loaded: Load) -> None:
    """Scales that suit one step would be wrong for the others: the weights, which Transposes read, are not folded."""
    model, _ = unrolled(small(gated=False, spelling=RELU2, activation="relu2", linear="transpose", biases=False))
    source = loaded(model)
    assert parse("mse+awq").awq
    foldings, obstacles = find_foldings(found_mlps(source))
    assert foldings == []
    assert len(obstacles) == STEPS


def fp8_twin(graph: Graph, model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every weight rounded to E4M3 by output channel."""
    twin = onnx.ModelProto.FromString(model.SerializeToString())
    tensors = {tensor.name: tensor for tensor in twin.graph.initializer}
    for name, in_out in (part for group in graph.groups for part in group):
        values = graph.weights[name]
        scale = np.abs(values).max(0 if in_out else 1, keepdims=True) / np.float32(448)
        rounded = np.clip(values / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
        tensors[name].CopyFrom(numpy_helper.from_array(rounded, name))
    return twin


@pytest.mark.parametrize("linear", ["matmul", "transpose", "gemm_transposed"])
def test_fp8(linear: str, loaded: Load, seed: int) -> None:
    """All read one FP8 weight each; every output is that of the model with weights rounded to FP8."""
    model, graph = unrolled(small(linear=linear, seed=seed))
    source = loaded(model)
    plan = plan_all(source, "fp8")
    assert [entry.decision for entry in plan.subgraphs] == ["fp8"] * STEPS
    result = rewritten(source, plan)
    onnx.checker.check_model(result.path)
    written = onnx.load(result.path)
    assert [node.op_type for node in written.graph.node].count("DequantizeLinear") == 3
    assert result.weights_bytes_after == written_bytes(written) < result.weights_bytes_before / 2
    x = draw(seed, 5, 32) if linear.startswith("gemm") else draw(seed, 2, 5, 32)
    assert_same(result.path, fp8_twin(graph, model), x)


def test_fp8_activations(loaded: Load, seed: int) -> None:
    """Every step quantizes its own inputs, by their own scales."""
    source = loaded(model := unrolled(small(seed=seed))[0])
    plan = plan_all(source, "fp8", calibrated=True)
    x = draw(seed, 2, 5, 32)
    statistics = collect(source.path, calibration_tensors(plan), [{"x": x}])
    result = rewritten(source, plan, statistics)
    written = onnx.load(result.path)
    tensors = {
        tensor.name: float(numpy_helper.to_array(tensor)) for tensor in written.graph.initializer if not tensor.dims
    }
    scales = {node.input[0]: tensors[node.input[1]] for node in written.graph.node if node.op_type == "QuantizeLinear"}
    assert scales == pytest.approx({name: amax / 448 for name, amax in statistics.amax.items()})
    assert len(scales) == 2 * STEPS
    for found, expected in zip(run(result.path, x), run(model, x), strict=True):
        assert 0 < np.linalg.norm(found - expected) < 0.12 * np.linalg.norm(expected)


@pytest.mark.parametrize("others", ["keep", "nvfp4_w4a16"])
@pytest.mark.parametrize("fp8", range(STEPS))
def test_one_step_in_fp8(fp8: int, others: str, loaded: Load, seed: int) -> None:
    """It alone reads FP8 weights, although the others read the same ones of the model."""
    model, graph = unrolled(small(linear="transpose", seed=seed))
    source = loaded(model)
    plan = plan_all(source)
    for step, entry in enumerate(plan.subgraphs):
        entry.decision = "fp8" if step == fp8 else others
    result = rewritten(source, plan)
    x = draw(seed, 2, 5, 32)
    rest = quantized_twin(graph, model) if others != "keep" else onnx.ModelProto.FromString(model.SerializeToString())
    twin = with_step_of(fp8_twin(graph, model), fp8, rest)
    assert_same(result.path, twin, x)


@pytest.mark.parametrize("linear", ["matmul", "transpose"])
def test_fp8_gated_mlps(linear: str, loaded: Load, seed: int) -> None:
    """All plugins read one FP8 weight each; the outputs are those of a plugin alone, step after step."""
    model, graph = unrolled(small(linear=linear, seed=seed))
    once = Graph(graph.spec)
    once.mlp("x", "y0")

    def in_fp8(proto: onnx.ModelProto, name: str) -> RewriteResult:
        source = loaded(proto)
        plan = plan_all(source, "fp8")
        for entry in plan.subgraphs:
            entry.op = "FP8GatedMLP"
        plan.check(source, EVERYTHING)
        return rewrite(source, plan, None, source.path.with_name(name))

    several, one = in_fp8(model, "several.onnx"), in_fp8(once.model(["y0"]), "one.onnx")
    plugins = [node for node in onnx.load(several.path).graph.node if node.domain]
    assert [node.op_type for node in plugins] == ["FP8GatedMLP"] * STEPS
    names = [formal.name for formal in OPS["FP8GatedMLP"].inputs]
    for part in ("gate_up_weight", "gate_up_scale", "down_weight", "down_scale"):
        assert len({node.input[names.index(part)] for node in plugins}) == 1
    x = draw(seed, 2, 5, 32)
    for found in run(several.path, x):
        (expected,) = run(one.path, x)
        # But for rows of which a value lies between two of FP8: ONNX Runtime need not sum alike in both models.
        apart = np.abs(found - expected) > 1e-4 * np.abs(expected) + 1e-5 * np.abs(expected).max()
        assert apart.any(axis=-1).mean() <= 0.2
        assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)
        x = np.tanh(expected)


def tied_autoencoder(seed: int) -> onnx.ModelProto:
    text = "g (float[b, 32] x) => (float[b, 32] y)"
    text += " { a = MatMul(x, w)  r = Relu(a)  t = Transpose<perm = [1, 0]>(w)  y = MatMul(r, t) }"
    return parsed(text, {"w": (32, 48)}, seed)


def test_fp8_of_a_weight_in_both_orientations(loaded: Load, seed: int) -> None:
    """No axis of the weight is the outputs' in both products."""
    (entry,) = plan_all(loaded(tied_autoencoder(seed)), "fp8").subgraphs
    assert entry.decision != "fp8"
    assert "its linears read weight 'w' in both orientations" in entry.reason


@pytest.mark.parametrize("linear", ["matmul", "transpose", "gemm_transposed"])
def test_16_bits(linear: str, loaded: Load, seed: int) -> None:
    """All read one set of constants in float16, written once, and compute what each alone computes."""
    model, graph = unrolled(small(linear=linear, seed=seed))
    source = loaded(model)
    plan = plan_all(source, "bf16")
    assert [entry.decision for entry in plan.subgraphs] == ["bf16"] * STEPS
    for entry in plan.subgraphs:
        entry.decision = "fp16"  # ONNX Runtime has no kernels for bfloat16
    result = rewritten(source, plan)
    onnx.checker.check_model(result.path, full_check=True)
    weights = sum(array.nbytes for array in graph.weights.values())
    assert result.weights_bytes_after == written_bytes(onnx.load(result.path)) == weights / 2
    x = draw(seed, 5, 32) if linear.startswith("gemm") else draw(seed, 2, 5, 32)
    for found, expected in zip(run(result.path, x), run(model, x), strict=True):
        assert 0 < np.linalg.norm(found - expected) < 3e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("others", ["keep", "nvfp4_w4a16", "fp8"])
@pytest.mark.parametrize("half", range(STEPS))
def test_one_step_in_16_bits(half: int, others: str, loaded: Load, seed: int) -> None:
    """It alone reads converted weights and what Transposes make of them."""
    model, graph = unrolled(small(linear="transpose", seed=seed))
    source = loaded(model)
    plan = plan_all(source)
    for step, entry in enumerate(plan.subgraphs):
        entry.decision = "fp16" if step == half else others
    result = rewritten(source, plan)
    onnx.checker.check_model(result.path, full_check=True)
    x = draw(seed, 2, 5, 32)
    twins = {"keep": lambda *_: onnx.ModelProto.FromString(model.SerializeToString()), "fp8": fp8_twin}
    twin = with_step_of(model, half, twins.get(others, quantized_twin)(graph, model))
    for found, expected in zip(run(result.path, x), run(twin, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-2 * np.abs(expected).max())


def test_16_bits_of_a_weight_in_both_orientations(loaded: Load, seed: int) -> None:
    source = loaded(tied_autoencoder(seed))
    plan = plan_all(source, "fp8")
    (entry,) = plan.subgraphs
    assert entry.decision == "bf16"
    entry.decision = "fp16"
    result = rewritten(source, plan)
    assert result.weights_bytes_after == result.weights_bytes_before / 2
    x = draw(seed, 5, 32)
    (found,), (expected,) = run(result.path, x), run(source.path, x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-3 * np.abs(expected).max())


def test_native_nvfp4(loaded: Load, seed: int) -> None:
    """Every product reads the same FP4 values, block scales and tensor scale."""
    model, _ = unrolled(small(seed=seed))
    source = loaded(model)
    native = replace(EVERYTHING, native_nvfp4=True)
    plan = make_plan(source, find_subgraphs(source), native, PlanOptions(precision="native-nvfp4", calibrated=True))
    assert [entry.decision for entry in plan.subgraphs] == ["native_nvfp4"] * STEPS
    x = draw(seed, 2, 5, 32)
    result = rewritten(source, plan, collect(source.path, calibration_tensors(plan), [{"x": x}]))
    written = onnx.load(result.path)
    types = [tensor.data_type for tensor in written.graph.initializer]
    assert types.count(onnx.TensorProto.FLOAT4E2M1) == types.count(onnx.TensorProto.FLOAT8E4M3FN) == 3
    for found, expected in zip(ReferenceEvaluator(written).run(None, {"x": x}), run(model, x), strict=True):
        assert np.linalg.norm(found - expected) < 0.5 * np.linalg.norm(expected)


def test_a_step_that_cannot_be_replaced(loaded: Load) -> None:
    """An output within one step refuses that step, and the others with it, whose weights it keeps; not their linears,
    which share each weight as a whole."""
    model, _ = unrolled(small())
    model.graph.output.append(onnx.helper.make_tensor_value_info("h_1", onnx.TensorProto.FLOAT, [None] * 3))
    found = find_subgraphs(loaded(model))
    linears = [part for part in found if part.kind == "linear"]  # gate and up are one
    assert [(len(part.linears), part.unsupported) for part in linears] == [(2, None), (1, None)] * STEPS
    reasons = [part.unsupported.text for part in found if part.kind != "linear"]
    assert len(reasons) == STEPS
    assert sum("'h_1' is also an output" in reason for reason in reasons) == 1
    assert sum("its weight 'gate' is shared" in reason for reason in reasons) == STEPS - 1


def with_copies(proto: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Every node after the first to read one of the named weights reads a copy of its own."""
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    for name in names:
        for number, node in enumerate([node for node in proto.graph.node if name in node.input][1:]):
            copy = proto.graph.initializer.add()
            copy.CopyFrom(stored[name])
            copy.name = f"{name}_copy{number}"
            node.input[:] = [copy.name if read == name else read for read in node.input]
    return proto


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("which", [slice(None), slice(1)], ids=["all", "some"])
def test_copies_of_weights_are_one(loaded: Load, dtype: str, which: slice) -> None:
    # torch's dynamo exporter transposes the weights of a module anew in every call, but for small ones.
    proto, graph = unrolled(small(linear="matmul", dtype=dtype))
    shared = rewritten(loaded(proto)).weights_bytes_after
    weights = [name for group in graph.groups for name, _ in group][which]
    model = loaded(with_copies(proto, weights))
    assert [subgraph.unsupported for subgraph in found_mlps(model)] == [None] * STEPS
    assert rewritten(model).weights_bytes_after == shared


def test_copies_in_the_bodies_of_control_flow_stay(loaded: Load, seed: int) -> None:
    """Nothing is replaced there, so a weight that both read could not be either."""
    text = """g (float[b, 32] x, bool flag) => (float[b, 32] y) {
            a = MatMul(x, up)  h = Relu(a)  z = MatMul(h, down)
            y = If (flag) <then_branch = t () => (float[b, 32] c) { p = MatMul(z, copy)  q = Tanh(p)
                               c = MatMul(q, down_copy) },
                           else_branch = e () => (float[b, 32] d) { d = Neg(z) }>
        }"""
    up, down = draw(seed, 32, 48), draw(seed, 48, 32)
    model = parsed(text, {"up": up, "down": down, "copy": up, "down_copy": down})
    assert [mlp.unsupported for mlp in found_mlps(loaded(model))] == [None]


def test_weights_of_one_value_are_no_copies(loaded: Load) -> None:
    proto, graph = unrolled(small(linear="matmul"))
    ((name, _),) = graph.groups[-1]
    (tensor,) = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), name))
    model = loaded(with_copies(proto, [name]))
    assert set(model.graph.initializers) >= {name, f"{name}_copy0", f"{name}_copy1"}
