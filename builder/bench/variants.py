"""The engines to compare: how each is built, and the input of all."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from trt_nvfp4.builder.bench.decoders import Lengths
from trt_nvfp4.builder.bench.subject import Request, Subject, given_sample
from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.builder.model.decoder_contract import IDS, NEW_LENGTH, PAST_LENGTH
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.calibration.samples.samples import input_specs
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS

# Baselines, by what they are called in results. TensorRT's own NVFP4 is one of whole engines: as single products cuBLAS
# has it not, and by the roofline it is as fast as W4A4.
BASELINES = ("fp8", "bf16")
NATIVE = "native_nvfp4"


def builds_of(
    request: Request, subject: Subject, data: Path, folder: Path
) -> tuple[dict[str, pipeline.Request], list[str]]:
    """How each contestant is built: the same model, target, shapes and data; and why one is not.

    The baselines have TensorRT's own layers for the subgraphs that the plan replaces, and no plugin.
    """
    model = subject.model
    ours = {entry.name for entry in subject.plan.subgraphs if entry.decision != Decision.KEEP}
    capabilities = replace(subject.target.capabilities, fp8_plugins=False)
    plans, notes = {"nvfp4": subject.plan}, []
    for name in (NATIVE, *BASELINES):
        precision = name.replace("_", "-")
        plan = make_plan(
            model,
            subject.found,
            capabilities,
            PlanOptions(
                precision=precision, kinds=ALL_KINDS, calibrated=True, recipe=subject.plan.recipe, attention="tensorrt"
            ),
        )
        replaced = [entry for entry in plan.subgraphs if entry.name in ours]
        if name == NATIVE and all(entry.decision != NATIVE for entry in replaced):
            why = replaced[0].reason if replaced else "the plan replaces nothing"
            notes.append(f"TensorRT's own NVFP4 is not built: {why}")
        else:
            plans[name] = replace(plan, subgraphs=replaced)
    builds = {}
    for name, plan in plans.items():
        plan.save(folder / f"{name}.plan.yaml")
        builds[name] = pipeline.Request(
            model.path,
            subject.target,
            folder / f"{name}.engine",
            plan=folder / f"{name}.plan.yaml",
            calib_data=data,
            trust_remote_code=request.trust_remote_code,
            opt_shapes=subject.shapes if subject.decoder is None else {},
            accuracy_samples=0,  # the engines themselves are compared
        )
    return builds, notes


def sample_of(request: Request, subject: Subject, lengths: Lengths | None = None) -> dict[str, np.ndarray]:
    """One input: the user's, or a random one of the opt shapes; of a decoder a prompt, and empty caches."""
    path = subject.model.path
    if (given := given_sample(request, path)) is not None:
        return given
    rng = np.random.default_rng(0)
    if subject.decoder is not None and lengths is not None:
        new = lengths.prompt
        caches = {name: spec for name, spec in input_specs(path).items() if name in subject.decoder.caches}
        sample = {name: np.zeros((1, *map(int, spec.shape[1:])), spec.dtype) for name, spec in caches.items()}
        sample[IDS] = rng.integers(0, subject.decoder.vocab_size, (1, new))
        return sample | {PAST_LENGTH: np.zeros(1, np.int64), NEW_LENGTH: np.full(1, new)}
    return random_samples(input_specs(path), vocabulary(path), 1, rng, subject.shapes)[0]
