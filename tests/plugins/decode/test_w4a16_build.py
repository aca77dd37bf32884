"""What the compiler makes of the decode kernel on every architecture: one per specialisation; native E2M1 on Blackwell.
(test_library.py: no spills.)"""

from __future__ import annotations

import re

import pytest
from compiled import compiled

ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_specialisations_and_native_conversion(arch: str) -> None:
    library = compiled(arch)
    kernels = {
        line for line in library.report.splitlines() if re.search("Function properties for .*sm80_w4a16_mlp", line)
    }
    assert len(kernels) == 12, "two dtypes, three numbers of columns, linear and MLP"
    if int(arch.strip("sm_a")) < 100:
        return
    fp16 = "\n".join(f for f in library.sass("w4a16.cu").split("Function : ") if "6__half" in f.splitlines()[0])
    assert "E2M1" in fp16, "FP16 activations: the conversion instruction"
