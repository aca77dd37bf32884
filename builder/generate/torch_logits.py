"""Logits on Torch's device: the chosen ones come to the host, all of them only on request."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .logits import HostLogits, Likeliest

_LOWER_32_BITS = 0xFFFFFFFF
_BITS_WITHOUT_SIGN = 0x7FFFFFFF


class TorchLogits:
    """Logits of each sequence's last valid tokens. They are gone with the runner's next step."""

    def __init__(self, values: Tensor, rows: np.ndarray | None = None, likeliest: Tensor | None = None) -> None:
        """The logits of `rows`, int64, of `values` [any, vocab] of a floating-point type; None: all rows. `likeliest`:
        the likeliest token of each of `values`, as `packed` gives it, where that is known."""
        self._values, self._rows, self._likeliest = values, rows, likeliest
        self.is_pending = values.is_cuda

    @classmethod
    def of_tokens(cls, values: Tensor, rows: np.ndarray, likeliest: Tensor | None = None) -> "TorchLogits":
        """The logits of `rows`, int64 [batch, count], of `values` [batch, tokens, vocab]."""
        flat = (rows + np.arange(len(rows))[:, None] * values.shape[1]).ravel()
        return cls(values.flatten(0, 1), flat, likeliest)

    def rows(self, numbers: Sequence[int]) -> "TorchLogits":
        chosen = np.array(numbers, np.int64)
        return TorchLogits(self._values, chosen if self._rows is None else self._rows[chosen], self._likeliest)

    def host(self) -> np.ndarray:
        return to_host(self._chosen().float())

    def likeliest(self, count: int | None) -> Likeliest:
        if count is None:
            return HostLogits(self.host()).likeliest(None)
        if count == 1 and self._likeliest is not None:
            found = to_host(self._likeliest)
            found = found if self._rows is None else found[self._rows]
        else:
            found = to_host(packed(self._chosen(), count))
        ids = found[:, : (found.shape[1] - 1) // 2]
        values = found[:, ids.shape[1] : -1].astype(np.float32)
        # NaN is the largest and the least of its row.
        return Likeliest(values, ids.astype(np.int64), np.isfinite(values[:, 0]) & np.isfinite(found[:, -1]))

    def _chosen(self) -> Tensor:
        if self._rows is None or np.array_equal(self._rows, np.arange(len(self._values))):
            return self._values
        return self._values[torch.from_numpy(self._rows).to(self._values.device, non_blocking=True)]


def packed(values: Tensor, count: int) -> Tensor:
    """The `count` likeliest tokens of each row of `values` [rows, vocab], float64 [rows, 2 * count + 1]: their ids,
    which are exact in that type, their logits, and the row's least logit. One copy to the host, and so one wait."""
    if count == 1:
        largest, ids = values.max(-1, keepdim=True)  # the first of equal ones
    else:
        ids = ordered(values).topk(min(count, values.shape[-1])).values
        ids = _LOWER_32_BITS - (ids & _LOWER_32_BITS)
        largest = values.gather(-1, ids)
    return torch.cat((ids.double(), largest.double(), values.amin(-1, keepdim=True).double()), -1)


def to_host(values: Tensor) -> np.ndarray:
    """A copy in pinned memory, behind one wait for the device."""
    found = values.to("cpu", non_blocking=True)
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()
    array: np.ndarray = found.numpy()
    return array


def ordered(values: Tensor) -> Tensor:
    """int64 keys, the larger the likelier and of equal logits the larger for the lower id, which is in the lower half:
    `topk` leaves open which of equal ones it gives."""
    bits = (values.float() + 0.0).view(torch.int32)  # +0 in place of -0
    upper = torch.where(bits < 0, bits ^ _BITS_WITHOUT_SIGN, bits).long() << 32
    return upper | (_LOWER_32_BITS - torch.arange(values.shape[-1], device=values.device))
