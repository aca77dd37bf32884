"""Speed of FP8MoE against BF16 experts (grouped_mm, compiled) and torch's FP8 GEMMs, with results checked.

    python -m benchmarks.kernels.fp8_moe [--models qwen3-30b-a3b ...] [--tokens 64 512] [--out FILE]

Needs a Hopper GPU. torch's FP8 contestants are the two GEMMs of the routed experts alone, on rows that are quantized
and sorted beforehand: expert by expert with sizes known on the host (_scaled_mm), and all experts together
(_scaled_grouped_mm, where this version of torch has it). Bytes and calls are counted as in moe.py.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.harness import environment, read_bandwidth, record, relative_error
from benchmarks.kernels.moe import DTYPE, Experts, attributes_of, dense, draw, plugin, report
from trt_nvfp4.builder.bench.timing import CudaDevice, Work, interleave
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.definition import OpDefinition
from trt_nvfp4.plugins.ops.number_formats import E4M3_MAX

HERE = Path(__file__).resolve().parents[1]
FP8 = torch.float8_e4m3fn


def random_weight(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Bytes of finite values, scales and a bias: of [..., n, k], outputs near one."""
    *batch, n, k = shape
    values = torch.randint(-128, 127, shape, dtype=torch.int8, device="cuda")
    values[values == -1] = 0  # NaN, as 127 is
    scales = (0.5 + torch.rand(*batch, n, device="cuda")) / (130 * math.sqrt(k))
    return [values, scales, (0.25 * torch.randn(*batch, n, device="cuda")).to(DTYPE)]


class Fp8Experts(Experts):
    op: ClassVar[OpDefinition] = OPS["FP8MoE"]
    bytes_per_weight: ClassVar[float] = 1.0

    @classmethod
    def of(cls, spec: dict[str, Any]) -> "Fp8Experts":
        h, i, experts = spec["hidden"], spec["intermediate"], spec["experts"]
        width = i * spec.get("shared_experts", 0) or 16
        tensors = [*random_weight((experts, 2 * i, h)), *random_weight((experts, h, i))]
        tensors += [*random_weight((2 * width, h)), *random_weight((h, width)), torch.zeros(h, device="cuda").to(DTYPE)]
        scales = torch.tensor([8.0, 32.0], device="cuda") / E4M3_MAX  # amax of x and about that of hidden values
        return cls(spec, attributes_of(spec) | {"static_scales": 1}, [*tensors, *scales])


def scaled_mm(experts: Fp8Experts, inputs: list[tuple[torch.Tensor, torch.Tensor]], grouped: bool) -> Work:
    """Both GEMMs of the routed experts."""
    up, up_scale, _, down, down_scale, _ = experts.tensors[:6]
    up, down = up.view(FP8).transpose(1, 2), down.view(FP8).transpose(1, 2)
    h, i, count = (experts.spec[name] for name in ("hidden", "intermediate", "experts"))
    calls = []
    for _, logits in inputs:
        sizes = torch.bincount(experts.chosen(logits).flatten(), minlength=count)
        if not grouped:
            sizes = (sizes + 15) // 16 * 16  # what _scaled_mm takes
        pairs = int(sizes.sum())
        rows = [torch.randn(pairs, k, device="cuda").to(FP8) for k in (h, i)]
        calls.append((rows, torch.ones(pairs, 1, device="cuda"), sizes.tolist(), sizes.cumsum(0).to(torch.int32)))

    def one_by_one() -> None:
        for rows, ones, sizes, _ in calls:
            for x, weight, scale in zip(rows, (up, down), (up_scale, down_scale), strict=True):
                for e, (part, one) in enumerate(zip(x.split(sizes), ones.split(sizes), strict=True)):
                    if len(part):
                        options = {"out_dtype": DTYPE, "use_fast_accum": True}
                        torch._scaled_mm(part, weight[e], one, scale[e][None], **options)

    def together() -> None:
        for rows, ones, _, offsets in calls:
            for x, weight, scale in zip(rows, (up, down), (up_scale, down_scale), strict=True):
                torch._scaled_grouped_mm(
                    x, weight, ones.flatten(), scale, offs=offsets, out_dtype=DTYPE, use_fast_accum=True
                )

    return together if grouped else one_by_one


def bench(host: PluginHost, experts: Fp8Experts, tokens: int, rounds: int, bandwidth: float) -> dict[str, Any]:
    inputs, case = draw(experts, tokens)
    contestants: dict[str, Work] = {}
    contestants["fp8 plugin"], y = plugin(host, experts, inputs)
    contestants["fp8 plugin"]()
    x, logits = inputs[-1]
    sample = slice(max(0, tokens - 4), tokens)
    error = relative_error(y[sample], experts.reference(x[sample], logits[sample]))
    contestants["bf16 grouped_mm"] = dense(experts, inputs)
    contestants["fp8 GEMMs, expert by expert"] = scaled_mm(experts, inputs, grouped=False)
    if hasattr(torch, "_scaled_grouped_mm"):
        contestants["fp8 GEMMs, grouped"] = scaled_mm(experts, inputs, grouped=True)
    timings = interleave(CudaDevice(), contestants, rounds, calls=dict.fromkeys(contestants, len(inputs)))
    # Fast accumulation keeps about 14 bits of a product, and E4M3 turns what crosses a boundary into 1/16.
    result = report(case, timings, "fp8 plugin", {"fp8 plugin": error}, 2e-2, bandwidth)
    return {**result, "relative_error": error}


def main() -> None:
    workloads = json.loads((HERE / "workloads.json").read_text())["moe"]
    names = [spec["name"] for spec in workloads["models"]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "fp8_moe.json")
    arguments = parser.parse_args()

    host = PluginHost(build_library("sm_90a"))
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")
    result: dict[str, Any] = {"environment": environment(), "read_bandwidth": bandwidth, "moe": []}
    for spec in workloads["models"]:
        if spec["name"] not in arguments.models:
            continue
        experts = Fp8Experts.of(spec)
        for tokens in arguments.tokens:
            result["moe"].append(bench(host, experts, tokens, arguments.rounds, bandwidth))
            torch.cuda.empty_cache()
        del experts
        torch.cuda.empty_cache()
    record(arguments.out, result)


if __name__ == "__main__":
    main()
