"""MLPs and mixtures split over GPUs: the plugin of every rank and NCCL's sum behind it, in one CUDA graph.

    python -m benchmarks.models.parallel --ranks 2 [--tokens 1 16 64] [--out benchmarks/results/models/parallel.json]

Every rank holds the rows of gate and up and the columns of the down projection that are its own, as build-engine
--parallel splits them; NCCL adds up. "one GPU" is the whole op by itself. The result of all ranks is compared with it.
The prediction: what one GPU takes, divided by the ranks, and the sum measured alone.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.harness import HERE, environment, plugin_host, record, relative_error, shown
from trt_nvfp4.builder.bench.timing import CudaDevice, Timing, Work, interleave
from trt_nvfp4.builder.parallel.ranks import run_ranks
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation
from trt_nvfp4.plugins.ops.moe_routing import Scoring
from trt_nvfp4.plugins.ops.number_formats import tile_scales

DTYPE = torch.float16
#: Of a replay, so that its start and the meeting of the ranks weigh little.
CALLS = 8


@dataclass(frozen=True)
class Matrix:
    """Packed codes [..., n, k / 2] and block scales [..., n, k / 16] in plain order, of outputs near one."""

    codes: torch.Tensor
    scales: torch.Tensor
    k: int

    @classmethod
    def random(cls, *shape: int) -> "Matrix":
        *lead, k = shape
        codes = torch.randint(-128, 128, (*lead, k // 2), dtype=torch.int8, device="cuda")
        return cls(codes, torch.randint(0x30, 0x40, (*lead, k // 16), dtype=torch.uint8, device="cuda"), k)

    def rows(self, rank: int, count: int) -> "Matrix":
        return Matrix(self.codes.chunk(count, -2)[rank], self.scales.chunk(count, -2)[rank], self.k)

    def columns(self, rank: int, count: int) -> "Matrix":
        return Matrix(self.codes.chunk(count, -1)[rank], self.scales.chunk(count, -1)[rank], self.k)

    def tensors(self) -> list[torch.Tensor]:
        """As the ops take them; no bias, the tensor scale of the whole matrix."""
        lead = self.codes.shape[:-2]
        scale = torch.full(lead, 1.0 / (3.7 * math.sqrt(self.k)), device="cuda")
        bias = torch.zeros(*lead, self.codes.shape[-2], dtype=DTYPE, device="cuda")
        return [self.codes.contiguous(), tile_scales(self.scales.contiguous()).view(torch.int8), scale, bias]


@dataclass(frozen=True)
class Problem:
    """An op, and its tensors behind the activations for matrices up and down."""

    name: str
    op: str
    attributes: dict[str, int | float]
    up: Matrix
    down: Matrix
    experts: int = 0

    def inputs(self, up: Matrix, down: Matrix, x: torch.Tensor, logits: torch.Tensor) -> list[torch.Tensor]:
        none = torch.zeros((), device="cuda")
        if not self.experts:
            return [x, *up.tensors(), *down.tensors(), none, none.clone()]
        h = x.shape[1]
        shared = [*Matrix.random(32, h).tensors(), *Matrix.random(h, 16).tensors()]
        gate = torch.zeros(h, dtype=DTYPE, device="cuda")
        bias = torch.zeros(self.experts, device="cuda")
        return [x, logits, bias, *up.tensors(), *down.tensors(), *shared, gate, none, none.clone()]


def llama_70b() -> Problem:
    h, i = 8192, 28672
    attributes = {"activation": int(Activation.SILU)}
    return Problem("Llama-70B's MLP", "NVFP4GatedMLP", attributes, Matrix.random(2 * i, h), Matrix.random(h, i))


def qwen3_30b_a3b() -> Problem:
    h, i, experts = 2048, 768, 128
    attributes = {"top_k": 8, "scoring": int(Scoring.SOFTMAX_OF_CHOSEN), "activation": int(Activation.SILU)}
    up, down = Matrix.random(experts, 2 * i, h), Matrix.random(experts, h, i)
    return Problem("Qwen3-30B-A3B's mixture", "NVFP4MoE", attributes, up, down, experts)


PROBLEMS: dict[str, Callable[[], Problem]] = {"llama-70b": llama_70b, "qwen3-30b-a3b": qwen3_30b_a3b}


def plugin(
    host: PluginHost, problem: Problem, calls: list[list[torch.Tensor]], sums: bool
) -> tuple[Work, list[torch.Tensor]]:
    session = host.session(problem.op, calls[0], problem.attributes)
    outputs = [torch.empty_like(call[0]) for call in calls]
    workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")

    def work() -> None:
        for call, y in zip(calls, outputs, strict=True):
            session.enqueue(call, [y], workspace)
            if sums:
                distributed.all_reduce(y)

    return work, outputs


def bench(host: PluginHost, problem: Problem, rank: int, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    h = problem.down.codes.shape[-2]
    activations = [
        (torch.randn(tokens, h, device="cuda").to(DTYPE), torch.randn(tokens, max(problem.experts, 1), device="cuda"))
        for _ in range(CALLS)
    ]

    def calls(up: Matrix, down: Matrix) -> list[list[torch.Tensor]]:
        first = problem.inputs(up, down, *activations[0])
        ahead = 2 if problem.experts else 1
        return [[*given[:ahead], *first[ahead:]] for given in activations]

    whole, expected = plugin(host, problem, calls(problem.up, problem.down), sums=False)
    share = calls(problem.up.rows(rank, count), problem.down.columns(rank, count))
    split, found = plugin(host, problem, share, sums=True)
    alone, _ = plugin(host, problem, share, sums=False)
    sums = [torch.zeros_like(y) for y in expected]
    contestants: dict[str, Work] = {
        "one GPU": whole,
        f"{count} GPUs": split,
        "a rank's plugin": alone,
        "the sum": lambda: [distributed.all_reduce(y) for y in sums],
    }
    timings = interleave(CudaDevice(), contestants, rounds, calls=dict.fromkeys(contestants, CALLS))
    whole()
    split()
    error = max(relative_error(y, reference) for y, reference in zip(found, expected, strict=True))
    predicted = timings["one GPU"].median_us / count + timings["the sum"].median_us
    measured = timings[f"{count} GPUs"].median_us
    return {
        "problem": problem.name,
        "tokens": tokens,
        "ranks": count,
        "relative_error": error,
        "predicted_us": predicted,
        "speed_up": timings["one GPU"].median_us / measured,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
    }


def work(rank: int, count: int, names: list[str], tokens: list[int], rounds: int) -> dict[str, Any]:
    """A rank's part: the same calls in the same order as every other's."""
    torch.manual_seed(0)
    host = plugin_host()
    steps = []
    for name in names:
        problem = PROBLEMS[name]()
        for m in tokens:
            steps.append(bench(host, problem, rank, count, m, rounds))
        del problem
        torch.cuda.empty_cache()
    return {"environment": environment(), "steps": steps}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=PROBLEMS, nargs="+", default=list(PROBLEMS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "parallel.json")
    given = parser.parse_args(arguments)
    plugin_host()  # compiled once, before the ranks ask for it
    ranks = run_ranks(work, given.ranks, given.only, given.tokens, given.rounds)
    for step in ranks[0]["steps"]:
        print(f"{step['problem']}, {step['tokens']} tokens: error {step['relative_error']:.1e}, "
              f"speed-up {step['speed_up']:.2f}, predicted {step['predicted_us']:.1f} us")  # fmt: skip
        for name, timing in step["timings"].items():
            print(shown(name, Timing(**timing)))
    record(given.out, {**ranks[0], "ranks": [rank["environment"] for rank in ranks]})


if __name__ == "__main__":
    main()
