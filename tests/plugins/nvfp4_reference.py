"""The ops in float64 and NVFP4's bits through ml_dtypes, sharing no code with the product."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def tile(scales: Bytes) -> Bytes:
    """[rows, blocks] to the 128x4 tiled order, padded with zeros, as its padded 2-D shape."""
    rows, blocks = scales.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-blocks // 4) * 4), np.uint8)
    padded[:rows, :blocks] = scales
    # Row 32 i + j of a tile lies at [j, i]: 128 rows fold into 32 lines of 16 bytes.
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(padded.shape)


def pack(codes: Bytes) -> Bytes:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


@dataclass
class Weight:
    """Random NVFP4 weights [*leading, rows, k], as bytes and as float64."""

    packed: torch.Tensor
    block_scales: torch.Tensor
    tensor_scale: torch.Tensor
    values: Array

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the ops take them."""
        return self.packed, self.block_scales, self.tensor_scale

    @classmethod
    def random(cls, rng: np.random.Generator, rows: int, k: int, leading: tuple[int, ...] = ()) -> "Weight":
        codes = rng.integers(0, 16, (*leading, rows, k), dtype=np.uint8)
        # From subnormals to 2; some blocks are zero.
        scales = rng.integers(0x01, 0x41, (*leading, rows, k // 16), dtype=np.uint8)
        scales[rng.random(scales.shape) < 0.05] = 0
        tensor_scale = (rng.random(leading) + 0.5).astype(np.float32) / np.float32(np.sqrt(k))
        block_values = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        values = _E2M1[codes] * np.repeat(block_values, 16, axis=-1) * tensor_scale[..., None, None]
        flat = scales.reshape(-1, *scales.shape[-2:])
        tiled = np.stack([tile(layer) for layer in flat])
        return cls(
            torch.from_numpy(pack(codes)).view(torch.int8),
            torch.from_numpy(tiled.reshape(*leading, *tiled.shape[1:])).view(torch.int8),
            torch.from_numpy(np.asarray(tensor_scale)),
            values,
        )


@dataclass
class Quantized:
    codes: Bytes
    block_scales: Bytes
    tensor_scale: np.float32

    @property
    def values(self) -> Array:
        scales = np.repeat(self.block_scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=-1)
        return _E2M1[self.codes] * scales * np.float64(self.tensor_scale)


def quantize(x: npt.NDArray[np.float32], tensor_scale: float = 0.0, scale_search: int = 0) -> Quantized:
    """torchao's two-level path, in float32, each step rounded to nearest, with the best of the block scales that
    `scale_search` names."""
    f = np.float32
    blocks = x.astype(f).reshape(x.shape[0], x.shape[1] // 16, 16)
    s_t = f(tensor_scale)
    if s_t == 0:
        amax = f(np.abs(blocks).max()) if blocks.size else f(0)
        s_t = max(amax / f(1536 if scale_search else 2688), f(2.0**-126))
    amax = np.abs(blocks).max(-1)
    candidates = scale_candidates(amax, s_t, scale_search)
    first = candidates[0]
    losses = [_loss(blocks, s_t, code) for code in candidates]
    best = np.choose(np.argmin(losses, 0), candidates)
    s_b = np.where((first > 0) & (first < 126), best, first).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = blocks * (f(1) / s_t / s_b.astype(f))[..., None]
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    codes[s_b == 0] = 0
    return Quantized(codes.reshape(x.shape), s_b.view(np.uint8), s_t)


def scale_candidates(amax: npt.NDArray[np.float32], s_t: np.float32, scale_search: int) -> list[npt.NDArray[np.int32]]:
    """E4M3 codes of the block scales that a search looks at, the one without a search first."""
    f = np.float32
    first, quarter = (
        np.minimum(amax / f(most) / s_t, f(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.int32)
        for most in (6, 4)
    )
    return {0: [first], 1: [first, quarter], 2: [first, *(np.clip(first + step, 1, 126) for step in (-1, 4, 5))]}[
        scale_search
    ]


def quantize_with_residual(
    x: npt.NDArray[np.float32], tensor_scale: float, scale_search: int, channels: int
) -> Quantized:
    """`quantize`, and behind it, under the same tensor scale, what that loses of the last `channels`, in float32."""
    first = quantize(x, tensor_scale, scale_search)
    if channels == 0:
        return first
    f = np.float32
    scales = np.repeat(first.block_scales.view(ml_dtypes.float8_e4m3fn).astype(f), 16, axis=-1)
    seen = (_E2M1[first.codes].astype(f) * scales) * first.tensor_scale
    lost = (x.astype(f) - seen)[:, x.shape[1] - channels :]
    second = quantize(lost, float(first.tensor_scale), scale_search)
    both = zip((first.codes, first.block_scales), (second.codes, second.block_scales), strict=True)
    codes, block_scales = (np.concatenate(parts, 1) for parts in both)
    return Quantized(codes, block_scales, first.tensor_scale)


def _loss(blocks: npt.NDArray[np.float32], s_t: np.float32, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Squared errors in whole 512ths of an E2M1 unit, summed as integers, by the scale's square in float32."""
    f = np.float32
    scales = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(f)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = np.abs(blocks) * np.minimum(f(1) / s_t / scales, np.finfo(f).max)[..., None]
        errors = np.abs(scaled - np.clip(scaled, 0, 6).astype(ml_dtypes.float4_e2m1fn).astype(f))
        steps = np.rint(np.minimum(errors * f(512), 1023)).astype(np.int64)
    return (steps**2).sum(-1).astype(f) * scales**2


def activate(x: Array, activation: int) -> Array:
    t = torch.from_numpy(x)
    return {
        0: lambda: t,
        1: lambda: t.relu(),
        2: lambda: t.relu() ** 2,
        3: lambda: torch.nn.functional.silu(t),
        4: lambda: torch.nn.functional.gelu(t),
        5: lambda: torch.nn.functional.gelu(t, approximate="tanh"),
        6: lambda: t * (1.702 * t).sigmoid(),
    }[activation]().numpy()


def gated_activate(gate: Array, up: Array, activation: int, alpha: float, limit: float) -> Array:
    if activation < 7:
        return activate(gate, activation) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if activation == 8:
        return up * gate / (1 + np.exp(-gate))
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def rounded(x: Array, dtype: torch.dtype) -> Array:
    """float64 through T."""
    return torch.from_numpy(x).to(dtype).double().numpy()


def rmsnorm(x: Array, weight: Array, epsilon: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight
