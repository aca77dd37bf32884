"""AWQ's channel scales in ONNX models: where they fold, what refuses them, and that the float model stays the same."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

from onnx_models import moe_spellings
from onnx_models.graphs import ACTIVATION_SPELLINGS, Graph, Spec, draw, mlp_model, run
from onnx_models.passes import plan_all
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import calibration_tensors, rewrite
from trt_nvfp4.graph_passes.weights.awq_folding import Folding, find_foldings, fold

Load = Callable[[onnx.ModelProto], SourceModel]
RECIPE = "mse+awq"


def block(norm: str, extra: str = "", outputs: tuple[str, ...] = ("y",), seed: int = 0) -> onnx.ModelProto:
    """norm -> gated MLP -> y, and `extra` nodes; the channels of x and of the hidden activation differ in size."""
    shapes = {"gate": (32, 48), "up": (32, 48), "down": (48, 32), "other": (32, 16), "w": (32,), "b": (32,)}
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 23]>
        g (float[rows, 32] x) => ({", ".join(f"float[rows, n_{name}] {name}" for name in outputs)}) {{
            {norm}
            {extra}
            g = MatMul(n, gate) s = Sigmoid(g) a = Mul(g, s) u = MatMul(n, up) h = Mul(a, u) y = MatMul(h, down)
        }}""")
    read = {name for node in model.graph.node for name in node.input}
    for i, (name, shape) in enumerate(shapes.items()):
        if name in read:
            array = np.random.default_rng((seed, i)).standard_normal(shape).astype(np.float32)
            if name in ("w", "up"):
                array *= np.exp(np.random.default_rng((seed, i, 1)).standard_normal(shape[-1:])).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


RMS = "n = RMSNormalization(x, w)"
LAYER = "n = LayerNormalization(x, w, b)"
DECOMPOSED = """two = Constant<value_float = 2.0>() e = Constant<value_float = 0.00001>() q = Pow(x, two)
    m = ReduceMean<keepdims = 1>(q, axes) v = Add(m, e) r = Sqrt(v) z = Div(x, r) one = Constant<value_float = 1.0>()
    w1 = Add(w, one) n = Mul(z, w1)"""


def foldings(source: SourceModel) -> tuple[list[Folding], dict[str, list[str]]]:
    # Routers are kept unless a plan says otherwise.
    return find_foldings([part for part in find_subgraphs(source) if part.unsupported is None])


def folded(source: SourceModel, samples: list[dict[str, np.ndarray]]) -> onnx.ModelProto:
    """The float model after folding, all that can be."""
    statistics = collect(source.path, calibration_tensors(plan_all(source, recipe=RECIPE)), samples)
    target = SourceModel(source.file, source.ir_model.clone())
    after = fold(foldings(target)[0], parse(RECIPE), statistics)
    model = ir.to_proto(target.ir_model)
    onnx.save(model, source.path.with_name("folded.onnx"))
    again = collect(source.path.with_name("folded.onnx"), list(after.amax), samples)
    for name, amax in after.amax.items():
        assert again.amax[name] == pytest.approx(amax, rel=1e-4), name
    return model


def rewritten(source: SourceModel, plan: Plan, statistics: Statistics) -> Path:
    return rewrite(source, plan, statistics, source.path.with_name("rewritten.onnx")).path


@pytest.mark.parametrize("norm", [RMS, LAYER, DECOMPOSED], ids=["rms", "layer", "one plus weight"])
def test_the_float_model_stays_the_same(norm: str, loaded: Load, seed: int) -> None:
    """Of blocks one after the other, until there is one whose channels are worth scaling, which not all are."""
    for index in range(6):
        model = block(norm, seed=seed + index)
        if "axes" in norm:
            model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "axes"))
        source = loaded(model)
        found, obstacles = foldings(source)
        assert [bool(folding.norm) for folding in found] == [False, True]
        assert not obstacles
        x = draw(seed + index, 40, 32)
        before, after = run(source.path, x)[0], run(changed := folded(source, [{"x": x}]), x)[0]
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-6 * np.abs(before).max())
        old = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        new = {tensor.name: numpy_helper.to_array(tensor) for tensor in changed.graph.initializer}
        offset = 1.0 if norm is DECOMPOSED else 0.0
        s = (old["w"] + offset) / (new["w"] + offset)  # what the norm was divided by
        hidden = old["up"][0] * s[0] / new["up"][0]
        if min(np.ptp(s), np.ptp(hidden)) > 0.1:
            break
    else:
        pytest.fail("no block was scaled")
    np.testing.assert_allclose(new["gate"], old["gate"] * s[:, None], rtol=1e-5)
    np.testing.assert_allclose(new["up"], old["up"] * s[:, None] / hidden, rtol=1e-5)
    np.testing.assert_allclose(new["down"], old["down"] * hidden[:, None], rtol=1e-4)


@pytest.mark.parametrize(
    ("activation", "gated", "power"),
    [("relu", False, 1.0), ("relu2", False, 0.5), ("gelu", False, None), ("gelu", True, 1.0), ("silu", True, 1.0)],
)
@pytest.mark.parametrize("linear", ["matmul", "gemm_scaled"])
def test_hidden_channels(
    activation: str, gated: bool, power: float | None, linear: str, loaded: Load, seed: int
) -> None:
    """With biases. What does not commute with scaling is refused, and the reason stands in the plan."""
    spelling = ACTIVATION_SPELLINGS[activation][0]
    model, _ = mlp_model(
        Spec(activation=activation, spelling=spelling, gated=gated, linear=linear, biases=True, seed=seed)
    )
    source = loaded(model)
    found, obstacles = foldings(source)
    assert [folding.power for folding in found] == ([] if power is None else [power])
    (reasons,) = obstacles.values()
    assert reasons[-1] == "input channels: they do not come from a norm"
    assert ("hidden channels" in reasons[0]) == (power is None)
    (entry,) = [entry for entry in plan_all(source, recipe=RECIPE).subgraphs if entry.kind != "linear"]
    assert entry.reason.endswith("awq leaves its input channels: they do not come from a norm")
    x = draw(seed, *((40,) if linear != "matmul" else (2, 20)), 32)
    before, after = run(source.path, x)[0], run(folded(source, [{"x": x}]), x)[0]
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-6 * np.abs(before).max())


@pytest.mark.parametrize(
    ("extra", "outputs", "reason"),
    [
        ("t = Tanh(n)", ("y", "t"), "also read by node"),
        ("", ("y", "n"), "an output of the graph"),
        ("t = Mul(x, w)", ("y", "t"), "'w' is used more than once"),
    ],
)
def test_norms_that_others_read(extra: str, outputs: tuple[str, ...], reason: str, loaded: Load, seed: int) -> None:
    source = loaded(block(RMS, extra, outputs, seed))
    found, obstacles = foldings(source)
    assert [folding.norm for folding in found] == [None]
    assert reason in str(obstacles)
    x = draw(seed, 30, 32)
    after = run(folded(source, [{"x": x}]), x)
    for a, b in zip(run(source.path, x), after, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-6 * np.abs(a).max())


def test_linears_that_share_a_norm(loaded: Load, seed: int) -> None:
    """One s for the MLP and the linear beside it; none, where the linear stays as it is."""
    source = loaded(block(RMS, "t = MatMul(n, other)", ("y", "t"), seed))
    subgraphs = find_subgraphs(source)
    assert [len(folding.readers) for folding in find_foldings(subgraphs)[0]] == [1, 2]
    only_mlp = [part for part in subgraphs if part.kind == "gated_mlp"]
    found, obstacles = find_foldings(only_mlp)
    assert len(found) == 1
    assert "also read by node" in str(obstacles)
    x = draw(seed, 30, 32)
    for a, b in zip(run(source.path, x), run(folded(source, [{"x": x}]), x), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-6 * np.abs(a).max())


def test_the_reason_names_the_first_reader(loaded: Load) -> None:
    """Of many, so that it is the same in every run."""
    others = [f"t{i}" for i in range(40)]
    source = loaded(block(RMS, " ".join(f"{t} = LeakyRelu<alpha = {t[1:]}.0>(n)" for t in others), ("y", *others)))
    first = next(node for node in source.graph if node.op_type == "LeakyRelu")
    assert f"also read by node '{first.name}' (LeakyRelu)" in str(foldings(source)[1])


def test_dead_and_constant_inputs(loaded: Load, seed: int) -> None:
    x = np.tile(draw(seed, 1, 32), (20, 1))
    source = loaded(block(RMS, seed=seed))
    for sample in (x, np.zeros_like(x), x * (np.arange(32) > 2)):
        before, after = run(source.path, x)[0], run(folded(source, [{"x": sample.astype(np.float32)}]), x)[0]
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())


def test_a_rewrite_is_nearer_with_it(loaded: Load, seed: int) -> None:
    """Weights matter by what they multiply; with and without GPTQ. On average of blocks: one may gain nothing."""
    for scales, bound in (("max", 1.0), ("mse", 1.0), ("local-hessian+gptq", 1.1)):
        ratios = []
        for index in range(6):
            source = loaded(block(RMS, seed=seed + index))
            x = draw(seed + index, 400, 32)
            expected = run(source.path, x)[0]
            kinds = calibration_tensors(plan_all(source, recipe=f"{scales}+awq"))
            statistics = collect(source.path, kinds, [{"x": x}])
            without, with_it = (
                np.linalg.norm(run(rewritten(source, plan_all(source, recipe=recipe), statistics), x)[0] - expected)
                for recipe in (scales, f"{scales}+awq")
            )
            ratios.append(with_it / without)
        assert np.exp(np.mean(np.log(ratios))) < bound


def test_a_rewrite_with_four_bit_activations(loaded: Load, seed: int) -> None:
    source = loaded(block(RMS, seed=seed))
    x = draw(seed, 400, 32)
    expected = run(source.path, x)[0]
    plan = plan_all(source, recipe=RECIPE, calibrated=True)
    assert plan.subgraphs[0].decision == "nvfp4_w4a4"
    statistics = collect(source.path, calibration_tensors(plan), [{"x": x}])
    found = run(rewritten(source, plan, statistics), x)[0]
    assert np.linalg.norm(found - expected) < 0.25 * np.linalg.norm(expected)


def test_weights_that_serve_twice(loaded: Load, seed: int) -> None:
    """Gate and up with one bias: scaling up's rows would scale gate's as well."""
    graph = Graph(Spec(biases=True, seed=seed))
    graph.mlp("x", "y")
    for node in graph.nodes:
        node.input[:] = ["gate_bias" if name == "up_bias" else name for name in node.input]
    found, obstacles = foldings(loaded(graph.model(["y"])))
    assert not found
    assert "'gate_bias' is used more than once" in str(obstacles)


def test_a_bias_of_one_number(loaded: Load, seed: int) -> None:
    """It serves all channels, and cannot be scaled by theirs."""
    model, _ = mlp_model(Spec(biases=True, seed=seed))
    (bias,) = [tensor for tensor in model.graph.initializer if tensor.name == "up_bias"]
    bias.CopyFrom(numpy_helper.from_array(draw(seed, 1), "up_bias"))
    found, obstacles = foldings(loaded(model))
    assert not found
    assert "'up_bias' is used more than once" in str(obstacles)


class OwnNorms(moe_spellings.Moe):
    """The router reads what one norm gives, the experts what another does."""

    def __init__(self, seed: int) -> None:
        super().__init__(moe_spellings.MoeSpec("gathered"), seed)
        self.of_router, self.of_experts = (torch.nn.Parameter(torch.randn(64).exp()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, 64)
        rows = rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        weights, chosen = self.route(self.router(rows * self.of_router))
        return self._gathered(rows * self.of_experts, weights, chosen).view(x.shape)


def test_a_router_with_a_norm_of_its_own(tmp_path: Path, seed: int) -> None:
    """Its weight stays when those of the experts are scaled."""
    moe_spellings.export(OwnNorms(seed), tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    found, _ = foldings(source)
    (at_norm,) = [folding for folding in found if folding.norm is not None]
    assert not at_norm.others
    x = draw(seed, 5, 20, 64)
    before, after = run(source.path, x)[0], run(folded(source, [{"x": x}]), x)[0]
    np.testing.assert_allclose(after, before, rtol=0, atol=5e-6 * np.abs(before).max())
