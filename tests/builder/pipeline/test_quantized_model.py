"""A directory with quantized weights: NVFP4 bytes, FP8 bytes and scales of caches are those of the rewritten model."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file

from checkpoint_formats.directories import quantize_directory
from checkpoint_formats.writers import FORMATS, Writer
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.common.errors import CalibrationError

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
    (anew,) = (warning for warning in report.warnings if "quantized here" in warning)
    assert "lm_head in NVFP4:" in anew, "it has no gate and up"
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


def with_cache_scales(directory: Path, scales: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})


def planned_attention(directory: Path, **options: Any) -> tuple[dict[str, Any], Report]:
    request = pipeline.Request(
        model=directory,
        target=find_target("rtx-blackwell"),
        output=directory.parent / "o.engine",
        **{"precision": "bf16", "task": "generate", "stop_after": "rewrite", "max_batch": 1, **options},
    )
    report = pipeline.run(request)
    (entry,) = [entry for entry in report.subgraphs if entry["kind"] == "attention"]
    return entry, report


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_scales_of_caches_become_those_of_the_engine(kv_cache: str, mixture: Path) -> None:
    by_head = torch.tensor([0.03, 0.06])
    with_cache_scales(
        mixture, {f"{LAYER}self_attn.k_scale": torch.tensor([0.02]), f"{LAYER}self_attn.v_scale": by_head}
    )
    entry, report = planned_attention(mixture, kv_cache=kv_cache)
    assert entry["decision"] == "attention_fp8"
    assert not any("scales for caches" in warning for warning in report.warnings)
    rewritten = onnx.load(report.files["rewritten model"])
    (node,) = (node for node in rewritten.graph.node if node.op_type == "CachedAttention")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in rewritten.graph.initializer}
    key, value = (constants[name] for name in node.input[9:])
    np.testing.assert_array_equal(key, np.float32([0.02, 0.02]))
    np.testing.assert_array_equal(value, by_head.numpy())


@pytest.mark.parametrize(
    ("scales", "options", "message"),
    [
        ({"k_scale": 1.0, "v_scale": 1.0}, {"attention": "tensorrt"}, "1 of 1 layers do not use"),
        ({"k_scale": 1.0}, {}, "those of 1 layers fit no attention that was found"),
    ],
)
def test_scales_of_caches_that_are_not_used(
    scales: dict[str, float], options: dict[str, str], message: str, mixture: Path
) -> None:
    with_cache_scales(mixture, {f"{LAYER}self_attn.{name}": torch.tensor(scale) for name, scale in scales.items()})
    entry, report = planned_attention(mixture, stop_after="plan", **options)
    assert entry["decision"] != "attention_fp8"
    assert any(message in warning for warning in report.warnings)


def test_scales_of_another_number_of_heads(mixture: Path) -> None:
    with_cache_scales(mixture, {f"{LAYER}self_attn.{of}_scale": torch.ones(3) for of in "kv"})
    with pytest.raises(CalibrationError, match=r"3 scales for the k cache of .*self_attn, which has 2 heads"):
        planned_attention(mixture, stop_after="plan")
