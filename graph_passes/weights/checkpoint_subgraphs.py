"""What an NVFP4 checkpoint holds of a subgraph: weights of its matrices, ranges of what they are multiplied with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.graph_passes.patterns.names import module_path
from trt_nvfp4.graph_passes.subgraphs.types import Linear, Subgraph
from trt_nvfp4.graph_passes.weights.checkpoint_experts import PackedExperts
from trt_nvfp4.graph_passes.weights.checkpoint_weights import NVFP4Source, input_scale
from trt_nvfp4.plugins.ops.number_formats import E2M1_MAX, E4M3_MAX


def packed_sources(checkpoint: NVFP4Checkpoint, linears: Sequence[Linear]) -> tuple[NVFP4Source, ...] | None:
    """Where the linears of one matrix (gate and up, or another alone) lie in the checkpoint.

    None where it has not all of them, the model turns a product's sign, or a checkpoint that is the model's own has
    other tensor scales for gate and up, where the op has one for both.
    """
    modules = [_module(checkpoint, linear) for linear in linears]
    if None in modules or any(linear.weight.scale <= 0 for linear in linears):
        return None
    sources = tuple(
        NVFP4Source(checkpoint, module, linear.weight, linear.weight.rows)
        for module, linear in zip(modules, linears, strict=True)
        if module is not None
    )
    if checkpoint.of_model and len({float(source.tensor_scales()[0]) for source in sources}) > 1:
        return None
    return sources


def separate_scales(checkpoint: NVFP4Checkpoint | None, linears: tuple[Linear, ...]) -> list[tuple[Linear, ...]]:
    """All of `linears` in one group, or each alone where the checkpoint has some of them and they cannot be one matrix:
    some are missing there, or their tensor scales differ."""
    if checkpoint is None:
        return [linears]
    found = [packed_sources(checkpoint, (linear,)) for linear in linears]
    scales = {None if sources is None else sources[0].tensor_scales()[0].item() for sources in found}
    return [linears] if len(scales) == 1 else [(linear,) for linear in linears]


def _module(checkpoint: NVFP4Checkpoint, linear: Linear) -> str | None:
    """By the module that the exporter recorded, else by the weight's own name."""
    names = (".".join(module_path(linear.multiply)), (linear.weight.stored.name or "").removesuffix(".weight"))
    return next(filter(None, map(checkpoint.module, names)), None)


def held_matrices(checkpoint: NVFP4Checkpoint, subgraph: Subgraph) -> list[bool]:
    """Of each matrix of the subgraph whether the checkpoint has it; of the experts of an MoE block together."""
    if subgraph.moe is not None:
        return [PackedExperts.find(checkpoint, subgraph.name) is not None]
    return [packed_sources(checkpoint, linears) is not None for linears in _matrices(subgraph)]


def _matrices(subgraph: Subgraph) -> list[tuple[Linear, ...]]:
    """Those that a checkpoint has or lacks as a whole."""
    return [(linear,) for linear in subgraph.projections] or subgraph.matrices


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
    moe = subgraph.moe
    if moe is None:
        found = [(linears, packed_sources(checkpoint, linears)) for linears in _matrices(subgraph)]
        return [(linears, [sources]) for linears, sources in found if sources is not None]
    experts = PackedExperts.find(checkpoint, subgraph.name)
    if experts is None:
        return []
    return [
        ([mlp.up for mlp in moe.experts], experts.routed(moe.experts, down=False)),
        ([mlp.down for mlp in moe.experts], experts.routed(moe.experts, down=True)),
    ]
