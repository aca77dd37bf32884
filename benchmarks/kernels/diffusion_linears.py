"""Block linears and MLPs of FLUX and Wan at a picture's tokens: our W4A16 and FP8 beside torch's BF16 and FP8.

    python -m benchmarks.kernels.diffusion_linears [--tokens 4608] [--out FILE]

Needs a Hopper GPU, which has no FP4 tensor cores: W4A4, which these shapes get on Blackwell, is not in it. FP8 of ours
is the plugin of gated MLPs; other products get TensorRT's own. Results are checked against float64.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.contestants import (
    Weight,
    dense_stack,
    fp8_stack,
    plugin_call,
    plugin_linear,
    plugin_stack,
    stack_inputs,
)
from benchmarks.harness import HERE, environment, plugin_host, record, relative_error, shown
from benchmarks.kernels.fp8_mlp import Fp8Weight, calibrated_layers
from benchmarks.kernels.fp8_mlp import plugin_stack as fp8_plugin_stack
from trt_nvfp4.builder.bench.timing import CudaDevice, Work, interleave
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation

#: Latents of 1024x1024 in patches of 16x16, and 512 tokens of text.
TOKENS = 4096 + 512
W4A16, FP8 = "nvfp4 w4a16", "fp8 plugin"
#: The largest relative errors: of 16-bit results, and of E4M3's roundings of the other order of sums.
TOLERANCES = {W4A16: 1e-2, FP8: 2e-2}


@dataclass(frozen=True)
class Contest:
    """Calls by name, what some of them write, and the values expected there."""

    works: dict[str, Work]
    outputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]


def linear(host: PluginHost, x: torch.Tensor, n: int) -> Contest:
    """x [m, k] -> [m, n]."""
    weight = Weight.random(n, x.shape[1], x.dtype)
    work, y = plugin_linear(host, x, weight)
    expected = x.double() @ weight.exact().T + weight.bias.double()
    works = {W4A16: work, "bf16": lambda: functional.linear(x, weight.dense), "fp8": _fp8(x, [weight])}
    return Contest(works, {W4A16: y}, {W4A16: expected})


def mlp(host: PluginHost, x: torch.Tensor, intermediate: int) -> Contest:
    """x [m, k] -> [m, intermediate], tanh's GELU -> [m, k]."""
    up, down = Weight.random(intermediate, x.shape[1], x.dtype), Weight.random(x.shape[1], intermediate, x.dtype)
    attributes = {"activation": int(Activation.GELU_TANH), "gated": 0, "norm": 0, "residual": 0}
    work, y = plugin_call(host, "NVFP4PersistentMLP", stack_inputs(x, [up], [down]), attributes)
    hidden = _gelu(x.double() @ up.exact().T + up.bias.double()).to(x.dtype)
    expected = hidden.double() @ down.exact().T + down.bias.double()
    dense = torch.compile(
        lambda x: functional.linear(_gelu(functional.linear(x, up.dense)), down.dense), dynamic=False, fullgraph=True
    )
    return Contest({W4A16: work, "bf16": lambda: dense(x), "fp8": _fp8(x, [up, down])}, {W4A16: y}, {W4A16: expected})


def gated_mlp(host: PluginHost, x: torch.Tensor, intermediate: int) -> Contest:
    """x [m, k] -> gate and up [m, intermediate] -> [m, k]."""
    up, down = Weight.random(2 * intermediate, x.shape[1], x.dtype), Weight.random(x.shape[1], intermediate, x.dtype)
    work, y = plugin_stack(host, x, [up], [down])
    both = x.double() @ up.exact().T + up.bias.double()
    hidden = (_gelu(both[:, 0::2]) * both[:, 1::2]).to(x.dtype)
    expected = hidden.double() @ down.exact().T + down.bias.double()
    fp8_weights = [Fp8Weight.random(2 * intermediate, x.shape[1])], [Fp8Weight.random(x.shape[1], intermediate)]
    layers, (of_fp8,) = calibrated_layers(x, *fp8_weights)
    fp8_work, (fp8_y,) = fp8_plugin_stack(host, x, layers)
    works = {W4A16: work, FP8: fp8_work, "bf16": dense_stack(x, [up], [down]), "fp8": fp8_stack(x, [up], [down])}
    return Contest(works, {W4A16: y, FP8: fp8_y}, {W4A16: expected, FP8: of_fp8})


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _fp8(x: torch.Tensor, weights: list[Weight]) -> Work:
    """``torch._scaled_mm`` of one weight, or of two with tanh's GELU between, under torch.compile."""
    dtype, one = torch.float8_e4m3fn, torch.ones((), device="cuda")
    first, *others = (weight.dense.to(dtype).t() for weight in weights)

    @torch.compile(dynamic=False, fullgraph=True)
    def work(x: torch.Tensor) -> torch.Tensor:
        y = torch._scaled_mm(x.to(dtype), first, one, one, out_dtype=torch.bfloat16)
        for other in others:
            y = torch._scaled_mm(_gelu(y).to(dtype), other, one, one, out_dtype=torch.bfloat16)
        return y

    return lambda: work(x)


@dataclass(frozen=True)
class Shape:
    """`k` inputs of a product, and its outputs or an MLP's hidden values, `n`."""

    contest: Callable[[PluginHost, torch.Tensor, int], Contest]
    k: int
    n: int

    @property
    def weights(self) -> int:
        return self.k * self.n * {linear: 1, mlp: 2, gated_mlp: 3}[self.contest]


SHAPES = {
    "FLUX.1: q, k, v in one": Shape(linear, 3072, 3 * 3072),
    "FLUX.1: attention's output": Shape(linear, 3072, 3072),
    "FLUX.1: MLP": Shape(mlp, 3072, 12288),
    "FLUX.1: output of a single block": Shape(linear, 3072 + 12288, 3072),
    "FLUX.2 klein 4B: MLP": Shape(gated_mlp, 3072, 9216),
    "Wan 14B: q, k or v": Shape(linear, 5120, 5120),
    "Wan 14B: MLP": Shape(mlp, 5120, 13824),
    "Wan 1.3B: MLP": Shape(mlp, 1536, 8960),
}


def timed(host: PluginHost, name: str, shape: Shape, tokens: int, rounds: int) -> dict[str, Any]:
    """A shape's times, printed. A wrong result stops the run."""
    contest = shape.contest(host, torch.randn(tokens, shape.k, device="cuda").bfloat16(), shape.n)
    for contestant in contest.outputs:
        contest.works[contestant]()
    errors = {key: relative_error(y, contest.expected[key]) for key, y in contest.outputs.items()}
    print(f"{name} ({shape.k}, {shape.n})", flush=True)
    for key, error in errors.items():
        if not error < TOLERANCES[key]:
            raise SystemExit(f"{key} is wrong: relative error {error:.2e}, at most {TOLERANCES[key]} is expected")
    timings = interleave(CudaDevice(), contest.works, rounds)
    flops = 2 * tokens * shape.weights
    for key, timing in timings.items():
        print(f"{shown(key, timing)}  {flops / timing.median_us / 1e6:7.1f} TFLOP/s", flush=True)
    torch.compiler.reset()  # which compiles eight versions of a function at most
    return {
        "name": name,
        "kind": shape.contest.__name__,
        "m": tokens,
        "k": shape.k,
        "n": shape.n,
        "timings": {key: asdict(timing) for key, timing in timings.items()},
        "relative_errors": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "diffusion_linears.json")
    arguments = parser.parse_args()
    host = plugin_host()
    torch.manual_seed(0)
    runs = []
    for name, shape in SHAPES.items():
        runs.append(timed(host, name, shape, arguments.tokens, arguments.rounds))
        torch.cuda.empty_cache()
    record(arguments.out, {"environment": environment(), "shapes": runs})


if __name__ == "__main__":
    main()
