"""One decode step of a hybrid language model with random weights: by this project's plugins, its recurrent layers by
torch too.

Mixers stand behind a norm and before a residual each: a recurrence (gated delta net or Mamba2), attention or a mixture
of experts; behind them a norm and the head. Linears of one input are one, with rows in the order of their use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.contestants import Weight, plugin_call, plugin_linear
from benchmarks.kernels.decoder_parts import (
    BYTES_PER_WEIGHT,
    EPSILON,
    Calls,
    Model,
    Shape,
    Step,
    attention,
    moe_inputs,
    random_experts,
    rms_norm,
    route,
)
from trt_nvfp4.graph_passes.planning.kinds.products import experts_touched
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops.activation import Activation
from trt_nvfp4.plugins.ops.moe_routing import Scoring

RECURRENCE, ATTENTION, MIXTURE = "M*E"  # as Nemotron's patterns spell them
GATED_DELTA = "gated_delta"


@dataclass(frozen=True, kw_only=True)
class Hybrid(Shape):
    """A hybrid's sizes; `layers` are those with attention. Keys and queries have `groups` heads, each of which serves
    several of the state's."""

    pattern: str  # a letter for each mixer
    rule: str  # LinearAttention's
    state_heads: int
    groups: int
    key_dim: int
    value_dim: int
    width: int = 4  # of the convolution
    output_gate: bool = False  # of attention
    shared: int = 0  # the shared expert's intermediate size
    moe: Mapping[str, int | float] = field(default_factory=dict)  # NVFP4MoE's attributes

    @property
    def is_delta(self) -> bool:
        return self.rule == GATED_DELTA

    @property
    def scale(self) -> float:
        """The factor of what the recurrence reads; gated delta nets scale queries so."""
        return self.key_dim**-0.5 if self.is_delta else 1.0

    @property
    def values(self) -> int:
        return self.state_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The convolution's: queries, keys and values (Mamba2's C, B and x)."""
        return 2 * self.groups * self.key_dim + self.values

    @property
    def in_rows(self) -> int:
        """The convolution's channels, the gated norm's gate and Mamba2's time steps, by one linear."""
        return self.channels + self.values + (0 if self.is_delta else self.state_heads)

    @property
    def small_rows(self) -> int:
        """Gates that a gated delta net computes from its input in 16 bits: decay and beta."""
        return 2 * self.state_heads if self.is_delta else 0

    @property
    def attention_rows(self) -> int:
        return self.qkv + self.output_gate * self.heads * self.head_dim

    def floor(self, batch: int, tokens: int, length: int) -> dict[str, float]:
        """Bytes that a step reads and writes, in parts: `tokens` new ones of each sequence."""
        recurrent, mixtures = self.pattern.count(RECURRENCE), self.pattern.count(MIXTURE)
        linears = self.layers * (self.attention_rows + self.heads * self.head_dim) + self.vocabulary
        projections = 2 + self.moe["gated"]
        expert = projections * (experts_touched(self.experts, self.top_k, batch * tokens) * self.intermediate)
        return {
            "attention and head": linears * self.hidden * BYTES_PER_WEIGHT,
            "experts": mixtures * (expert + projections * self.shared) * self.hidden * BYTES_PER_WEIGHT,
            "routers": 2.0 * mixtures * self.experts * self.hidden,
            "caches": 2.0 * self.cached(batch, length),
            **{part: recurrent * read for part, read in self.recurrent_floor(batch).items()},
        }

    def recurrent_floor(self, batch: int) -> dict[str, float]:
        """The same of one recurrent layer. States are read and written once, in float32."""
        return {
            "recurrent linears": (self.in_rows + self.values) * self.hidden * BYTES_PER_WEIGHT,
            "16-bit weights": 2.0 * (self.small_rows * self.hidden + self.channels * (self.width + 1)),
            "states": 2 * 4.0 * batch * self.values * self.key_dim,
            "convolution states": 2 * 2.0 * batch * self.channels * (self.width - 1),
        }


#: Qwen3.6-35B-A3B: what transformers' Qwen3_5MoeTextConfig has by default, from its configuration on the hub.
#: Nemotron-3-Nano-30B-A3B: its configuration on the hub (NemotronHConfig's defaults are those of another model).
HYBRIDS = {
    "Qwen3.6-35B-A3B": Hybrid(
        layers=10, hidden=2048, intermediate=512, heads=16, kv_heads=2, head_dim=256, vocabulary=248320, rotary=64,
        experts=256, top_k=8, pattern="MEMEME*E" * 10, rule=GATED_DELTA, state_heads=32, groups=16, key_dim=128,
        value_dim=128, output_gate=True, shared=512,
        moe={"gated": 1, "activation": int(Activation.SILU), "renormalize": 1, "shared": 1, "shared_gated": 1},
    ),
    "Nemotron-3-Nano-30B-A3B": Hybrid(
        layers=6, hidden=2688, intermediate=1856, heads=32, kv_heads=2, head_dim=128, vocabulary=131072, rotary=0,
        qk_norm=0, experts=128, top_k=6, pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", rule="gated",
        state_heads=64, groups=8, key_dim=128, value_dim=64, shared=3712,
        moe={"gated": 0, "activation": int(Activation.RELU2), "scoring": int(Scoring.SIGMOID), "renormalize": 1,
             "scaling_factor": 2.5, "shared": 1},
    ),
}  # fmt: skip


@dataclass
class Recurrence:
    """`gates` [2 heads, hidden] in 16 bits: a gated delta net's decays and betas; Mamba2 has none."""

    projection: Weight
    gates: Tensor | None
    convolution: list[Tensor]  # weight [channels, 1, width], bias [channels]
    rates: Tensor  # float32 [2, heads]: -exp(A_log) and the time steps' bias
    skip: Tensor  # float32 [values]: Mamba2's D
    output: Weight


@dataclass
class Attention:
    qkv: Weight  # and the output gate's rows
    output: Weight


@dataclass
class Mixture:
    router: Tensor
    experts: list[Tensor]  # as NVFP4MoE takes them


@dataclass
class HybridModel(Model):
    """Random weights of a hybrid, in the order of its `mixers`; `layers` stays empty."""

    shape: Hybrid
    mixers: list[Recurrence | Attention | Mixture] = field(default_factory=list)

    @classmethod
    def random(cls, shape: Hybrid, dtype: torch.dtype) -> "HybridModel":  # type: ignore[override]  of hybrids only
        def linear(n: int, k: int) -> Weight:
            return replace(Weight.random(n, k, dtype), bias=torch.zeros(n, device="cuda"))

        def small(rows: int) -> Tensor:
            return torch.randn(rows, shape.hidden, device="cuda", dtype=dtype) / shape.hidden**0.5

        def recurrence() -> Recurrence:
            convolution = torch.randn(shape.channels, 1, shape.width, device="cuda", dtype=dtype) / 2
            rates = torch.rand(2, shape.state_heads, device="cuda")
            rates[0].neg_()
            return Recurrence(
                linear(shape.in_rows, shape.hidden),
                small(shape.small_rows) if shape.is_delta else None,
                [convolution, torch.zeros(shape.channels, device="cuda", dtype=dtype)],
                rates,
                torch.rand(shape.values, device="cuda"),
                linear(shape.hidden, shape.values),
            )

        def attention() -> Attention:
            rows = shape.attention_rows, shape.heads * shape.head_dim
            return Attention(linear(rows[0], shape.hidden), linear(shape.hidden, rows[1]))

        def mixture() -> Mixture:
            sizes = shape.experts, shape.hidden, shape.intermediate
            return Mixture(small(shape.experts), random_experts(*sizes, dtype, int(shape.moe["gated"]), shape.shared))

        kinds = {RECURRENCE: recurrence, ATTENTION: attention, MIXTURE: mixture}
        head = Weight.random(shape.vocabulary, shape.hidden, dtype)
        return cls(shape, dtype, [], head, [kinds[kind]() for kind in shape.pattern])

    @property
    def recurrences(self) -> list[Recurrence]:
        return [mixer for mixer in self.mixers if isinstance(mixer, Recurrence)]

    def states(self, batch: int) -> list[list[Tensor]]:
        """Each recurrence's: its convolution's state and its own, random."""
        shape = self.shape
        sizes = (batch, shape.channels, shape.width - 1), (batch, shape.state_heads, shape.key_dim, shape.value_dim)
        return [
            [torch.randn(sizes[0], device="cuda", dtype=self.dtype), torch.randn(sizes[1], device="cuda") / 8]
            for _ in self.recurrences
        ]


def recurrence_inputs(shape: Hybrid, mixed: Tensor, gates: Tensor, rates: Tensor) -> list[Tensor]:
    """LinearAttention's queries, keys, values, decays and, of the delta rule, betas, in float32, from the convolution's
    output [batch, channels, tokens] and gates [batch, tokens, heads or 2 heads]."""
    keys, repeats = shape.groups * shape.key_dim, shape.state_heads // shape.groups
    rows = mixed.transpose(1, 2).float().split([keys, keys, shape.values], -1)
    heads = shape.groups, shape.groups, shape.state_heads
    q, k, v = (x.unflatten(-1, (count, -1)) for x, count in zip(rows, heads, strict=True))
    times = functional.softplus(gates[..., : shape.state_heads].float() + rates[1])
    if shape.is_delta:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    else:
        v = v * times.unsqueeze(-1)
    q, k = (x.repeat_interleave(repeats, -2) for x in (q, k))
    betas = [gates[..., shape.state_heads :].float().sigmoid()] if shape.is_delta else []
    return [q.flatten(-2), k.flatten(-2), v.flatten(-2), times * rates[0], *betas]


def gated_norm(shape: Hybrid, y: Tensor, projected: Tensor, mixed: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    """The recurrence's y [batch, tokens, values] normed by head and gated; Mamba2's with its skip, gated before it is
    normed by group."""
    gate = functional.silu(projected[..., shape.channels : shape.channels + shape.values].float())
    wide = y.float()
    if not shape.is_delta:
        wide = (wide + mixed[:, -shape.values :].transpose(1, 2).float() * skip) * gate
    by_group = wide.unflatten(-1, (shape.state_heads if shape.is_delta else shape.groups, -1))
    normed = functional.rms_norm(by_group, by_group.shape[-1:], eps=EPSILON).flatten(-2) * weight.float()
    return (normed * gate if shape.is_delta else normed).to(y.dtype)


@torch.compile(dynamic=False)
def _inputs(shape: Hybrid, mixed: Tensor, gates: Tensor, rates: Tensor, out: list[Tensor]) -> None:
    for to, value in zip(out, recurrence_inputs(shape, mixed, gates, rates), strict=True):
        to.copy_(value)


@torch.compile(dynamic=False)
def _gated_norm(
    shape: Hybrid, y: Tensor, projected: Tensor, mixed: Tensor, skip: Tensor, weight: Tensor, out: Tensor
) -> None:
    out.copy_(gated_norm(shape, y, projected, mixed, skip, weight))


@torch.compile(dynamic=False)
def _add_norm(x: Tensor, y: Tensor, weight: Tensor, both: Tensor, normed: Tensor) -> None:
    both.copy_(x + y)
    normed.copy_(rms_norm(both, weight))


@torch.compile(dynamic=False)
def _gate(y: Tensor, gate: Tensor, out: Tensor) -> None:
    out.copy_(y * gate.sigmoid())


def _whole(calls: Calls, part: str, x: Tensor) -> Tensor:
    """x itself where it lies in one piece, or a copy that a call makes."""
    if x.is_contiguous():
        return x
    copy = torch.empty(x.shape, device="cuda", dtype=x.dtype)
    calls.append((part, partial(copy.copy_, x)))
    return copy


def normed(model: HybridModel, x: Tensor, y: Tensor, part: str, small: Tensor | None) -> tuple[Calls, list[Tensor]]:
    """The residual x + y, its norm and, of a router or gates, what these compute from that in 16 bits."""
    ones, both, out = model.ones(model.shape.hidden), torch.empty_like(x), torch.empty_like(x)
    if small is None:
        return [("norms", partial(_add_norm, x, y, ones, both, out))], [both, out]
    rows = torch.empty(*x.shape[:2], len(small), device="cuda")
    return [(f"norms and {part}", partial(route, x, y, ones, small, both, out, rows))], [both, out, rows]


def recurrent(
    host: PluginHost, model: HybridModel, mixer: Recurrence, x: Tensor, y: Tensor, states: list[Tensor]
) -> tuple[Calls, Tensor, Tensor]:
    """A norm and a recurrence, states in place: the calls, the residual x + y and what comes to that."""
    shape, heads = model.shape, model.shape.state_heads
    calls, (both, rows, *gates) = normed(model, x, y, "gates", mixer.gates)
    call, projected = plugin_linear(host, rows, mixer.projection)
    calls.append(("in projections", call))
    inputs = [_whole(calls, "convolution", projected[..., : shape.channels].transpose(1, 2))]
    inputs += [*mixer.convolution, states[0]]
    call, mixed = plugin_call(host, "CausalConvWithState", inputs, {"activation": "silu", "ndim": 1}, states[:1])
    calls.append(("convolution", call))
    sizes = [heads * shape.key_dim] * 2 + [shape.values, heads] + [heads] * shape.is_delta
    q, k, v, *others = (torch.empty(*x.shape[:2], size, device="cuda", dtype=x.dtype) for size in sizes)
    (gate,) = gates or [projected[..., -heads:]]
    calls.append(("recurrence's inputs", partial(_inputs, shape, mixed, gate, mixer.rates, [q, k, v, *others])))
    attributes = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": shape.rule, "scale": shape.scale}
    call, read = plugin_call(host, "LinearAttention", [q, k, v, states[1], *others], attributes, states[1:])
    calls.append(("recurrence", call))
    out = torch.empty_like(read)
    arguments = (shape, read, projected, mixed, mixer.skip, model.ones(shape.values), out)
    calls.append(("gated norm", partial(_gated_norm, *arguments)))
    call, y = plugin_linear(host, out, mixer.output)
    return [*calls, ("out projections", call)], both, y


def attended(
    host: PluginHost, model: HybridModel, mixer: Attention, step: Step, x: Tensor, y: Tensor, caches: Tensor
) -> tuple[Calls, Tensor, Tensor]:
    """The same of attention; `caches` [2, batch, kv_heads, capacity, head_dim]."""
    calls, (both, rows) = normed(model, x, y, "", None)
    call, projected = plugin_linear(host, rows, mixer.qkv)
    calls.append(("attention's linears", call))
    qkv = _whole(calls, "attention", projected[..., : model.shape.qkv])
    call, out = attention(host, model, step, qkv, caches)
    calls.append(("attention", call))
    if model.shape.output_gate:
        ungated, out = out, torch.empty_like(out)
        calls.append(("attention", partial(_gate, ungated, projected[..., model.shape.qkv :], out)))
    call, y = plugin_linear(host, out, mixer.output)
    return [*calls, ("attention's linears", call)], both, y


def mixed(host: PluginHost, model: HybridModel, mixer: Mixture, x: Tensor, y: Tensor) -> tuple[Calls, Tensor, Tensor]:
    """The same of a mixture of experts."""
    calls, (both, rows, logits) = normed(model, x, y, "routers", mixer.router)
    attributes = {"top_k": model.shape.top_k, **model.shape.moe}
    call, y = plugin_call(host, "NVFP4MoE", moe_inputs(mixer.experts, rows, logits), attributes)
    return [*calls, ("experts", call)], both, y


def composed(host: PluginHost, model: HybridModel, step: Step, states: list[list[Tensor]]) -> tuple[Calls, Tensor]:
    """The step by plugins, and by compiled torch what lies between them; its calls, and the logits that they make."""
    x, y = step.x, torch.zeros_like(step.x)
    calls: Calls = []
    caches_left, states_left = iter(step.caches), iter(states)
    for mixer in model.mixers:
        if isinstance(mixer, Recurrence):
            found, x, y = recurrent(host, model, mixer, x, y, next(states_left))
        elif isinstance(mixer, Attention):
            found, x, y = attended(host, model, mixer, step, x, y, next(caches_left))
        else:
            found, x, y = mixed(host, model, mixer, x, y)
        calls += found
    found, (_, rows) = normed(model, x, y, "", None)
    call, logits = plugin_linear(host, rows, model.head)
    return [*calls, *found, ("head", call)], logits


def recurrent_layers(
    host: PluginHost, model: HybridModel, x: Tensor, states: list[list[Tensor]]
) -> tuple[Calls, list[Tensor]]:
    """The recurrent layers alone, one behind another, by plugins; and what each adds to the residual."""
    calls: Calls = []
    y, outputs = torch.zeros_like(x), []
    for mixer, own in zip(model.recurrences, states, strict=True):
        found, x, y = recurrent(host, model, mixer, x, y, own)
        calls += found
        outputs.append(y)
    return calls, outputs


@torch.compile(dynamic=False)
def _dense_layer(
    shape: Hybrid,
    x: Tensor,
    y: Tensor,
    ones: Tensor,
    weights: tuple[Tensor, Tensor | None, Tensor],
    others: tuple[Tensor, Tensor, Tensor],
    states: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """A norm and a recurrence in 16 bits, states in place: the residual, and what comes to that."""
    (projection, small, output), (weight, rates, skip), (before, state) = weights, others, states
    both = x + y
    rows = rms_norm(both, ones)
    projected = functional.linear(rows, projection)
    gates = projected[..., -shape.state_heads :] if small is None else functional.linear(rows, small)
    window = torch.cat((before, projected[..., : shape.channels].transpose(1, 2)), -1)
    before.copy_(window[..., -(shape.width - 1) :])
    mixed = functional.silu((window.unfold(-1, shape.width, 1).float() * weight.float()).sum(-1)).to(x.dtype)
    heads = [each.unflatten(-1, (shape.state_heads, -1)) for each in recurrence_inputs(shape, mixed, gates, rates)]
    now, outputs = state, []
    for q, k, v, decay, *beta in zip(*(each.unbind(1) for each in heads), strict=True):
        now = now * decay.exp().unsqueeze(-1)
        update = beta[0] * (v - (now * k.unsqueeze(-1)).sum(-2)) if beta else v
        now = now + k.unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append((now * q.unsqueeze(-1)).sum(-2) * shape.scale)
    state.copy_(now)
    recurred = torch.stack(outputs, 1).flatten(-2).to(x.dtype)
    normed = gated_norm(shape, recurred, projected, mixed, skip, torch.ones_like(skip))
    return both, functional.linear(normed, output)


def dense_recurrent_layers(model: HybridModel, x: Tensor, states: list[list[Tensor]]) -> Callable[[], list[Tensor]]:
    """The recurrent layers in 16 bits under torch.compile, on the same weights; returns what each adds."""
    ones, zeros = model.ones(model.shape.hidden), torch.zeros_like(x)

    def work() -> list[Tensor]:
        both, y, outputs = x, zeros, []
        for mixer, own in zip(model.recurrences, states, strict=True):
            weights = mixer.projection.dense, mixer.gates, mixer.output.dense
            others = mixer.convolution[0], mixer.rates, mixer.skip
            both, y = _dense_layer(model.shape, both, y, ones, weights, others, own)
            outputs.append(y)
        return outputs

    return work
