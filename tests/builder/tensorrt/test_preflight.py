"""Traps: small models that TensorRT reads without an error and computes otherwise, or refuses without saying why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.tensorrt import preflight

FLOAT16, FLOAT, BOOL, INT64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
CACHE = ("batch", 2, 16, 64)
NEW = ("batch", 2, "new", 64)


def model(nodes: Sequence[onnx.NodeProto], inputs: dict[str, tuple[int, Any]], *outputs: str) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    results = [helper.make_tensor_value_info(name, FLOAT16, None) for name in outputs]
    graph = helper.make_graph(nodes, "trap", values, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


QUERY = {"q": (FLOAT16, NEW)}
KEYS = {"k": (FLOAT16, NEW), "v": (FLOAT16, NEW)}
MASK = {"mask": (BOOL, ("batch", 1, "new", "new"))}
CACHES = {"past_k": (FLOAT16, CACHE), "past_v": (FLOAT16, CACHE)}
LENGTH = {"length": (INT64, ("batch",))}


def attention(*inputs: str, outputs: Sequence[str] = ("y",), **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Attention", inputs, list(outputs), name="attn", **attributes)


def scatter(past: str, new: str, present: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("TensorScatter", [past, new, "length"], [present], name=f"append_{new}", **attributes)


def appended(**attributes: Any) -> list[onnx.NodeProto]:
    return [scatter("past_k", "k", "all_k", **attributes), scatter("past_v", "v", "all_v", **attributes)]


def over_concat(**attributes: Any) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Concat", [f"past_{part}", part], [f"all_{part}"], name=f"concat_{part}", axis=2)
        for part in ("k", "v")
    ]
    inputs = {**QUERY, **KEYS, **CACHES}
    return model([*nodes, attention("q", "all_k", "all_v", **attributes)], inputs, "y", "all_k", "all_v")


def over_cache(*mask: str, updates: dict[str, Any] | None = None, **attributes: Any) -> onnx.ModelProto:
    inputs = {**QUERY, **KEYS, **CACHES, **LENGTH, **{name: MASK[name] for name in mask}}
    node = attention("q", "all_k", "all_v", *mask, **attributes)
    return model([*appended(**updates or {}), node], inputs, "y", "all_k", "all_v")


def cache_of(kind: int, shape: Sequence[Any] = CACHE, outputs: Sequence[str] = ("present",)) -> onnx.ModelProto:
    inputs = {"past": (kind, shape), "k": (kind, ("batch", 2, "new", 64)), **LENGTH}
    nodes = [scatter("past", "k", "present"), helper.make_node("Identity", ["present"], ["copy"], name="copy")]
    return model(nodes, inputs, *outputs)


def computed_cache() -> onnx.ModelProto:
    nodes = [helper.make_node("Neg", ["past"], ["negative"], name="neg"), scatter("negative", "k", "present")]
    return model(nodes, {"past": (FLOAT16, CACHE), "k": (FLOAT16, NEW), **LENGTH}, "present")


TRAPS: dict[str, tuple[Callable[[], onnx.ModelProto], str, str]] = {
    "lengths": (
        lambda: model([attention("q", "k", "v", "", "", "", "length")], {**QUERY, **KEYS, **LENGTH}, "y"),
        "attn",
        "ignores nonpad_kv_seqlen",
    ),
    "past": (
        lambda: model(
            [attention("q", "k", "v", "", "past_k", "past_v", outputs=("y", "all_k", "all_v"))],
            {**QUERY, **KEYS, **CACHES},
            "y",
            "all_k",
            "all_v",
        ),
        "attn",
        "takes no past_key",
    ),
    "scores_out": (
        lambda: model([attention("q", "k", "v", outputs=("y", "", "", "scores"))], {**QUERY, **KEYS}, "y", "scores"),
        "attn",
        "one output",
    ),
    "softcap": (
        lambda: model([attention("q", "k", "v", softcap=30.0)], {**QUERY, **KEYS}, "y"),
        "attn",
        "no softcap",
    ),
    "causal_and_mask": (
        lambda: model([attention("q", "k", "v", "mask", is_causal=1)], {**QUERY, **KEYS, **MASK}, "y"),
        "attn",
        "is_causal or a mask",
    ),
    "causal_over_cache": (lambda: over_cache(is_causal=1), "attn", "would not see the cache"),
    "causal_over_concat": (lambda: over_concat(is_causal=1), "attn", "would not see the cache"),
    "circular": (lambda: over_cache("mask", updates={"mode": "circular"}), "append_k", "linear"),
    "other_axis": (lambda: over_cache("mask", updates={"axis": 1}), "append_k", "axis 2"),
    "float8_cache": (lambda: cache_of(TensorProto.FLOAT8E4M3FN), "append_k", "float8e4m3fn"),
    "int8_cache": (lambda: cache_of(TensorProto.INT8), "append_k", "int8"),
    "dynamic_capacity": (lambda: cache_of(FLOAT16, ("batch", 2, "capacity", 64)), "append_k", "is dynamic"),
    "flat_cache": (lambda: cache_of(FLOAT16, ("batch", 16, 64)), "append_k", "here 3 and -2"),
    "computed_cache": (computed_cache, "append_k", "'negative' is none"),
    "hidden_cache": (lambda: cache_of(FLOAT16, outputs=("copy",)), "append_k", "outputs of the model"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_trap_is_refused_with_its_node(name: str) -> None:
    make, node, text = TRAPS[name]
    with pytest.raises(BuilderError) as failure:
        preflight.check_readable(Path("trap.onnx"), make())
    assert failure.value.exit_code == MODEL_AT_FAULT
    message = str(failure.value)
    assert message.startswith(f"trap.onnx: node '{node}' (")
    assert text in message


@pytest.mark.parametrize(
    "make",
    [
        lambda: over_cache("mask"),
        lambda: over_cache("mask", updates={"axis": 2, "mode": "linear"}),
        lambda: model([attention("q", "k", "v", is_causal=1)], {**QUERY, **KEYS}, "y"),
        lambda: model([attention("q", "k", "v", "mask", softcap=0.0)], {**QUERY, **KEYS, **MASK}, "y"),
        over_concat,
        lambda: cache_of(FLOAT),
    ],
)
def test_what_tensorrt_reads_right_passes(make: Callable[[], onnx.ModelProto]) -> None:
    preflight.check_readable(Path("fine.onnx"), make())


def test_masks_are_listed_by_node() -> None:
    assert preflight.attentions(over_cache("mask")) == {"attn": True}
    assert preflight.attentions(over_concat()) == {"attn": False}


def test_network_is_compared_with_the_model(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    from trt_nvfp4.builder.tensorrt.backend import logger
    from trt_nvfp4.builder.tensorrt.network_checks import network_problems

    onnx.save(over_cache("mask"), tmp_path / "m.onnx")
    log = logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(str(tmp_path / "m.onnx")), log.errors
    caches = {"past_k": "all_k", "past_v": "all_v"}
    assert list(network_problems(trt, network, {"attn": True}, caches)) == []
    (unmasked,) = network_problems(trt, network, {"attn": False}, caches)
    assert "'attn': the model's attention has no mask, TensorRT's has a mask" in unmasked
    (moved,) = network_problems(trt, network, {"attn": True}, {"past_k": "all_v"})
    assert "cache 'past_k': TensorRT does not update it in place as 'all_v'" in moved
