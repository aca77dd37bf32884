"""Subgraphs in 16 bits: Casts around them, and those inside stay."""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

from onnx_models.graphs import ACTIVATION_SPELLINGS, draw, mlp_model, run, spec
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.graph_passes.load.source import SourceModel

Load = Callable[[onnx.ModelProto], SourceModel]


def test_fp16_casts(loaded: Load, seed: int) -> None:
    """A float32 model's MLP in float16: Casts around it, weights and constants converted, the graph's types kept."""
    spelling = ACTIVATION_SPELLINGS["gelu_tanh"][0]
    model, _ = mlp_model(spec(activation="gelu_tanh", spelling=spelling, biases=True, seed=seed))
    source = loaded(model)
    plan = plan_all(source, precision="bf16")
    assert [entry.decision for entry in plan.subgraphs] == ["bf16"]
    plan.subgraphs[0].decision = "fp16"
    result = rewritten(source, plan)
    onnx.checker.check_model(str(result.path), full_check=True)
    written = onnx.load(result.path)
    assert {t.data_type for t in written.graph.initializer} == {TensorProto.FLOAT16}
    assert written.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    x = draw(seed, 2, 3, 32)
    (expected,), (found,) = run(model, x), run(result.path, x)
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


def test_casts_inside_stay_what_they_are(loaded: Load, seed: int) -> None:
    """A float16 model's activation in float32 stays so in bfloat16."""
    spelling = next(text for text in ACTIVATION_SPELLINGS["silu"] if "Cast" in text)
    source = loaded(mlp_model(spec(spelling=spelling, gated=False, dtype="float16", seed=seed))[0])
    plan = plan_all(source)
    plan.subgraphs[0].decision = "bf16"
    nodes = onnx.load(rewritten(source, plan).path).graph.node
    types = [node.attribute[0].i for node in nodes if node.op_type == "Cast"]
    bf16, fp16 = TensorProto.BFLOAT16, TensorProto.FLOAT16
    assert types == [bf16, TensorProto.FLOAT, bf16, fp16]  # of x, in front of Sigmoid, behind it, of y
