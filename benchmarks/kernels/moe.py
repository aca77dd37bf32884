"""Few-token speed of NVFP4MoE against BF16 experts (grouped_mm, compiled) and humming-kernels' MoE GEMMs, checked.

    python -m benchmarks.kernels.moe [--models qwen3-30b-a3b ...] [--tokens 1 8 64] [--out FILE]
    python -m benchmarks.kernels.moe --w4a4 --tokens 8 64 512 4096 --out benchmarks/results/kernels/moe_w4a4.json

Needs a GPU; --w4a4, which quantizes activations as well, a Blackwell one (on others the generic kernels run).
humming-kernels is left out, and reported as missing, where it is not installed. The bytes counted are those of the
distinct experts chosen (and the shared one), once, in NVFP4. Calls rotate through inputs that choose other experts, and
through copies of the shared one's weights, so that the L2 cache is cold.
"""

import argparse
import importlib.util
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn import functional

from benchmarks.harness import environment, plugin_host, read_bandwidth, record, relative_error, shown
from benchmarks.kernels.humming_moe import KINDS, HummingExperts
from trt_nvfp4.builder.bench.timing import CudaDevice, Timing, Work, interleave
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation
from trt_nvfp4.plugins.ops.definition import OpDefinition
from trt_nvfp4.plugins.ops.moe_routing import ROUTING_ATTRIBUTES, Scoring, route
from trt_nvfp4.plugins.ops.number_formats import tile_scales

HERE = Path(__file__).resolve().parents[1]
COLD_BYTES = 512 << 20
#: Of a replay, whose own start costs a few microseconds.
FEWEST_CALLS = 12
#: Of the shared expert, whose weights calls would else find in the L2 cache.
SHARED_COPIES = 4
DTYPE = torch.bfloat16
HAS_HUMMING = importlib.util.find_spec("humming") is not None


def attributes_of(spec: dict[str, Any]) -> dict[str, int | float]:
    """The op's attributes for a model of workloads.json."""
    sigmoid = spec["scoring"] == "sigmoid"
    grouped = {"n_group": 8, "topk_group": 4, "group_score_top": 2, "scaling_factor": 2.5} if sigmoid else {}
    return {
        "top_k": spec["top_k"],
        "scoring": int(Scoring.SIGMOID if sigmoid else Scoring.SOFTMAX_OF_CHOSEN),
        "renormalize": int(sigmoid),
        "activation": int(Activation.SWIGLU_CLAMPED if "clamp" in spec else Activation.SILU),
        "limit": spec.get("clamp", 7.0),
        "shared": int("shared_experts" in spec),
        **grouped,
    }


def random_weight(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Packed codes, tiled scales, tensor scales and a bias: of [..., n, k], outputs near one."""
    *batch, n, k = shape
    packed = torch.randint(-128, 128, (*batch, n, k // 2), dtype=torch.int8, device="cuda")
    scales = torch.randint(0x30, 0x40, (*batch, n, k // 16), dtype=torch.uint8, device="cuda")
    tensor_scale = torch.full(batch, 1.0 / (3.7 * math.sqrt(k)), device="cuda")
    bias = (0.25 * torch.randn(*batch, n, device="cuda")).to(DTYPE)
    return [packed, tile_scales(scales).view(torch.int8), tensor_scale, bias]


@dataclass
class Experts:
    op: ClassVar[OpDefinition] = OPS["NVFP4MoE"]
    bytes_per_weight: ClassVar[float] = 0.5 + 1 / 16
    spec: dict[str, Any]
    attributes: dict[str, int | float]
    tensors: list[torch.Tensor]  # the op's, from gate_up_weight to hidden_tensor_scale

    @classmethod
    def random(cls, spec: dict[str, Any], w4a4: bool) -> "Experts":
        h, i, experts = spec["hidden"], spec["intermediate"], spec["experts"]
        width = i * spec.get("shared_experts", 0) or 16  # the op takes one where it uses none
        tensors = [*random_weight((experts, 2 * i, h)), *random_weight((experts, h, i))]
        tensors += [*random_weight((2 * width, h)), *random_weight((h, width)), torch.zeros(h, device="cuda").to(DTYPE)]
        attributes = attributes_of(spec) | {"quantize_activations": int(w4a4), "static_scales": int(w4a4)}
        scales = torch.tensor([8.0, 32.0], device="cuda") / 2688  # amax of x and about that of hidden values
        return cls(spec, attributes, [*tensors, *(scales if w4a4 else 0 * scales)])

    def in_half(self) -> "Experts":
        """For FP16 activations."""
        return replace(self, tensors=[t.half() if t.dtype == DTYPE else t for t in self.tensors])

    def with_own_shared(self) -> list[torch.Tensor]:
        """The same tensors, the shared expert's elsewhere in memory."""
        names = [f.name for f in self.op.inputs][3:]
        return [t.clone() if name.startswith("shared") else t for name, t in zip(names, self.tensors, strict=True)]

    @property
    def expert_bytes(self) -> float:
        return 3 * self.spec["hidden"] * self.spec["intermediate"] * self.bytes_per_weight

    def routed(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights [tokens, top_k]."""
        complete = self.op.complete_attributes(**self.attributes)
        routing = {name: complete[name] for name in ROUTING_ATTRIBUTES}
        return route(logits, torch.zeros(logits.shape[1], device="cuda"), **routing)

    def chosen(self, logits: torch.Tensor) -> torch.Tensor:
        return self.routed(logits)[0]

    def inputs(self, tokens: int, calls: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """x and logits of each call. A single token's experts follow a permutation: no two calls in a row meet."""
        result = []
        order = torch.randperm(self.spec["experts"], device="cuda")
        for call in range(calls):
            logits = torch.randn(tokens, self.spec["experts"], device="cuda")
            if tokens == 1:
                top_k = self.spec["top_k"]
                logits[0, order[torch.arange(top_k, device="cuda") + call * top_k % (len(order) - top_k + 1)]] += 5
            result.append((torch.randn(tokens, self.spec["hidden"], device="cuda").to(DTYPE), logits))
        return result

    def reference(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The op's Torch reference, of the experts that these tokens chose: the others are left out."""
        used, numbers = self.chosen(logits).unique(return_inverse=True)
        routed = next(i for i, f in enumerate(self.op.inputs) if f.name.startswith("shared")) - 3
        tensors = [t[used] for t in self.tensors[:routed]]
        few = torch.full((x.shape[0], len(used)), -1e4, device="cuda").scatter(
            1, numbers, logits.gather(1, self.chosen(logits))
        )
        attributes = {**self.attributes, "n_group": 1, "topk_group": 1, "group_score_top": 1}
        bias = torch.zeros(len(used), device="cuda")
        tensors += self.tensors[routed:]
        return self.op.reference(x, few, bias, *tensors, **attributes)  # type: ignore[return-value]


def plugin(
    host: PluginHost, experts: Experts, inputs: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Work, torch.Tensor]:
    bias = torch.zeros(experts.spec["experts"], device="cuda")
    copies = [experts.tensors, *(experts.with_own_shared() for _ in range(SHARED_COPIES - 1))]
    calls = [[x, logits, bias, *copies[i % SHARED_COPIES]] for i, (x, logits) in enumerate(inputs)]
    session = host.session(experts.op.name, calls[0], experts.attributes)
    y = torch.empty_like(inputs[0][0])
    workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
    return lambda: [session.enqueue(call, [y], workspace) for call in calls], y


def dense(experts: Experts, inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> Work:
    """16-bit experts by grouped_mm under torch.compile: as Hugging Face's implementation, random weights."""
    h, i, count, top_k = (experts.spec[name] for name in ("hidden", "intermediate", "experts", "top_k"))
    up = torch.empty(count, 2 * i, h, dtype=DTYPE, device="cuda").normal_(0, h**-0.5)
    down = torch.empty(count, h, i, dtype=DTYPE, device="cuda").normal_(0, i**-0.5)
    shared = [torch.randn(2 * i, h, device="cuda").to(DTYPE), torch.randn(h, i, device="cuda").to(DTYPE)]

    torch._dynamo.reset()  # its limit of recompilations counts all models and numbers of tokens together

    @torch.compile(dynamic=False, fullgraph=True)  # past the limit this raises, where otherwise it would run uncompiled
    def moe(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        values, chosen = logits.topk(top_k, dim=-1)
        weights = values.softmax(-1)
        order = chosen.flatten().argsort()
        offsets = torch.nn.functional.one_hot(chosen.flatten(), count).sum(0).cumsum(0).to(torch.int32)
        rows = x[order // top_k]
        gate, linear = torch._grouped_mm(rows, up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
        hidden = functional.silu(gate) * linear
        out = torch._grouped_mm(hidden, down.transpose(1, 2), offs=offsets) * weights.flatten()[order, None]
        y = torch.zeros_like(out).index_copy(0, order, out).view(x.shape[0], top_k, h).sum(1)
        if "shared_experts" in experts.spec:
            gate, linear = functional.linear(x, shared[0]).chunk(2, dim=-1)
            y = y + functional.linear(functional.silu(gate) * linear, shared[1])
        return y.to(DTYPE)

    return lambda: [moe(x, logits) for x, logits in inputs]


def draw(experts: Experts, tokens: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], dict[str, Any]]:
    """x [tokens, hidden] and logits of as many calls as read COLD_BYTES, and what a record says of the case."""
    distinct = lambda logits: len(experts.chosen(logits).unique())  # noqa: E731
    guess = distinct(torch.randn(tokens, experts.spec["experts"], device="cuda"))
    calls = max(FEWEST_CALLS, math.ceil(COLD_BYTES / (guess * experts.expert_bytes)))
    inputs = experts.inputs(tokens, calls)
    mean = sum(distinct(logits) for _, logits in inputs) / len(inputs)
    weight_bytes = experts.expert_bytes * (mean + experts.spec.get("shared_experts", 0))
    case = {"model": experts.spec["name"], "tokens": tokens, "calls": calls, "experts": mean}
    return inputs, case | {"megabytes": weight_bytes / 1e6}


def bench(
    host: PluginHost,
    experts: Experts,
    humming: HummingExperts | None,
    tokens: int,
    rounds: int,
    bandwidth: float,
    alone: bool,
) -> dict[str, Any]:
    inputs, case = draw(experts, tokens)
    contestants: dict[str, Work] = {}
    contestants["nvfp4"], y = plugin(host, experts, inputs)
    contestants["nvfp4"]()
    x, logits = inputs[-1]
    sample = slice(0, min(tokens, 4))
    expected = experts.reference(x[sample], logits[sample])
    errors = {"nvfp4": relative_error(y[sample], expected)}
    w4a4 = bool(experts.attributes["quantize_activations"])
    if not w4a4:
        in_half = experts.in_half()
        contestants["nvfp4 fp16"], halves = plugin(host, in_half, [(x.half(), logits) for x, logits in inputs])
        contestants["nvfp4 fp16"]()
        errors["nvfp4 fp16"] = relative_error(halves[sample], in_half.reference(x.half()[sample], logits[sample]))
    if not alone:
        contestants["bf16 grouped_mm"] = dense(experts, inputs)
    if humming is not None:
        routed = [(x, *experts.routed(logits)) for x, logits in inputs]
        for kind in KINDS:
            contestants[f"humming {kind}"], output = humming(kind, routed)
            contestants[f"humming {kind}"]()
            errors[f"humming {kind}"] = relative_error(output()[sample], expected)
    timings = interleave(CudaDevice(), contestants, rounds, calls=dict.fromkeys(contestants, len(inputs)))
    # With W4A4 a hidden value on a rounding boundary of NVFP4 may fall on its other side.
    most = 2e-2 if w4a4 else 1e-2
    return {**report(case, timings, "nvfp4", errors, most, bandwidth), "relative_errors": errors}


def report(
    case: dict[str, Any], timings: dict[str, Timing], ours: str, errors: dict[str, float], most: float, bandwidth: float
) -> dict[str, Any]:
    """Prints a case of draw and returns it with its timings; an error above `most` stops the run. Of bandwidth are
    the contestants whose names begin with `ours`."""
    fractions = {
        name: case["megabytes"] * 1e6 / timing.median_us * 1e6 / bandwidth
        for name, timing in timings.items()
        if name.startswith(ours)
    }
    print("{model} tokens={tokens} experts={experts:.1f} {megabytes:.0f} MB".format_map(case), flush=True)
    for name, timing in timings.items():
        line = shown(name, timing)
        line += f"  {fractions[name]:6.1%} of bandwidth" if name in fractions else ""
        line += f"  relative error {errors[name]:.1e}" if name in errors else ""
        print(line, flush=True)
    for name, error in errors.items():
        if not error < most:
            raise SystemExit(f"{name} is wrong: relative error {error:.2e}, at most {most:g} is expected")
    return {
        **case,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "bandwidth_fractions": fractions,
    }


def main() -> None:
    workloads = json.loads((HERE / "workloads.json").read_text())["moe"]
    names = [spec["name"] for spec in workloads["models"]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--w4a4", action="store_true", help="quantize activations to NVFP4 too")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--alone", action="store_true", help="the plugin without the others")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "moe.json")
    arguments = parser.parse_args()

    host = plugin_host()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s" + ("" if HAS_HUMMING else "; humming-kernels is not installed"))
    result: dict[str, Any] = {"environment": environment(), "read_bandwidth": bandwidth, "moe": []}
    for spec in workloads["models"]:
        if spec["name"] not in arguments.models:
            continue
        experts = Experts.random(spec, arguments.w4a4)
        humming = None
        if HAS_HUMMING and not arguments.alone and not arguments.w4a4:
            humming = HummingExperts(experts.tensors, experts.op.complete_attributes(**experts.attributes))
        for tokens in arguments.tokens:
            result["moe"].append(bench(host, experts, humming, tokens, arguments.rounds, bandwidth, arguments.alone))
            torch.cuda.empty_cache()
        del experts, humming
        torch.cuda.empty_cache()
    record(arguments.out, result)


if __name__ == "__main__":
    main()
