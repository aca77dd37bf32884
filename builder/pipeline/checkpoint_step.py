"""Which checkpoint NVFP4 weights are taken from, byte by byte: one beside the model, or the model's own directory."""

from __future__ import annotations

from collections.abc import Sequence

from trt_nvfp4.builder.errors import USAGE, BuilderError
from trt_nvfp4.builder.export.huggingface import is_model_directory
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.recipes import parse
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph
from trt_nvfp4.graph_passes.weights.checkpoint_subgraphs import held_matrices


def nvfp4_checkpoint(request: Request) -> NVFP4Checkpoint | None:
    """`--packed-weights`, or else what the model's directory itself has in NVFP4; None where there is neither.

    Raises CalibrationError for files that cannot be read.
    """
    if request.packed_weights is not None:
        return NVFP4Checkpoint(request.packed_weights)
    if not is_model_directory(request.model) or not any(request.model.glob("*.safetensors")):
        return None
    return NVFP4Checkpoint(request.model, of_model=True) or None


def check_checkpoint(
    checkpoint: NVFP4Checkpoint, subgraphs: Sequence[Subgraph], request: Request, plan: Plan, report: Report
) -> None:
    """Raise BuilderError (usage) where nothing in the plan takes weights of `--packed-weights`, or the recipe changes
    those of the model; name what is quantized anew."""
    planned = {entry.name for entry in plan.subgraphs if entry.decision.startswith("nvfp4")}
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
