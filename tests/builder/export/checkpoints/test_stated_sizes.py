"""Groups, blocks and layouts are those that a configuration states; what fits none of them is refused, not guessed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_formats.writers import FORMATS
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.export.checkpoints.directory import quantized_directory
from trt_nvfp4.builder.export.checkpoints.settings import Settings

MODULE = "model.layers.0.mlp.up_proj."
N, K = 200, 160


def read(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any], metadata: dict[str, str] | None = None
) -> torch.Tensor:
    """The weight of the one module that the files hold."""
    named = {MODULE + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata)
    config = {"model_type": "llama", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    found = quantized_directory(folder)
    assert found is not None
    weight: torch.Tensor = found.state_dict()[f"{MODULE}weight"][...]
    return weight


def fp8(rows: int, columns: int, name: str = "weight_scale") -> dict[str, torch.Tensor]:
    """With so many scales."""
    return {"weight": torch.randn(N, K).to(torch.float8_e4m3fn), name: torch.rand(rows, columns) + 0.5}


def spread(tensors: dict[str, torch.Tensor], rows: int, columns: int) -> torch.Tensor:
    """Each scale over so many rows and columns."""
    values, scale = tensors.values()
    return values.float() * scale.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]


def groups(*weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{number}": {"weights": stated} for number, stated in enumerate(weights)},
    }


@pytest.mark.parametrize(
    "stated",
    [
        groups({"strategy": "block", "block_structure": "64x96"}),
        groups({"strategy": "block", "block_structure": [64, 96]}),
        groups({"group_size": 32}, {"strategy": "block", "block_structure": [64, 96]}),
        {"quant_method": "fp8", "weight_block_size": [64, 96]},
    ],
)
def test_blocks(stated: dict[str, Any], tmp_path: Path) -> None:
    """200 rows in blocks of 64: the last is smaller, though four of 50 would be even."""
    tensors = fp8(4, 2)
    torch.testing.assert_close(read(tmp_path, tensors, stated), spread(tensors, 64, 96), rtol=0, atol=0)


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "fp8", "weight_block_size": [1, 96]},
        groups({"group_size": 96}, {"group_size": 64}, {"group_size": None, "strategy": "channel"}),
        {**groups({"group_size": 96}), "input_activations": {"group_size": 128}},
        {"quant_method": "gptq", "group_size": 64, "dynamic": {"+:.*up.*": {"group_size": 96}}},
    ],
)
def test_groups_of_some_modules(stated: dict[str, Any], tmp_path: Path) -> None:
    """160 columns in groups of 96, and not two of 80."""
    tensors = fp8(N, 2)
    torch.testing.assert_close(read(tmp_path, tensors, stated), spread(tensors, 1, 96), rtol=0, atol=0)


def test_groups_at_any_depth(tmp_path: Path) -> None:
    stated: dict[str, Any] = {"group_size": 96}
    for _ in range(10_000):
        stated = {"config_groups": stated}
    assert Settings.of(tmp_path, {"quantization_config": stated}).groups == {96}


@pytest.mark.parametrize(
    ("tensors", "stated", "words"),
    [
        (lambda: fp8(N, 2), groups({"group_size": 96}, {"group_size": 128}), r"\(96, 128\)"),
        (lambda: fp8(N, 2), groups({"group_size": 32}), r"\(32\)"),
        (lambda: fp8(4, 2), {"quant_method": "fp8", "weight_block_size": [128, 128]}, r"\(128 x 128\)"),
        (lambda: fp8(3, 7), {"quant_method": "fp8"}, r"holds scales \[3, 7\]"),
        (lambda: fp8(N, 5), {"quant_method": "fp8", "weight_block_size": [128, 128]}, r"\(128 x 128\)"),
        (lambda: fp8(50, 5), groups({"group_size": 32}), r"\(32\)"),
    ],
    ids=["two that fit", "none that fits", "other blocks", "odd ones", "even groups", "even rows"],
)
def test_scales_that_fit_nothing_stated(
    tensors: Callable[[], dict[str, torch.Tensor]], stated: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=words) as raised:
        read(tmp_path, tensors(), stated)
    assert f"{MODULE}weight_scale holds scales" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "quantization"), [("gptq 4", {"checkpoint_format": "gptq"}), ("awq", {"version": "gemm"})]
)
@pytest.mark.parametrize(
    ("stated", "words"), [({"group_size": 48}, r"\(48\)"), ({"weight_block_size": [128, 128]}, r"\(128 x 128\)")]
)
def test_groups_of_integers_that_fit_nothing_stated(
    name: str, quantization: dict[str, Any], stated: dict[str, Any], words: str, tmp_path: Path, rng: Any
) -> None:
    tensors, _ = FORMATS[name][0](rng, 64, 128)
    count, method = len(tensors["scales"]), name.partition(" ")[0]
    assert count > 1
    if method == "gptq":
        del tensors["g_idx"]
    expected = rf"{MODULE}weight: {count} groups of 128 columns fit none.* that config\.json states {words}"
    with pytest.raises(ModelFaultError, match=expected):
        read(tmp_path, tensors, {"quant_method": method, "bits": 4, **quantization, **stated})


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "marlin", "llm-awq"])
def test_layouts_of_awq_for_one_kernel(version: str, tmp_path: Path, rng: Any) -> None:
    tensors, _ = FORMATS["awq"][0](rng, 64, 64)
    with pytest.raises(ModelFaultError, match=f"AWQ's version {version}, and gemm, .* are read"):
        read(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "version": version})


def test_scales_of_torchao_in_an_order_for_one_kernel(tmp_path: Path) -> None:
    tensors = {"_weight_qdata": fp8(1, 1)["weight"], "_weight_scale": torch.full((N, K // 32), 127, dtype=torch.uint8)}
    described = {"_type": "MXTensor", "_data": {"is_swizzled_scales": False, "act": {"is_swizzled_scales": True}}}
    stated = {"quant_method": "torchao"}
    found = read(tmp_path, tensors, stated, {f"{MODULE}weight": json.dumps(described)})
    torch.testing.assert_close(found, tensors["_weight_qdata"].float(), rtol=0, atol=0)
    described["_data"] = {"is_swizzled_scales": True}
    with pytest.raises(BuilderError, match=r"_weight_scale is swizzled for one kernel \(is_swizzled_scales\)"):
        read(tmp_path, tensors, stated, {f"{MODULE}weight": json.dumps(described)})


@pytest.mark.parametrize(
    ("dtype", "stated"),
    [
        (torch.int8, {"quant_method": "fp8"}),
        (torch.int8, groups({"num_bits": 8, "type": "float"})),
        (torch.float8_e4m3fn, groups({"num_bits": 8, "type": "int"})),
    ],
)
def test_bytes_of_another_type(dtype: torch.dtype, stated: dict[str, Any], tmp_path: Path) -> None:
    """A header that calls FP8 INT8, or the other way round."""
    tensors = {"weight": torch.ones(N, K).to(dtype), "weight_scale": torch.ones(N, 1)}
    with pytest.raises(BuilderError, match=r"and config\.json states values of type"):
        read(tmp_path, tensors, stated)
    both = groups({"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"})
    assert (read(tmp_path, tensors, both) == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_files_that_are_said_to_be_dequantized(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({f"{MODULE}weight": torch.ones(2, 2, dtype=dtype)}, tmp_path / "model.safetensors")
    stated = {"quant_method": "mxfp4", "dequantize": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": stated}))
    if dtype is torch.bfloat16:
        assert quantized_directory(tmp_path) is None
        return
    with pytest.raises(BuilderError, match="by mxfp4, in a format that is not read"):
        quantized_directory(tmp_path)


def test_two_sets_of_files(tmp_path: Path) -> None:
    """transformers reads the single file, others the index."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(BuilderError, match="which lists other files; keep only the checkpoint's own files"):
        quantized_directory(tmp_path)
