"""The inputs of an engine's build: a bundle's manifest, read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trt_nvfp4.builder.tensorrt.network_checks import AttentionNode
from trt_nvfp4.builder.tensorrt.verify import PlannedNodes


@dataclass(frozen=True)
class Weights:
    """Weights that the engine reads from a file beside it: their names among the network's inputs, and the digest of
    the file's content (see `weights_file`)."""

    file: Path
    digest: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """A manifest with its paths made absolute; see `bundle.py` for what writes it."""

    target: str
    arch: str
    compute_capability: tuple[int, int]
    module: str
    oldest_version: str
    model: Path
    engine: Path
    plugin_library: Path | None
    plugin_sources: Path | None
    #: Whether the engine carries the plugin library; it lies beside the engine otherwise.
    embed_plugins: bool
    timing_cache: Path | None
    profiles: list[dict[str, tuple[tuple[int, ...], ...]]]
    planned: tuple[PlannedNodes, ...]
    attentions: dict[str, AttentionNode]
    caches: dict[str, str]
    checksums: dict[Path, str]
    #: Names of the groups of kernels that the model's plugins need; the library must have them.
    kernels: tuple[str, ...] = ()
    weights: Weights | None = None
    #: Whether the engine's own weights may stay in host memory.
    weight_streaming: bool = False
