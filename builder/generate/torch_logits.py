"""Logits on Torch's device: what is chosen comes to the host, and all of them only where a caller asks for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .logits import HostLogits, Likeliest

_LOWER_32_BITS = 0xFFFFFFFF
_BITS_WITHOUT_SIGN = 0x7FFFFFFF


class TorchLogits:
    """Logits of each sequence's last valid token. They are gone with the runner's next step."""

    def __init__(self, values: Tensor, new: np.ndarray) -> None:
        """`values` [batch, 1 or tokens, vocab] of a floating-point type; `new` [batch], valid tokens."""
        if values.shape[1] > 1:
            last = torch.from_numpy(new - 1).to(values.device)
            values = values[torch.arange(len(new), device=values.device), last]
        else:
            values = values[:, 0]
        self._values = values

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
