"""The interface of a way to choose block scales."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics


@dataclass(frozen=True)
class ScaleChoice:
    """Chooses the E4M3 scale of every block of a weight.

    Attributes:
        needs: the statistics of the input that it takes, fields of `InputStatistics`.
        largest: the block scale of the weight's largest block under max scaling, which fixes the tensor scale: 448, or
            less where a choice may raise block scales above max scaling.
        choose: (weight float32 [N, K], tensor scale, statistics) -> block scales float8_e4m3fn [N, K/16].
    """

    needs: frozenset[str]
    largest: float
    choose: Callable[[Tensor, Tensor, InputStatistics], Tensor]
