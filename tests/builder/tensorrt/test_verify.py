"""Reading TensorRT's layer lists, and checking them against a plan."""

import json

import pytest
from planned_nodes import planned_nodes

from trt_nvfp4.builder.tensorrt.verify import (
    Layer,
    Outcome,
    PlannedNodes,
    check_layers,
    copied_caches,
    float32_products,
    layers_of_inspector,
    layers_of_log,
)

# As TensorRT-RTX 1.7 prints them, dimensions and strides shortened.
LOG = "\n".join(
    [
        "Layers:",
        "Name: __mye27_0_myl0_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , "
        "StreamId: 0, Metadata: ",
        "Name: mlp_myl0_2, LayerType: custom_layer, Inputs: [ { Name: z, Dimensions: [-1,64], Datatype: Half }], "
        "Constants: [], Outputs: [ { Name: k, Dimensions: [-1,64], Datatype: Half }], TacticName: , StreamId: 0, "
        "Metadata: [ONNX Layer: mlp]",
        "Name: mm8_myl0_2, LayerType: gemm, Inputs: [ { Name: a, Datatype: FP8 }], "
        "Constants: [ { Name: W, Datatype: FP8 }, "
        "{ Name: s, Datatype: Float }], Outputs: [ { Name: k, Datatype: Half }], TacticName: __myelin, StreamId: 0, "
        "Metadata: [ONNX Layer: mm8]\x1f[ONNX Layer: dq]\x1f[ONNX Layer: /model/layers.0/wdq]",
        "",
        "I/O Tensors:",
        " Name: x, IOMode: Input, DataType: Half",
    ]
)


def planned(decision: str, *nodes: str, quantized: tuple[str, ...] = ()) -> list[PlannedNodes]:
    return [planned_nodes("layer0", decision, *nodes, quantized=quantized)]


def test_log_lists_layers() -> None:
    layers = layers_of_log(LOG)
    assert [layer.kind for layer in layers] == ["shape_call", "custom_layer", "gemm"]
    assert [layer.is_plugin for layer in layers] == [False, True, False]
    assert layers[2].nodes == {"mm8", "dq", "/model/layers.0/wdq"}
    # Outputs do not count: an FP32 product written as FP8 is no FP8 product.
    assert layers[2].datatypes == {"FP8", "Float"}
    assert (layers[2].inputs, layers[2].constants) == (("FP8",), ("FP8", "Float"))


def test_log_without_constants() -> None:
    """As TensorRT 10 prints it in some versions."""
    (layer,) = layers_of_log(
        "Layers:\nName: mm, LayerType: gemm, Inputs: [ { Name: x, Format/Datatype: Row major linear FP16 format }], "
        "Outputs: [ { Name: y, Format/Datatype: Half }], TacticName: t, StreamId: 0, Metadata: [ONNX Layer: mm]"
    )
    assert layer.constants is None
    assert "FP16" in layer.datatypes


def test_inspector_lists_layers() -> None:
    entry = {"Name": "mlp", "LayerType": "PluginV3", "Inputs": [{"Format/Datatype": "Row major linear FP16 format"}]}
    operands = {"Inputs": [{"Datatype": "Half"}], "Constants": [{"Datatype": "FP8"}]}
    gemm = {"Name": "g", "LayerType": "gemm", **operands, "Metadata": "[ONNX Layer: mm8]"}
    plugin, product = layers_of_inspector(json.dumps({"Layers": [entry, gemm]}))
    assert plugin.is_plugin
    assert plugin.nodes == {"mlp"}
    assert (plugin.constants, product.constants) == (None, ("FP8",))
    assert "mm8" in product.nodes
    assert product.datatypes == {"Half", "FP8"}


def test_plugin_and_fp8_as_planned() -> None:
    layers = layers_of_log(LOG)
    assert check_layers(layers, planned("nvfp4", "mlp")) == [Outcome("layer0", "nvfp4 plugin", None)]
    assert check_layers(layers, planned("fp8", "mm8"))[0].realized == "fp8"


@pytest.mark.parametrize(
    ("decision", "nodes", "problem"),
    [
        ("nvfp4", ["gone"], "0 plugin layers"),
        ("nvfp4", ["mm8"], "0 plugin layers"),
        ("nvfp4", [], "no node carries it"),
        ("fp8", ["mlp"], "expected a layer that reads fp8"),
        ("bf16", ["mm8"], "expected a layer that reads bf16"),
        ("fp8", ["gone"], "no layer"),
    ],
)
def test_shortfall_is_found(decision: str, nodes: list[str], problem: str) -> None:
    (entry,) = check_layers(layers_of_log(LOG), planned(decision, *nodes))
    assert entry.realized == "missing"
    assert problem in str(entry.problem)


def test_two_plugin_layers_for_one_node_are_a_shortfall() -> None:
    layer = Layer("a", "custom_layer", (), frozenset({"mlp"}))
    assert check_layers([layer, layer], planned("nvfp4", "mlp"))[0].problem


@pytest.mark.parametrize(
    ("decision", "inputs", "constants", "as_planned"),
    [
        # As TensorRT-RTX 1.7 reads them: a GEMM, a product of one row, the same of 16-bit activations, merged or not.
        ("fp8", ("FP8",), ("FP8", "Float", "Float"), True),
        ("native_nvfp4", ("FP4E2M1", "FP8"), ("FP4E2M1", "Float", "Float", "FP8"), True),
        ("native_nvfp4", ("FP8", "FP4E2M1"), ("Float", "FP4E2M1", "Float", "FP8"), True),
        ("fp8", ("Half",), ("Half", "FP8"), False),
        ("fp8", ("Half",), ("FP8", "FP8"), False),
        ("native_nvfp4", ("Half", "FP8"), ("FP4E2M1", "FP8"), False),
        # 16-bit weights; biases and residuals of 16 bits, in any place; weights made at run time.
        ("fp8", ("FP8",), ("Half", "Float"), False),
        ("fp8", ("Half", "FP8"), ("Half", "FP8"), True),
        ("fp8", ("FP8", "FP8"), (), True),
        # Where constants are not listed, the activations alone are checked.
        ("fp8", ("FP8", "Half"), None, True),
        ("fp8", ("Half",), None, False),
    ],
)
def test_both_operands_are_checked(
    decision: str, inputs: tuple[str, ...], constants: tuple[str, ...] | None, as_planned: bool
) -> None:
    layer = Layer("a", "gemm", inputs, frozenset({"mm"}), constants)
    (entry,) = check_layers([layer], planned(decision, "mm", quantized=("mm",)))
    assert (entry.problem is None) == as_planned
    assert as_planned or f"expected a layer that reads activations and weights in {decision}" in str(entry.problem)


def test_caches_that_are_copied_around_a_plugin_are_reported() -> None:
    """TensorRT binds the network's caches to the plugin's ports, or copies them to others."""
    planned = [planned_nodes("a", "attention", "a", caches=("past.key", "past.value"))]
    caches = {f"past.{part}": f"present.{part}" for part in ("key", "value")}
    line = (
        "Name: a{0}, LayerType: custom_layer, Inputs: {{ {{Name: past.key{0}, Datatype: Half}}, {{Name: {1}{0}, "
        "Datatype: Half}}}}, Outputs: {{ {{Name: present.key{0}, Datatype: Half}}, {{Name: present.value{0}, "
        "Datatype: Half}}}}, TacticName: , StreamId: 0, Metadata: [ONNX Layer: a]"
    )

    def problems(*second: str) -> list[str]:
        suffixes = ("", " [profile 1]")
        log = "\n".join(["Layers:", *(line.format(s, name) for s, name in zip(suffixes, second, strict=True))])
        return list(copied_caches(layers_of_log(log), planned, caches, profiles=2))

    assert problems("past.value", "past.value") == []
    (problem,) = problems("past.value", "copy_of_past.value")
    assert problem.startswith("profile 1: 1 of 2 caches")


@pytest.mark.parametrize(
    ("graph", "profile"), [(1, 1), (0, 0)], ids=["graphs of all profiles", "counted from 0 in each"]
)
def test_layers_that_read_constants_alone_are_in_the_profile_of_their_graph(graph: int, profile: int) -> None:
    """As TensorRT-RTX 1.7 lists what makes 16-bit weights of FP8 codes ahead of a product."""
    weights = "Name: __myl_CastMulCast_myl{0}_8, LayerType: kgen, Inputs: [], Constants: [ {{ Name: w, Datatype: FP8 }}"
    product = "Name: mm{1}_myl{0}_9, LayerType: gemm, Inputs: [ {{ Name: x{1}, Datatype: BFloat16 }}"
    lines = [
        f"{line.format(number, mark)}], Outputs: [], TacticName: t, StreamId: 0, Metadata: [ONNX Layer: {node}]"
        for number, mark in ((0, ""), (graph, " [profile 1]"))
        for node, line in (("dq", weights), ("mm", product))
    ]
    layers = layers_of_log("\n".join(["Layers:", *lines]))
    assert [layer.profile for layer in layers] == [0, 0, profile, 1]
    (entry,) = check_layers(layers, planned("fp8", "dq"), profiles=2)
    assert (entry.problem is None) == (profile == 1)


def test_products_in_float32() -> None:
    """Those of the network's types, those that TensorRT built otherwise, and none that it folded away."""
    layers = (("bf16.cast", "bf16", "Float"), ("bf16.mm", "bf16", "BFloat16"), ("wide", "wide", "Float"))
    layers += (("widened", "widened", "Float"), ("no_product", "no_product", "Float"))
    log = "\n".join(
        f"Name: {layer}, LayerType: gemm, Inputs: [ {{ Name: x, Datatype: {operand} }}], Constants: [ {{ Name: w, "
        f"Datatype: {operand} }}, {{ Name: alpha, Datatype: Float }}], Outputs: [], TacticName: t, StreamId: 0, "
        f"Metadata: [ONNX Layer: {node}]\x1f[ONNX Layer: {node}.bias]"
        for layer, node, operand in layers
    )
    products = {"bf16": False, "wide": True, "widened": False, "folded": True}
    assert float32_products(layers_of_log(f"Layers:\n{log}"), products) == ["wide", "widened"]
