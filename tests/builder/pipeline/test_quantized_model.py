"""A directory with quantized weights: NVFP4 bytes and FP8 bytes are those of the rewritten model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

from checkpoint_formats.directories import quantize_directory
from checkpoint_formats.writers import FORMATS, Writer
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target

transformers = pytest.importorskip("transformers")

LAYER = "model.layers.0."


@pytest.fixture
def mixture(tmp_path: Path, rng: np.random.Generator) -> Path:
    """NVFP4 MLPs, FP8 attention, the head in 16 bits; bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        dtype="bfloat16",
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "mixture")

    def writer_of(module: str) -> Writer | None:
        if ".mlp." in module:
            return FORMATS["nvfp4 compressed-tensors"][0]
        name = "fp8 per tensor" if module.endswith(("q_proj", "o_proj")) else "fp8 per channel"
        return FORMATS[name][0] if module.endswith("_proj") else None

    quantize_directory(tmp_path / "mixture", rng, writer_of, {"quant_method": "compressed-tensors"})
    return tmp_path / "mixture"


def test_bytes_of_the_checkpoint(mixture: Path) -> None:
    request = pipeline.Request(
        model=mixture,
        target=find_target("rtx-blackwell"),
        output=mixture.parent / "o.engine",
        task="features",
        kinds=("gated_mlp", "mlp", "linear"),
        stop_after="rewrite",
    )
    report = pipeline.run(request)
    decisions = {entry["name"]: entry["decision"] for entry in report.subgraphs}
    stored = load_file(mixture / "model.safetensors")
    rewritten = onnx.load(mixture.parent / "o.rewritten.onnx")
    arrays = {
        tensor.name: np.frombuffer(tensor.raw_data, np.uint8) if tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN
        else numpy_helper.to_array(tensor)
        for tensor in rewritten.graph.initializer
    }  # fmt: skip
    (mlp,) = (node for node in rewritten.graph.node if node.op_type == "NVFP4GatedMLP")
    gate, up, down = (
        stored[f"{LAYER}mlp.{name}_proj.weight_packed"].numpy().view(np.int8) for name in ("gate", "up", "down")
    )
    found = {array.shape: array for name in mlp.input if (array := arrays.get(name)) is not None}
    np.testing.assert_array_equal(found[192, 32], np.stack([gate, up], 1).reshape(192, 32))
    np.testing.assert_array_equal(found[64, 48], down)
    published = {of: stored[f"{LAYER}self_attn.{of}_proj.weight"].view(torch.uint8).numpy() for of in "qkvo"}
    in_model = [a for a in arrays.values() if a.dtype == np.uint8 and a.size == 64 * 64]
    for name, values in published.items():
        assert any(np.array_equal(a, v.reshape(-1)) for a in in_model for v in (values, values.T)), (name, decisions)
