"""Decoders with caches that grow, as optimum and onnxruntime-genai export them, with random weights."""

import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from trt_nvfp4.common.onnx_runtime import onnxruntime

VOCAB = 96
NAMES = sorted(file.name.removesuffix(".onnx.xz") for file in Path(__file__).parent.glob("*.xz"))


def model(name: str, rng: np.random.Generator) -> onnx.ModelProto:
    """The model of that name, its large weights drawn anew."""
    proto = onnx.ModelProto.FromString(lzma.decompress((Path(__file__).parent / f"{name}.onnx.xz").read_bytes()))
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and not tensor.raw_data and not tensor.float_data:
            values = 0.15 * rng.standard_normal(tuple(tensor.dims))
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    return proto


def greedy(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The next tokens by the exported model itself in ONNX Runtime, one sequence over its growing caches."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {entry.name: entry.shape for entry in session.get_inputs()}
    outputs = [entry.name for entry in session.get_outputs()]
    caches = {
        name: np.zeros((1, shape[1], 0, shape[3] if isinstance(shape[3], int) else 16), np.float32)
        for name, shape in inputs.items()
        if name.startswith("past_key_values")
    }
    text, new = list(prompt), list(prompt)
    while len(text) < len(prompt) + count:
        feeds = {"input_ids": np.array([new]), "attention_mask": np.ones((1, len(text)), np.int64), **caches}
        if "position_ids" in inputs:
            feeds["position_ids"] = np.arange(len(text) - len(new), len(text))[None]
        found = dict(zip(outputs, session.run(outputs, feeds), strict=True))
        caches = {name: found[name.replace("past_key_values", "present")] for name in caches}
        new = [int(found["logits"][0, -1].argmax())]
        text += new
    return text[len(prompt) :]
