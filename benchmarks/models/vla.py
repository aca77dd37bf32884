"""The MLPs of a pi0.5-shaped policy on one observation: of its prefix (968 tokens) and of ten action steps (50 tokens),
by this project's plugins and by BF16 and FP8 under torch.compile, with results checked.

    python -m benchmarks.models.vla [--library FILE] [--out benchmarks/results/models/vla.json]

Random weights; every contestant is a CUDA graph, each step reads all weights again. Attention, norms and the vision
encoder are left out. Needs a Hopper GPU.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.contestants import Weight, in_turn, plugin_call
from benchmarks.harness import HERE, environment, plugin_host, read_bandwidth, record, relative_error, shown
from benchmarks.kernels.decode import stack_reference
from benchmarks.kernels.fp8_mlp import Fp8Weight, calibrated_layers, plugin_stack
from trt_nvfp4.builder.bench.timing import CudaDevice, Work, interleave
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation

Dense = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """Gated MLPs, GELU-tanh, over `tokens` rows, `steps` times in a row."""

    layers: int
    hidden: int
    intermediate: int
    tokens: int
    steps: int

    @property
    def weights(self) -> int:
        return self.layers * 3 * self.hidden * self.intermediate


PARTS = {"prefix": Part(18, 2048, 16384, 968, 1), "action": Part(18, 1024, 4096, 50, 10)}
#: Rounding differences grow with the layers.
LARGEST_ERROR = {"nvfp4 w4a16": 5e-2, "fp8 plugin": 1e-1}


def nvfp4(host: PluginHost, x: torch.Tensor, ups: list[Weight], downs: list[Weight]) -> tuple[Work, torch.Tensor]:
    """NVFP4GatedMLP, 16-bit activations, layer by layer: attention lies between."""
    calls, zeros = [], [torch.zeros((), device="cuda")] * 2
    for pair in zip(ups, downs, strict=True):
        weights = [t for w in pair for t in (w.packed, w.block_scales, w.tensor_scale, w.bias)]
        attributes: dict[str, int | float] = {"activation": int(Activation.GELU_TANH)}
        call, x = plugin_call(host, "NVFP4GatedMLP", [x, *weights, *zeros], attributes)
        calls.append(call)
    return in_turn(calls), x


def compiled(x: torch.Tensor, weights: Dense, mode: str, product: Callable[..., torch.Tensor]) -> Work:
    """`product` for both linears of each layer; one layer is compiled, and the CUDA graph holds all."""

    @torch.compile(mode=mode, dynamic=False, fullgraph=True)
    def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, linear = product(x, up).chunk(2, dim=-1)
        return product(functional.gelu(gate, approximate="tanh") * linear, down)

    def stack() -> torch.Tensor:
        y = x
        for up, down in weights:
            y = layer(y, up, down)
        return y

    return stack


def scaled(fast: bool) -> Callable[..., torch.Tensor]:
    """E4M3 products of given weights [k, n]."""
    one = torch.ones((), device="cuda")

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.to(torch.float8_e4m3fn)
        return torch._scaled_mm(rows, weight, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return product


def by_torch(x: torch.Tensor, part: Part) -> dict[str, Work]:
    """BF16 and FP8 in torch's default mode, BF16 autotuned too; FP8 takes rows in sixteens."""

    def random(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5

    h, i = part.hidden, part.intermediate
    dense = [(random(2 * i, h), random(h, i)) for _ in range(part.layers)]
    fp8 = [tuple(w.to(torch.float8_e4m3fn).t() for w in pair) for pair in dense]
    padded = functional.pad(x, (0, 0, 0, -x.shape[0] % 16))
    autotuned = "max-autotune-no-cudagraphs"
    return {
        "bf16": compiled(x, dense, "default", functional.linear),
        "bf16 autotuned": compiled(x, dense, autotuned, functional.linear),
        "fp8": compiled(padded, fp8, "default", scaled(fast=False)),  # type: ignore[arg-type]
        "fp8, fast accumulation": compiled(padded, fp8, "default", scaled(fast=True)),  # type: ignore[arg-type]
    }


def bench(host: PluginHost, name: str, part: Part, rounds: int, bandwidth: float) -> dict[str, Any]:
    x = torch.randn(part.tokens, part.hidden, device="cuda").bfloat16()
    sizes = (2 * part.intermediate, part.hidden), (part.hidden, part.intermediate)
    ups, downs = ([Weight.random(*size, torch.bfloat16) for _ in range(part.layers)] for size in sizes)
    works: dict[str, Work] = {}
    works["nvfp4 w4a16"], y = nvfp4(host, x, ups, downs)
    works["nvfp4 w4a16"]()
    errors = {"nvfp4 w4a16": relative_error(y, stack_reference(x, ups, downs))}
    del ups, downs
    fp8_weights = [[Fp8Weight.random(*size) for _ in range(part.layers)] for size in sizes]
    layers, expected = calibrated_layers(x, *fp8_weights)
    works["fp8 plugin"], outputs = plugin_stack(host, x, layers)
    works["fp8 plugin"]()
    errors["fp8 plugin"] = relative_error(outputs[-1], expected[-1])
    for contestant, error in errors.items():
        if not error < LARGEST_ERROR[contestant]:
            raise SystemExit(f"{name}: {contestant} is wrong: relative error {error:.2e}")
    works |= by_torch(x, part)
    steps = {contestant: in_turn([work] * part.steps) for contestant, work in works.items()}
    timings = interleave(CudaDevice(), steps, rounds)
    print(f"{name}: {part}")
    for contestant, timing in timings.items():
        print(shown(contestant, timing))
    return {
        "part": name,
        **asdict(part),
        "floor_us": {
            "nvfp4 w4a16": part.steps * part.weights * (0.5 + 1 / 16) / bandwidth * 1e6,
            "fp8 plugin": part.steps * part.weights / bandwidth * 1e6,
        },
        "relative_errors": errors,
        "timings": {contestant: asdict(timing) for contestant, timing in timings.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="a built plugin library, instead of one built for this GPU")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "vla.json")
    given = parser.parse_args()
    host = PluginHost(given.library) if given.library else plugin_host()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    runs = []
    for name, part in PARTS.items():
        runs.append(bench(host, name, part, given.rounds, bandwidth))
        torch.compiler.reset()  # which compiles eight versions of a function at most
        torch.cuda.empty_cache()
        result = {"environment": environment(), "read_bandwidth": bandwidth, "parts": runs}
        record(given.out, result)


if __name__ == "__main__":
    main()
