"""The hybrid steps compute what the models do: recurrences beside transformers' layers, whole steps on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_host import ReferenceHost
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.contestants import Weight
from benchmarks.kernels import hybrid_parts
from benchmarks.kernels.decoder import whole
from benchmarks.kernels.decoder_parts import Step, rms_norm
from benchmarks.kernels.hybrid_parts import HYBRIDS, Hybrid, HybridModel, Recurrence

BATCH, TOKENS = 2, 5
_SIZES: dict[str, Any] = {"layers": 1, "hidden": 64, "intermediate": 32, "head_dim": 32, "vocabulary": 48, "experts": 8}
DELTA, MAMBA2 = (
    replace(HYBRIDS["Qwen3.6-35B-A3B"], **_SIZES, heads=4, rotary=8, top_k=3, shared=32, pattern="ME*E",
            state_heads=4, groups=2, key_dim=16, value_dim=32),
    replace(HYBRIDS["Nemotron-3-Nano-30B-A3B"], **_SIZES, heads=4, top_k=3, shared=64, pattern="MEM*E",
            state_heads=8, groups=2, key_dim=32, value_dim=8),
)  # fmt: skip


class _OnCpu(TorchFunctionMode):
    """Tensors that the benchmark makes on the GPU are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        return function(*args, **given | ({"device": "cpu"} if given.get("device") == "cuda" else {}))


@pytest.fixture(autouse=True)
def on_the_cpu(seed: int) -> Any:
    torch.manual_seed(seed)
    with _OnCpu(), torch.compiler.set_stance("force_eager"), torch.no_grad():
        yield


def gated_delta_net(shape: Hybrid, mixer: Recurrence) -> torch.nn.Module:
    from transformers import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

    config = Qwen3_5MoeTextConfig(
        hidden_size=shape.hidden, num_hidden_layers=1, layer_types=["linear_attention"],
        linear_num_key_heads=shape.groups, linear_num_value_heads=shape.state_heads,
        linear_key_head_dim=shape.key_dim, linear_value_head_dim=shape.value_dim,
    )  # fmt: skip
    layer = Qwen3_5MoeGatedDeltaNet(config, 0)
    assert mixer.gates is not None
    mixed, z = mixer.projection.dense.split([shape.channels, shape.values])
    a, b = mixer.gates.chunk(2)
    layer.load_state_dict(
        {
            "in_proj_qkv.weight": mixed, "in_proj_z.weight": z, "in_proj_a.weight": a, "in_proj_b.weight": b,
            "conv1d.weight": mixer.convolution[0], "A_log": (-mixer.rates[0]).log(), "dt_bias": mixer.rates[1],
            "norm.weight": torch.ones(shape.value_dim), "out_proj.weight": mixer.output.dense,
        }
    )  # fmt: skip
    return layer


def mamba2(shape: Hybrid, mixer: Recurrence) -> torch.nn.Module:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    config = NemotronHConfig(
        hidden_size=shape.hidden, mamba_num_heads=shape.state_heads, mamba_head_dim=shape.value_dim,
        n_groups=shape.groups, ssm_state_size=shape.key_dim, layer_norm_epsilon=1e-6,
        layers_block_type=["linear_attention"],
    )  # fmt: skip
    layer = NemotronHMamba2Mixer(config, 0)
    keys = shape.groups * shape.key_dim

    def reordered(rows: Tensor) -> Tensor:  # theirs are x, B, C
        c, b, x = rows.split([keys, keys, shape.values])
        return torch.cat((x, b, c))

    mixed, z, dt = mixer.projection.dense.split([shape.channels, shape.values, shape.state_heads])
    weight, bias = mixer.convolution
    layer.load_state_dict(
        {
            "in_proj.weight": torch.cat((z, reordered(mixed), dt)), "conv1d.weight": reordered(weight),
            "conv1d.bias": reordered(bias), "A_log": (-mixer.rates[0]).log(), "dt_bias": mixer.rates[1],
            "D": mixer.skip.view(shape.state_heads, -1)[:, 0], "norm.weight": torch.ones(shape.values),
            "out_proj.weight": mixer.output.dense,
        }
    )  # fmt: skip
    return layer


@pytest.mark.parametrize(("shape", "theirs"), [(DELTA, gated_delta_net), (MAMBA2, mamba2)], ids=["delta", "mamba2"])
def test_recurrences_are_the_models_own(shape: Hybrid, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By plugins and by torch, a prompt and one token behind it, against transformers' layer over all of them."""
    pytest.importorskip("transformers")
    model = HybridModel.random(replace(shape, pattern="M"), torch.float32)
    (mixer,) = model.recurrences
    mixer.skip = mixer.skip.view(shape.state_heads, -1)[:, :1].expand(-1, shape.value_dim).flatten()
    x = torch.randn(BATCH, TOKENS + 1, shape.hidden)
    expected = theirs(shape, mixer)(rms_norm(x, torch.ones(shape.hidden)))
    states, dense_states = ([[torch.zeros_like(s) for s in each] for each in model.states(BATCH)] for _ in range(2))
    found, dense = [], []
    for part in x.split([TOKENS, 1], 1):
        calls, (y,) = hybrid_parts.recurrent_layers(ReferenceHost(), model, part, states)
        whole(calls)()
        found.append(y)
        dense.append(hybrid_parts.dense_recurrent_layers(model, part, dense_states)()[0])
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(dense, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [DELTA, MAMBA2], ids=["delta", "mamba2"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (1, 4)])
def test_a_whole_step_on_the_cpu(shape: Hybrid, batch: int, tokens: int) -> None:
    """Its calls are such as the ops take, every mixer is among them, and every sequence has logits of its own."""
    model = HybridModel.random(shape, torch.bfloat16)
    step = Step.random(model, batch, 16, fp8=False, tokens=tokens)
    step.x[:] = step.x[:1]
    states = model.states(batch)
    for each in (step.caches.transpose(0, 2), *(state for layer in states for state in layer)):
        each[:] = each[:1]
    calls, logits = hybrid_parts.composed(ReferenceHost(), model, step, states)
    whole(calls)()
    assert logits.shape == (batch, tokens, shape.vocabulary)
    assert logits.isfinite().all()
    for one in logits[1:]:
        torch.testing.assert_close(one, logits[0])
    parts = [part for part, _ in calls]
    assert parts.count("experts") == shape.pattern.count("E")
    assert parts.count("recurrence") == shape.pattern.count("M")


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_floor_counts_every_byte_once(name: str) -> None:
    """At so many tokens that all experts are read: the bytes of a small model's own weights, states and caches."""
    shape = {"Qwen3.6-35B-A3B": DELTA, "Nemotron-3-Nano-30B-A3B": MAMBA2}[name]
    model, tokens = HybridModel.random(shape, torch.bfloat16), 4096
    floor = shape.floor(BATCH, tokens, 16)

    def nvfp4(*weights: Weight) -> float:
        return sum(weight.packed.nbytes * 9 / 8 for weight in weights)

    attention = [m for m in model.mixers if isinstance(m, hybrid_parts.Attention)]
    mixtures = [m for m in model.mixers if isinstance(m, hybrid_parts.Mixture)]
    dense = [weight for m in attention for weight in (m.qkv, m.output)]
    recurrent = [weight for m in model.recurrences for weight in (m.projection, m.output)]
    assert floor["attention and head"] == nvfp4(model.head, *dense)
    assert floor["recurrent linears"] == nvfp4(*recurrent)
    assert floor["experts"] == pytest.approx(sum(m.experts[i].nbytes * 9 / 8 for m in mixtures for i in (0, 4, 8, 12)))
    assert floor["routers"] == sum(m.router.nbytes for m in mixtures)
    small = [x for m in model.recurrences for x in (m.gates, *m.convolution) if x is not None]
    assert floor["16-bit weights"] == sum(x.nbytes for x in small)
    convolution, recurrence = zip(*model.states(BATCH), strict=True)
    assert floor["states"] == 2 * sum(x.nbytes for x in recurrence)
    assert floor["convolution states"] == 2 * sum(x.nbytes for x in convolution)
    assert floor["caches"] == Step.random(model, BATCH, 16, fp8=False).caches.nbytes


def test_shapes_are_transformers_own() -> None:
    """Qwen3.6-35B-A3B's are those that transformers has by default."""
    config = pytest.importorskip("transformers").Qwen3_5MoeTextConfig()
    shape = HYBRIDS["Qwen3.6-35B-A3B"]
    kinds = {"linear_attention": "ME", "full_attention": "*E"}
    assert shape.pattern == "".join(kinds[layer] for layer in config.layer_types)
    assert (shape.hidden, shape.intermediate, shape.shared, shape.vocabulary) == (
        config.hidden_size, config.moe_intermediate_size, config.shared_expert_intermediate_size, config.vocab_size,
    )  # fmt: skip
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.rotary) == (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        config.head_dim * config.rope_parameters["partial_rotary_factor"],
    )  # fmt: skip
    assert (shape.experts, shape.top_k, shape.width) == (
        config.num_experts, config.num_experts_per_tok, config.linear_conv_kernel_dim,
    )  # fmt: skip
    assert (shape.groups, shape.state_heads, shape.key_dim, shape.value_dim) == (
        config.linear_num_key_heads, config.linear_num_value_heads,
        config.linear_key_head_dim, config.linear_value_head_dim,
    )  # fmt: skip
