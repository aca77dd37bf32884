"""Reading TensorRT's layer lists, and checking them against a plan."""

from __future__ import annotations

import json

import pytest

from trt_nvfp4.builder.layers import Layer, check_layers, layers_of_inspector, layers_of_log

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


def planned(decision: str, *nodes: str) -> list[dict[str, object]]:
    return [{"name": "layer0", "decision": decision, "engine_nodes": list(nodes)}]


def test_log_lists_layers() -> None:
    layers = layers_of_log(LOG)
    assert [layer.kind for layer in layers] == ["shape_call", "custom_layer", "gemm"]
    assert [layer.is_plugin for layer in layers] == [False, True, False]
    assert layers[2].nodes == {"mm8", "dq", "/model/layers.0/wdq"}
    # Outputs do not count: an FP32 product written as FP8 is no FP8 product.
    assert layers[2].datatypes == {"FP8", "Float"}


def test_inspector_lists_layers() -> None:
    entry = {"Name": "mlp", "LayerType": "PluginV3", "Inputs": [{"Format/Datatype": "Row major linear FP16 format"}]}
    operands = {"Inputs": [{"Datatype": "Half"}], "Constants": [{"Datatype": "FP8"}]}
    gemm = {"Name": "g", "LayerType": "gemm", **operands, "Metadata": "[ONNX Layer: mm8]"}
    plugin, product = layers_of_inspector(json.dumps({"Layers": [entry, gemm]}))
    assert plugin.is_plugin
    assert plugin.nodes == {"mlp"}
    assert "mm8" in product.nodes
    assert product.datatypes == {"Half", "FP8"}


def test_plugin_and_fp8_as_planned() -> None:
    layers = layers_of_log(LOG)
    assert check_layers(layers, planned("nvfp4", "mlp")) == [
        {"name": "layer0", "realized": "nvfp4 plugin", "problem": None}
    ]
    assert check_layers(layers, planned("fp8", "mm8"))[0]["realized"] == "fp8"


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
    assert entry["realized"] == "missing"
    assert problem in entry["problem"]


def test_two_plugin_layers_for_one_node_are_a_shortfall() -> None:
    layer = Layer("a", "custom_layer", frozenset(), frozenset({"mlp"}))
    assert check_layers([layer, layer], planned("nvfp4", "mlp"))[0]["problem"]
