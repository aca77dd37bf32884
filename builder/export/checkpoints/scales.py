"""Spreads scales over the values that share them."""

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
        _check_strategy(parts, role, scale.reshape([1] * len(shape)), shape)
        return scale.reshape(())
    scale, settings = _with_all_axes(parts, role, scale, shape), parts.settings
    _check_strategy(parts, role, scale, shape)
    block = _block(parts, role, scale, shape)
    for axis, (count, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if count in (1, size):
            continue
        if block is not None and axis >= len(shape) - 2:
            of_block: int | None = block[axis - len(shape)]
        elif axis == len(shape) - 1:
            of_block = group_size(parts, size, count)
        else:
            of_block = None if settings.blocks or settings.groups else _even(size, count)
        if of_block is None:
            raise _misfit(parts, role, scale.shape, shape)
        scale = scale.repeat_interleave(of_block, axis).narrow(axis, 0, size)
    return scale


def check_zero_points(parts: Parts, zero_point: Tensor | None) -> None:
    """Raise CalibrationError for zero points of symmetric weights that are not 0, and for weights without zero points
    that the configuration calls asymmetric."""
    symmetric = parts.settings.is_symmetric
    if symmetric and zero_point is not None and bool(zero_point.any()):
        raise parts.error(
            f"{parts.keys['zero_point']} holds {zero_point.min():g} to {zero_point.max():g}, and config.json states "
            "symmetric weights, whose zero points are 0"
        )
    if symmetric is False and zero_point is None:
        raise parts.error(f"{parts.weight} has no zero points, and config.json states weights that are not symmetric")


def group_size(parts: Parts, size: int, count: int) -> int | None:
    """How many of `size` columns share one of `count` scales: as the configuration states, the last group being smaller
    where they do not divide; where it states no groups and no blocks, as many in each. None where neither is possible,
    or several are."""
    stated = parts.settings.groups
    if not stated:
        return size if count == 1 else None if parts.settings.blocks else _even(size, count)
    fitting = {min(group, size) for group in stated if _fits(size, group, count)}
    return next(iter(fitting)) if len(fitting) == 1 else None


def _check_strategy(parts: Parts, role: str, scale: Tensor, shape: Sequence[int]) -> None:
    """Raise CalibrationError for scales [..., rows, columns] of another granularity than the configuration states.
    Finer ones than a whole tensor's cannot be misread."""
    settings = parts.settings
    if len(shape) < 2 or not settings.strategies:
        return
    (rows, columns), (n, k) = scale.shape[-2:], shape[-2:]
    by_row = rows == n
    fits = {
        "tensor": columns == 1,
        "channel": by_row and columns == 1,
        "group": by_row and (not settings.groups or any(_fits(k, group, columns) for group in settings.groups)),
        "block": any(
            _fits(n, height, rows) and _fits(k, width, columns) for height, width in settings.blocks or {_BLOCK}
        ),
    }
    if not any(fits[strategy] for strategy in settings.strategies):
        raise _misfit(parts, role, scale.shape, shape)


def _fits(size: int, of: int, count: int) -> bool:
    return -(-size // of) == count


def _even(size: int, count: int) -> int | None:
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


def _block(parts: Parts, role: str, scale: Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, as the configuration says or else as is usual; None where it is not of
    blocks of both. Raises CalibrationError where none of those that are stated fits."""
    if scale.dim() < 2 or scale.shape[-2] == shape[-2] > 1:  # of rows, or of groups in them
        return None
    stated = parts.settings.blocks
    counts = scale.shape[-2:]
    fitting = [
        block
        for block in stated or (_BLOCK,)
        if all(_fits(size, of, n) for size, of, n in zip(shape[-2:], block, counts, strict=True))
    ]
    if stated and len(fitting) != 1 and not all(n in (1, size) for size, n in zip(shape[-2:], counts, strict=True)):
        raise _misfit(parts, role, scale.shape, shape)
    return fitting[0] if fitting else None


def _misfit(parts: Parts, role: str, found: Sequence[int], shape: Sequence[int]) -> Exception:
    stated = parts.settings.stated_groups or " or ".join(sorted(parts.settings.strategies))
    by = f" by the blocks and groups that config.json states ({stated})" if stated else ""
    return parts.error(f"{parts.keys[role]} holds scales {list(found)}, which do not fit values {list(shape)}{by}")
