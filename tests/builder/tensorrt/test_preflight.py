"""Traps: small models that TensorRT reads without an error and computes otherwise, or refuses without saying why."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.tensorrt import preflight
from trt_nvfp4.builder.tensorrt.network_checks import AttentionNode, network_problems

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


def over_keys(mask: int, keys: int | str, shape: Sequence[Any]) -> onnx.ModelProto:
    values = dict.fromkeys(("k", "v"), (FLOAT16, ("batch", 2, keys, 64)))
    inputs = {**QUERY, **values, "mask": (mask, shape)}
    return model([attention("q", "k", "v", "mask")], inputs, "y")


def of_flat_heads() -> onnx.ModelProto:
    inputs = {name: (FLOAT16, ("batch", "new", 64 * heads)) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return model([attention("q", "k", "v", q_num_heads=4, kv_num_heads=2)], inputs, "y")


def scaled_before() -> onnx.ModelProto:
    own = helper.make_node("Mul", ["x", "factor"], ["q"], name="own_scale")
    return model(
        [own, attention("q", "k", "v", scale=1.0)], {"x": (FLOAT16, NEW), "factor": (FLOAT16, ()), **KEYS}, "y"
    )


def over_more_keys() -> onnx.ModelProto:
    keys = dict.fromkeys(("k", "v"), (FLOAT16, ("batch", 2, 8, 64)))
    return model([attention("q", "k", "v", is_causal=1)], {"q": (FLOAT16, ("batch", 2, 4, 64)), **keys}, "y")


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
    "softcap": (lambda: model([attention("q", "k", "v", softcap=30.0)], {**QUERY, **KEYS}, "y"), "attn", "no softcap"),
    "softmax_precision": (
        lambda: model([attention("q", "k", "v", softmax_precision=1)], {**QUERY, **KEYS}, "y"),
        "attn",
        "leave out softmax_precision",
    ),
    "short_mask": (lambda: over_keys(FLOAT16, 8, ("new", 4)), "attn", "a mask for all keys"),
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
    "computed_cache": (computed_cache, "append_k", "'negative' is computed"),
    "hidden_cache": (lambda: cache_of(FLOAT16, outputs=("copy",)), "append_k", "outputs of the model"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_trap_is_refused_with_its_node(name: str) -> None:
    make, node, text = TRAPS[name]
    with pytest.raises(ModelFaultError) as failure:
        preflight.check_readable(Path("trap.onnx"), make())
    message = str(failure.value)
    assert message.startswith(f"trap.onnx: node '{node}' (")
    assert text in message


READ_RIGHT: dict[str, Callable[[], onnx.ModelProto]] = {
    "mask": lambda: over_cache("mask"),
    "axis_2": lambda: over_cache("mask", updates={"axis": 2, "mode": "linear"}),
    "causal": lambda: model([attention("q", "k", "v", is_causal=1)], {**QUERY, **KEYS}, "y"),
    "causal_over_more_keys": over_more_keys,  # both count from the first key
    "no_softcap": lambda: model([attention("q", "k", "v", "mask", softcap=0.0)], {**QUERY, **KEYS, **MASK}, "y"),
    "concat": over_concat,
    "scale": lambda: over_cache("mask", scale=0.3),
    "scale_0": lambda: over_cache("mask", scale=0.0),
    "scaled_before": scaled_before,
    "flat_heads": of_flat_heads,
    "float_mask": lambda: over_keys(FLOAT16, "keys", ("new", "keys")),
    "mask_of_all_tokens": lambda: over_keys(BOOL, 8, ("batch", 1, 1, 8)),
    "float_cache": lambda: cache_of(FLOAT),
}


@pytest.mark.parametrize("name", READ_RIGHT)
def test_what_tensorrt_reads_right_passes(name: str, tmp_path: Path) -> None:
    made = READ_RIGHT[name]()
    preflight.check_readable(Path("fine.onnx"), made)
    assert problems(made, preflight.attentions(made), {}, tmp_path) == []


def test_attentions_are_listed_by_node() -> None:
    assert preflight.attentions(over_cache("mask", scale=0.5)) == {"attn": AttentionNode(True, False, 0.5)}
    assert preflight.attentions(over_concat(is_causal=1)) == {"attn": AttentionNode(False, True, None)}


@pytest.mark.parametrize(
    ("read", "meant", "text"),
    [
        ("concat", "mask", "has a mask, TensorRT's has no mask"),
        ("causal", "concat", "has causality NONE, TensorRT's has causality UPPER_LEFT"),
        ("concat", "causal", "has causality UPPER_LEFT, TensorRT's has causality NONE"),
        ("scale", "mask", "has the scale 0.125, TensorRT's has the scale 0.3"),
        ("scaled_before", "concat", "has the scale 0.125, TensorRT's has the scale 1"),
        ("flat_heads", "scaled_before", "has the scale 1, TensorRT's has the scale 0.125"),
    ],
)
def test_a_network_that_attends_otherwise_is_told(read: str, meant: str, text: str, tmp_path: Path) -> None:
    (problem,) = problems(READ_RIGHT[read](), preflight.attentions(READ_RIGHT[meant]()), {}, tmp_path)
    assert problem == f"node 'attn': the model's attention {text}"


def test_caches_are_compared_with_the_model(tmp_path: Path) -> None:
    masked = READ_RIGHT["mask"]()
    assert problems(masked, {}, {"past_k": "all_k", "past_v": "all_v"}, tmp_path) == []
    (moved,) = problems(masked, {}, {"past_k": "all_v"}, tmp_path)
    assert "cache 'past_k': TensorRT does not update it in place as 'all_v'" in moved


def problems(
    model: onnx.ModelProto, attentions: dict[str, AttentionNode], caches: dict[str, str], folder: Path
) -> list[str]:
    """What TensorRT's network of `model` does otherwise than these nodes and caches."""
    trt = pytest.importorskip("tensorrt_rtx")
    from trt_nvfp4.builder.tensorrt.backend import logger

    onnx.save(model, folder / "m.onnx")
    log = logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(str(folder / "m.onnx")), log.errors
    return list(network_problems(trt, network, attentions, caches))


@pytest.mark.parametrize(
    ("op", "message"), [("NonZero", "depends on values, as in"), ("BitShift", "does not have"), ("Add", "")]
)
def test_what_no_engine_of_tensorrt_rtx_holds(op: str, message: str) -> None:
    """Wherever it stands, and only ONNX's own: an operator of this name in another domain is a plugin's."""
    body = helper.make_graph(
        [helper.make_node(op, ["q"], ["z"], name="n")], "body", [], [helper.make_empty_tensor_value_info("z")]
    )
    branch = helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body)
    for node in (helper.make_node(op, ["q"], ["y"], name="n"), branch):
        if not message:
            preflight.check_operators(Path("m.onnx"), model([node], QUERY, "y"))
            continue
        with pytest.raises(ModelFaultError, match=rf"m\.onnx: node 'n' \({op}\): .*{message}.*export it again"):
            preflight.check_operators(Path("m.onnx"), model([node], QUERY, "y"))
    preflight.check_operators(Path("m.onnx"), model([helper.make_node(op, ["q"], ["y"], domain="mine")], QUERY, "y"))


@pytest.mark.parametrize(
    ("domain", "op", "message"),
    [
        ("com.microsoft", "GroupQueryAttention", "ONNX Runtime's attention; convert the decoder with --cache inplace"),
        ("com.microsoft", "RotaryEmbedding", "ONNX Runtime's, which TensorRT does not have; give the model as it was"),
        ("com.microsoft", "Gelu", None),
        ("", "MatMulInteger", "integer operators; give the model in float, or with QuantizeLinear"),
        ("", "QLinearConv", "integer operators; give the model in float, or with QuantizeLinear"),
        ("", "DequantizeLinear", None),
    ],
)
def test_operators_that_tensorrt_lacks(domain: str, op: str, message: str | None) -> None:
    made = model([helper.make_node(op, ["q"], ["y"], name="n", domain=domain)], QUERY, "y")
    if message is None:
        preflight.check_readable(Path("m.onnx"), made)
        return
    with pytest.raises(ModelFaultError, match=rf"m\.onnx: node 'n' \({op}\): .*{message}"):
        preflight.check_readable(Path("m.onnx"), made)
