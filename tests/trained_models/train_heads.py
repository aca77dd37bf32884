"""Trains heads that draft for the fixtures: an EAGLE-3 head for `llama`, and the `mtp.*` layer of `qwen3_moe`.

Minutes on two cores each: python train_heads.py eagle3 && python train_heads.py mtp

A head learns the target's probabilities, as it is used: its first token from the target's hidden states, the next ones
from its own (EAGLE-3's training-time test, Li et al. 2025, section 3). Seeds are fixed; other versions round
differently, so weights trained again are alike, not equal.
"""

import argparse
import copy
import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedTokenizerFast

from trt_nvfp4.builder.export.draft_heads.eagle import EagleHead, states_for_eagle
from trt_nvfp4.builder.export.draft_heads.head import Head, HiddenStates, last_hidden_states, with_hidden_states
from trt_nvfp4.builder.export.draft_heads.mtp import MTPHead, one_layer_config

HERE = Path(__file__).parent
DRAFTED = 4  # tokens of a draft in training
BATCH, CONTEXT = 8, 96
LEARNING_RATE = 2e-3
WARMUP = 20
DRAFT_VOCABULARY = 640
#: Weight of each later token's loss, to the power of its place.
DECAY = 0.8


def eagle3(target: Any, tokens: list[int]) -> tuple[Head, HiddenStates]:
    """Knows the training text's most frequent tokens only, as published heads do."""
    text = target.config
    config = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=DRAFT_VOCABULARY,
        # The layers behind which hidden states are read.
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True},
        num_hidden_layers=1,
        tie_word_embeddings=False,
        **{name: getattr(text, name) for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id",
        )},
    )  # fmt: skip
    head = EagleHead(config, text.hidden_size)
    known = sorted(token for token, _ in Counter(tokens).most_common(DRAFT_VOCABULARY))
    head.model.lm_head.take_targets(torch.tensor(known))
    head.model.lm_head.weight.data = target.lm_head.weight.data[known].clone()
    head.model.model.embed_tokens.weight = target.get_input_embeddings().weight
    return head, states_for_eagle(target, head)


def mtp(target: Any, tokens: list[int]) -> tuple[Head, HiddenStates]:
    """Starts as a copy of the target's last layer, and shares its embeddings."""
    config = one_layer_config(target.config)
    model = type(target)(config)
    model.model.layers[0].load_state_dict(target.model.layers[-1].state_dict())
    model.model.norm.load_state_dict(target.model.norm.state_dict())
    model.model.embed_tokens.weight = target.get_input_embeddings().weight
    model.tie_weights()
    return MTPHead(model), last_hidden_states(target)


HEADS = {"eagle3": eagle3, "mtp": mtp}
TARGETS = {"eagle3": "llama", "mtp": "qwen3_moe"}
STEPS = {"eagle3": 480, "mtp": 300}


def masks(context: int) -> list[Tensor]:
    """For each token of a draft, which keys its positions see, [1, 1, context, keys]: those of the true text up to
    where the draft begins, and of each of its earlier tokens the one at its place."""
    place = torch.arange(context)
    behind = place[:, None] - place
    return [
        torch.cat([behind >= step, *(behind == step - before for before in range(1, step + 1))], 1)[None, None]
        for step in range(DRAFTED)
    ]


def losses(head: Head, hidden: Tensor, logits: Tensor, ids: Tensor, visible: list[Tensor]) -> tuple[Tensor, Tensor]:
    """([DRAFTED] mean cross entropies with the target's probabilities, [DRAFTED] shares of equal likeliest tokens)."""
    cache = DynamicCache()
    wanted = logits[:, 1:]
    places = torch.arange(wanted.shape[1])[None]
    found, equal = [], []
    for step, mask in enumerate(visible):
        drafted, own = with_hidden_states(
            head, head.hidden_states(), input_ids=ids[:, 1:], previous_hidden_states=hidden, position_ids=places,
            attention_mask=torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min),
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        drafted, expected = drafted[:, step:], wanted[:, step:]
        expected = expected.masked_fill(drafted == torch.finfo(drafted.dtype).min, -math.inf)
        entropies = nn.functional.cross_entropy(
            drafted.flatten(0, 1), expected.softmax(-1).flatten(0, 1), reduction="none"
        )
        found.append(entropies.mean())
        equal.append((drafted.argmax(-1) == wanted[:, step:].argmax(-1)).float().mean())
        hidden = nn.functional.pad(own[:, :-1], (0, 0, 1, 0))
    return torch.stack(found), torch.stack(equal)


def train(name: str, steps: int) -> None:
    random.seed(0)
    torch.manual_seed(0)
    target = (
        AutoModelForCausalLM.from_pretrained(HERE / TARGETS[name], dtype=torch.float32).eval().requires_grad_(False)
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / TARGETS[name])
    tokens = tokenizer.encode((HERE / "text" / "train.txt").read_text())
    head, states = HEADS[name](target, tokens)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps) + 1e-3)
    )
    text, visible = torch.tensor(tokens), masks(CONTEXT)
    weights = DECAY ** torch.arange(DRAFTED)
    started = time.monotonic()
    for step in range(1, steps + 1):
        begin = torch.randint(0, len(text) - CONTEXT, (BATCH, 1))
        ids = text[begin + torch.arange(CONTEXT + 1)]
        logits, hidden = with_hidden_states(target, states, input_ids=ids, use_cache=False)
        loss, equal = losses(head, hidden[:, :-1], logits, ids, visible)
        (loss * weights).sum().backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 0 or step == steps:
            shares = ", ".join(f"{share:.2f}" for share in equal)
            print(
                f"{name} step {step}: loss {loss[0]:.3f}, equal {shares}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    SAVE[name](head)


def save_eagle3(head: Any) -> None:
    """As SpecForge publishes heads: `d2t` holds what is added to a token of the head's own."""
    folder = HERE / "llama_eagle3"
    folder.mkdir(exist_ok=True)
    places = head.model.lm_head.places
    known = (places < DRAFT_VOCABULARY).nonzero()[:, 0]
    renamed = {"model.model.layers.0.": "midlayer.", "model.model.": "", "model.": "", "fuse.": ""}
    tensors = {}
    for name, tensor in head.state_dict().items():
        old = next(prefix for prefix in renamed if name.startswith(prefix))
        if "embed_tokens" not in name:
            tensors[renamed[old] + name.removeprefix(old)] = tensor.to(torch.bfloat16).contiguous()
    tensors |= {"d2t": known - torch.arange(DRAFT_VOCABULARY), "t2d": places < DRAFT_VOCABULARY}
    save_file(tensors, folder / "model.safetensors")
    config = head.config.to_diff_dict() | {"target_hidden_size": head.config.hidden_size, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_mtp(head: Any) -> None:
    """As Qwen3-Next names a head's tensors. A directory with them is the target's with this file beside its own."""
    layer = copy.deepcopy(head.model.model.layers[0])
    state = {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    gate_up, down = (state.pop(f"layers.0.mlp.experts.{name}") for name in ("gate_up_proj", "down_proj"))
    for expert, (both, back) in enumerate(zip(gate_up, down, strict=True)):
        parts = zip(("gate_proj", "up_proj", "down_proj"), (*both.chunk(2), back), strict=True)
        state |= {f"layers.0.mlp.experts.{expert}.{name}.weight": part for name, part in parts}
    state |= {
        "pre_fc_norm_embedding.weight": head.embedding_norm.weight,
        "pre_fc_norm_hidden.weight": head.hidden_norm.weight,
        "fc.weight": head.projection.weight,
        "norm.weight": head.model.model.norm.weight,
    }
    folder = HERE / "qwen3_moe_mtp"
    folder.mkdir(exist_ok=True)
    tensors = {f"mtp.{name}": tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "mtp.safetensors")


SAVE = {"eagle3": save_eagle3, "mtp": save_mtp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*HEADS])
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    train(arguments.what, arguments.steps or STEPS[arguments.what])


if __name__ == "__main__":
    main()
