"""Equal decoder layers become one NVFP4Decoder over one cache, which computes what its parts compute."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_models.layered_decoder import DIM, KV_HEADS, VOCAB, WIDTH, LayeredDecoder
from onnx_models.passes import plan_all
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.mixed_precision.choose import choose
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS
from trt_nvfp4.graph_passes.planning.plan import Plan, PlanError
from trt_nvfp4.graph_passes.rewrite import rewrite

CAPACITY = LayeredDecoder().capacity


def parts_of(source: SourceModel) -> Plan:
    """A plan in which layers can become one launch: float32 ones do not by themselves."""
    plan = plan_all(source, kinds=(*ALL_KINDS, "decoder"), attention="plugin")
    for entry in plan.subgraphs:
        if entry.kind in ALL_KINDS and "router" not in entry.name:
            entry.decision = Decision.NVFP4_W4A16
    return plan


def fused(plan: Plan, *layers: int) -> Plan:
    for entry in plan.subgraphs:
        if entry.kind == "decoder" and any(entry.name.endswith(str(layer)) for layer in layers):
            entry.decision = Decision.DECODER
    return plan


def run(model: Path, layers: int, steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Logits and caches of every step, caches passed on."""
    runner = session(model)
    names = [entry.name for entry in runner.get_outputs()]
    caches = {
        f"past_key_values.{layer}.{part}": np.zeros((2, KV_HEADS, CAPACITY, DIM), np.float32)
        for layer in range(layers)
        for part in ("key", "value")
    }
    results = []
    for ids, past, new in steps:
        lengths = {"input_ids": ids, "past_length": past, "new_length": new}
        outputs = dict(zip(names, runner.run(None, {**lengths, **caches}), strict=True))
        caches = {name: outputs[name.replace("past_key_values", "present")] for name in caches}
        results += [outputs[name] for name in sorted(outputs)]
    return results


def steps(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A ragged prompt, and two tokens behind it."""
    new = np.array([5, 2])
    return [
        (rng.integers(0, VOCAB, (2, 5)), np.zeros(2, np.int64), new),
        (rng.integers(0, VOCAB, (2, 1)), new, np.ones(2, np.int64)),
        (rng.integers(0, VOCAB, (2, 1)), new + 1, np.ones(2, np.int64)),
    ]


@pytest.mark.parametrize(
    ("chosen", "own_tables", "caches"),
    [
        ((0, 1, 2), (), ["past_key_values.0-2"]),
        ((0, 1, 2), (0, 2), ["past_key_values.0-0", "past_key_values.1-1", "past_key_values.2-2"]),
        ((0, 1), (), ["past_key_values.0-1", "past_key_values.2.key", "past_key_values.2.value"]),
        (
            (0, 2),
            (),
            ["past_key_values.0-0", "past_key_values.1.key", "past_key_values.1.value", "past_key_values.2-2"],
        ),
    ],
)
def test_layers_compute_what_their_parts_do(
    tmp_path: Path, rng: np.random.Generator, chosen: tuple[int, ...], own_tables: tuple[int, ...], caches: list[str]
) -> None:
    source = load(LayeredDecoder(own_tables=own_tables).save(tmp_path / "m.onnx", rng))
    apart = rewrite(source, parts_of(source), None, tmp_path / "apart.onnx").path
    plan = fused(parts_of(source), *chosen)
    result = rewrite(source, plan, None, tmp_path / "fused.onnx")
    graph = onnx.load(result.path).graph
    assert [value.name for value in graph.input][3:] == caches
    nodes = [node for node in graph.node if node.op_type == "NVFP4Decoder"]
    assert (
        len(nodes)
        == len(caches) - caches.count("past_key_values.1.key") * 2 - caches.count("past_key_values.2.key") * 2
    )
    for entry in plan.subgraphs:  # parts and layers name the node that computes them
        if any(entry.name.startswith(f"layers.{layer}") for layer in chosen):
            assert result.realized[entry.name][0] in {node.name for node in nodes}
    functions = {function.name for function in onnx.load(result.path).functions}
    # The head stays a linear of its own.
    assert functions == ({"NVFP4Decoder", "NVFP4Linear"} if len(chosen) == 3 else functions | {"NVFP4GatedMLP"})
    given = steps(rng)
    for ours, theirs in zip(run(result.path, 3, given), run(apart, 3, given), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_each_attention_has_the_tables_of_its_layer(tmp_path: Path, rng: np.random.Generator) -> None:
    source = load(LayeredDecoder(own_tables=(1,)).save(tmp_path / "m.onnx", rng))
    plan = plan_all(source, attention="plugin", exclude="mlp|head|attn.[qkvo]")
    path = rewrite(source, plan, None, tmp_path / "rewritten.onnx").path
    assert sum(node.op_type == "CachedAttention" for node in onnx.load(path).graph.node) == 3
    given = steps(rng)
    for ours, theirs in zip(run(path, 3, given), run(source.path, 3, given), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_mixtures_compute_what_their_parts_do(tmp_path: Path, rng: np.random.Generator) -> None:
    source = load(LayeredDecoder(layers=2, experts=4).save(tmp_path / "m.onnx", rng))
    apart = rewrite(source, parts_of(source), None, tmp_path / "apart.onnx").path
    result = rewrite(source, fused(parts_of(source), 0, 1), None, tmp_path / "fused.onnx")
    model = onnx.load(result.path)
    (node,) = [node for node in model.graph.node if node.op_type == "NVFP4MoEDecoder"]
    assert not [n for n in model.graph.node if n.op_type in ("NVFP4MoE", "TopK")]
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    assert (attributes["top_k"], attributes["scoring"], attributes["renormalize"]) == (2, 0, 1)
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    assert [shapes[name] for name in node.input if "router" in name or "down_bias" in name] == [
        [2, 4, WIDTH],
        [2, 4, WIDTH],
    ]
    given = steps(rng)
    for ours, theirs in zip(run(result.path, 2, given), run(apart, 2, given), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_layer_that_differs_stands_alone(tmp_path: Path, rng: np.random.Generator) -> None:
    source = load(LayeredDecoder(shown=(0,)).save(tmp_path / "m.onnx", rng))
    result = rewrite(source, fused(parts_of(source), 0, 1, 2), None, tmp_path / "fused.onnx")
    # The first one's output is the model's, too.
    names = [value.name for value in onnx.load(result.path).graph.input][3:]
    assert names == ["past_key_values.0-0", "past_key_values.1-2"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"experts": 3, "biased": (1,)}, "its router has biases or groups, which NVFP4MoEDecoder does not have"),
        ({"odd_epsilon": (1,)}, "its norms have different epsilons"),
        ({"no_residual": (1,)}, "its MLP's output is not added to the input of the norm in front"),
    ],
)
def test_what_is_no_layer_says_why(
    tmp_path: Path, rng: np.random.Generator, changed: dict[str, Any], reason: str
) -> None:
    source = load(LayeredDecoder(**changed).save(tmp_path / "m.onnx", rng))
    unsupported = [subgraph.unsupported for subgraph in find_subgraphs(source) if subgraph.kind == "decoder"]
    assert [found and found.text for found in unsupported] == [None, reason, None]


def test_a_router_in_float32_keeps_its_layer_apart(tmp_path: Path, rng: np.random.Generator) -> None:
    """The op's router has the type of x, and might choose other experts by rounded weights."""
    source = load(LayeredDecoder(layers=2, experts=4).save(tmp_path / "m.onnx", rng))
    chosen = choose(source, "bf16")
    router = next(node.name for node in source.ir_model.graph if "layers.1/moe/router" in (node.name or ""))
    kept = replace(chosen, float32={**chosen.float32, "for this test": [str(router)]})
    reason = "its router has weights of another type than its activations"
    for activations, expected in ((chosen, None), (kept, reason)):
        found = find_subgraphs(convert(source, activations))
        unsupported = [part.unsupported for part in found if part.kind == "decoder"]
        assert [reason and reason.text for reason in unsupported] == [None, expected]
        assert [part.unsupported for part in found if part.kind == "moe"] == [None, None]


def test_plans_say_what_speaks_against_a_layer(tmp_path: Path, rng: np.random.Generator) -> None:
    source = load(LayeredDecoder().save(tmp_path / "m.onnx", rng))

    def first(**options: object) -> tuple[str, str]:
        plan = plan_all(source, **options)
        entry = next(entry for entry in plan.subgraphs if entry.kind == "decoder")
        return str(entry.decision), entry.reason

    kinds = (*ALL_KINDS, "decoder")
    assert first() == ("keep", "--kinds names moe, gated_mlp, mlp, linear, not decoder")
    assert "its activations are float32" in first(kinds=kinds)[1]
    assert "its attention is TensorRT's own" in first(kinds=kinds, attention="tensorrt")[1]
    assert "not fp8" in first(kinds=kinds, precision="fp8")[1]


def test_an_edited_part_keeps_its_layer_from_one_launch(tmp_path: Path, rng: np.random.Generator) -> None:
    source = load(LayeredDecoder(layers=2).save(tmp_path / "m.onnx", rng))
    plan = fused(parts_of(source), 0, 1)
    next(entry for entry in plan.subgraphs if entry.kind == "gated_mlp").decision = Decision.FP8
    with pytest.raises(PlanError, match=r"its part 'layers\.0\.mlp' is planned as fp8, and a fused layer takes"):
        rewrite(source, plan, None, tmp_path / "fused.onnx")
    assert not (tmp_path / "fused.onnx").exists()


def test_weights_and_norms_are_stacked_by_layer(tmp_path: Path, rng: np.random.Generator) -> None:
    source = load(LayeredDecoder().save(tmp_path / "m.onnx", rng))
    path = rewrite(source, fused(parts_of(source), 0, 1, 2), None, tmp_path / "fused.onnx").path
    shapes = {tensor.name: list(tensor.dims) for tensor in onnx.load(path, load_external_data=False).graph.initializer}
    assert shapes["layers.0/attention_norm_weight"] == [3, WIDTH]
    assert shapes["layers.0/down_tensor_scale"] == [3]
