"""Recurrences: found, planned as plugins, or as the nodes that ONNX defines them by; the same numbers either way."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.rewrite import rewrite

HIDDEN, HEADS, KEY, VALUE = 32, 2, 16, 24
TARGET = Capabilities("any")


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("exclude", [None, "scan_me"], ids=["plugin", "definition"])
def test_what_it_computes_stays(tmp_path: Path, seed: int, rule: str, exclude: str | None) -> None:
    rng = np.random.default_rng(seed)
    path = tmp_path / "m.onnx"
    onnx.save(recurrence(rng, rule), path)
    source = load(path)
    plan = make_plan(source, find_subgraphs(source), TARGET, PlanOptions(precision="bf16", exclude=exclude))
    entry = next(entry for entry in plan.subgraphs if entry.kind == "recurrent")
    assert entry.decision == ("recurrent" if exclude is None else "keep")
    assert entry.shapes == {
        "q_heads": HEADS,
        "heads": HEADS,
        "key_dim": KEY,
        "value_dim": VALUE,
        "decay_dim": {"gated": KEY, "gated_delta": 1}.get(rule, 0),
    }
    kernels = kind_of(entry).kernels(entry, TARGET)
    assert kernels is not None
    assert kernels.is_generic  # values of 24
    plan.subgraphs = [entry]
    rewritten = rewrite(source, plan, None, tmp_path / "rewritten.onnx").path
    operators = {node.op_type for node in onnx.load(rewritten).graph.node}
    assert ("LinearAttention" in operators, "Scan" in operators) == (exclude is None, exclude is not None)
    for tokens in (1, 7):
        feed = {"x": rng.standard_normal((2, tokens, HIDDEN)), "past": rng.standard_normal((2, HEADS, KEY, VALUE))}
        feed = {name: array.astype(np.float32) for name, array in feed.items()}
        expected, found = (onnxruntime.InferenceSession(file).run(None, feed) for file in (path, rewritten))
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)


def recurrence(rng: np.random.Generator, rule: str) -> onnx.ModelProto:
    """A recurrence by a rule, whose inputs are linears of one tensor."""
    widths = {"q": HEADS * KEY, "k": HEADS * KEY, "v": HEADS * VALUE, "decay": HEADS, "beta": HEADS}
    widths["decay"] *= KEY if rule == "gated" else 1
    weights = {name: rng.standard_normal((HIDDEN, size)) / 8 for name, size in widths.items()}
    nodes = [helper.make_node("MatMul", ["x", f"w_{name}"], [name]) for name in widths]
    nodes.append(helper.make_node("Neg", ["decay"], ["negative"]))
    nodes.append(helper.make_node("Softplus", ["negative"], ["large"]))
    nodes.append(helper.make_node("Neg", ["large"], ["logarithm"]))
    given = ["q", "k", "v", "past", "logarithm" if "gated" in rule else "", "beta" if "delta" in rule else ""]
    while not given[-1]:
        given.pop()
    attributes = {"q_num_heads": HEADS, "kv_num_heads": HEADS, "update_rule": rule}
    nodes.append(helper.make_node("LinearAttention", given, ["y", "present"], name="scan_me", **attributes))
    types = {"x": ["batch", "new", HIDDEN], "past": ["batch", HEADS, KEY, VALUE]}
    outputs = {"y": ["batch", "new", HEADS * VALUE], "present": ["batch", HEADS, KEY, VALUE]}
    inputs, results = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side.items()]
        for side in (types, outputs)
    )
    tensors = [numpy_helper.from_array(array.astype(np.float32), f"w_{name}") for name, array in weights.items()]
    graph = helper.make_graph(nodes, "recurrence", inputs, results, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)], ir_version=11)
