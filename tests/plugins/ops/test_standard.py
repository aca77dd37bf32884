"""Torch references of ONNX's operators against ONNX's own evaluator, and what the adapters know of their schemas."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

from trt_nvfp4.plugins.ops import STANDARD_OPS, StandardOp
from trt_nvfp4.plugins.ops.standard import CONV_ACTIVATIONS, OPSET, UPDATE_RULES

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "ops.md").read_text()


def evaluated(op: str, tensors: list[torch.Tensor | None], attributes: dict[str, Any]) -> list[torch.Tensor]:
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(tensors)]
    feeds = {name: x.numpy() for name, x in zip(names, tensors, strict=True) if x is not None}
    given = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, x.shape) for name, x in feeds.items()]
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("y", "state")]
    graph = helper.make_graph([helper.make_node(op, names, ["y", "state"], **attributes)], "g", given, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    return [torch.from_numpy(np.asarray(x)) for x in ReferenceEvaluator(model).run(None, feeds)]


@pytest.mark.parametrize("rule", UPDATE_RULES)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("past", [False, True])
def test_linear_attention(rule: str, per_row: bool, past: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    batch, tokens, heads, group, key_dim, value_dim = 2, 5, 2, 3, 4, 6
    lead = (batch, tokens)
    widths = (heads * group * key_dim, heads * key_dim, heads * value_dim)
    tensors: list[torch.Tensor | None] = [torch.randn(*lead, width, generator=rng) for width in widths]
    tensors.append(torch.randn(batch, heads, key_dim, value_dim, generator=rng) if past else None)
    decay = -torch.rand(*lead, heads * (key_dim if per_row else 1), generator=rng)
    beta = torch.rand(*lead, 1 if per_row else heads, generator=rng)
    tensors += [decay if "gated" in rule else None, beta if "delta" in rule else None]
    attributes = {"q_num_heads": heads * group, "kv_num_heads": heads, "update_rule": rule, "scale": 0.3 * per_row}
    found = STANDARD_OPS["LinearAttention"].reference(*tensors, **attributes)
    for actual, wanted in zip(found, evaluated("LinearAttention", tensors, attributes), strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("activation", CONV_ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("optional", [False, True])
def test_causal_conv(activation: str, tokens: int, optional: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, tokens), (3, 1, 4), (3,), (2, 3, 3)]
    tensors: list[torch.Tensor | None] = [torch.randn(*shape, generator=rng) for shape in shapes]
    if not optional:
        tensors[2:] = [None, None]
    found = STANDARD_OPS["CausalConvWithState"].reference(*tensors, activation=activation)
    for actual, wanted in zip(
        found, evaluated("CausalConvWithState", tensors, {"activation": activation}), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("op", STANDARD_OPS.values(), ids=lambda op: op.name)
def test_ports_and_attributes_are_the_schemas(op: StandardOp) -> None:
    schema = onnx.defs.get_schema(op.name, OPSET)
    assert [port.name for port in op.inputs] == [port.name for port in schema.inputs]
    assert [port.name for port in op.outputs] == [port.name for port in schema.outputs]
    single = [port for port in schema.inputs if port.option == onnx.defs.OpSchema.FormalParameterOption.Single]
    assert op.required == len(single)
    # TensorRT's parser adds the number of spatial dimensions.
    assert op.attributes.keys() - {"ndim"} == schema.attributes.keys()
    for name, attribute in schema.attributes.items():
        if not attribute.required:
            default = helper.get_attribute_value(attribute.default_value)
            assert op.attributes[name] == (default.decode() if isinstance(default, bytes) else default)


@pytest.mark.parametrize("op", STANDARD_OPS.values(), ids=lambda op: op.name)
def test_the_page_lists_them(op: StandardOp) -> None:
    section = PAGE.split(f"### `{op.name}`")[1].split("\n### ")[0]
    for port in (*op.inputs, *op.outputs):
        assert f"`{port.name}` | {port.type} | {port.doc} |" in section
    for name, value in op.attributes.items():
        assert f"| attribute | `{name}` |" in section
        assert f"default {value} |" in section
