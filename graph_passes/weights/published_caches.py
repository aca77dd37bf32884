"""Scales that a checkpoint publishes for FP8 caches: those of keys and values as attention was calibrated with them."""

from collections.abc import Iterable, Mapping

import torch

from trt_nvfp4.calibration.checkpoint import without_model
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.patterns.names import module_path
from trt_nvfp4.graph_passes.subgraphs.attention import AttentionSubgraph
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

# Key of a cache's `meta`: float32 [kv_heads], which multiplies the E4M3 numbers in it.
_SCALES = "trt_nvfp4.cache_scales"


def attach_cache_scales(subgraphs: Iterable[Subgraph], scales: Mapping[tuple[str, str], torch.Tensor]) -> None:
    """Notes scales at the caches of attention. `scales`: by attention module and "k" or "v", one or one per head; taken
    where both are there.

    Raises CalibrationError where their number is another than that of the heads.
    """
    by_module = {(without_model(module), of): scale for (module, of), scale in scales.items()}
    attentions = (subgraph for subgraph in subgraphs if isinstance(subgraph, AttentionSubgraph))
    for block in filter(None, (subgraph.attention for subgraph in attentions)):
        module = without_model(".".join(module_path(block.core)))
        found = [by_module.get((module, of)) for of in "kv"]
        for cache, of, scale in zip(block.past, "kv", found, strict=True):
            if scale is None or None in found:
                continue
            if scale.numel() not in (1, block.key.heads):
                raise CalibrationError(
                    f"the checkpoint has {scale.numel()} scales for the {of} cache of {module[1:]}, which has "
                    f"{block.key.heads} heads: expected one, or one per head"
                )
            cache.meta[_SCALES] = scale.float().expand(block.key.heads).contiguous()


def published_cache_scales(subgraph: Subgraph) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Those of keys and values, float32 [kv_heads]; None where the checkpoint has none, and for other subgraphs."""
    if not isinstance(subgraph, AttentionSubgraph) or subgraph.attention is None:
        return None
    key, value = (cache.meta.get(_SCALES) for cache in subgraph.attention.past)
    return None if key is None or value is None else (key, value)


def with_published_scales(subgraphs: Iterable[Subgraph]) -> set[str]:
    """The names of the tensors whose FP8 cache needs no statistics."""
    return {name for part in subgraphs if published_cache_scales(part) is not None for name in part.linear_inputs}
