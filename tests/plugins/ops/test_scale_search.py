"""Block scales by least error: the ONNX bodies and the Torch reference bit by bit, and how much error they save."""

from typing import Any

import numpy as np
import pytest
import torch
from nvfp4_reference import quantize
from op_bodies import RUNNERS, Inputs, assert_agrees, model_of, onnxruntime_outputs

from trt_nvfp4.plugins.ops import OPS, OpError
from trt_nvfp4.plugins.ops.number_formats import E4M3_VALUES, dequantize_blocks, quantize_blocks, tensor_scale

QUANTIZED = ["NVFP4Quantize", "NVFP4Linear", "NVFP4GatedMLP", "NVFP4PersistentMLP", "NVFP4MoE"]
SEARCHES = pytest.mark.parametrize("scale_search", [1, 2])


@RUNNERS
@SEARCHES
@pytest.mark.parametrize(("lead", "k"), [((), 32), ((2, 70), 80)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_bits_of_shapes_and_given_scales(
    runner: Any, lead: tuple[int, ...], k: int, scale: float, scale_search: int, seed: int
) -> None:
    tensors = Inputs(seed, torch.float32).quantize(lead, k, scale)
    tensors[0][..., :16] = 0.0  # a block of zeros
    assert_agrees("NVFP4Quantize", tensors, runner, scale_search=scale_search)


@RUNNERS
@SEARCHES
def test_bits_at_every_block_scale(runner: Any, scale_search: int, seed: int) -> None:
    """From what rounds to no scale to what is beyond the largest; ties between candidates; magnitudes of all sizes."""
    values = torch.tensor([*E4M3_VALUES, 1e-4, 460.0, 700.0])
    edges = torch.cat([values, torch.nextafter(values, torch.tensor(torch.inf)), (values[1:] + values[:-1]) / 2])
    x = Inputs(seed, torch.float32).normal(len(edges), 16)
    x = x / x.abs().amax(1, keepdim=True) * 6 * edges[:, None]
    tensors = [x, torch.zeros_like(x), torch.ones(16), torch.tensor(1.0)]
    assert_agrees("NVFP4Quantize", tensors, runner, scale_search=scale_search)
    _, blocks, _, _ = OPS["NVFP4Quantize"].reference(*tensors, scale_search=scale_search)
    assert (blocks != OPS["NVFP4Quantize"].reference(*tensors)[1]).any()


@RUNNERS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the evaluator
@SEARCHES
@pytest.mark.parametrize("scale", [0.0, 1.0], ids=["computed", "given"])
@pytest.mark.parametrize("special", [torch.nan, torch.inf], ids=str)
def test_nan_and_infinity_keep_their_scale(
    runner: Any, special: float, scale: float, scale_search: int, seed: int
) -> None:
    tensors = Inputs(seed, torch.float32).quantize((4,), 48, scale)
    tensors[0][1, 5] = special
    expected = OPS["NVFP4Quantize"].reference(*tensors, scale_search=scale_search)
    found = runner(model_of("NVFP4Quantize", tensors, scale_search=scale_search), tensors)
    assert torch.equal(found[0], expected[0].double())
    scales = [blocks.to(torch.int8).view(torch.float8_e4m3fn).float().abs() for blocks in (found[1], expected[1])]
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    if scale:  # else the tensor scale is none
        by_amax = OPS["NVFP4Quantize"].reference(*tensors)[1]
        assert expected[1].flatten()[4 * 4] == by_amax.flatten()[4 * 4]  # tiled: row 1, block 0


@SEARCHES
def test_reference_against_float64_and_ml_dtypes(scale_search: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((200, 96)) * 10.0 ** rng.integers(-6, 4, (200, 1))).astype(np.float32)
    for scale in (0.0, 1e-3, 10.0):
        expected = quantize(x, scale, scale_search)
        chosen = torch.tensor(scale) if scale else tensor_scale(torch.from_numpy(x).abs().max(), scale_search)
        assert chosen.item() == expected.tensor_scale
        codes, blocks = quantize_blocks(torch.from_numpy(x), chosen, scale_search)
        np.testing.assert_array_equal(blocks.view(torch.uint8).numpy(), expected.block_scales)
        np.testing.assert_array_equal(codes.numpy(), expected.codes)


def test_error_falls_with_every_candidate(seed: int) -> None:
    """By float64's measure, on channels of different sizes."""
    x = Inputs(seed, torch.float32).normal(2000, 512) * Inputs(seed + 1, torch.float32).normal(1, 512).exp()
    errors = []
    for scale_search in (0, 1, 2):
        scale = tensor_scale(x.abs().max(), scale_search)
        seen = dequantize_blocks(*quantize_blocks(x, scale, scale_search), scale)
        errors.append((seen.double() - x.double()).square().sum().item())
    assert errors[1] < 0.97 * errors[0]
    assert errors[2] < 0.98 * errors[1]


@SEARCHES
@pytest.mark.parametrize("op", QUANTIZED[1:])
def test_every_op_with_quantized_activations_takes_it(op: str, scale_search: int, seed: int) -> None:
    tensors = Inputs(seed, torch.float32).small(op)
    plain = OPS[op].reference(*tensors, quantize_activations=1)
    assert isinstance(plain, torch.Tensor)
    found = OPS[op].reference(*tensors, quantize_activations=1, scale_search=scale_search)
    assert not torch.equal(plain, found)
    assert_agrees(op, tensors, onnxruntime_outputs, quantize_activations=1, scale_search=scale_search)
    weights_only = OPS[op].reference(*tensors, scale_search=scale_search)
    assert torch.equal(weights_only, OPS[op].reference(*tensors))


@pytest.mark.parametrize("op", QUANTIZED)
def test_what_it_may_be(op: str, seed: int) -> None:
    with pytest.raises(OpError, match="scale_search must be 0 to 2, found 3"):
        OPS[op].complete_attributes(scale_search=3)
