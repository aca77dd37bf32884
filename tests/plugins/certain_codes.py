"""NVFP4 of values that are known up to float32's errors: what it is, and where those cannot change it."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
from nvfp4_reference import Array, quantize, scale_candidates

Bools = npt.NDArray[np.bool_]


def certain_values(x: Array, noise: Array, scale: float, scale_search: int) -> tuple[Array, Bools]:
    """What x, [rows, columns], is as NVFP4, and where it is that too with every value up to `noise` larger or smaller:
    its code and the scale of its block are the same. The largest values of a block and of the tensor are wrong
    independently of each other."""
    f = np.float32
    expected = quantize(x.astype(f), scale, scale_search)
    size, largest = np.abs(x), np.abs(x).argmax()
    share = 0.0 if scale else noise.flat[largest] / size.flat[largest]
    certain = np.ones(x.shape, bool)
    for sign in (1, -1):
        moved = ((size + sign * noise) * np.sign(x)).astype(f)
        amax = np.abs(moved).reshape(len(x), -1, 16).max(-1)
        for way in (1, -1):
            tensor_scale = f(float(expected.tensor_scale) * (1 + way * share))
            near = quantize(moved, float(tensor_scale), scale_search)
            same = near.block_scales == expected.block_scales
            if scale_search:
                candidates = scale_candidates(amax, tensor_scale, scale_search)
                same &= _settled(
                    size, noise + share * size, float(expected.tensor_scale), candidates, expected.block_scales
                )
            certain &= np.isclose(near.values, expected.values, 1e-5, 1e-9) & np.repeat(same, 16, axis=-1)
    return expected.values, certain


def _settled(
    size: Array,
    noise: Array,
    tensor_scale: float,
    candidates: list[npt.NDArray[np.int32]],
    chosen: npt.NDArray[np.uint8],
) -> Bools:
    """Blocks of which the most that the chosen candidate may lose is less than the least that another may. An error is
    the distance to a code, so that it is wrong by no more than the value is."""
    f = np.float32
    blocks, noise = (part.reshape(*chosen.shape, 16) for part in (size, noise))
    most, least = np.full(chosen.shape, np.inf), np.full(chosen.shape, np.inf)
    for candidate in candidates:
        scales = candidate.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled, wrong = (part / (tensor_scale * scales)[..., None] for part in (blocks, noise))
            errors = np.abs(scaled - np.clip(scaled, 0, 6).astype(f).astype(ml_dtypes.float4_e2m1fn).astype(np.float64))
            up, down = (
                (np.rint(np.clip((errors + way * wrong) * 512, 0, 1023)) ** 2).sum(-1) * scales**2 for way in (1, -1)
            )
        most = np.where(candidate == chosen, up, most)
        least = np.where(candidate == chosen, least, np.minimum(least, down))
    searched = (candidates[0] > 0) & (candidates[0] < 126)
    return np.asarray(~searched | (most * (1 + 1e-6) < least))
