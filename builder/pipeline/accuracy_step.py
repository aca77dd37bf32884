"""Accuracy on the user's samples: the mix of precisions that meets a budget, and how the rewritten model agrees."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trt_nvfp4.builder.accuracy.compare import compare
from trt_nvfp4.builder.accuracy.decoding import compare_decoding
from trt_nvfp4.builder.accuracy.precision_search import Part, choose_precisions
from trt_nvfp4.builder.accuracy.runners import ModelRunner
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.model.decoder_contract import IDS, NEW_LENGTH
from trt_nvfp4.builder.model.model import Model
from trt_nvfp4.builder.pipeline.calibrate_step import samples_of
from trt_nvfp4.builder.pipeline.run import Run
from trt_nvfp4.builder.records.contents import Accuracy, DecodingAgreement
from trt_nvfp4.calibration.samples.filled_caches import with_filled_caches
from trt_nvfp4.calibration.samples.samples import InputSpec, Sample, SampleRange
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.replacing import scratch
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.graph_passes.planning.plan import Plan

#: Steps over the caches behind the first half of each sample.
MOST_STEPS = 32


def choose_plan(run: Run) -> Plan:
    """The plan with the cheapest precisions that meet the accuracy budget."""
    request = run.request
    assert request.accuracy_budget is not None
    run.progress.stage(f"choosing precisions for {request.accuracy_budget}")
    choice = choose_precisions(
        run.draft(),
        request.accuracy_budget,
        choosing=with_filled_caches(samples_of(run)),
        held_out=with_filled_caches(samples_of(run, held_out=True)),
        progress=run.progress,
        folder=request.base.parent,
    )
    run.report.budget = choice.outcome
    run.report.warnings += choice.warnings
    return choice.plan


def measure_accuracy(run: Run, rewritten: Model) -> Accuracy:
    """Agreement of the rewritten model with the original on some of the user's samples, or why it was not measured; for
    a float32 network that became one of 16 bits, also the effect of only that on the outputs ("network").

    The original is the model before surgery, where that kept its inputs and outputs."""
    request, progress, network = run.request, run.progress, run.network
    data = request.calib_data
    if data is None or is_statistics(data) or not request.accuracy_samples:
        return {"not_measured": "no input samples to measure with (--calib-data, --set accuracy-samples)"}
    progress.stage("comparing with the original")

    def samples(_: Mapping[str, InputSpec]) -> Iterator[Sample]:
        chosen = itertools.islice(samples_of(run, held_out=True), request.accuracy_samples)
        for number, sample in enumerate(chosen, 1):
            yield sample
            progress.step(number, request.accuracy_samples, f"sample {number}")

    converted = network.activations.dtype is not None
    original = run.original if run.original.interface() == run.model.interface() else run.model
    try:
        result = replace(ModelRunner.of(rewritten), rounding=converted)
        found = compare(ModelRunner.of(original), result, samples)
        accuracy: Accuracy = {
            "samples": found.samples,
            "held_out": isinstance(samples_of(run), (Part, SampleRange)) or request.accuracy_data is not None,
            "tensors": [row.as_dict() for row in found.agreements],
        }
        if converted:
            progress.stage(f"comparing the network in {network.activations.type} with the original")
            with scratch(request.base.parent) as folder:
                file = folder / "network.onnx"
                write(network.ir_model, file)
                sixteen_bits = replace(ModelRunner.of(file), rounding=True)
                unreplaced = compare(ModelRunner.of(run.model), sixteen_bits, samples)
            accuracy["network"] = [row.as_dict() for row in unreplaced.agreements]
        if (steps := _steps(run, original, rewritten)) is not None:
            accuracy["steps"] = steps
    except BuilderError as error:
        # ONNX Runtime does not know all that TensorRT knows, its MoE layer for one.
        return {"not_measured": str(error)}
    return accuracy


def _steps(run: Run, original: Model, rewritten: Model) -> DecodingAgreement | None:
    """A decoder's agreement step by step over its caches, behind the first half of the same samples; None for other
    models."""
    decoder = original.decoder
    if decoder is None or IDS not in run.model.specs:
        return None
    run.progress.stage("comparing step by step over the caches")
    samples = itertools.islice(samples_of(run, held_out=True), run.request.accuracy_samples)
    texts = [[int(token) for token in sample[IDS][0, : int(sample[NEW_LENGTH][0])]] for sample in samples]
    prompts = [text[: max(1, len(text) // 2)] for text in texts]
    steps = min(MOST_STEPS, decoder.capacity - max(map(len, prompts)) + 1)
    return compare_decoding(original.path, rewritten.path, steps, prompts).as_dict()
