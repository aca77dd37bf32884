"""The roofline against hand-computed figures, and the rows of subgraphs against a run of the model."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_models import moe_spellings
from onnx_models.graphs import parsed
from onnx_models.moe_spellings import MoeSpec
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.inputs.row_counts import subgraph_tokens
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.roofline.predict import LIMITS, grouped_seconds, predict, slow_decoding, subgraph_cost
from trt_nvfp4.builder.targets import TARGETS
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities, Decision
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.products import experts_touched

STACK = {"in_features": 2048, "intermediate_features": 16384, "out_features": 2048, "layers": 18}


def test_every_target_has_limits_and_they_fit_its_instructions() -> None:
    assert LIMITS.keys() == TARGETS.keys()
    for name, target in TARGETS.items():
        limits = LIMITS[name]
        assert ("fp4" in limits.tflops) == target.fp4_instructions
        assert limits.tflops["fp8"] == pytest.approx(2 * limits.tflops["bf16"], rel=0.02)


def test_few_tokens_are_bound_by_memory() -> None:
    cost = subgraph_cost("gated_mlp", STACK, "nvfp4_w4a16", 1, LIMITS["thor"])
    # 18 layers of 3 x 2048 x 16384 weights, 9 bits in 16 of 4, and 4096 activations of 2 bytes.
    assert cost.bytes == 18 * 3 * 2048 * 16384 * 0.5625 + 4096 * 2
    assert cost.operations == 2 * 18 * 3 * 2048 * 16384
    assert cost.bound == "memory"
    assert cost.seconds == pytest.approx(3.733e-3, rel=1e-3)


def test_many_tokens_are_bound_by_arithmetic() -> None:
    shapes = {"in_features": 8192, "out_features": 8192}
    costs = {
        decision: subgraph_cost("linear", shapes, decision, 8192, LIMITS["b200"])
        for decision in ("nvfp4_w4a4", "nvfp4_w4a16", "fp8", "bf16")
    }
    decoded = costs.pop("nvfp4_w4a16")
    assert {cost.bound for cost in costs.values()} == {"compute"}
    # 1.0995e12 operations at 9, 4.5 and 2.25 PFLOPS.
    assert [round(cost.seconds * 1e6, 1) for cost in costs.values()] == [122.2, 244.3, 488.7]
    # 256 passes over 2^18 words, which 592 schedulers decode in 43 clocks each.
    assert (decoded.bound, round(decoded.seconds * 1e6)) == ("issue", 2654)


def test_what_a_kept_subgraph_costs_depends_on_its_type() -> None:
    shapes = {"in_features": 4096, "out_features": 4096}
    half, single = (subgraph_cost("linear", shapes, "keep", 1, LIMITS["h200"], d) for d in ("float16", "float32"))
    assert single.bytes == 2 * half.bytes
    half, single = (subgraph_cost("linear", shapes, "keep", 8192, LIMITS["h200"], d) for d in ("float16", "float32"))
    assert (half.bound, single.bound) == ("compute", "compute")
    assert single.seconds == pytest.approx(2 * half.seconds)  # TF32
    with pytest.raises(ValueError, match="H200 SXM has no fp4 tensor cores"):
        subgraph_cost("linear", shapes, "nvfp4_w4a4", 1, LIMITS["h200"])


def test_weights_that_are_decoded_slowly_are_a_warning() -> None:
    entry = {"names": ["up"], "decision": "nvfp4_w4a16", "bound": "issue", "tokens": 64}
    (warning,) = slow_decoding([entry, {**entry, "names": ["down"]}], TARGETS["b200"].capabilities)
    assert warning.startswith(
        "up (and 1 more): at 64 rows W4A16 decodes weights slower than memory brings them on b200"
    )
    assert not slow_decoding([{**entry, "bound": "memory"}], TARGETS["b200"].capabilities)
    assert not slow_decoding([entry], TARGETS["h200"].capabilities)  # without FP4 tensor cores


def test_an_mlp_of_two_precisions_is_its_products_one_after_another() -> None:
    shapes = {"in_features": 4096, "intermediate_features": 14336, "out_features": 4096}
    limits = LIMITS["rtx-blackwell"]

    def seconds(decision: str, tokens: int) -> float:
        return subgraph_cost("gated_mlp", shapes, Decision(decision), tokens, limits).seconds

    for tokens in (1, 16, 4096):
        up, down = (
            subgraph_cost("linear", {"in_features": k, "out_features": n}, Decision(decision), tokens, limits).seconds
            for k, n, decision in ((4096, 28672, "nvfp4_w4a4"), (14336, 4096, "nvfp4_w4a16"))
        )
        gates = tokens * (28672 + 14336) * 2 / limits.bandwidth
        assert seconds("nvfp4_mixed", tokens) == pytest.approx(up + down + gates)
        assert seconds("nvfp4_w4a4", tokens) < seconds("nvfp4_mixed", tokens)
    # Where arithmetic binds, between both.
    assert seconds("nvfp4_mixed", 4096) < seconds("nvfp4_w4a16", 4096)


def test_residual_channels_are_more_columns_and_a_pass_over_x() -> None:
    limits, w4a4 = LIMITS["b200"], Decision.NVFP4_W4A4
    dense = {"in_features": 4096, "intermediate_features": 14336, "out_features": 4096}
    moe = dense | {"gated": 1, "experts": 8, "top_k": 8, "shared_features": 2048}
    columns = {"gated_mlp": 2 * 14336 + 4096, "moe": 8 * (2 * 14336 + 4096) + 2 * 2048 + 4096}
    for kind, shapes in (("gated_mlp", dense), ("moe", moe)):
        plain, more = (subgraph_cost(kind, shapes, w4a4, 10, limits, residual=count) for count in (0, 64))
        assert more.bytes - plain.bytes == pytest.approx(0.5625 * 64 * columns[kind] + 10 * 2 * 4096 * 2)
        assert more.operations - plain.operations == pytest.approx(2 * 10 * 64 * columns[kind])
        assert subgraph_cost(kind, shapes, Decision.NVFP4_W4A16, 10, limits, residual=64) == subgraph_cost(
            kind, shapes, Decision.NVFP4_W4A16, 10, limits
        )


def test_groups_are_padded_to_tiles_and_tiles_to_rounds() -> None:
    # Two groups with rows read their weights; 1 + 3 tiles of rows by 2 of columns are one round of 148.
    seconds = grouped_seconds([1, 0, 300], 256, 4096)
    assert seconds["memory"] == (2 * 256 * 4096 * 0.5625 + 2 * 301 * (256 + 4096)) / 8e12
    assert seconds["compute"] == pytest.approx(148 * 2 * 128 * 128 * 4096 / 9e15)
    assert seconds["operands"] == pytest.approx(256 * 4096 * 0.5625 / 118.4e9)
    two_rounds = grouped_seconds([128 * 75], 256, 4096)
    assert [two_rounds[bound] for bound in ("compute", "operands")] == [
        2 * seconds[bound] for bound in ("compute", "operands")
    ]


def test_experts_touched_against_sampling(rng: np.random.Generator) -> None:
    chosen = [
        len({int(e) for _ in range(8) for e in rng.choice(32, 4, replace=False)})  # 8 tokens, 4 of 32 each
        for _ in range(2000)
    ]
    assert experts_touched(32, 4, 8) == pytest.approx(np.mean(chosen), rel=0.02)
    assert experts_touched(32, 4, 1) == pytest.approx(4)


def test_experts_are_read_when_they_are_chosen() -> None:
    """Mixtral 8x7B: one token reads two of eight experts, many tokens all of them."""
    shapes = {"in_features": 4096, "intermediate_features": 14336, "out_features": 4096, "gated": 1}
    shapes |= {"experts": 8, "top_k": 2}
    expert = 3 * 4096 * 14336
    one, many = (subgraph_cost("moe", shapes, "nvfp4_w4a16", t, LIMITS["b200"]) for t in (1, 512))
    assert one.bytes == pytest.approx(2 * expert * 0.5625 + 8192 * 2)
    assert many.bytes == pytest.approx(8 * expert * 0.5625 + 512 * 8192 * 2)
    assert many.operations == 2 * 512 * 2 * expert
    with_shared = subgraph_cost("moe", {**shapes, "shared_features": 2048}, "nvfp4_w4a16", 1, LIMITS["b200"])
    assert with_shared.operations - one.operations == 2 * 3 * 4096 * 2048


@pytest.mark.parametrize("gated", [True, False])
def test_an_expert_has_the_matrices_that_the_model_has(tmp_path: Path, gated: bool, seed: int) -> None:
    spec = MoeSpec("loop", experts=4, top_k=2, gated=gated, activation="silu" if gated else "relu2")
    moe = moe_spellings.Moe(spec, seed)
    moe_spellings.export(moe, tmp_path / "moe.onnx", seed)
    source = load(tmp_path / "moe.onnx")
    capabilities = Capabilities("any", nvfp4_w4a16=True)
    in_float32 = make_plan(source, find_subgraphs(source), capabilities)
    tokens = {subgraph.name: 1 for subgraph in in_float32.subgraphs}
    assert not predict(in_float32, tokens, LIMITS["b200"], capabilities)  # by generic kernels, without tensor cores
    (entry,) = (entry for entry in in_float32.subgraphs if entry.kind == "moe")
    cost = subgraph_cost(entry.kind, entry.shapes, "nvfp4_w4a16", 1, LIMITS["b200"], entry.dtype)
    weights = sum(parameter.numel() for parameter in moe.experts.parameters()) // 4
    assert cost.operations == 2 * 2 * weights
    assert cost.bytes == pytest.approx(2 * weights * 0.5625 + 2 * moe_spellings.HIDDEN * 4)


def test_rows_of_subgraphs(tmp_path: Path, rng: np.random.Generator) -> None:
    """A model that cuts its sequence: the second linear sees fewer rows than the first."""
    text = """cuts (float[batch, sequence, 32] x) => (float[batch, rest, 16] y)
        <int64[1] begin = {2}, int64[1] end = {1000}, int64[1] axis = {1}> {
            [first] a = MatMul(x, w1)
            [cut] b = Slice(a, begin, end, axis)
            [second] y = MatMul(b, w2)
        }"""
    path = tmp_path / "m.onnx"
    onnx.save(parsed(text, {"w1": (32, 32), "w2": (32, 16)}), path)
    source = load(path)
    plan = make_plan(
        source, find_subgraphs(source), Capabilities("any", nvfp4_w4a16=True), PlanOptions(kinds=("linear",))
    )
    tokens = subgraph_tokens(source, plan.subgraphs, {"x": (3, 7, 32)})
    inner = session(path, [entry.input for entry in plan.subgraphs])
    values = inner.run([entry.input for entry in plan.subgraphs], {"x": np.ones((3, 7, 32), np.float32)})
    assert list(tokens.values()) == [value.size // value.shape[-1] for value in values] == [21, 15]
    with pytest.raises(BuilderError, match="has no input 'z'"):
        subgraph_tokens(source, plan.subgraphs, {"z": (1, 1)})


@pytest.mark.parametrize("x", ["float[batch, sequence, 32]", "int64[batch, sequence]"])
def test_rows_that_inference_cannot_tell(x: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Behind an operator that ONNX does not know they are the input's: of values or of ids."""
    text = f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g ({x} x) => (float[batch, sequence, 16] y) {{ a = com.microsoft.Inverse(x)  y = MatMul(a, w) }}"""
    onnx.save(parsed(text, {"w": (32, 16)}), tmp_path / "m.onnx")
    source = load(tmp_path / "m.onnx")
    plan = make_plan(
        source, find_subgraphs(source), Capabilities("any", nvfp4_w4a16=True), PlanOptions(kinds=("linear",))
    )
    assert list(subgraph_tokens(source, plan.subgraphs, {"x": (3, 7, 32)[: x.count(",") + 1]}).values()) == [21]
