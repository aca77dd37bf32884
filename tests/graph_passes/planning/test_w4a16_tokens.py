"""Up to which tokens W4A16 is kept where FP8 is the other choice: by kind, and of experts by how many are chosen."""

from __future__ import annotations

import pytest

from trt_nvfp4.graph_passes.planning.w4a16_tokens import most_decode_tokens
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph


@pytest.mark.parametrize(
    ("kind", "experts", "top_k", "calibrated", "uncalibrated"),
    [
        ("gated_mlp", 0, 0, 32, 64),
        ("mlp", 0, 0, 32, 64),
        ("linear", 0, 0, 32, 64),
        ("moe", 128, 8, 256, 512),  # Qwen3: 256 tokens are 16 for each expert
        ("moe", 8, 2, 160, 320),  # Mixtral: 40 for each expert
        ("moe", 4, 4, 40, 80),  # all of them
    ],
)
def test_most_tokens(kind: str, experts: int, top_k: int, calibrated: int, uncalibrated: int) -> None:
    shapes = {"experts": experts, "top_k": top_k} if kind == "moe" else {"in_features": 64, "out_features": 64}
    subgraph = Subgraph("s", kind, (), "x", "y", shapes, "silu", "float16", None)
    assert most_decode_tokens(subgraph, calibrated=True) == calibrated
    assert most_decode_tokens(subgraph, calibrated=False) == uncalibrated
