"""docs/tactics.md lists every tactic of the plugins' C interface with its number."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tactics_and_their_numbers() -> None:
    header = (ROOT / "plugins" / "kernels" / "api" / "trt_nvfp4.h").read_text()
    page = (ROOT / "docs" / "tactics.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(re.findall(r"TRT_NVFP4_TACTIC_(\w+) = (\d+)", header))
