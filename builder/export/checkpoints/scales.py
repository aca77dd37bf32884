"""Spreads scales over the values that share them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trt_nvfp4.builder.export.checkpoints.parts import Parts

# DeepSeek's blocks of rows and columns, in use wherever a configuration states none.
_BLOCK = (128, 128)


def spread(parts: Parts, role: str, scale: Tensor, shape: Sequence[int]) -> Tensor:
    """`scale`, which the tensor in that role holds, so that it multiplies values of `shape`, [..., N, K].

    It has one element; or one for each row [N] or matrix [E]; or an axis for each of the values', of length 1, the
    values' own, or that of whole groups or blocks.

    Raises CalibrationError where the counts fit no values of that shape, or more than one way.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    scale = _with_all_axes(parts, role, scale, shape)
    block = _block(parts, scale, shape)
    for axis, (count, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if count in (1, size):
            continue
        in_block = block is not None and axis >= len(shape) - 2
        of_block = block[axis - len(shape)] if block is not None and in_block else group_size(parts, size, count)
        if of_block is None:
            raise _misfit(parts, role, scale.shape, shape)
        scale = scale.repeat_interleave(of_block, axis).narrow(axis, 0, size)
    return scale


def group_size(parts: Parts, size: int, count: int) -> int | None:
    """How many of `size` columns share one of `count` scales: as the configuration states, the last group being smaller
    where they do not divide; else as many in each. None where neither is possible."""
    stated = parts.settings.group
    if stated is not None and -(-size // stated) == count:
        return stated
    return size // count if count and size % count == 0 else None


def _with_all_axes(parts: Parts, role: str, scale: Tensor, shape: Sequence[int]) -> Tensor:
    if scale.dim() == len(shape):
        return scale
    if scale.dim() == 1 and len(scale) == shape[0]:  # one for each row, or for each matrix of a stack
        return scale.reshape(-1, *[1] * (len(shape) - 1))
    is_stack = len(shape) == 3 and scale.dim() == 2 and scale.shape[0] == shape[0]
    if is_stack and shape[1] != shape[2] and scale.shape[1] in shape[1:]:
        return scale.unsqueeze(2 if scale.shape[1] == shape[1] else 1)
    raise _misfit(parts, role, scale.shape, shape)


def _block(parts: Parts, scale: Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, as the configuration says or else as is usual; None where it is not of
    blocks of both."""
    if scale.dim() < 2 or scale.shape[-2] == shape[-2] > 1:  # of rows, or of groups in them
        return None

    def fits(block: tuple[int, int]) -> bool:
        return all(-(-size // of) == n for size, of, n in zip(shape[-2:], block, scale.shape[-2:], strict=True))

    return next((block for block in (parts.settings.block, _BLOCK) if block is not None and fits(block)), None)


def _misfit(parts: Parts, role: str, found: Sequence[int], shape: Sequence[int]) -> Exception:
    return parts.error(f"{parts.keys[role]} holds scales {list(found)}, which do not fit values {list(shape)}")
