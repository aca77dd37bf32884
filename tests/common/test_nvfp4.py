"""NVFP4 tensors against torchao and ml_dtypes, and what is refused."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from trt_nvfp4.common import nvfp4


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.float(), b.float())


def reference_values(packed: torch.Tensor, block_scales: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """float64 values by ml_dtypes, element by element."""
    low_high = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    e2m1 = low_high.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    e4m3 = block_scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return e2m1 * np.repeat(e4m3, 16, axis=-1) * scale.double().item()


@settings(max_examples=50)
@given(
    st.integers(0, 2**31),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(-40, 40),
)
def test_quantize_against_torchao(seed: int, rows: int, blocks: int, dtype: torch.dtype, log2: float) -> None:
    """Bit by bit: Gaussian blocks stay far above scale 2^-6, below which torchao clamps and ours is subnormal."""
    x = (random(seed, rows, 16 * blocks) * 2.0**log2).to(dtype)
    packed, block_scales, scale = nvfp4.quantize(x)
    assert (packed.dtype, packed.shape) == (torch.uint8, (rows, 8 * blocks))
    assert (block_scales.dtype, block_scales.shape) == (torch.float8_e4m3fn, (rows, blocks))
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    assert scale == x.float().abs().max() / 2688
    assert (block_scales.float() >= 2.0**-6).all()
    expected_scales, expected_packed = nvfp4_quantize(x, per_tensor_scale=scale)
    assert torch.equal(block_scales.view(torch.uint8), expected_scales.view(torch.uint8))
    assert torch.equal(packed, expected_packed)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16))
def test_dequantize_undoes_quantize_within_half_a_step(values: list[float]) -> None:
    """Any 16 floats: each lies within half an E2M1 step of its block, plus what rounding the block scale costs."""
    x = torch.tensor([values])
    packed, block_scales, scale = nvfp4.quantize(x)
    found = nvfp4.dequantize(packed, block_scales, scale)
    assert found.isfinite().all()
    amax = x.abs().max().item()
    if amax > 1e-30:
        error = (found.double() - x.double()).abs()
        assert (error <= amax * (1 / 6 + 1 / 16)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dequantize_against_ml_dtypes(dtype: torch.dtype, seed: int) -> None:
    packed, block_scales, scale = nvfp4.quantize(random(seed, 3, 5, 64))
    found = nvfp4.dequantize(packed, block_scales, scale, dtype)
    assert found.dtype == dtype
    expected = torch.from_numpy(reference_values(packed, block_scales, scale)).float().to(dtype)
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.equal(nvfp4.dequantize(packed.view(torch.int8), block_scales, scale, dtype), found)


def test_large_tensors_in_chunks_equal_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(seed, 37, 112).bfloat16()
    whole = nvfp4.quantize(x)
    values = nvfp4.dequantize(*whole)
    monkeypatch.setattr(nvfp4, "_CHUNK", 48)
    assert_same(nvfp4.quantize(x), whole)
    assert torch.equal(nvfp4.dequantize(*whole), values)


def test_a_transposed_view_is_read_in_its_own_order(seed: int) -> None:
    x = random(seed, 48, 32)
    assert_same(nvfp4.quantize(x.T), nvfp4.quantize(x.T.contiguous()))


def test_given_tensor_scale_is_used_and_returned(seed: int) -> None:
    x = random(seed, 4, 32)
    packed, block_scales, scale = nvfp4.quantize(x, 0.25)
    assert scale.item() == 0.25
    # Half of E2M1's widest step, 4 to 6, and E4M3's rounding of the block scale, a sixteenth.
    blocks, errors = x.view(4, -1, 16), (nvfp4.dequantize(packed, block_scales, scale) - x).view(4, -1, 16)
    assert (errors.abs() <= (1 + 1 / 16) / 6 * blocks.abs().amax(-1, keepdim=True)).all()
    assert not torch.equal(block_scales.float(), nvfp4.quantize(x)[1].float())


def test_zero_blocks_and_zero_tensors() -> None:
    x = torch.zeros(2, 32)
    x[1, :16] = 6.0
    packed, block_scales, scale = nvfp4.quantize(x)
    torch.testing.assert_close(nvfp4.dequantize(packed, block_scales, scale), x, rtol=2e-7, atol=0)
    packed, block_scales, scale = nvfp4.quantize(torch.zeros(2, 32))
    assert scale == 2.0**-126
    assert packed.count_nonzero() == block_scales.float().count_nonzero() == 0


@pytest.mark.parametrize("amax", [torch.finfo(torch.float32).max, 1e30, 2.0**-100, 2.0**-114])
def test_huge_and_tiny_amax_keep_their_precision(amax: float, seed: int) -> None:
    x = random(seed, 8, 64).clamp(-1, 1).double() * amax
    found = nvfp4.dequantize(*nvfp4.quantize(x.float())).double()
    assert (found - x).norm() < 0.15 * x.norm()


def test_empty_tensors() -> None:
    packed, block_scales, _ = nvfp4.quantize(torch.empty(0, 32))
    assert (packed.shape, block_scales.shape) == ((0, 16), (0, 2))
    assert nvfp4.dequantize(packed, block_scales, 1.0).shape == (0, 32)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_inf_are_refused_with_their_position(bad: float, dtype: torch.dtype, seed: int) -> None:
    x = random(seed, 3, 4, 32).to(dtype)
    x[1, 2, 17] = bad
    with pytest.raises(ValueError, match=rf"x\[1, 2, 17\] is {bad}"):
        nvfp4.quantize(x)


@pytest.mark.parametrize("shape", [(), (15,), (4, 24), (16, 1)])
def test_odd_tails_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"multiple of 16.*pad it with zeros"):
        nvfp4.quantize(torch.ones(shape))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_tensor_scales_that_are_no_scale_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="tensor_scale must be one positive, finite number"):
        nvfp4.quantize(torch.ones(1, 16), scale)


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a float tensor, found torch.int64"):
        nvfp4.quantize(torch.ones(1, 16, dtype=torch.int64))


def test_dequantize_refuses_what_does_not_belong_together() -> None:
    packed, block_scales, scale = nvfp4.quantize(torch.ones(2, 32))
    with pytest.raises(ValueError, match=r"found \(2, 16\) and \(2, 1\)"):
        nvfp4.dequantize(packed, block_scales[:, :1], scale)
    with pytest.raises(ValueError, match=r"found torch.uint8 and torch.float32"):
        nvfp4.dequantize(packed, block_scales.float(), scale)


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu(seed: int) -> None:
    x = random(seed, 64, 256).bfloat16()
    cpu, gpu = nvfp4.quantize(x), nvfp4.quantize(x.cuda())
    assert_same(tuple(tensor.cpu() for tensor in gpu), cpu)
    assert torch.equal(nvfp4.dequantize(*gpu).cpu(), nvfp4.dequantize(*cpu))
