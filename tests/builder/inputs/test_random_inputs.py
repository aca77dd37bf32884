"""Random inputs that a model of text or pictures can run on."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.calibration.samples.samples import input_specs


def test_random_inputs_make_sense(tmp_path: Path, rng: np.random.Generator) -> None:
    shape = ["batch", "sequence"]
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, shape),
            helper.make_tensor_value_info("position_ids", TensorProto.INT64, shape),
            helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, 8, 8]),
            helper.make_tensor_value_info("position", TensorProto.FLOAT, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*shape, 4])],
        [onnx.numpy_helper.from_array(np.ones((30, 4), np.float32), "table")],
    )
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    model = tmp_path / "m.onnx"
    (sample,) = random_samples(input_specs(model), vocabulary(model), 1, rng, {"input_ids": (2, 500)})
    assert sample["input_ids"].shape == (2, 500)
    assert sample["input_ids"].min() >= 0
    assert 15 < sample["input_ids"].max() < 30
    assert sample["attention_mask"].all()
    assert (sample["position_ids"] == np.arange(sample["position_ids"].shape[-1])).all()
    assert sample["position"].shape == ()
    assert sample["pixels"].dtype == np.float32
    assert sample["pixels"].std() == pytest.approx(1, abs=0.3)
