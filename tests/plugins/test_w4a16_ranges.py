"""Activations and weights at the ends of their ranges, by the W4A16 kernels that scale activations to FP16: those of
one token, whose lanes sum in FP16, and those of few tokens, which multiply BF16 so."""

import numpy as np
import pytest
import torch
from nvfp4_reference import Array, Bytes, Quantized, Weight, pack, tile
from op_inputs import float64, scalar
from test_kernels import require_gpu_of

from trt_nvfp4.plugins.host import PluginHost

pytestmark = pytest.mark.gpu

W4A16, W4A16_MMA_SYNC, W4A16_SM90 = 2, 6, 8
LARGEST_SCALE = 0x7E  # 448
N, K = 40, 544


def weight(codes: Bytes, scales: Bytes, tensor_scale: float) -> Weight:
    tensors = (torch.from_numpy(pack(codes)).view(torch.int8), torch.from_numpy(tile(scales)).view(torch.int8))
    return Weight(*tensors, scalar(tensor_scale), Quantized(codes, scales, np.float32(tensor_scale)).values)


def run(host: PluginHost, x: torch.Tensor, w: Weight, tactic: int) -> tuple[torch.Tensor, Array, Array]:
    """The output, x times the weights in float64, and the size of such sums, had their products random signs; no bias,
    no activation."""
    require_gpu_of(tactic)
    inputs = [x, *w.tensors, torch.zeros(N, dtype=x.dtype), scalar(0)]
    with host.session("NVFP4Linear", [t.cuda() for t in inputs], {}, tactic=tactic) as session:
        (y,) = session.run([t.cuda() for t in inputs])
    with np.errstate(invalid="ignore"):  # infinity times zero
        return y.cpu(), float64(x) @ w.values.T, np.sqrt(float64(x) ** 2 @ w.values.T**2)


def assert_near(y: torch.Tensor, reference: Array, size: Array) -> None:
    """Where products cancel, the error is theirs, not that of what is left."""
    tolerance = 2e-3 if y.dtype == torch.float16 else 1e-2
    bound = tolerance * max(np.linalg.norm(reference), np.linalg.norm(size))
    assert np.linalg.norm(float64(y) - reference) <= bound


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
# W4A16's is the kernel for small linears.
TOKENS = pytest.mark.parametrize(
    ("m", "tactic"), [(1, W4A16), (5, W4A16), (1, W4A16_MMA_SYNC), (5, W4A16_MMA_SYNC), (5, W4A16_SM90)]
)


def activations(rng: np.random.Generator, kind: str, m: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.from_numpy(rng.standard_normal((m, K)))
    info = torch.finfo(dtype)
    if kind == "largest":
        return torch.full((m, K), min(info.max, 1e30)).to(dtype)
    if kind == "smallest":
        # FP16: most of them subnormal. Tensor scales of float32 could not make up for BF16's smallest.
        return (values * max(info.smallest_normal / 3, 1e-30)).to(dtype)
    values /= 256
    values[:, rng.integers(K, size=3)] = 2.0**14  # each in a chunk of its own or not
    return values.to(dtype)


@DTYPES
@TOKENS
@pytest.mark.parametrize("kind", ["largest", "smallest", "outliers"])
@pytest.mark.parametrize("weights", ["largest", "any"])
def test_ends_of_the_range(
    host: PluginHost, seed: int, kind: str, weights: str, m: int, tactic: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    x = activations(rng, kind, m, dtype)
    codes = rng.integers(0, 16, (N, K), dtype=np.uint8)
    scales = rng.integers(0, LARGEST_SCALE + 1, (N, K // 16), dtype=np.uint8)
    if weights == "largest":
        # With x of one sign all products are, and no sum may overflow. Otherwise rows have signs of their own: the norm
        # of equal rows' error would be one row's, whose tail is long.
        codes[:], scales[:] = 0x7 if kind == "largest" else codes | 0x7, LARGEST_SCALE
    size = np.abs(float64(x)).max() * 6 * 448 * K
    y, *expected = run(host, x, weight(codes, scales, float(1e3 / size)), tactic)
    assert torch.isfinite(y).all()
    assert_near(y, *expected)


@DTYPES
@TOKENS
def test_chunks_of_very_different_size(host: PluginHost, seed: int, m: int, tactic: int, dtype: torch.dtype) -> None:
    """Rows whose large chunk has no weights show that the small one keeps its bits."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((m, K)))
    x[:, :256] *= 2.0**-10
    x[:, 256:] *= 2.0**12
    x = x.to(dtype)
    codes = rng.integers(0, 16, (N, K), dtype=np.uint8)
    codes[::2, 256:] = 0
    scales = rng.integers(0x30, 0x41, (N, K // 16), dtype=np.uint8)
    y, *expected = run(host, x, weight(codes, scales, 0.05), tactic)
    assert_near(y[:, ::2], *(values[:, ::2] for values in expected))
    assert_near(y[:, 1::2], *(values[:, 1::2] for values in expected))


@DTYPES
@TOKENS
def test_zeros_give_zeros(host: PluginHost, seed: int, m: int, tactic: int, dtype: torch.dtype) -> None:
    w = Weight.random(np.random.default_rng(seed), N, K)
    y, *_ = run(host, torch.zeros(m, K, dtype=dtype), w, tactic)
    assert (y == 0).all()


@DTYPES
@TOKENS
def test_nan_and_infinity_reach_their_token_s_output(
    host: PluginHost, seed: int, m: int, tactic: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    w = Weight.random(rng, N, K)
    x = torch.from_numpy(rng.standard_normal((m, K))).to(dtype)
    x.view(torch.int16)[0, 300] = -1  # no number, with all bits set
    y, *_ = run(host, x, w, tactic)
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()
    x[0, 300] = float("inf")
    y, reference, _ = run(host, x, w, tactic)
    assert np.isinf(reference[0]).any()
    np.testing.assert_array_equal(float64(y[0]), reference[0])
    assert y[1:].isfinite().all()
