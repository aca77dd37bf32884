"""One decode step of whole hybrid language models: NVFP4 plugins with compiled torch between them, in a CUDA graph.

    python -m benchmarks.kernels.hybrid_steps [--only NAME] [--batches 1 8] [--lengths 1024 8192] [--tokens 1 4]
                                 [--out benchmarks/results/kernels/hybrid_steps.json]

All layers and the head, BF16 activations, random weights, one new token per sequence and, of one sequence, 4. Linears
and experts are NVFP4, as a plan without options has them (the experts of both models by NVFP4MoE, which has squared
ReLU, no gate and sigmoid routing too); routers and the gates of decays stay in 16 bits. The floor is what a step must
read and write (weights and scales, keys and values, states once each way in float32) over the read bandwidth measured
in the same run. Where the time goes is measured part by part, each alone. The recurrent layers alone are timed beside
torch.compile's in BF16. Where the shapes come from: hybrid_parts.py.
"""

import gc
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.harness import environment, plugin_host, read_bandwidth, record, relative_error, shown
from benchmarks.kernels.decoder import by_part, step_options, whole
from benchmarks.kernels.decoder_parts import Step
from benchmarks.kernels.hybrid_parts import HYBRIDS, HybridModel, composed, dense_recurrent_layers, recurrent_layers
from trt_nvfp4.builder.bench.timing import CudaDevice, interleave
from trt_nvfp4.plugins.host import PluginHost

WHOLE = "parts"


def bench_step(
    host: PluginHost, name: str, model: HybridModel, batch: int, tokens: int, length: int, rounds: int, bandwidth: float
) -> dict[str, Any]:
    """A whole step, and its parts."""
    device, step = CudaDevice(), Step.random(model, batch, length, fp8=False, tokens=tokens)
    calls, logits = composed(host, model, step, model.states(batch))
    whole(calls)()
    finite = bool(logits.isfinite().all())
    timings = interleave(device, {WHOLE: whole(calls)}, rounds)
    floor = model.shape.floor(batch, tokens, length)
    floor_us = sum(floor.values()) / bandwidth * 1e6
    fraction = floor_us / timings[WHOLE].median_us
    print(f"{name}, batch {batch}, {tokens} tokens, {length} cached")
    print(f"{shown(WHOLE, timings[WHOLE])}  {fraction:.1%} of the floor", flush=True)
    breakdown = by_part(device, calls, rounds)
    print("  " + ", ".join(f"{part} {time:.0f}" for part, time in breakdown.items()), flush=True)
    return {
        "model": name, "batch": batch, "tokens": tokens, "length": length, "floor_bytes": floor, "floor_us": floor_us,
        "fraction_of_floor": fraction, "finite": finite, "breakdown_us": breakdown,
        "timings": {contestant: asdict(timing) for contestant, timing in timings.items()},
    }  # fmt: skip


def bench_layers(
    host: PluginHost, name: str, model: HybridModel, batch: int, rounds: int, bandwidth: float
) -> dict[str, Any]:
    """The recurrent layers by plugins and in BF16, one token; the difference is of what the first layer makes."""
    x = torch.randn(batch, 1, model.shape.hidden, device="cuda", dtype=model.dtype)
    states = model.states(batch)
    dense = dense_recurrent_layers(model, x, [[state.clone() for state in layer] for layer in states])
    calls, outputs = recurrent_layers(host, model, x, states)
    whole(calls)()
    difference = relative_error(outputs[0], dense()[0])
    timings = interleave(CudaDevice(), {"plugins": whole(calls), "BF16": dense}, rounds)
    floor_us = len(states) * sum(model.shape.recurrent_floor(batch).values()) / bandwidth * 1e6
    print(f"{name}, batch {batch}, {len(states)} recurrences, floor {floor_us:.0f} us, difference {difference:.1e}")
    for contestant, timing in timings.items():
        print(shown(contestant, timing), flush=True)
    return {
        "model": name, "batch": batch, "layers": len(states), "floor_us": floor_us, "difference": difference,
        "timings": {contestant: asdict(timing) for contestant, timing in timings.items()},
    }  # fmt: skip


def freed() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = step_options(__doc__, HYBRIDS, [1024, 8192], "hybrid_steps.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4], help="new ones; more than 1 only of batch 1")
    given = parser.parse_args(arguments)
    host = PluginHost(given.library) if given.library else plugin_host()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")
    result: dict[str, Any] = {
        "environment": environment(),
        "read_bandwidth": bandwidth,
        "shapes": {name: asdict(HYBRIDS[name]) for name in given.only},
        "steps": [],
        "recurrent_layers": [],
    }
    for name in given.only:
        model = HybridModel.random(HYBRIDS[name], torch.bfloat16)
        sizes = [(batch, tokens) for tokens in given.tokens for batch in given.batches if tokens == 1 or batch == 1]
        for batch, tokens in sizes:
            for length in given.lengths:
                step = bench_step(host, name, model, batch, tokens, length, given.rounds, bandwidth)
                result["steps"].append(step)
                record(given.out, result)
                freed()
        for batch in given.batches:
            layers = bench_layers(host, name, model, batch, given.rounds, bandwidth)
            result["recurrent_layers"].append(layers)
            record(given.out, result)
            freed()
        del model
        freed()
        torch.compiler.reset()


if __name__ == "__main__":
    main()
