"""One decode step of whole language models: NVFP4 plugins, BF16 and FP8 under torch.compile and a CUDA graph.

    python -m benchmarks.kernels.decoder [--only NAME] [--batches 1 8] [--lengths 1024 8192 32768]
                                 [--out benchmarks/results/kernels/decoder.json]

All layers and the head, one new token per sequence, BF16 activations, random weights. The floor is what a step must
read (NVFP4 weights and scales, keys and values, each once) over the read bandwidth measured in the same run. "parts"
are our plugins one by one with compiled torch between them, "one launch" is NVFP4Decoder or NVFP4MoEDecoder; both
through the plugin host, in a CUDA graph. Where the time goes is measured part by part, each alone.
"""

import argparse
import gc
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import in_turn
from benchmarks.harness import HERE, environment, plugin_host, read_bandwidth, record, relative_error, shown
from benchmarks.kernels.decoder_parts import (
    BYTES_PER_WEIGHT,
    SHAPES,
    Calls,
    Dense,
    Model,
    Shape,
    Step,
    composed,
    one_launch,
)
from trt_nvfp4.builder.bench.timing import CudaDevice, Work, interleave
from trt_nvfp4.builder.roofline.predict import LIMITS
from trt_nvfp4.plugins.host import PluginHost

#: Of one GPU's memory, what a step's caches and weights may take.
MOST_MEMORY = 0.9


def floor_bytes(shape: Shape, batch: int, length: int, fp8: bool) -> float:
    """What a step reads: weights with their block scales, and the caches."""
    return shape.weights(batch) * BYTES_PER_WEIGHT + shape.cached(batch, length) * (1 if fp8 else 2)


def whole(calls: Calls) -> Work:
    return in_turn([call for _, call in calls])


def by_part(device: CudaDevice, calls: Calls, rounds: int) -> dict[str, float]:
    """Microseconds of each part's calls alone."""
    timed = {part: in_turn([call for other, call in calls if other == part]) for part, _ in calls}
    return {part: timing.median_us for part, timing in interleave(device, timed, max(5, rounds // 3)).items()}


def bench(
    host: PluginHost,
    name: str,
    model: Model,
    dense: dict[str, Dense],
    batch: int,
    length: int,
    rounds: int,
    bandwidth: float,
) -> dict[str, Any]:
    """All contestants of one step, and the parts of the composed one."""
    shape, device = model.shape, CudaDevice()
    contestants: dict[str, Work] = {}
    breakdowns: dict[str, dict[str, float]] = {}
    differences: dict[str, float] = {}
    for fp8 in (False, True):
        suffix = ", FP8 caches" if fp8 else ""
        step = Step.random(model, batch, length, fp8)
        calls, logits = composed(host, model, step)
        contestants[f"parts{suffix}"] = whole(calls)
        whole(calls)()
        expected = logits.clone()
        found = one_launch(host, model, step)
        if found is not None:
            contestants[f"one launch{suffix}"] = whole(found[0])
            whole(found[0])()
            differences[f"one launch{suffix}"] = relative_error(found[1], expected)
        if not fp8:
            contestants |= {kind: compiled.step(step, length) for kind, compiled in dense.items()}
        breakdowns[f"parts{suffix}"] = by_part(device, calls, rounds)
        if found is not None:
            breakdowns[f"one launch{suffix}"] = by_part(device, found[0], rounds)
            # What the launch takes beside its reads of old keys and values.
            step.past_length.zero_()
            breakdowns[f"one launch{suffix}"]["layers, nothing cached"] = by_part(device, found[0][:1], rounds)[
                "layers"
            ]
            step.past_length.fill_(length - 1)
    timings = interleave(device, contestants, rounds)
    floors = {cache: floor_bytes(shape, batch, length, cache == "e4m3") for cache in ("bfloat16", "e4m3")}
    fractions = {
        contestant: floors["e4m3" if "FP8 caches" in contestant else "bfloat16"] / bandwidth * 1e6 / timing.median_us
        for contestant, timing in timings.items()
    }
    print(f"{name}, batch {batch}, {length} cached")
    for contestant, timing in timings.items():
        print(f"{shown(contestant, timing)}  {fractions[contestant]:.1%} of the floor")
    for contestant, parts in breakdowns.items():
        print(f"  {contestant}: " + ", ".join(f"{part} {time:.0f}" for part, time in parts.items()))
    return {
        "model": name,
        "batch": batch,
        "length": length,
        "read_bandwidth": bandwidth,
        "floor_bytes": floors,
        "floor_us": {cache: read / bandwidth * 1e6 for cache, read in floors.items()},
        "fraction_of_floor": fractions,
        "breakdown_us": breakdowns,
        "difference_from_parts": differences,
        "roofline_us": {
            target: {cache: read / limits.bandwidth * 1e6 for cache, read in floors.items()}
            for target, limits in LIMITS.items()
        },
        "timings": {contestant: asdict(timing) for contestant, timing in timings.items()},
    }


def fits(model: Model, batch: int, length: int) -> bool:
    """Whether caches of both types find room beside the weights."""
    free, total = torch.cuda.mem_get_info()
    return model.shape.cached(batch, length) * 3 < free - (1 - MOST_MEMORY) * total


def step_options(about: str | None, models: Iterable[str], lengths: list[int], record: str) -> argparse.ArgumentParser:
    """The options of a benchmark of decode steps, which says `about` of itself: of `models`, with caches of `lengths`
    tokens, recorded as `record`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=models, nargs="+", default=list(models))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--library", type=Path, help="a built plugin library, instead of one built for this GPU")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / record)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = step_options(__doc__, SHAPES, [1024, 8192, 32768], "decoder.json").parse_args(arguments)
    host = PluginHost(given.library) if given.library else plugin_host()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")
    result: dict[str, Any] = {
        "environment": environment(),
        "shapes": {name: asdict(SHAPES[name]) for name in given.only},
        "steps": [],
        "left_out": [],
    }
    for name in given.only:
        model = Model.random(SHAPES[name], torch.bfloat16)
        for batch in given.batches:
            kinds = {} if model.shape.experts else {"BF16": False, "FP8": True}
            dense = {kind: Dense(model, batch, fp8) for kind, fp8 in kinds.items()}
            for length in given.lengths:
                if not fits(model, batch, length):
                    result["left_out"].append([name, batch, length])
                    continue
                result["steps"].append(bench(host, name, model, dense, batch, length, given.rounds, bandwidth))
                gc.collect()
                torch.cuda.empty_cache()
                record(given.out, result)
        del model, dense
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()


if __name__ == "__main__":
    main()
