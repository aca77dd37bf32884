"""The elementary formats, bit by bit, against ml_dtypes and torchao."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.prototype.mx_formats.utils import to_blocked

from trt_nvfp4.plugins.ops import number_formats as formats

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
finite_float32 = st.floats(width=32, allow_nan=False)


def all_16_bit_values(dtype: torch.dtype) -> torch.Tensor:
    """Every float16 or bfloat16 but NaN, in float32."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float()
    return values[~values.isnan()]


def beside(points: np.ndarray) -> torch.Tensor:
    """The points, their float32 neighbours on both sides, and all of these negated."""
    points = points.astype(np.float32)
    inf = np.float32(np.inf)
    positive = np.concatenate([points, np.nextafter(points, inf), np.nextafter(points, -inf)])
    return torch.from_numpy(np.concatenate([positive, -positive]))


def ml_dtypes_codes(x: torch.Tensor, dtype: type) -> np.ndarray:
    return x.numpy().astype(dtype).view(np.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_e2m1_encode_every_16_bit_value(dtype: torch.dtype) -> None:
    x = all_16_bit_values(dtype)
    np.testing.assert_array_equal(formats.e2m1_encode(x).numpy(), ml_dtypes_codes(x, ml_dtypes.float4_e2m1fn))


def test_e2m1_encode_at_ties_and_their_neighbours() -> None:
    x = beside(np.array([*E2M1_MIDPOINTS, *formats.E2M1_VALUES[:8], 2.0**-126, 2.0**-149, 1e38, np.inf]))
    np.testing.assert_array_equal(formats.e2m1_encode(x).numpy(), ml_dtypes_codes(x, ml_dtypes.float4_e2m1fn))


@given(st.lists(finite_float32, min_size=1, max_size=64))
def test_e2m1_encode_any_float(values: list[float]) -> None:
    x = torch.tensor(values)
    np.testing.assert_array_equal(formats.e2m1_encode(x).numpy(), ml_dtypes_codes(x, ml_dtypes.float4_e2m1fn))


def test_e2m1_encode_nan_is_a_zero() -> None:
    assert formats.e2m1_encode(torch.tensor([math.nan, -math.nan])).tolist() == [0, 0]


def test_e2m1_decode_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    decoded = formats.e2m1_decode(codes)
    np.testing.assert_array_equal(decoded.numpy().view(np.uint32), expected.view(np.uint32))  # -0 is not 0
    assert torch.equal(formats.e2m1_encode(decoded), codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_e4m3_round_every_16_bit_value(dtype: torch.dtype) -> None:
    x = all_16_bit_values(dtype)
    expected = ml_dtypes_codes(x.clamp(-448, 448), ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(formats.e4m3_round(x).view(torch.uint8).numpy(), expected)


def test_e4m3_round_at_ties_subnormals_and_beyond_the_range() -> None:
    values = np.array(formats.E4M3_VALUES)
    x = beside(np.concatenate([values, (values[1:] + values[:-1]) / 2, [464.0, 465.0, 480.0, 1e30, np.inf]]))
    expected = ml_dtypes_codes(x.clamp(-448, 448), ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(formats.e4m3_round(x).view(torch.uint8).numpy(), expected)


def test_e4m3_every_code() -> None:
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)  # 127, 255: NaN
    values = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert torch.equal(formats.e4m3_round(values).view(torch.uint8), codes)
    assert tuple(values[:127].tolist()) == formats.E4M3_VALUES
    assert formats.e4m3_round(torch.tensor(math.nan)).isnan()


def test_pack_puts_the_even_element_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert formats.pack(codes).tolist() == [[0x21, 0x0F]]


@given(st.integers(0, 2**31), st.integers(0, 3), st.integers(1, 40))
def test_unpack_inverts_pack(seed: int, rows: int, half: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 2 * half), dtype=torch.uint8, generator=generator)
    packed = formats.pack(codes)
    assert torch.equal(formats.unpack(packed), codes)
    assert torch.equal(formats.unpack(packed.view(torch.int8)), codes)


def test_pack_refuses_an_odd_axis() -> None:
    with pytest.raises(ValueError, match="even"):
        formats.pack(torch.zeros(2, 3, dtype=torch.uint8))


SCALE_SHAPES = [(1, 1), (128, 4), (127, 5), (129, 3), (300, 17), (32, 4)]


def random_scales(seed: int, *shape: int) -> torch.Tensor:
    codes = torch.randint(1, 127, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return codes.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", SCALE_SHAPES)
def test_tile_scales_against_torchao(shape: tuple[int, int], seed: int) -> None:
    scales = random_scales(seed, *shape)
    expected = to_blocked(scales.view(torch.uint8)).flatten()
    assert torch.equal(formats.tile_scales(scales).view(torch.uint8).flatten(), expected)


@pytest.mark.parametrize("shape", SCALE_SHAPES)
def test_untile_scales_inverts_tile_scales_also_in_batches(shape: tuple[int, int], seed: int) -> None:
    scales = random_scales(seed, 3, *shape)
    tiled = formats.tile_scales(scales)
    assert torch.equal(tiled[1].view(torch.uint8), formats.tile_scales(scales[1]).view(torch.uint8))
    assert torch.equal(formats.untile_scales(tiled, *shape).view(torch.uint8), scales.view(torch.uint8))


def test_untile_scales_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match=r"\(128, 8\)"):
        formats.untile_scales(random_scales(1, 128, 4), 100, 5)
    with pytest.raises(ValueError, match=r"tiled as \(128, 4\), found \(256, 4\)"):
        formats.untile_scales(random_scales(1, 256, 4), 100, 4)


def random_blocks(seed: int, rows: int, k: int, spread: float) -> torch.Tensor:
    """Gaussian values in blocks whose magnitudes differ by up to 2^spread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k // 16, 16, generator=generator)
    return (x * torch.exp2(torch.rand(rows, k // 16, 1, generator=generator) * -spread)).reshape(rows, k)


@settings(max_examples=50)
@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(-60, 60),
)
def test_quantize_blocks_against_torchao(seed: int, rows: int, blocks: int, dtype: torch.dtype, log2: float) -> None:
    """Bit by bit where block scales are normal numbers; torchao raises smaller ones to 2^-6, ours keep subnormals."""
    x = (random_blocks(seed, rows, 16 * blocks, 12.0) * 2.0**log2).to(dtype)
    scale = formats.tensor_scale(x.abs().max())
    codes, block_scales = formats.quantize_blocks(x, scale)
    torchao_scales, torchao_packed = nvfp4_quantize(x, per_tensor_scale=scale)
    wanted = x.float().reshape(rows, blocks, 16).abs().amax(-1) / 6 / scale
    normal = wanted >= 2.0**-6
    assert normal.any()
    np.testing.assert_array_equal(
        block_scales.view(torch.uint8)[normal].numpy(), torchao_scales.view(torch.uint8)[normal].numpy()
    )
    ours = formats.pack(codes).reshape(rows, blocks, 8)
    np.testing.assert_array_equal(ours[normal].numpy(), torchao_packed.reshape(rows, blocks, 8)[normal].numpy())


def test_quantize_blocks_at_ties_of_scale_and_value() -> None:
    """Values chosen so that scale 1 and every midpoint occur: x / 1 is encoded as ml_dtypes encodes it."""
    values = [*E2M1_MIDPOINTS, 6.0, *(-m for m in E2M1_MIDPOINTS), -6.0]
    codes, scales = formats.quantize_blocks(torch.tensor([values]), torch.tensor(1.0))
    assert scales.float().tolist() == [[1.0]]
    expected = ml_dtypes_codes(torch.tensor([values]), ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(codes.numpy(), expected)
    # amax / 6 = 1.0625 lies between 1 and 1.125: the tie goes to the even mantissa, 1; 1.1875 goes up, to 1.25.
    ties = torch.tensor([[6 * 1.0625] + [0.0] * 15, [6 * 1.1875] + [0.0] * 15])
    assert formats.quantize_blocks(ties, torch.tensor(1.0))[1].float().tolist() == [[1.0], [1.25]]


def test_subnormal_block_scales_are_kept() -> None:
    x = torch.full((1, 16), 6 * 2.0**-8)
    codes, scales = formats.quantize_blocks(x, torch.tensor(1.0))
    assert scales.float().item() == 2.0**-8
    assert torch.equal(formats.dequantize_blocks(codes, scales, torch.tensor(1.0)), x)


@pytest.mark.parametrize("magnitude", [0.0, 2.0**-149, 2.0**-135, 2.0**-126, 2.0**-110, 1e30, 3e38])
def test_quantize_blocks_of_zero_tiny_and_huge_blocks_is_finite(magnitude: float, seed: int) -> None:
    x = random_blocks(seed, 4, 64, 0.0).clamp(-1, 1) * magnitude
    x[0] = 0.0
    x[1, 3] = 0.0
    scale = formats.tensor_scale(x.abs().max())
    codes, scales = formats.quantize_blocks(x, scale)
    values = formats.dequantize_blocks(codes, scales, scale)
    assert values.isfinite().all()
    assert values[0].count_nonzero() == 0
    assert scales[0].float().count_nonzero() == 0
    assert codes[1, 3] == 0
    if magnitude >= 2.0**-110:
        assert (values - x).double().norm() < 0.15 * x.double().norm()


def test_a_block_whose_scale_rounds_to_zero_has_codes_zero() -> None:
    x = torch.full((1, 16), -(2.0**-12))
    codes, scales = formats.quantize_blocks(x, torch.tensor(1.0))
    assert scales.float().item() == 0
    assert codes.tolist() == [[0] * 16]


def test_values_beyond_the_given_scale_saturate() -> None:
    x = torch.full((1, 16), -1e6)
    codes, scales = formats.quantize_blocks(x, torch.tensor(1.0))
    assert formats.dequantize_blocks(codes, scales, torch.tensor(1.0)).tolist() == [[-2688.0] * 16]


def test_quantize_blocks_refuses_a_broken_block() -> None:
    with pytest.raises(ValueError, match="16"):
        formats.quantize_blocks(torch.ones(2, 24), torch.tensor(1.0))


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu(seed: int) -> None:
    x = random_blocks(seed, 64, 256, 20.0)
    scale = formats.tensor_scale(x.abs().max())
    codes, scales = formats.quantize_blocks(x, scale)
    gpu_codes, gpu_scales = formats.quantize_blocks(x.cuda(), scale.cuda())
    assert torch.equal(gpu_codes.cpu(), codes)
    assert torch.equal(gpu_scales.cpu().view(torch.uint8), scales.view(torch.uint8))
    tiled = formats.tile_scales(gpu_scales)
    assert torch.equal(tiled.cpu().view(torch.uint8), formats.tile_scales(scales).view(torch.uint8))
    assert torch.equal(
        formats.dequantize_blocks(gpu_codes, gpu_scales, scale.cuda()).cpu(),
        formats.dequantize_blocks(codes, scales, scale),
    )
