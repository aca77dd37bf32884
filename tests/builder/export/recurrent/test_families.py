"""Tiny hybrids with random weights: states in ONNX Runtime generate what transformers generates."""

from pathlib import Path
from typing import Any

import pytest
import torch
from generated_ids import generated
from tiers import tiers

from onnx_models.any_causal_lm import made
from onnx_models.near_ties import assert_same
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.model.decoder_contract import CacheOptions

transformers = pytest.importorskip("transformers")

# One model of each arithmetic; `family_sweep.py` has the others.
QUICK = ("Qwen3_5ForCausalLM", "Lfm2ForCausalLM")
SLOW = ("NemotronHForCausalLM",)
NAMES = (*QUICK, *SLOW, "KimiLinearForCausalLM", "FalconH1ForCausalLM", "MambaForCausalLM", "ZambaForCausalLM")
NAMES += ("RecurrentGemmaForCausalLM", "MiniMaxForCausalLM")
# The keys of an indexer, which chooses 4 tokens to attend to, are a state.
NAMES += ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
NEW_TOKENS = 24


@pytest.mark.parametrize("name", tiers(NAMES, QUICK, SLOW))
def test_generates_what_transformers_generates(tmp_path: Path, seed: int, name: str) -> None:
    """Prompts of unequal length in one batch, in one step and in pieces; a sequence that ended leaves the others be."""
    model = made(name)
    model.save_pretrained(tmp_path / "m")
    path = export(tmp_path / "m", tmp_path / "m.onnx", "auto", CacheOptions(128, max_batch=3))
    torch.manual_seed(seed)
    prompts = [torch.randint(3, 100, (length,)).tolist() for length in (5, 70, 1)]
    expected = [by_transformers(model, prompt) for prompt in prompts]
    runner = OnnxRunner(path)
    assert runner.decoder.states
    for runner.longest_step in (128, 16):
        without_end = generated(runner, prompts, NEW_TOKENS)
        for prompt, found, whole in zip(prompts, without_end, expected, strict=True):
            assert_same(model, prompt, found, whole)
    stop = expected[0][3]
    for found, whole in zip(generated(runner, prompts, NEW_TOKENS, stop), without_end, strict=True):
        assert found == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def by_transformers(model: Any, prompt: list[int]) -> list[int]:
    """transformers' greedy tokens, without an end of text."""
    model.generation_config = transformers.GenerationConfig()
    model.config.eos_token_id = None
    ids = torch.tensor([prompt])
    found = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return list(found[0, len(prompt) :].tolist())
