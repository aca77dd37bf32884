"""Accuracy on the user's samples: the mix of precisions that meets a budget, and how the rewritten model agrees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trt_nvfp4.builder.accuracy.compare import compare
from trt_nvfp4.builder.accuracy.decoding import compare_decoding
from trt_nvfp4.builder.accuracy.precision_search import Part, choose_precisions
from trt_nvfp4.builder.accuracy.runners import Side
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.export.decoder_contract import IDS, NEW_LENGTH, decoder_of
from trt_nvfp4.builder.onnx_file import read
from trt_nvfp4.builder.pipeline.calibrate_step import samples_of
from trt_nvfp4.builder.pipeline.progress import Progress
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.report.contents import Accuracy, DecodingAgreement
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.samples.filled_caches import with_filled_caches
from trt_nvfp4.calibration.samples.samples import InputSpec, Sample, SampleRange
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.replacing import scratch
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.subgraphs.types import Subgraph

#: Steps over the caches behind the first half of each sample.
MOST_STEPS = 32


def choose_plan(
    request: Request,
    model: SourceModel,
    found: Sequence[Subgraph],
    specs: Mapping[str, InputSpec],
    plan: Plan,
    statistics: Statistics | None,
    tokens: Mapping[str, int],
    report: Report,
    progress: Progress,
    checkpoint: NVFP4Checkpoint | None,
) -> Plan:
    """The plan with the cheapest precisions that meet the accuracy budget."""
    assert request.accuracy_budget is not None
    progress.stage(f"choosing precisions for {request.accuracy_budget}")
    choice = choose_precisions(
        model,
        found,
        plan,
        statistics,
        request.target,
        request.accuracy_budget,
        choosing=with_filled_caches(samples_of(request, specs)),
        held_out=with_filled_caches(samples_of(request, specs, held_out=True)),
        tokens=tokens,
        require=request.require,
        kv_cache=request.kv_cache,
        progress=progress,
        folder=request.base.parent,
        checkpoint=checkpoint,
    )
    report.budget = choice.outcome
    report.warnings += choice.warnings
    return choice.plan


def measure_accuracy(
    request: Request,
    specs: Mapping[str, InputSpec],
    model: SourceModel,
    before: Path,
    rewritten: Path,
    progress: Progress,
) -> Accuracy:
    """Agreement of the rewritten model with the original on some of the user's samples, or why there is none; of a
    float32 network that became one of 16 bits, also what that alone does to the outputs ("network").

    The original is the model `before` surgery, where that kept its inputs and outputs."""
    data = request.calib_data
    if data is None or is_statistics(data) or not request.accuracy_samples:
        return {"not_measured": "no input samples to measure with (--calib-data, --accuracy-samples)"}
    progress.stage("comparing with the original")

    def samples(_: Mapping[str, InputSpec]) -> Iterator[Sample]:
        chosen = itertools.islice(samples_of(request, specs, held_out=True), request.accuracy_samples)
        for number, sample in enumerate(chosen, 1):
            yield sample
            progress.step(number, request.accuracy_samples, f"sample {number}")

    converted = model.activations.dtype is not None
    original = Side.of(before if _interface(before) == _interface(model.path) else model.path)
    try:
        found = compare(original, replace(Side.of(rewritten), rounding=converted), samples)
        accuracy: Accuracy = {
            "samples": found.samples,
            "held_out": isinstance(samples_of(request, specs), (Part, SampleRange))
            or request.accuracy_data is not None,
            "tensors": [row.as_dict() for row in found.agreements],
        }
        if converted:
            progress.stage(f"comparing the network in {model.activations.type} with the original")
            with scratch(request.base.parent) as folder:
                network = folder / "network.onnx"
                write(model.ir_model, network)
                alone = compare(Side.of(model.path), replace(Side.of(network), rounding=True), samples)
            accuracy["network"] = [row.as_dict() for row in alone.agreements]
        if (steps := _steps(request, specs, original.path, rewritten, progress)) is not None:
            accuracy["steps"] = steps
    except BuilderError as error:
        # ONNX Runtime does not know all that TensorRT knows, its MoE layer for one.
        return {"not_measured": str(error)}
    return accuracy


def _interface(model: Path) -> tuple[list[str], list[str]]:
    graph = read(model).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def _steps(
    request: Request, specs: Mapping[str, InputSpec], original: Path, rewritten: Path, progress: Progress
) -> DecodingAgreement | None:
    """A decoder's agreement step by step over its caches, behind the first half of the same samples; None for other
    models."""
    decoder = decoder_of(read(original))
    if decoder is None or IDS not in specs:
        return None
    progress.stage("comparing step by step over the caches")
    samples = itertools.islice(samples_of(request, specs, held_out=True), request.accuracy_samples)
    texts = [[int(token) for token in sample[IDS][0, : int(sample[NEW_LENGTH][0])]] for sample in samples]
    prompts = [text[: max(1, len(text) // 2)] for text in texts]
    steps = min(MOST_STEPS, decoder.capacity - max(map(len, prompts)) + 1)
    return compare_decoding(original, rewritten, steps, prompts).as_dict()
