"""Data of checkpoints, taken byte by byte: NVFP4 weights of one beside the model or of the model's own directory, FP8
weights and scales of FP8 caches of the latter."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.export.checkpoints.directory import QuantizedDirectory, quantized_directory
from trt_nvfp4.builder.model.model_files import is_model_directory
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.pipeline.run import Run
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import held_matrices
from trt_nvfp4.graph_passes.weights.published_caches import attach_cache_scales, published_cache_scales


def nvfp4_checkpoint(request: Request) -> NVFP4Checkpoint | None:
    """`--set packed-weights`, or else what the model's directory itself has in NVFP4; None where there is neither.

    Raises CalibrationError for files that cannot be read.
    """
    if request.packed_weights is not None:
        # A part was published with them.
        return NVFP4Checkpoint(request.packed_weights, of_model=request.is_part)
    if not is_model_directory(request.model) or not any(request.model.glob("*.safetensors")):
        return None
    changed = request.adapter.modules() if request.adapter is not None else ()
    return NVFP4Checkpoint(request.model, of_model=True, changed=changed) or None


def attach_published(run: Run) -> QuantizedDirectory | None:
    """Note the scales that the model's directory has for its weights in FP8 and for FP8 caches; returns what it holds
    quantized, None where nothing is.

    Raises CalibrationError for scales of caches that do not fit the model.
    """
    request, subgraphs = run.request, run.subgraphs
    quantized = quantized_directory(request.model) if is_model_directory(request.model) else None
    if quantized is not None:
        fp8 = quantized.fp8()
        run.report.warnings += unusable_scales(request.model, fp8.unusable)
        fp8.attach(subgraphs, request.adapter.modules() if request.adapter is not None else ())
        if quantized.cache_format == "FP8":
            attach_cache_scales(subgraphs, quantized.cache_scales)
    return quantized


def unusable_scales(source: Path, scales: Mapping[str, float]) -> Iterator[str]:
    """Which activations stay in 16 bits because the checkpoint's scales for them mean nothing."""
    if scales:
        name, value = next(iter(scales.items()))
        yield (
            f"{source}: {len(scales)} scales of activations are not positive and finite, such as {value:g} of {name}: "
            "what they scale stays in 16 bits, of a mixture all experts' inputs; --calib-data FILE|DIR measures it"
        )


def unused_cache_scales(run: Run) -> Iterator[str]:
    """Why caches do not get the scales that the directory has for them."""
    published = run.published
    if published is None:
        return
    has = f"{run.request.model} has scales for caches of keys and values"
    if published.cache_scales and published.cache_format != "FP8":
        yield f"{has} in {published.cache_format}, which no cache here has: they are left out"
        return
    scaled = {part.name for part in run.subgraphs if published_cache_scales(part) is not None}
    if lost := len({module for module, _ in published.cache_scales}) - len(scaled):
        yield f"{has} in FP8, and those of {lost} layers fit no attention that was found: they are left out"
    decisions = {entry.name: entry for entry in run.plan.subgraphs if entry.name in scaled}
    others = [entry for entry in decisions.values() if entry.decision != Decision.ATTENTION_FP8]
    if others:
        yield (
            f"{has} in FP8, which {len(others)} of {len(decisions)} layers do not use ({others[0].reason}); "
            "--kv-cache fp8 takes them"
        )


def check_checkpoint(run: Run) -> None:
    """Raise UsageError where nothing in the plan takes weights of `packed_weights`, or the recipe changes
    those of the model; name what is quantized anew."""
    checkpoint, request, plan, report = run.checkpoint, run.request, run.plan, run.report
    if checkpoint is None:
        return
    planned = {entry.name for entry in plan.subgraphs if entry.lowering.is_nvfp4_plugin}
    held = {part.name: held_matrices(checkpoint, part) for part in run.subgraphs if part.name in planned}
    report.warnings += unusable_scales(request.packed_weights or request.model, checkpoint.unusable)
    absent = [name for name, matrices in held.items() if not all(matrices)]
    if checkpoint.of_model:
        if parse(plan.recipe).awq and any(map(any, held.values())):
            raise UsageError(
                f"recipe '{plan.recipe}' scales channels of weights, and those of {request.model} are NVFP4 already "
                "and taken as they are; leave awq out, or give the original model"
            )
        gated = {part.name for part in run.subgraphs if any(mlp.gate is not None for mlp in part.mlps)}
        for how, names in (
            ("", [name for name in absent if name not in gated]),
            (" with one scale for gate and up", [name for name in absent if name in gated]),
        ):
            if names:
                report.warnings.append(
                    f"{request.model} does not hold all weights of {_listed(names)} in NVFP4{how}: they are quantized "
                    "here"
                )
        return
    if not planned:
        raise UsageError(
            f"{request.packed_weights}: the plan has no NVFP4 plugin, so that packed weights have no use; "
            "leave --set packed-weights out, or choose --precision auto or nvfp4"
        )
    if not any(map(any, held.values())):
        raise UsageError(
            f"{request.packed_weights}: holds no NVFP4 weights of the {len(planned)} subgraphs in the plan, such as "
            f"'{absent[0]}', but those of others, such as '{next(iter(checkpoint))}'"
        )
    if absent:
        report.warnings.append(
            f"{request.packed_weights} lacks weights of {', '.join(absent)}: quantized from the model's own"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"
