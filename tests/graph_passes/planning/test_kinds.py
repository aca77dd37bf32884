"""Up to which tokens W4A16 is kept where FP8 is the other choice: by kind, and of experts by how many are chosen."""

import pytest

from trt_nvfp4.graph_passes.planning.kinds.products import Products
from trt_nvfp4.graph_passes.planning.kinds.registry import KINDS


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
    products = KINDS[kind]
    assert isinstance(products, Products)
    assert products.most_w4a16_tokens(shapes, calibrated=True) == calibrated
    assert products.most_w4a16_tokens(shapes, calibrated=False) == uncalibrated
