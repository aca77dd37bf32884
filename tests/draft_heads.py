"""Tiny checkpoints with heads that draft, of random weights, in the names that their families publish."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from trt_nvfp4.builder.model.decoder_contract import decoder_of
from trt_nvfp4.builder.model.onnx_file import opened
from trt_nvfp4.builder.model.onnx_session import session

WIDTH, VOCABULARY = 64, 96
#: Of caches in tests.
CAPACITY = 16
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
_EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2}
_LINEAR = {f"linear_{part}": 2 if "num" in part else 16 for part in ("num_key_heads", "num_value_heads")}
_LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16, "num_hidden_layers": 4}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16}

#: Family -> (class of its configuration, its values, what stands before the names of the head's layer, of its two
#: norms, projection and last norm).
MTP: dict[str, tuple[str, dict[str, Any], str, Sequence[str]]] = {
    "glm4_moe": (
        "Glm4Moe", {**_GROUPS, **_EXPERTS, "head_dim": 16},
        "model.layers.2.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    ),
    "deepseek_v3": (
        "DeepseekV3", {**_GROUPS, **_EXPERTS, **_LATENT, "num_key_value_heads": 4, "num_nextn_predict_layers": 1},
        "model.layers.2.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**_LINEAR, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
         "shared_expert_intermediate_size": 32},
        "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    ),
    "mimo": (
        "Qwen2", {"num_hidden_layers": 2},
        "model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ),
    "nemotron_h": (
        "NemotronH",
        {**_MAMBA, **_EXPERTS, "head_dim": 16, "moe_shared_expert_intermediate_size": 32,
         "layers_block_type": ["mamba", "attention", "moe"], "mtp_layers_block_type": ["attention", "moe"]},
        "mtp.", ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm"),
    ),
}  # fmt: skip


def write_mtp(family: str, folder: Path) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Write a checkpoint, and return its head by the family's own layers: (ids, hidden states) -> (logits, hidden
    states)."""
    torch.manual_seed(0)
    kind, values, prefix, names = MTP[family]
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**_COMMON, **values})
    ).eval()
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    layers = list(model.get_decoder().layers)[-2 if family == "nemotron_h" else -1 :]
    number = len(model.get_decoder().layers) - len(layers)
    own: dict[str, str] = {}
    for key in state:
        place, _, rest = key.partition(".layers.")[2].partition(".")
        if place.isdecimal() and int(place) >= number:
            inner = f"layers.{int(place) - number}." if prefix == "mtp." else ""
            own[key] = f"{prefix}{inner}{rest}"
    head = {name: torch.randn_like(state[key]) * 0.1 for key, name in own.items()}
    norms = [0.1 * torch.randn(WIDTH) + 1 for _ in range(3)]
    projection = torch.randn(WIDTH, 2 * WIDTH) * 0.1
    for name, tensor in zip(names, (*norms[:2], projection, norms[2]), strict=True):
        head[f"{prefix}{name}.weight"] = tensor
    # The reference: the model's own last layers, with the head's weights.
    save_file({**state, **head}, folder / "model.safetensors", {"format": "pt"})
    (other := folder / "reference").mkdir()
    last = {key: head[name] for key, name in own.items()}
    save_file({**state, **last}, other / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(other)
    model = type(model).from_pretrained(other, attn_implementation="eager").eval()
    layers = list(model.get_decoder().layers)[number:]
    shifted = family == "qwen3_next"  # its norms multiply by 1 + weight

    def norm(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = getattr(model.config, "rms_norm_eps", None) or model.config.layer_norm_epsilon
        scaled = tensor * torch.rsqrt(tensor.pow(2).mean(-1, keepdim=True) + eps)
        return scaled * (weight + 1 if shifted else weight)

    @torch.no_grad()
    def reference(ids: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = [norm(model.get_input_embeddings()(ids), norms[0]), norm(previous, norms[1])]
        hidden = torch.cat(both[::-1] if family == "mimo" else both, -1) @ projection.T
        positions = torch.arange(ids.shape[1])[None]
        mask = torch.full((ids.shape[1],) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        extra = {} if rotary is None else {"position_embeddings": rotary(hidden, positions)}
        for layer in layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, **extra)
        hidden = norm(hidden, norms[2])
        return model.get_output_embeddings()(hidden), hidden

    return reference


def write_eagle(target: Any, folder: Path, **changed: Any) -> dict[str, torch.Tensor]:
    """Write an EAGLE-3 head for a Llama as SpecForge publishes them, with a draft vocabulary of half the target's, and
    return its tensors."""
    config = target.config
    width, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    size, inner = config.vocab_size // 2, 3 * width // 2
    shapes = {
        **{f"midlayer.self_attn.{n}_proj.weight": (heads * dim, 2 * width) for n in "qkv"},
        "midlayer.self_attn.o_proj.weight": (width, heads * dim),
        **{f"midlayer.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": (width, inner),
        **{f"midlayer.{n}.weight": (width,) for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "fc.weight": (width, 3 * width),
        "norm.weight": (width,),
        "lm_head.weight": (size, width),
    }
    torch.manual_seed(1)
    state = {name: 0.1 * torch.randn(shape) + (len(shape) == 1) for name, shape in shapes.items()}
    targets = torch.randperm(config.vocab_size)[:size].sort().values
    state |= {"d2t": targets - torch.arange(size), "t2d": torch.zeros(config.vocab_size, dtype=torch.bool)}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    stated = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": size,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    (folder / "config.json").write_text(json.dumps({**stated, **changed}))
    return state


def llama(folder: Path) -> Any:
    """A Llama of four layers, which also lies in `folder`."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_COMMON, num_hidden_layers=4, head_dim=16)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def stepped(path: Path, ids: np.ndarray, previous: np.ndarray, lengths: list[list[int]]) -> list[np.ndarray]:
    """[logits, hidden states] of all valid tokens of two sequences, which get `lengths` tokens in each step."""
    decoder = decoder_of(opened(path).proto)
    assert decoder is not None
    assert decoder.takes_hidden
    runtime = session(opened(path))
    shape = (len(ids), decoder.kv_heads[0], CAPACITY)
    caches = [
        np.zeros((*shape, (decoder.value_head_dim if name.endswith("value") else decoder.head_dim)[0]), np.float32)
        for name in decoder.caches
    ]
    past = np.zeros(len(ids), np.int64)
    found: list[list[list[np.ndarray]]] = [[[], []] for _ in ids]
    for new in map(np.array, lengths):
        index = np.minimum(past[:, None] + np.arange(new.max()), ids.shape[1] - 1)
        given = np.take_along_axis(ids, index, 1), np.take_along_axis(previous, index[..., None], 1)
        feeds = {"input_ids": given[0], "past_length": past, "new_length": new, "previous_hidden_states": given[1]}
        names = ["logits", "hidden_states", *decoder.presents]
        logits, hidden, *caches = runtime.run(names, feeds | dict(zip(decoder.caches, caches, strict=True)))
        for row, count in enumerate(new):
            found[row][0].append(logits[row, -count:])
            found[row][1].append(hidden[row, :count])
        past = past + new
    return [np.stack([np.concatenate(row[part]) for row in found]) for part in (0, 1)]
