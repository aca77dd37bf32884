"""A weight that is dequantized when it is read."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trt_nvfp4.builder.export.checkpoints.parts import Parts


@dataclass(frozen=True)
class QuantizedWeight:
    """One weight of the model: its parts, their format in words, its shape, and what dequantizes it, exactly (in
    float32, or in bfloat16 where that is exact)."""

    parts: Parts
    format: str
    shape: tuple[int, ...]
    dequantize: Callable[[], Tensor]

    def read(self) -> Tensor:
        """The values by which the model multiplies. Raises CalibrationError where the tensors do not fit together."""
        values = self.dequantize()
        if "pre_quant_scale" not in self.parts.keys:
            return values
        # AWQ: a factor of each input, which the weight takes over.
        factors = self.parts.scale("pre_quant_scale")
        if factors.shape != (self.shape[-1],):
            raise self.parts.error(
                f"{self.parts.keys['pre_quant_scale']} must have the {self.shape[-1]} columns of {self.parts.weight}, "
                f"found {list(factors.shape)}"
            )
        return values.float() * factors
