"""Statistics of the input x [rows, K] of a quantized matrix product, from calibration samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.plugins.ops import number_formats
from trt_nvfp4.plugins.ops.number_formats import BLOCK

_DAMPING = 0.01  # of the mean diagonal, however many rows there are
_MATRICES = ("hessian", "quantized_hessian", "quantized_cross")


@dataclass(frozen=True)
class InputStatistics:
    """Statistics over all rows of all samples; None where one was not collected. All tensors are float32.

    Attributes:
        rows: how many rows they are of; None: so many that it does not matter.
        amax: max |x|.
        channel_amax: [K], max |x_k|.
        head_amax: [heads], max |x| of x [batch, heads, rows, K], for keys and values that are cached.
        mean_square: [K], E[x_k^2].
        block_gram: [K/16, 16, 16], E[x_b x_b^T] of each block b of 16 channels.
        hessian: [K, K], E[x x^T].
        quantized_hessian: [K, K], E[q q^T] of q, x quantized to NVFP4 under the tensor scale that amax gives.
        quantized_cross: [K, K], E[x q^T].
    """

    rows: int | None = None
    amax: float | None = None
    channel_amax: Tensor | None = None
    head_amax: Tensor | None = None
    mean_square: Tensor | None = None
    block_gram: Tensor | None = None
    hessian: Tensor | None = None
    quantized_hessian: Tensor | None = None
    quantized_cross: Tensor | None = None

    @classmethod
    def of_rows(cls, x: Tensor, kinds: Collection[str]) -> InputStatistics:
        """The statistics `kinds` of activations [..., K] in memory, K a multiple of 16 where they include blocks."""
        rows = x.reshape(-1, x.shape[-1]).float()
        return cls(len(rows), **{kind: _MEASURES[kind](rows) for kind in kinds})

    def __getitem__(self, kind: str) -> Tensor:
        """A statistic that must be there; raises CalibrationError."""
        value = getattr(self, kind)
        if value is None:
            raise CalibrationError(f"{kind} of the input was not collected; calibrate again with this recipe")
        return torch.as_tensor(value)

    @property
    def width(self) -> int | None:
        """K, where a statistic has it."""
        if self.block_gram is not None:
            return self.block_gram.shape[0] * BLOCK
        known = (self.channel_amax, self.mean_square, self.hessian, self.quantized_hessian)
        return next((value.shape[-1] for value in known if value is not None), None)

    def damping(self, channels: int) -> float:
        """The share of its mean to add to the diagonal of E[x x^T] of so many channels: few rows say little of how many
        channels depend on each other, and must not be fitted."""
        return _DAMPING + (channels / self.rows if self.rows else 0.0)

    def only(self, kinds: Collection[str], device: torch.device | str) -> InputStatistics:
        """Those of `kinds` (amax aside) that there are, on `device`."""
        return InputStatistics(self.rows, **self._changed(dict.fromkeys(kinds, lambda value: value.to(device))))

    def _changed(self, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
        """Those that `changes` names, changed, as far as they were collected."""
        values = {kind: getattr(self, kind) for kind in changes}
        return {kind: changes[kind](value) for kind, value in values.items() if value is not None}

    def blocks(self, first: int, count: int) -> InputStatistics:
        """The statistics of `count` blocks of 16 channels by themselves, from block `first` on."""
        channels = slice(first * BLOCK, (first + count) * BLOCK)
        changes = {
            **dict.fromkeys(("channel_amax", "mean_square"), lambda values: values[channels]),
            "block_gram": lambda grams: grams[first : first + count],
        }
        return InputStatistics(self.rows, **self._changed(changes))

    def in_order(self, order: Tensor) -> InputStatistics:
        """Those of x[order] (int64 [K]). What is known of blocks of 16 follows from `hessian`. Those of quantized
        activations stay those of x quantized in its own order, without residual channels: an approximation."""
        channels = order.cpu()
        ordered = self._changed(
            {
                **dict.fromkeys(("channel_amax", "mean_square"), lambda values: values[channels]),
                **dict.fromkeys(_MATRICES, lambda values: values[channels][:, channels]),
            }
        )
        if "hessian" in ordered and self.block_gram is not None:
            blocks = len(order) // BLOCK
            grams = ordered["hessian"].view(blocks, BLOCK, blocks, BLOCK).diagonal(dim1=0, dim2=2)
            ordered["block_gram"] = grams.permute(2, 0, 1).contiguous()
        return InputStatistics(self.rows, self.amax, **ordered)

    def divided(self, scales: Tensor) -> InputStatistics:
        """Those of x / scales (float32 [K]). `amax` needs `channel_amax`; those of quantized activations are lost."""
        inverse = scales.reciprocal()
        blocks = inverse.view(-1, BLOCK)
        divided = self._changed(
            {
                "channel_amax": lambda values: values * inverse,
                "mean_square": lambda values: values * inverse.square(),
                "block_gram": lambda grams: grams * blocks[:, :, None] * blocks[:, None, :],
                "hessian": lambda values: values * inverse[:, None] * inverse,
            }
        )
        amax = divided["channel_amax"].max().item() if "channel_amax" in divided else None
        return InputStatistics(self.rows, amax, **divided)


def quantized(rows: Tensor, amax: Tensor) -> Tensor:
    """x [rows, K] as the NVFP4 kernels see it, under the tensor scale that `amax` gives."""
    scale = number_formats.tensor_scale(amax)
    return number_formats.dequantize_blocks(*number_formats.quantize_blocks(rows, scale), scale)


def _block_gram(rows: Tensor) -> Tensor:
    blocks = rows.view(len(rows), -1, BLOCK).transpose(0, 1)
    return blocks.transpose(1, 2) @ blocks / len(rows)


def _quantized_hessian(rows: Tensor) -> Tensor:
    seen = quantized(rows, rows.abs().max())
    return seen.T @ seen / len(seen)


def _quantized_cross(rows: Tensor) -> Tensor:
    return rows.T @ quantized(rows, rows.abs().max()) / len(rows)


_MEASURES = {
    "amax": lambda rows: rows.abs().max().item(),
    "channel_amax": lambda rows: rows.abs().amax(0),
    "mean_square": lambda rows: rows.square().mean(0),
    "block_gram": _block_gram,
    "hessian": lambda rows: rows.T @ rows / len(rows),
    "quantized_hessian": _quantized_hessian,
    "quantized_cross": _quantized_cross,
}
