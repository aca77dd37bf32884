"""Trains the fixtures: a small SwiGLU language model (Llama) and a small mixture of experts (Qwen3-MoE).

Both are Hugging Face directories with BF16 weights, small enough to be committed and trained well enough that
quantization shows. On one H200 both take about two minutes:

    python train.py tokenizer && python train.py llama && python train.py qwen3_moe

Seeds are fixed; other GPUs and versions round differently, so weights trained again are alike, not equal.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

HERE = Path(__file__).parent
VOCABULARY = 1024
CONTEXT = 256
BATCH = 64
LEARNING_RATE = 2e-3
WARMUP = 200
VALIDATION_BYTES = 80_000  # the end of train.txt: which step is kept is decided there

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_SHAPE, intermediate_size=640, num_hidden_layers=4))


def qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **_SHAPE,
        intermediate_size=256,
        moe_intermediate_size=96,
        num_hidden_layers=3,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    model = Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts.forward = _all_experts.__get__(layer.mlp.experts)
    return model


MODELS = {"llama": llama, "qwen3_moe": qwen3_moe}
# Of 0.1 to 0.5, what validated best.
DROPOUT = {"llama": 0.4, "qwen3_moe": 0.3}
STEPS = {"llama": 4000, "qwen3_moe": 3000}


def _all_experts(self: nn.Module, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Every expert computes every token: no waiting for the GPU to say which were chosen."""
    weights = torch.zeros(x.shape[0], self.num_experts, dtype=scores.dtype, device=x.device).scatter(1, chosen, scores)
    gate, up = torch.einsum("th,enh->etn", x, self.gate_up_proj).chunk(2, dim=-1)
    return torch.einsum("eti,ehi,te->th", nn.functional.silu(gate) * up, self.down_proj, weights.to(x.dtype))


def train_tokenizer() -> None:
    """Byte-level BPE on the training text, the same for both models."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train([str(HERE / "text" / "train.txt")], vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"])
    for name in MODELS:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
        tokenizer.save_pretrained(HERE / name)


def dropout(model: nn.Module, p: float) -> None:
    """Dropout on what enters the residual stream; these architectures have none of their own."""

    def drop(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return nn.functional.dropout(output[0], p, module.training), *output[1:]
        return nn.functional.dropout(output, p, module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "self_attn", "mlp")):
            module.register_forward_hook(drop)


def batches(tokens: Tensor, steps: int) -> Iterator[Tensor]:
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - CONTEXT, (BATCH,), device=tokens.device)
        yield tokens[starts[:, None] + torch.arange(CONTEXT, device=tokens.device)]


def cross_entropy(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(name: str) -> None:
    steps = STEPS[name]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = MODELS[name]().cuda()
    dropout(model, DROPOUT[name])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / name)
    text = (HERE / "text" / "train.txt").read_text()
    tokens, validation = (
        torch.tensor(tokenizer.encode(part), device="cuda")
        for part in (text[:-VALIDATION_BYTES], text[-VALIDATION_BYTES:])
    )
    validation = validation[: len(validation) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps) + 1e-3)
    )
    started, best = time.monotonic(), math.inf
    for step, ids in enumerate(batches(tokens, steps), start=1):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 250 == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                validated = cross_entropy(model, validation).item()
            model.train()
            print(f"{name} step {step}: train {loss.item():.3f}, validation {validated:.4f}, "
                  f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
            if validated < best:
                best = validated
                weights = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    model.config.output_router_logits = False
    model.to(torch.bfloat16).load_state_dict(weights)
    model.save_pretrained(HERE / name)
    print(f"{name}: kept validation {best:.4f}, perplexity {math.exp(best):.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tokenizer", *MODELS])
    arguments = parser.parse_args()
    if arguments.what == "tokenizer":
        train_tokenizer()
    else:
        train(arguments.what)


if __name__ == "__main__":
    main()
