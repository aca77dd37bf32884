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

    def __init__(self, values: Tensor) -> None:
        """`values` [rows, vocab] of a floating-point type."""
        self._values = values
        self.is_pending = values.is_cuda

    @classmethod
    def of_tokens(cls, values: Tensor, rows: np.ndarray) -> "TorchLogits":
        """The logits of `rows`, int64 [batch, count], of `values` [batch, tokens, vocab]."""
        if rows.shape[1] < values.shape[1]:
            index = torch.from_numpy(rows).to(values.device)
            values = values[torch.arange(len(rows), device=values.device)[:, None], index]
        return cls(values.flatten(0, 1))

    def rows(self, numbers: Sequence[int]) -> "TorchLogits":
        index = torch.tensor(numbers).to(self._values.device, non_blocking=True)  # the step may still run
        return TorchLogits(self._values[index])

    def host(self) -> np.ndarray:
        found: np.ndarray = self._values.float().cpu().numpy()
        return found

    @torch.inference_mode()
    def likeliest(self, count: int | None) -> Likeliest:
        if count is None:
            return HostLogits(self.host()).likeliest(None)
        finite = self._values.isfinite().all(-1)
        if count == 1:
            values, ids = self._values.max(-1, keepdim=True)  # the first of equal ones
        else:
            ids = ordered(self._values).topk(min(count, self._values.shape[-1])).values
            ids = _LOWER_32_BITS - (ids & _LOWER_32_BITS)
            values = self._values.gather(-1, ids)
        # One copy, and so one wait: ids of a vocabulary are exact in float64.
        packed = torch.cat((values.double(), ids.double(), finite.double()[:, None]), -1).cpu().numpy()
        size = ids.shape[1]
        return Likeliest(packed[:, :size].astype(np.float32), packed[:, size:-1].astype(np.int64), packed[:, -1] > 0)


def ordered(values: Tensor) -> Tensor:
    """int64 keys, the larger the likelier and of equal logits the larger for the lower id, which is in the lower half:
    `topk` leaves open which of equal ones it gives."""
    bits = (values.float() + 0.0).view(torch.int32)  # +0 in place of -0
    upper = torch.where(bits < 0, bits ^ _BITS_WITHOUT_SIGN, bits).long() << 32
    return upper | (_LOWER_32_BITS - torch.arange(values.shape[-1], device=values.device))
