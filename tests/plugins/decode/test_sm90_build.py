"""What the compiler makes of the SM90 kernels: no multiplication that waits for the one before. (test_library.py: no
spills.)"""

import re

import pytest
from compiled import compiled


@pytest.mark.slow
def test_no_serialized_wgmma() -> None:
    report = compiled("sm_90a").report
    kernels = set(re.findall(r"Function properties for (\S*sm90_w4a16_\S*)", report))
    assert len(kernels) == 43, (
        "two dtypes; linears of four numbers of tokens, their sums and an image of x; five of whole MLPs, before which "
        "one erases; mixtures of whole and of shared tiles, of one token and of more, of wide and wider jobs, their "
        "images"
    )
    assert "serialized" not in report
