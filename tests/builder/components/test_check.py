"""The comparison of an exported chain with the original."""

import numpy as np
import pytest

from trt_nvfp4.builder.components.check import check_export
from trt_nvfp4.builder.errors import ModelFaultError


@pytest.mark.parametrize("rounding", [None, 0.0, 0.05])
@pytest.mark.parametrize("sixteen_bits", [False, True])
def test_more_than_rounding_is_refused(rounding: float | None, sixteen_bits: bool, rng: np.random.Generator) -> None:
    """In 16 bits a difference of 12 % passes only where 16 bits change the original itself nearly as much."""
    expected = rng.standard_normal((3, 50))
    own = None if rounding is None else lambda: rounding
    for error in (5e-4, 0.12, 0.2):
        found = expected * (1 + error)
        if error < 1e-3 or (sixteen_bits and error < 0.15 and rounding):
            assert check_export("m", [expected], [found], sixteen_bits, own) == pytest.approx(error)
        else:
            with pytest.raises(ModelFaultError, match=f"relative error {error:.1%}"):
                check_export("m", [expected], [found], sixteen_bits, own)
