"""What the compiler makes of the decode kernel on every architecture: one per specialisation; native E2M1 on Blackwell.
(test_library.py: no spills.)"""

import pytest
from compiled import compiled

ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_specialisations_and_native_conversion(arch: str) -> None:
    library = compiled(arch)
    small = 10 if arch in ("sm_90a", "sm_100a", "sm_103a") else 6  # by clusters too
    for kernel, count in (("sm80_w4a16_token", 4), ("sm80_w4a16_mlp", 12), ("sm80_w4a16_small", small)):
        found = {line for line in library.report.splitlines() if "Function properties for" in line and kernel in line}
        assert len(found) == count, "two dtypes; linear and MLP, small linears; columns of more than one token"
    if int(arch.strip("sm_a")) < 100:
        return
    for source in ("w4a16.cu", "w4a16_small.cu"):
        fp16 = "\n".join(f for f in library.sass(source).split("Function : ") if "6__half" in f.splitlines()[0])
        assert "E2M1" in fp16, "FP16 activations: the conversion instruction"
