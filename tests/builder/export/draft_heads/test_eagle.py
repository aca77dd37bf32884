"""EAGLE-3 heads: what is exported computes what the published description says, in the target and in the head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import CAPACITY, VOCABULARY, WIDTH, llama, stepped, write_eagle
from safetensors.torch import save_file

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.export.huggingface import export, export_head
from trt_nvfp4.builder.model.decoder_contract import CacheOptions, decoder_of
from trt_nvfp4.builder.model.onnx_file import opened
from trt_nvfp4.builder.model.onnx_session import session


def norm(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt(tensor.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def reference(
    state: dict[str, torch.Tensor], embeds: torch.Tensor, previous: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target's vocabulary, and hidden states."""
    layer = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in state.items()}
    both = torch.cat((norm(embeds, layer["input_layernorm"]), norm(previous, layer["hidden_norm"])), -1)
    query, key, value = (
        (both @ layer[f"self_attn.{name}_proj"].T).unflatten(-1, (-1, 16)).transpose(1, 2) for name in "qkv"
    )
    angles = torch.arange(both.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    query, key = (part * cos + torch.cat((-part[..., 8:], part[..., :8]), -1) * sin for part in (query, key))
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = previous + mixed.transpose(1, 2).flatten(2) @ layer["self_attn.o_proj"].T
    normed = norm(hidden, layer["post_attention_layernorm"])
    gated = torch.nn.functional.silu(normed @ layer["mlp.gate_proj"].T) * (normed @ layer["mlp.up_proj"].T)
    hidden = hidden + gated @ layer["mlp.down_proj"].T
    known = norm(hidden, state["norm.weight"]) @ state["lm_head.weight"].T
    logits = torch.full((*known.shape[:2], VOCABULARY), torch.finfo(torch.float32).min)
    logits[..., torch.arange(known.shape[-1]) + state["d2t"]] = known
    return logits, hidden


def test_target_and_head(tmp_path: Path) -> None:
    model = llama(tmp_path / "model")
    state = write_eagle(model, tmp_path / "head")
    options = CacheOptions(CAPACITY, 2, draft=str(tmp_path / "head"))
    export_head(tmp_path / "model", tmp_path / "t.draft.onnx", options)
    rng = np.random.default_rng(0)
    ids, previous = rng.integers(0, VOCABULARY, (2, 8)), rng.standard_normal((2, 8, WIDTH)).astype(np.float32)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.from_numpy(ids))
        expected = reference(state, embeds, torch.from_numpy(previous))
        target = model(torch.from_numpy(ids), output_hidden_states=True).hidden_states
    found = stepped(tmp_path / "t.draft.onnx", ids, previous, [[3, 5], [1, 1], [4, 2]])
    for result, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, whole, rtol=2e-3, atol=2e-4)

    export(tmp_path / "model", tmp_path / "t.onnx", "generate", options)
    decoder = decoder_of(opened(tmp_path / "t.onnx").proto)
    assert decoder is not None
    assert decoder.hidden_size == WIDTH
    caches = {name: np.zeros((2, 2, CAPACITY, 16), np.float32) for name in decoder.caches}
    lengths = {"past_length": np.zeros(2, np.int64), "new_length": np.full(2, 8)}
    (states,) = session(opened(tmp_path / "t.onnx")).run(["hidden_states"], {"input_ids": ids, **lengths, **caches})
    fused = torch.cat([target[number + 1] for number in (0, 1, 2)], -1) @ state["fc.weight"].T
    np.testing.assert_allclose(states, fused, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hidden_size": 32}, "trained for hidden states of width 32, and the model has 64"),
        ({"vocab_size": 128}, "trained for a vocabulary of 128, and the model has 96"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}},
            "before the layers 2, 3, 10 .* which has 4",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "abc"}}, "must be three numbers of layers"),
        ({"num_key_value_heads": 2}, "not an EAGLE-3 head as its config.json says: .*k_proj"),
        ({"draft_vocab_size": 20}, "not an EAGLE-3 head as its config.json says: .*lm_head"),
        ({"rope_theta": "x"}, "not an EAGLE-3 head as its config.json says"),
    ],
)
def test_heads_that_do_not_fit(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = llama(tmp_path / "model")
    write_eagle(model, tmp_path / "head", **changed)
    with pytest.raises(ModelFaultError, match=says):
        export_head(tmp_path / "model", tmp_path / "t.onnx", CacheOptions(CAPACITY, draft=str(tmp_path / "head")))


@pytest.mark.parametrize(
    "d2t",
    [
        torch.zeros(VOCABULARY // 2 - 1, dtype=torch.int64),
        torch.zeros(VOCABULARY // 2),
        torch.full((VOCABULARY // 2,), VOCABULARY),
        torch.full((VOCABULARY // 2,), -1),
    ],
    ids=["shorter", "float", "beyond", "negative"],
)
def test_vocabularies_that_do_not_fit(d2t: torch.Tensor, tmp_path: Path) -> None:
    state = write_eagle(llama(tmp_path / "model"), tmp_path / "head")
    save_file({**state, "d2t": d2t}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ModelFaultError, match=r"head: d2t is .*; it must map 48 tokens to the model's 96"):
        export_head(tmp_path / "model", tmp_path / "t.onnx", CacheOptions(CAPACITY, draft=str(tmp_path / "head")))
