"""FP8GatedMLP against torch.compile's FP8 over the reference stack, with results checked.

    python -m benchmarks.kernels.fp8_mlp [--tokens 64 128 256 384 968] [--out benchmarks/results/kernels/fp8_mlp.json]

Needs a Hopper GPU.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.contestants import fp8_stack, in_turn, plugin_call
from benchmarks.harness import environment, read_bandwidth, record, relative_error
from trt_nvfp4.builder.bench.timing import CudaDevice, Work, interleave
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation
from trt_nvfp4.plugins.ops.number_formats import E4M3_MAX, e4m3_round

HERE = Path(__file__).resolve().parents[1]
PEAK_SIZE = 8192


@dataclass(frozen=True)
class Fp8Weight:
    """Random E4M3 weights [n, k] with a scale per channel, and `dense`, the values that they stand for."""

    values: torch.Tensor  # float8_e4m3fn [n, k]
    scale: torch.Tensor  # float32 [n]
    bias: torch.Tensor  # bfloat16 [n]; keeps a deep stack's values near one
    dense: torch.Tensor  # bfloat16 [n, k]

    @classmethod
    def random(cls, n: int, k: int) -> "Fp8Weight":
        dense = torch.randn(n, k, device="cuda") / k**0.5
        scale = dense.abs().amax(1) / E4M3_MAX
        values = e4m3_round(dense / scale[:, None])
        return cls(values, scale, (0.25 * torch.randn(n, device="cuda")).bfloat16(), dense.bfloat16())


@dataclass(frozen=True)
class Layer:
    up: Fp8Weight
    down: Fp8Weight
    input_scale: torch.Tensor
    hidden_scale: torch.Tensor


def product(x: torch.Tensor, scale: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """float64: x quantized under `scale`, times the weights, plus the bias."""
    quantized = e4m3_round(x.float() / scale).double()
    return quantized @ weight.values.double().T * (scale * weight.scale).double() + weight.bias.double()


def calibrated_layers(x: torch.Tensor, ups: list[Fp8Weight], downs: list[Fp8Weight]) -> tuple[list[Layer], list[Any]]:
    """Layers with scales from the largest magnitudes that x meets on its way, and every layer's expected output."""
    layers, outputs = [], []
    for up, down in zip(ups, downs, strict=True):
        input_scale = (x.abs().amax() / E4M3_MAX).float()
        both = product(x, input_scale, up)
        hidden = functional.gelu(both[:, 0::2], approximate="tanh") * both[:, 1::2]
        hidden_scale = (hidden.abs().amax() / E4M3_MAX).float()
        x = product(hidden, hidden_scale, down).to(x.dtype)
        layers.append(Layer(up, down, input_scale, hidden_scale))
        outputs.append(x)
    return layers, outputs


def plugin_stack(host: PluginHost, x: torch.Tensor, layers: list[Layer]) -> tuple[Work, list[torch.Tensor]]:
    """FP8GatedMLP layer by layer; returns the call and what each layer writes."""
    attributes = {"activation": int(Activation.GELU_TANH), "static_scales": 1}
    calls, outputs = [], []
    for layer in layers:
        inputs = [x]
        for weight in (layer.up, layer.down):
            inputs += [weight.values.view(torch.int8), weight.scale, weight.bias]
        call, x = plugin_call(host, "FP8GatedMLP", [*inputs, layer.input_scale, layer.hidden_scale], attributes)
        calls.append(call)
        outputs.append(x)
    return in_turn(calls), outputs


def scaled_mm_peak(rounds: int) -> dict[str, float]:
    """FLOP/s of ``torch._scaled_mm`` on square matrices, with and without fast accumulation."""
    one = torch.ones((), device="cuda")
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    works: dict[str, Work] = {
        name: partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
        for name, fast in (("float32 accumulation", False), ("fast accumulation", True))
    }
    timings = interleave(CudaDevice(), works, rounds)
    return {name: 2 * PEAK_SIZE**3 / timing.median_us * 1e6 for name, timing in timings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256, 384, 968])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "fp8_mlp.json")
    arguments = parser.parse_args()

    spec = json.loads((HERE / "workloads.json").read_text())["mlp_stack"]
    hidden, intermediate = spec["hidden"], spec["intermediate"]
    host = PluginHost(build_library("sm_90a"))
    torch.manual_seed(0)
    bandwidth, peak = read_bandwidth(), scaled_mm_peak(arguments.rounds)
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s, peak {max(peak.values()) / 1e12:.0f} TFLOP/s")
    ups = [Fp8Weight.random(2 * intermediate, hidden) for _ in range(spec["layers"])]
    downs = [Fp8Weight.random(hidden, intermediate) for _ in range(spec["layers"])]
    weights = spec["layers"] * 3 * hidden * intermediate
    runs = []
    for m in arguments.tokens:
        x = torch.randn(m, hidden, device="cuda").bfloat16()
        layers, expected = calibrated_layers(x, ups, downs)
        contestants: dict[str, Work] = {}
        contestants["fp8 plugin"], outputs = plugin_stack(host, x, layers)
        contestants["fp8 plugin"]()
        errors = {
            "first layer": relative_error(outputs[0], expected[0]),
            "stack": relative_error(outputs[-1], expected[-1]),
        }
        if not errors["first layer"] < 2e-2:
            raise SystemExit(f"wrong at {m} tokens: relative errors {errors}")
        contestants["torch"] = fp8_stack(x, ups, downs)  # type: ignore[arg-type]
        contestants["torch, fast accumulation"] = fp8_stack(x, ups, downs, fast=True)  # type: ignore[arg-type]
        timings = interleave(CudaDevice(), contestants, arguments.rounds)
        torch.compiler.reset()  # which compiles eight versions of a function at most
        flops = 2 * m * weights
        run = {
            "m": m,
            "timings": {name: asdict(timing) for name, timing in timings.items()},
            "relative_errors": errors,
            "floor_us": 1e6 * max(weights / bandwidth, flops / max(peak.values())),
            "fraction_of_peak": flops / timings["fp8 plugin"].median_us * 1e6 / max(peak.values()),
        }
        runs.append(run)
        print(json.dumps(run))
    result = {"environment": environment(), "read_bandwidth": bandwidth, "scaled_mm_peak": peak, "stack": runs}
    record(arguments.out, result)


if __name__ == "__main__":
    main()
