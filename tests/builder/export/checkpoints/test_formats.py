"""Every format is dequantized to the very values that its codes and scales stand for."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoint_formats.writers import FORMATS, gptq
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.export.checkpoints.directory import QuantizedDirectory, quantized_directory
from trt_nvfp4.common.errors import CalibrationError

MODULE = "model.layers.0.mlp.up_proj."
N, K = 40, 160


def directory(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object] | None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama"} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> QuantizedDirectory:
    found = quantized_directory(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_values(name: str, rng: np.random.Generator, tmp_path: Path) -> None:
    writer, quantization = FORMATS[name]
    tensors, expected = writer(rng, N, K)
    found = read(directory(tmp_path, {MODULE + key: tensor for key, tensor in tensors.items()}, quantization))
    assert list(found.weights) == [f"{MODULE}weight"]
    assert not found.plain
    weight = found.weights[f"{MODULE}weight"]
    assert weight.shape == (N, K)
    values = found.state_dict()[f"{MODULE}weight"][...]
    assert values.shape == (N, K)
    # float32 rounds products of scales; nothing else does.
    np.testing.assert_allclose(values.double().numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in FORMATS if "gptq" not in name and "blockwise" not in name])
def test_what_the_tensors_alone_say(name: str, rng: np.random.Generator, tmp_path: Path) -> None:
    tensors, expected = FORMATS[name][0](rng, N, K)
    found = read(directory(tmp_path, {MODULE + key: tensor for key, tensor in tensors.items()}, None))
    values = found.state_dict()[f"{MODULE}weight"][...]
    np.testing.assert_allclose(values.double().numpy(), expected, rtol=1e-6, atol=1e-9)


def test_blocks_of_128_are_usual(tmp_path: Path) -> None:
    values = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) + 0.5
    tensors = {f"{MODULE}weight": values, f"{MODULE}weight_scale_inv": scale}
    found = read(directory(tmp_path, tensors, None)).state_dict()[f"{MODULE}weight"][...]
    spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    torch.testing.assert_close(found, values.float() * spread, rtol=0, atol=0)


@pytest.mark.parametrize("stated", ["groups of modules", "the top"])
def test_groups_that_do_not_divide_the_columns(stated: str, tmp_path: Path) -> None:
    """160 columns in groups of 96: the last is smaller, though two of 80 would be even."""
    values = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    scale = torch.rand(N, 2) + 0.5
    tensors = {f"{MODULE}weight": values, f"{MODULE}weight_scale": scale}
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 96}
    said = {"group_size": 96} if stated == "the top" else {"config_groups": {"group_0": {"weights": weights}}}
    found = read(directory(tmp_path, tensors, {"quant_method": "compressed-tensors", **said}))
    expected = values.float() * scale.repeat_interleave(96, 1)[:, :K]
    torch.testing.assert_close(found.state_dict()[f"{MODULE}weight"][...], expected, rtol=0, atol=0)


def test_gptq_without_indices_in_groups_that_do_not_divide(rng: np.random.Generator, tmp_path: Path) -> None:
    tensors, _ = FORMATS["gptq 4"][0](rng, N, K)
    packed = {name: tensors[name] for name in ("qweight", "qzeros", "scales")}
    packed |= {name: packed[name][:2] for name in ("qzeros", "scales")}
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 96}
    group = torch.from_numpy((np.arange(K) // 96).astype(np.int32))
    values = []
    for number, extra in enumerate(({}, {"g_idx": group})):
        folder = tmp_path / str(number)
        folder.mkdir()
        named = {MODULE + name: tensor for name, tensor in {**packed, **extra}.items()}
        values.append(read(directory(folder, named, quantization)).state_dict()[f"{MODULE}weight"][...])
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)


@pytest.mark.parametrize("stated", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, None], ids=["sym", "sym not stated"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("second", [True, False], ids=["stored as v2", "stored as v1"])
def test_symmetric_zero_points_show_the_version_of_gptq(
    stated: str, symmetric: bool | None, bits: int, second: bool, rng: np.random.Generator, tmp_path: Path
) -> None:
    tensors, expected = gptq(bits, False, second, symmetric=True)(rng, N, K)
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": stated}
    quantization |= {} if symmetric is None else {"sym": symmetric}
    found = read(directory(tmp_path, {MODULE + key: tensor for key, tensor in tensors.items()}, quantization))
    np.testing.assert_allclose(found.state_dict()[f"{MODULE}weight"][...].double().numpy(), expected, rtol=1e-6)


def test_indices_of_zeros_stand_for_groups_in_order(rng: np.random.Generator, tmp_path: Path) -> None:
    tensors, expected = FORMATS["gptq 4"][0](rng, N, K)
    tensors["g_idx"] *= 0
    quantization = {**FORMATS["gptq 4"][1], "group_size": 32}
    found = read(directory(tmp_path, {MODULE + key: tensor for key, tensor in tensors.items()}, quantization))
    np.testing.assert_allclose(found.state_dict()[f"{MODULE}weight"][...].double().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (3, 40), (3, 40, 1), (3, 1, 160)])
def test_scales_of_stacked_experts(shape: tuple[int, ...], tmp_path: Path) -> None:
    values, scale = torch.randn(3, 40, 160).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    name = "model.layers.0.mlp.experts.down_proj"
    found = read(directory(tmp_path, {name: values, f"{name}_weight_scale": scale}, None)).state_dict()[name][...]
    spread = scale.reshape(*shape, *[1] * (3 - len(shape)))
    torch.testing.assert_close(found, values.float() * spread, rtol=0, atol=0)


def test_experts_of_gpt_oss(rng: np.random.Generator, tmp_path: Path) -> None:
    blocks = rng.integers(0, 256, (2, 8, 3, 16)).astype(np.uint8)
    exponents = rng.integers(110, 130, (2, 8, 3)).astype(np.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(exponents)}
    found = read(directory(tmp_path, tensors, {"quant_method": "mxfp4"})).state_dict()[name][...]
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert found.shape == (2, 96, 8)
    for expert, row, block, byte in np.ndindex(blocks.shape):
        pair = int(blocks[expert, row, block, byte])
        for half, code in enumerate((pair & 15, pair >> 4)):
            expected = table[code] * 2.0 ** (int(exponents[expert, row, block]) - 127)
            assert float(found[expert, block * 32 + 2 * byte + half, row]) == expected


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_in_nvfp4(transposed: bool, rng: np.random.Generator, tmp_path: Path) -> None:
    writer = FORMATS["nvfp4 modelopt"][0]
    written = [writer(rng, 48, 32) for _ in range(2)]
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    roles = {"": "weight", "_weight_scale": "weight_scale", "_weight_scale_2": "weight_scale_2"}
    tensors = {name + end: torch.stack([part[role] for part, _ in written]) for end, role in roles.items()}
    expected = np.stack([whole for _, whole in written])
    if transposed:
        tensors = {key: t if t.dim() == 1 else t.transpose(1, 2).contiguous() for key, t in tensors.items()}
        expected = expected.transpose(0, 2, 1)
    found = read(directory(tmp_path, tensors, None)).state_dict()[name][...]
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["nvfp4 modelopt", "nvfp4 compressed-tensors", "stacked"])
def test_weights_of_zeros_whose_scales_mean_nothing(
    name: str, bad: float, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Of experts that are never chosen; of others the message shows the value."""
    writer, quantization = FORMATS[name if name in FORMATS else "nvfp4 modelopt"]
    tensors, expected = writer(rng, N, K)
    (of_tensor,) = (key for key in tensors if key in ("weight_scale_2", "weight_global_scale"))
    (values,) = (key for key in tensors if tensors[key].dtype == torch.uint8)
    prefix, weight = MODULE, f"{MODULE}weight"
    if name == "stacked":
        prefix = weight = "model.layers.0.mlp.experts.up_proj"
        tensors = {key.removeprefix("weight"): t for key, t in tensors.items() if key != "input_scale"}
        tensors = {key: torch.stack([t, t]) for key, t in tensors.items()}
        of_tensor, values, expected = "_scale_2", "", np.stack([expected, expected * 0])
    scales = tensors[of_tensor].reshape(-1).clone()
    scales[-1] = bad
    tensors[of_tensor] = scales
    with pytest.raises((BuilderError, CalibrationError), match=rf"scale.* found {bad:g}"):
        read(directory(tmp_path, {prefix + key: t for key, t in tensors.items()}, quantization)).state_dict()[weight][
            ...
        ]
    dead = (-1,) if name == "stacked" else ()
    tensors[values] = tensors[values].clone()
    tensors[values][dead] &= 0x88  # zeros of both signs
    found = read(directory(tmp_path, {prefix + key: t for key, t in tensors.items()}, quantization)).state_dict()
    expected = expected if name == "stacked" else expected * 0
    np.testing.assert_allclose(found[weight][...].double().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "of",
    [
        "self_attn.{}_scale",
        "self_attn.attn.{}_scale",
        "self_attn.qkv_proj.{}_scale",
        "self_attn.{0}_proj.{0}_scale",
        "self_attn.{}_proj.output_scale",
    ],
)
def test_scales_of_caches(of: str, tmp_path: Path) -> None:
    tensors = {f"model.layers.0.{of.format(which)}": torch.tensor(scale) for which, scale in (("k", 0.5), ("v", 2.0))}
    found = read(directory(tmp_path, tensors, None))
    attention = "model.layers.0.self_attn"
    assert {key: scale.tolist() for key, scale in found.cache_scales.items()} == {
        (attention, "k"): [0.5],
        (attention, "v"): [2.0],
    }
    assert (found.plain, found.cache_format) == ([], "FP8")


def test_one_scale_for_keys_and_values(tmp_path: Path) -> None:
    found = read(directory(tmp_path, {"model.layers.0.self_attn.kv_scale": torch.tensor(0.5)}, None))
    assert {of: scale.tolist() for (_, of), scale in found.cache_scales.items()} == {"k": [0.5], "v": [0.5]}


@pytest.mark.parametrize(
    ("quantization", "extra", "expected"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {}, "FP8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, {}, "INT of 8 bits"),
        ({"kv_cache_scheme": "NVFP4"}, {}, "NVFP4"),
        ({}, {"model.layers.0.self_attn.k_proj.k_bias": torch.ones(1, 2, 1, 8)}, "numbers with biases"),
    ],
)
def test_formats_of_caches(
    quantization: dict[str, object], extra: dict[str, torch.Tensor], expected: str, tmp_path: Path
) -> None:
    scales = {f"model.layers.0.self_attn.{of}_proj.{of}_scale": torch.tensor(0.5) for of in "kv"}
    found = read(directory(tmp_path, scales | extra, {"quant_method": "modelopt", **quantization}))
    assert (found.cache_format, found.plain) == (expected, [])


def of_groups(size: int, **others: object) -> dict[str, object]:
    return {"config_groups": {"group_0": {"weights": {"group_size": size, "strategy": "group", **others}}}}


# Tensors that fit each other, under a configuration that states others.
CONTRADICTED: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor], dict[str, object]]] = {
    "half the block scales": ("nvfp4 modelopt", "weight_scale", lambda t: t[:, ::2], {"group_size": 16}),
    "half, by the algorithm": ("nvfp4 modelopt", "weight_scale", lambda t: t[:, ::2], {}),
    "half, compressed-tensors": ("nvfp4 compressed-tensors", "weight_scale", lambda t: t[:, ::2], of_groups(16)),
    "NVFP4 of W4A8's blocks": ("nvfp4 modelopt", "weight", lambda t: t, {"quant_algo": "W4A8_NVFP4_FP8"}),
    "one group of five": ("awq", "scales", lambda t: t[:1], {"group_size": 32}),
    "groups of another size": ("gptq 4", "scales", lambda t: t, {"group_size": 64}),
    "whole rows": ("gptq 4", "scales", lambda t: t, {"group_size": -1}),
    "rows in another group": ("gptq 4 act order", "g_idx", lambda t: t.clamp_min(1), {"group_size": 32}),
    "bits of the other modules": ("gptq 4", "scales", lambda t: t, {"bits": 8, "dynamic": {"+:.*up.*": {"bits": 3}}}),
    "zero points of symmetric weights": ("gptq 4", "qzeros", lambda t: t, {"sym": True}),
    "symmetric, and AWQ": ("awq", "qzeros", lambda t: t, {"zero_point": False}),
    "symmetric, and packed": ("pack-quantized 8 zero points", "scales", lambda t: t, of_groups(32, symmetric=True)),
    "zero points that are missing": ("pack-quantized 4", "scales", lambda t: t, of_groups(32, symmetric=False)),
    "packed in other groups": ("pack-quantized 4", "weight_scale", lambda t: t[:, :1], of_groups(32)),
    "packed in other bits": ("pack-quantized 4", "weight_scale", lambda t: t, of_groups(32, num_bits=8)),
    "a row's scale for groups": ("int8 groups", "weight_scale", lambda t: t[:, :1], of_groups(16)),
    "a scale for rows": ("fp8 per channel", "weight_scale", lambda t: t[:1], of_groups(-1, strategy="channel")),
    "a scale for blocks": ("fp8 blockwise", "weight_scale_inv", lambda t: t[:1, :1], {}),
    "blocks too few": ("fp8 blockwise", "weight_scale_inv", lambda t: t[:, :1], {}),
    "one group of INT4": ("int4 modelopt", "weight_scale", lambda t: t[:, :1], {"group_size": 32}),
}


@pytest.mark.parametrize("case", CONTRADICTED)
def test_tensors_that_the_configuration_contradicts(case: str, rng: np.random.Generator, tmp_path: Path) -> None:
    name, key, change, stated = CONTRADICTED[case]
    writer, quantization = FORMATS[name]
    tensors, _ = writer(rng, N, K)
    tensors |= {key: change(tensors[key])} if key in tensors else {}
    folder = directory(tmp_path, {MODULE + k: t for k, t in tensors.items()}, {**quantization, **stated})
    with pytest.raises((BuilderError, CalibrationError), match=r"layers\.0\.mlp\.up_proj\."):
        read(folder).state_dict()[f"{MODULE}weight"][...]


HOSTILE = {
    "a scale too many": ("fp8 per channel", "weight_scale", lambda t: torch.cat([t, t[:1]])),
    "a scale that is NaN": ("fp8 per channel", "weight_scale", lambda t: t * torch.nan),
    "block scales too few": ("nvfp4 modelopt", "weight_scale", lambda t: t.float()[:, 1:].to(t.dtype)),
    "two tensor scales": ("nvfp4 modelopt", "weight_scale_2", lambda t: t.repeat(2)),
    "a negative tensor scale": ("nvfp4 modelopt", "weight_scale_2", lambda t: -t),
    "a shape beyond the words": ("pack-quantized 4", "weight_shape", lambda t: t * 1000),
    "a negative shape": ("pack-quantized 4", "weight_shape", lambda t: -t),
    "groups that are not there": ("gptq 4 act order", "g_idx", lambda t: t + 1),
    "negative groups": ("gptq 4 act order", "g_idx", lambda t: t - 1),
    "zero points too few": ("gptq 4", "qzeros", lambda t: t[:, 1:]),
    "groups too many": ("awq", "scales", lambda t: torch.cat([t, t])),
    "factors too few": ("nvfp4 awq", "pre_quant_scale", lambda t: t[1:]),
    "another shape": (
        "nf4 bitsandbytes",
        "weight.quant_state.bitsandbytes__nf4",
        lambda t: torch.tensor(list(b'{"quant_type": "nf4", "blocksize": 1, "shape": [4000000000, 1]}'), dtype=t.dtype),
    ),
    "no JSON": ("nf4 bitsandbytes", "weight.quant_state.bitsandbytes__nf4", lambda t: t + 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_do_not_fit_together(case: str, rng: np.random.Generator, tmp_path: Path) -> None:
    name, key, change = HOSTILE[case]
    writer, quantization = FORMATS[name]
    tensors, _ = writer(rng, N, K)
    tensors[key] = change(tensors[key])
    with pytest.raises(Exception, match=r"up_proj\.") as raised:
        read(directory(tmp_path, {MODULE + k: t for k, t in tensors.items()}, quantization)).state_dict()[
            f"{MODULE}weight"
        ][...]
    assert "model.layers.0.mlp.up_proj" in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_values_without_a_scale(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(ModelFaultError, match=r"up_proj.weight is \w+, and the files hold no scale for it"):
        quantized_directory(directory(tmp_path, {f"{MODULE}weight": torch.zeros(40, 160).to(dtype)}, None))


@pytest.mark.parametrize(
    "tensors",
    [
        {"qweight": torch.zeros(20, 40, dtype=torch.int32), "unknown.weight_packed": torch.zeros(2, 2).byte()},
        {"weight_packed": torch.zeros(40, 80, dtype=torch.uint8)},
        {"weight": torch.zeros(40, 160), "pre_quant_scale": torch.ones(160)},
    ],
    ids=["gptq without scales", "packed alone", "factors alone"],
)
def test_formats_that_are_not_read_are_named(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(ModelFaultError, match="give the directory of the original model"):
        quantized_directory(directory(tmp_path, {MODULE + key: tensor for key, tensor in tensors.items()}, None))


def test_methods_whose_tensors_are_not_known(tmp_path: Path) -> None:
    tensors = {f"{MODULE}codebooks": torch.zeros(2), f"{MODULE}codes": torch.zeros(2)}
    with pytest.raises(BuilderError, match="quantized, by aqlm, in a format that is not read"):
        quantized_directory(directory(tmp_path, tensors, {"quant_method": "aqlm"}))


def test_plain_weights(tmp_path: Path) -> None:
    tensors = {f"{MODULE}weight": torch.zeros(4, 4), f"{MODULE}input_scale": torch.ones(1), "bias": torch.zeros(2)}
    assert quantized_directory(directory(tmp_path, tensors, None)) is None
