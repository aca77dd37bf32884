"""From how many tokens on FP8 is faster than NVFP4 weights with 16-bit activations (W4A16) on a GPU without FP4 tensor
cores: the measurement behind graph_passes/planning/w4a16_tokens.py.

    python -m benchmarks.kernels.nvfp4_or_fp8 [--tokens 32 64 ...] [--out benchmarks/results/kernels/nvfp4_or_fp8.json]

Gated MLPs and mixtures of experts, bfloat16, weights out of L2, results checked. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import Weight, in_turn, plugin_call
from benchmarks.harness import environment, plugin_host, record, relative_error
from benchmarks.kernels.fp8_mlp import Fp8Weight
from benchmarks.kernels.fp8_moe import Fp8Experts
from benchmarks.kernels.moe import Experts, draw, plugin
from trt_nvfp4.builder.bench.timing import CudaDevice, Timing, Work, interleave
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation
from trt_nvfp4.plugins.ops.number_formats import E4M3_MAX

HERE = Path(__file__).resolve().parents[1]
#: hidden / intermediate: of MiniLM, ViT-L, Llama 3.2 1B and Llama 2 7B, and the reference stack's.
MLPS = [(384, 1536), (1024, 4096), (2048, 8192), (4096, 11008), (2048, 16384)]
TOKENS = [8, 16, 32, 64, 65, 96, 128, 192, 256, 512, 968]
#: Weights rotate through this many bytes of NVFP4: several times any L2.
COLD_BYTES = 256 << 20
#: Of captured calls, however small the weights.
MOST_CALLS = 100
NVFP4, FP8, AT_RUN_TIME = "nvfp4 w4a16", "fp8", "fp8, scales at run time"
#: Largest relative errors: of 16-bit products; of 8-bit values some of which, and with a scale found anew many, cross a
#: rounding boundary.
LARGEST_ERROR = {NVFP4: 1e-2, FP8: 2e-2, AT_RUN_TIME: 4e-2}

Weights = list[list[torch.Tensor]]


def nvfp4_weights(hidden: int, intermediate: int, copies: int) -> Weights:
    """The inputs of `copies` NVFP4GatedMLPs behind x."""
    zeros = [torch.zeros((), device="cuda")] * 2
    layers = []
    for _ in range(copies):
        pair = (Weight.random(n, k, torch.bfloat16) for n, k in ((2 * intermediate, hidden), (hidden, intermediate)))
        layers.append([t for w in pair for t in (w.packed, w.block_scales, w.tensor_scale, w.bias)] + zeros)
    return layers


def fp8_weights(hidden: int, intermediate: int, copies: int) -> Weights:
    """The inputs of `copies` FP8GatedMLPs behind x, with scales for x and hidden values of about these sizes."""
    scales = [torch.tensor(amax / E4M3_MAX, device="cuda") for amax in (5.0, 20.0)]
    layers = []
    for _ in range(copies):
        pair = (Fp8Weight.random(n, k) for n, k in ((2 * intermediate, hidden), (hidden, intermediate)))
        layers.append([t for w in pair for t in (w.values.view(torch.int8), w.scale, w.bias)] + scales)
    return layers


def mlp_calls(
    host: PluginHost, op: str, x: torch.Tensor, layers: Weights, attributes: dict[str, int | float]
) -> tuple[Work, float]:
    """One call for each of `layers`, and the relative error of the last one's result."""
    calls, y = [], x
    for layer in layers:
        call, y = plugin_call(host, op, [x, *layer], attributes)
        calls.append(call)
    calls[-1]()
    expected = OPS[op].reference(x, *layers[-1], **attributes)
    assert isinstance(expected, torch.Tensor)
    return in_turn(calls), relative_error(y, expected)


def bench_mlps(host: PluginHost, tokens: list[int], timed: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    runs = []
    for hidden, intermediate in MLPS:
        copies = min(MOST_CALLS, max(2, COLD_BYTES // (3 * hidden * intermediate * 9 // 16)))
        nvfp4, fp8 = (make(hidden, intermediate, copies) for make in (nvfp4_weights, fp8_weights))
        silu: dict[str, int | float] = {"activation": int(Activation.SILU)}
        contestants = {
            NVFP4: ("NVFP4GatedMLP", nvfp4, silu),
            FP8: ("FP8GatedMLP", fp8, silu | {"static_scales": 1}),
            AT_RUN_TIME: ("FP8GatedMLP", [[*layer[:-2], 0 * layer[-2], 0 * layer[-1]] for layer in fp8], silu),
        }
        for m in tokens:
            x = torch.randn(m, hidden, device="cuda").bfloat16()
            found = {name: mlp_calls(host, op, x, w, a) for name, (op, w, a) in contestants.items()}
            runs.append(timed({"hidden": hidden, "intermediate": intermediate, "tokens": m}, found, copies))
    return runs


def bench_mixtures(host: PluginHost, tokens: list[int], timed: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """FP8 with calibrated scales alone."""
    runs = []
    for spec in json.loads((HERE / "workloads.json").read_text())["moe"]["models"]:
        nvfp4, fp8 = Experts.random(spec, w4a4=False), Fp8Experts.of(spec)
        for m in tokens:
            inputs, _ = draw(nvfp4, m)
            x, logits = inputs[-1]
            sample = slice(max(0, m - 4), m)
            found = {}
            for name, experts in ((NVFP4, nvfp4), (FP8, fp8)):
                work, y = plugin(host, experts, inputs)
                work()
                found[name] = work, relative_error(y[sample], experts.reference(x[sample], logits[sample]))
            pairs = m * spec["top_k"] / spec["experts"]
            case = {"model": spec["name"], "tokens": m, "tokens_of_an_expert": pairs}
            runs.append(timed(case, found, len(inputs)))
        del nvfp4, fp8
        torch.cuda.empty_cache()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "nvfp4_or_fp8.json")
    arguments = parser.parse_args()

    def timed(case: dict[str, Any], found: dict[str, tuple[Work, float]], calls: int) -> dict[str, Any]:
        works = {name: work for name, (work, _) in found.items()}
        errors = {name: error for name, (_, error) in found.items()}
        for name, error in errors.items():
            if not error < LARGEST_ERROR[name]:
                raise SystemExit(f"{name} is wrong: {case}, relative error {error:.2e}")
        timings: dict[str, Timing] = interleave(
            CudaDevice(), works, arguments.rounds, calls=dict.fromkeys(works, calls)
        )
        times = ", ".join(f"{name} {timing.median_us:.1f} us" for name, timing in timings.items())
        print(", ".join(f"{name} {value}" for name, value in case.items()) + f": {times}", flush=True)
        return {**case, "timings": {n: asdict(t) for n, t in timings.items()}, "relative_errors": errors}

    host = plugin_host()
    torch.manual_seed(0)
    result: dict[str, Any] = {"environment": environment()}
    result["mlp"] = bench_mlps(host, arguments.tokens, timed)
    result["moe"] = bench_mixtures(host, arguments.tokens, timed)
    record(arguments.out, result)


if __name__ == "__main__":
    main()
