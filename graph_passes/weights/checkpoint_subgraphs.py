"""A subgraph's data in an NVFP4 checkpoint: weights of its matrices, and ranges of their inputs."""

from collections.abc import Iterable, Sequence

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.graph_passes.patterns.names import module_path
from trt_nvfp4.graph_passes.subgraphs.parts import Linear
from trt_nvfp4.graph_passes.subgraphs.products import MoeSubgraph
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.graph_passes.weights.checkpoint_experts import PackedExperts
from trt_nvfp4.graph_passes.weights.checkpoint_weights import NVFP4Source, common_scale, input_scale
from trt_nvfp4.plugins.ops.number_formats import E2M1_MAX, E4M3_MAX


def packed_sources(checkpoint: NVFP4Checkpoint, linears: Sequence[Linear]) -> tuple[NVFP4Source, ...] | None:
    """Where the linears of one matrix (gate and up, or another one) lie in the checkpoint.

    None if it lacks one of them or the model negates a product; also if the checkpoint is the model's own, and gate
    and up have no common tensor scale, which the op needs.
    """
    modules = [_module(checkpoint, linear) for linear in linears]
    if None in modules or any(linear.weight.scale <= 0 for linear in linears):
        return None
    sources = tuple(
        NVFP4Source(checkpoint, module, linear.weight, linear.weight.rows)
        for module, linear in zip(modules, linears, strict=True)
        if module is not None
    )
    return None if checkpoint.of_model and common_scale(sources) is None else sources


def separate_scales(checkpoint: NVFP4Checkpoint | None, linears: tuple[Linear, ...]) -> list[tuple[Linear, ...]]:
    """`linears` in groups that can be one matrix: all in one group, or each in its own if the checkpoint has only some
    of them or their tensor scales differ."""
    if checkpoint is None:
        return [linears]
    found = [packed_sources(checkpoint, (linear,)) for linear in linears]
    known = [sources[0] for sources in found if sources is not None]
    fits = len(known) in (0, len(found)) and (not known or common_scale(known) is not None)
    return [linears] if fits else [(linear,) for linear in linears]


def _module(checkpoint: NVFP4Checkpoint, linear: Linear) -> str | None:
    """By the module that the exporter recorded, else by the weight's own name."""
    names = (".".join(module_path(linear.multiply)), (linear.weight.stored.name or "").removesuffix(".weight"))
    return next(filter(None, map(checkpoint.module, names)), None)


def held_matrices(checkpoint: NVFP4Checkpoint, subgraph: Subgraph) -> list[bool]:
    """Whether the checkpoint has each matrix of the subgraph; the experts of an MoE block count as one."""
    if isinstance(subgraph, MoeSubgraph) and subgraph.moe is not None:
        return [PackedExperts.find(checkpoint, subgraph) is not None]
    return [packed_sources(checkpoint, linears) is not None for linears in subgraph.checkpoint_matrices]


def packed_ranges(checkpoint: NVFP4Checkpoint, subgraphs: Iterable[Subgraph]) -> dict[str, float]:
    """Largest magnitudes of the tensors that linears multiply, by name, as far as the checkpoint has scales for them.

    Raises:
        CalibrationError: the experts of an MoE block are not those of the model.
    """
    ranges: dict[str, float] = {}
    for subgraph in subgraphs:
        for linears, groups in _read_by(checkpoint, subgraph):
            if scale := float(input_scale(groups)):
                for name in (linear.observed for linear in linears):
                    ranges[name] = max(scale * E2M1_MAX * E4M3_MAX, ranges.get(name, 0.0))
    return ranges


def _read_by(
    checkpoint: NVFP4Checkpoint, subgraph: Subgraph
) -> list[tuple[Sequence[Linear], Sequence[tuple[NVFP4Source, ...]]]]:
    """Linears that one activation scale serves, with their sources."""
    if not isinstance(subgraph, MoeSubgraph):
        found = [(linears, packed_sources(checkpoint, linears)) for linears in subgraph.checkpoint_matrices]
        return [(linears, [sources]) for linears, sources in found if sources is not None]
    if (moe := subgraph.moe) is None:
        return []
    experts = PackedExperts.find(checkpoint, subgraph)
    if experts is None:
        return []
    return [
        ([mlp.up for mlp in moe.experts], experts.routed(moe.experts, down=False)),
        ([mlp.down for mlp in moe.experts], experts.routed(moe.experts, down=True)),
    ]
