"""What is taken from checkpoints, byte by byte: NVFP4 weights of one beside the model or of the model's own directory,
FP8 weights and scales of FP8 caches of the latter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trt_nvfp4.builder.errors import USAGE, BuilderError
from trt_nvfp4.builder.export.checkpoints.directory import QuantizedDirectory, quantized_directory
from trt_nvfp4.builder.export.huggingface import is_model_directory
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import held_matrices
from trt_nvfp4.graph_passes.weights.published_caches import attach_cache_scales, published_cache_scales


def nvfp4_checkpoint(request: Request) -> NVFP4Checkpoint | None:
    """`--packed-weights`, or else what the model's directory itself has in NVFP4; None where there is neither.

    Raises CalibrationError for files that cannot be read.
    """
    if request.packed_weights is not None:
        return NVFP4Checkpoint(request.packed_weights)
    if not is_model_directory(request.model) or not any(request.model.glob("*.safetensors")):
        return None
    changed = request.adapter.modules() if request.adapter is not None else ()
    return NVFP4Checkpoint(request.model, of_model=True, changed=changed) or None


def attach_published(request: Request, subgraphs: Sequence[Subgraph]) -> QuantizedDirectory | None:
    """Note the scales that the model's directory has for its weights in FP8 and for FP8 caches; returns what it holds
    quantized, None where nothing is.

    Raises CalibrationError for scales of caches that do not fit the model.
    """
    quantized = quantized_directory(request.model) if is_model_directory(request.model) else None
    if quantized is not None:
        quantized.fp8().attach(subgraphs, request.adapter.modules() if request.adapter is not None else ())
        if quantized.cache_format == "FP8":
            attach_cache_scales(subgraphs, quantized.cache_scales)
    return quantized


def unused_cache_scales(
    request: Request, published: QuantizedDirectory | None, subgraphs: Sequence[Subgraph], plan: Plan
) -> Iterator[str]:
    """Why caches do not get the scales that the directory has for them."""
    if published is None:
        return
    has = f"{request.model} has scales for caches of keys and values"
    if published.cache_scales and published.cache_format != "FP8":
        yield f"{has} in {published.cache_format}, which no cache here has: they are left out"
        return
    scaled = {part.name for part in subgraphs if published_cache_scales(part) is not None}
    if lost := len({module for module, _ in published.cache_scales}) - len(scaled):
        yield f"{has} in FP8, and those of {lost} layers fit no attention that was found: they are left out"
    decisions = {entry.name: entry for entry in plan.subgraphs if entry.name in scaled}
    others = [entry for entry in decisions.values() if entry.decision != Decision.ATTENTION_FP8]
    if others:
        yield (
            f"{has} in FP8, which {len(others)} of {len(decisions)} layers do not use ({others[0].reason}); "
            "--kv-cache fp8 takes them"
        )


def check_checkpoint(
    checkpoint: NVFP4Checkpoint, subgraphs: Sequence[Subgraph], request: Request, plan: Plan, report: Report
) -> None:
    """Raise BuilderError (usage) where nothing in the plan takes weights of `--packed-weights`, or the recipe changes
    those of the model; name what is quantized anew."""
    planned = {entry.name for entry in plan.subgraphs if entry.lowering.is_nvfp4_plugin}
    held = {part.name: held_matrices(checkpoint, part) for part in subgraphs if part.name in planned}
    absent = [name for name, matrices in held.items() if not all(matrices)]
    if checkpoint.of_model:
        if parse(plan.recipe).awq and any(map(any, held.values())):
            raise BuilderError(
                USAGE,
                f"recipe '{plan.recipe}' scales channels of weights, and those of {request.model} are NVFP4 already "
                "and taken as they are; leave awq out, or give the original model",
            )
        if absent:
            report.warnings.append(
                f"{request.model} does not hold all weights of {_listed(absent)} in NVFP4 with one scale for gate and "
                "up: they are quantized here"
            )
        return
    if not planned:
        raise BuilderError(
            USAGE,
            f"{request.packed_weights}: the plan has no NVFP4 plugin, so that packed weights have no use; "
            "leave --packed-weights out, or choose --precision auto or nvfp4",
        )
    if not any(map(any, held.values())):
        raise BuilderError(
            USAGE,
            f"{request.packed_weights}: holds NVFP4 weights of none of the {len(planned)} subgraphs in the plan, such "
            f"as '{absent[0]}'; it has such as '{next(iter(checkpoint))}'",
        )
    if absent:
        report.warnings.append(
            f"{request.packed_weights} lacks weights of {', '.join(absent)}: quantized from the model's own"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"
