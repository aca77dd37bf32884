"""Residual channels: the ONNX bodies and the Torch references bit by bit, and what they are worth."""

from typing import Any

import pytest
import torch
from op_bodies import RUNNERS, Inputs, assert_agrees, model_of, onnxruntime_outputs
from torch import Tensor

from trt_nvfp4.plugins.ops import OPS, OpError
from trt_nvfp4.plugins.ops.number_formats import (
    BLOCK,
    dequantize_blocks,
    quantize_blocks,
    quantize_with_residual,
    tensor_scale,
    tile_scales,
    unpack,
    untile_scales,
)

QUANTIZED = ["NVFP4Linear", "NVFP4GatedMLP", "NVFP4PersistentMLP", "NVFP4MoE"]


def with_repeated_columns(op: str, tensors: list[Tensor], count: int) -> list[Tensor]:
    """The op's inputs, the last `count` columns of every weight once more."""
    named = dict(zip((formal.name for formal in OPS[op].inputs), tensors, strict=True))
    for name, packed in list(named.items()):
        if not name.endswith("weight") or packed.dtype != torch.int8:
            continue
        scales_name = "weight_scales" if name == "weight" else name.replace("_weight", "_scales")
        rows, blocks = packed.shape[-2], packed.shape[-1] * 2 // BLOCK
        scales = untile_scales(named[scales_name].view(torch.float8_e4m3fn), rows, blocks).view(torch.uint8)
        named[name] = torch.cat([packed, packed[..., -count // 2 :]], -1)
        named[scales_name] = tile_scales(torch.cat([scales, scales[..., -count // BLOCK :]], -1)).view(torch.int8)
    return list(named.values())


@RUNNERS
@pytest.mark.parametrize("scale_search", [0, 1, 2])
@pytest.mark.parametrize(("lead", "k", "count"), [((), 64, 64), ((2, 70), 80, 16), ((0,), 32, 32)], ids=str)
def test_bits_of_quantize(runner: Any, lead: tuple[int, ...], k: int, count: int, scale_search: int, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).quantize(lead, k, 1e-3 if lead else 0.0)
    tensors[0][..., :16] = 0.0  # a block of zeros
    tensors[0][..., -16:] *= 1e-6 if count == 16 else 30.0  # scales that round to 0; saturation under the given one
    if 0 in lead:
        outputs = OPS["NVFP4Quantize"].reference(*tensors, residual_channels=count)
        assert outputs[0].shape == (0, (k + count) // 2)
        return
    assert_agrees("NVFP4Quantize", tensors, runner, scale_search=scale_search, residual_channels=count)


@RUNNERS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the evaluator
@pytest.mark.parametrize("scale_search", [0, 2])
@pytest.mark.parametrize("special", [torch.nan, torch.inf], ids=str)
def test_nan_and_infinity(runner: Any, special: float, scale_search: int, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).quantize((4,), 48, 1.0)
    tensors[0][1, 40] = special
    attributes = {"scale_search": scale_search, "residual_channels": 32}
    expected = OPS["NVFP4Quantize"].reference(*tensors, **attributes)
    found = runner(model_of("NVFP4Quantize", tensors, **attributes), tensors)
    assert torch.equal(found[0], expected[0].double())
    scales = [blocks.to(torch.int8).view(torch.float8_e4m3fn).float().abs() for blocks in (found[1], expected[1])]
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale_search", [0, 2])
@pytest.mark.parametrize("op", QUANTIZED)
def test_every_op_with_quantized_activations_takes_them(op: str, scale_search: int, seed: int) -> None:
    tensors = with_repeated_columns(op, Inputs(seed, torch.float32).small(op), 16)
    attributes = {"quantize_activations": 1, "scale_search": scale_search, "residual_channels": 16}
    assert_agrees(op, tensors, onnxruntime_outputs, **attributes)


def test_error_of_the_last_channels_falls_to_a_tenth(seed: int) -> None:
    """By float64's measure; the others are as they were, and the product has W's last columns twice."""
    x = Inputs(seed, torch.float32).normal(500, 64)
    x[:, 32:] *= 8
    scale = tensor_scale(x.abs().max(), 2)
    plain = dequantize_blocks(*quantize_blocks(x, scale, 2), scale)
    both = dequantize_blocks(*quantize_with_residual(x, scale, 2, 32), scale)
    assert torch.equal(both[:, :64], plain)
    summed = both[:, :64].clone()
    summed[:, 32:] += both[:, 64:]
    before, after = ((seen[:, 32:] - x[:, 32:]).double().square().sum() for seen in (plain, summed))
    assert after < 0.02 * before

    tensors = Inputs(seed + 1, torch.float32).linear((500,), 8, 64)
    tensors[0] = x
    tensors = with_repeated_columns("NVFP4Linear", tensors, 32)
    y = OPS["NVFP4Linear"].reference(*tensors, quantize_activations=1, scale_search=2, residual_channels=32)
    weight = dequantize_blocks(
        unpack(tensors[1]), untile_scales(tensors[2].view(torch.float8_e4m3fn), 8, 6), tensors[3]
    )
    torch.testing.assert_close(y, summed @ weight[:, :64].T + tensors[4], rtol=1e-5, atol=1e-4)


def test_what_they_may_be(seed: int) -> None:
    op = OPS["NVFP4Linear"]
    tensors = Inputs(seed, torch.float32).small("NVFP4Linear")
    with pytest.raises(OpError, match="residual_channels must be 0 to 64, found 80"):
        op.complete_attributes(residual_channels=80)
    with pytest.raises(OpError, match="a multiple of 16 and at most K = 32, found 8"):
        op.reference(*tensors, quantize_activations=1, residual_channels=8)
    with pytest.raises(OpError, match="a multiple of 16 and at most K = 32, found 48"):
        op.reference(*tensors, quantize_activations=1, residual_channels=48)
    with pytest.raises(OpError, match="needs quantize_activations 1"):
        op.reference(*tensors, residual_channels=16)
    with pytest.raises(OpError, match=r"weight must have shape \[16, 24\], found \[16, 16\]"):
        op.reference(*tensors, quantize_activations=1, residual_channels=16)
