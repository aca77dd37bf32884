"""Operators in Torch against the test cases that come with ONNX, whose outputs its authors computed with NumPy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.generate.torch_graph.graph import Graph
from trt_nvfp4.builder.generate.torch_graph.operators import OPERATORS
from trt_nvfp4.builder.generate.torch_graph.plugins import ReferencePlugins
from trt_nvfp4.builder.generate.torch_graph.program import Program
from trt_nvfp4.builder.generate.torch_graph.tensors import torch_tensor

CPU = torch.device("cpu")
# What these say in their names is refused by the operator itself, with the node's name.
LACKING = ("edge_pad", "reflect_pad", "wrap_pad", "_mul", "_max", "_min", "multiply", "empty_set", "no_saturate")
# Of values up to about 1.
FAR = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
# ONNX has no cases of one node and one output for these; DistCollective is TensorRT's.
WITHOUT_CASES = {"DistCollective", "LayerNormalization", "RMSNormalization"}


def cases() -> Iterator[Any]:
    from onnx.backend.test.case.node import collect_testcases

    for case in collect_testcases(None):
        nodes = case.model.graph.node
        older = "_opset1" in case.name
        if len(nodes) == 1 and nodes[0].op_type in OPERATORS and nodes[0].domain == "" and not older:
            # Written for the opset that an operator changed in last.
            case.model.opset_import[0].version = max(case.model.opset_import[0].version, 24)
            yield case


def as_torch(value: Any) -> torch.Tensor:
    return torch_tensor(value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_case_of_onnx_is_computed_or_refused(tmp_path: Path) -> None:
    computed, wrong = set(), []
    for case in cases():
        try:
            onnx.save(case.model, tmp_path / "m.onnx")
            graph = Graph(tmp_path / "m.onnx", CPU)
            data = [([as_torch(x) for x in given], [as_torch(y) for y in out]) for given, out in case.data_sets]
        except BuilderError:
            continue
        for given, expected in data:
            try:
                found = Program(graph, ReferencePlugins).run(dict(zip(graph.inputs, given, strict=True)))
                for name, y in zip(graph.outputs, expected, strict=True):
                    assert (found[name].dtype, found[name].shape) == (y.dtype, y.shape)
                    far = FAR.get(y.dtype, 1e-5)
                    torch.testing.assert_close(found[name].float(), y.float(), rtol=1e-3, atol=far, equal_nan=True)
                computed.add(case.model.graph.node[0].op_type)
            except (AssertionError, BuilderError) as error:
                wrong.append(f"{case.name}: {error}")
    unexpected = [text for text in wrong if not any(word in text.split(":")[0] for word in LACKING)]
    assert not unexpected, "\n".join(unexpected)
    assert OPERATORS.keys() - computed <= WITHOUT_CASES


def _save(path: Path, node: onnx.NodeProto, opset: int = 24) -> Path:
    values = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name]
              for names in (node.input, node.output)]  # fmt: skip
    graph = helper.make_graph([node], "g", *values)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), path)
    return path


@pytest.mark.parametrize(
    ("node", "opset", "words"),
    [
        (helper.make_node("Loop", ["n"], ["y"], name="again"), 24, "node 'again': torch has no operator Loop here"),
        (helper.make_node("Attention", ["q", "k", "v", "", "p"], ["y"]), 24, "Attention with more than 4 inputs"),
        (helper.make_node("Attention", ["q", "k", "v"], ["y", "p"]), 24, "Attention with more than 1 output"),
        (helper.make_node("Relu", ["x"], ["y"], consumed_inputs=[1]), 24, "Relu with attribute consumed_inputs"),
        (helper.make_node("Relu", ["x"], ["y"], domain="com.example"), 24, "operator com.example.Relu"),
        (helper.make_node("Odd", ["x"], ["y"], domain="trt_nvfp4"), 24, "op trt_nvfp4.Odd"),
        (helper.make_node("Relu", ["x"], ["y"]), 13, "opset 18 or newer here, found 13"),
    ],
)
def test_what_torch_has_no_function_for_is_refused_at_once(
    tmp_path: Path, node: onnx.NodeProto, opset: int, words: str
) -> None:
    with pytest.raises(BuilderError, match=words) as caught:
        Graph(_save(tmp_path / "m.onnx", node, opset), CPU)
    assert caught.value.exit_code == MODEL_AT_FAULT
    assert "--runner onnxruntime" in str(caught.value)


def test_norms(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    x, scale = torch.randn(3, 5, 16), torch.randn(16)
    centered = x - x.mean(-1, keepdim=True)
    for op, values in (("RMSNormalization", x), ("LayerNormalization", centered)):
        node = helper.make_node(op, ["x", "s"], ["y"], epsilon=1e-3)
        graph = Graph(_save(tmp_path / "m.onnx", node), CPU)
        found = Program(graph, ReferencePlugins).run({"x": x, "s": scale})["y"]
        torch.testing.assert_close(found, values / (values.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * scale)


def test_a_node_that_fails_is_named(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "s"], ["y"], name="product")
    program = Program(Graph(_save(tmp_path / "m.onnx", node), CPU), ReferencePlugins)
    with pytest.raises(BuilderError, match=r"node 'product' \(MatMul\) cannot be computed"):
        program.run({"x": torch.ones(2, 3), "s": torch.ones(2, 3)})
