"""More layers, heads, experts or labels than any model has are refused, whatever lists they are in; sizes are not."""

from typing import Any

import pytest

from trt_nvfp4.common.model_config import check_counts


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000,"),
        ({"n_layer": 10**9}, "n_layer is"),
        ({"text_config": {"num_local_experts": 10**7}}, "text_config.num_local_experts is"),
        ({"depths": [2, 2, 10**8]}, "depths is"),
        ({"parts": [{"decoder_layers": 1e300}]}, "parts.decoder_layers is 1e"),
        ({"num_labels": 1 << 70}, "num_labels is"),
        ({"n_head": float("inf")}, "n_head is inf"),
    ],
)
def test_refused(config: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_counts(config)


def test_what_is_in_models() -> None:
    deep: Any = 10**12
    for _ in range(5000):  # deeper than Python's calls
        deep = {"a": [deep]}
    sizes = {"vocab_size": 10**6, "max_position_embeddings": 10**7, "rope_theta": 10**9, "hidden_size": 16384}
    check_counts({**sizes, "num_hidden_layers": 126, "num_experts": 384, "num_labels": 21843, "deep": deep, "x": None})
    check_counts([])
