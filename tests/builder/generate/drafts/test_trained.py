"""Trained heads: no token changes, and their drafts are right more often than chance could make them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import tiers
from trained_heads import CAPACITY, HEADS, TRAINED, exported, prompts
from transformers import AutoModelForCausalLM

from onnx_models.near_ties import assert_same
from trt_nvfp4.builder.generate.drafts.drafting import Drafting
from trt_nvfp4.builder.generate.drafts.model import ModelDrafter
from trt_nvfp4.builder.generate.drafts.ngram import NgramDrafter
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner

from .test_drafts import Found, free, run

#: The accepted share of first drafted tokens; a head that knows nothing is right once in hundreds.
FLOOR = 0.25
CASES = [(head, drafter, batch) for head in HEADS for drafter in ("head", "ngram", "small model") for batch in (1, 4)]


@cache
def model_of(folder: Path, head: str) -> tuple[OnnxRunner, Any, list[list[int]]]:
    """Its runner, transformers' own and prompts of unequal length."""
    reference = AutoModelForCausalLM.from_pretrained(TRAINED / HEADS[head], dtype=torch.float32)
    texts = [text[: 1 + 3 * number] for number, text in enumerate(prompts(length=40))]
    return OnnxRunner(exported(head, folder)), reference, texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


def in_batches(
    runner: OnnxRunner, texts: list[list[int]], batch: int, count: int, drafting: Drafting
) -> tuple[Found, list[int]]:
    """The texts, and how many first tokens of drafts were drafted and accepted."""
    found: Found = []
    first = [0, 0]
    for begin in range(0, len(texts), batch):
        found += run(runner, texts[begin : begin + batch], count, drafting=drafting)
        for counts in drafting.statistics.by_position[:1]:
            first = [first[0] + counts[0], first[1] + counts[1]]
    return found, first


def accepted_share(folder: Path, head: str, drafter: str, batch: int, most: int, count: int) -> float:
    """The accepted share of first drafted tokens. Compares the texts of `most` prompts, `count` tokens each, with those
    without drafts, one by one."""
    runner, reference, texts = model_of(folder, head)
    if drafter == "ngram":
        drafting = Drafting(NgramDrafter(), clock=free)
    else:
        other = next(name for name in HEADS if name != head)
        file = exported(head, folder).with_suffix(".draft.onnx") if drafter == "head" else exported(other, folder)
        drafting = Drafting(ModelDrafter(OnnxRunner(file), runner), clock=free)
    plain, _ = in_batches(runner, texts[:most], 1, count, Drafting())
    found, (drafted, accepted) = in_batches(runner, texts[:most], batch, count, drafting)
    for text, (tokens, finish), (expected, why) in zip(texts, found, plain, strict=False):
        assert finish == why
        assert_same(reference, text, tokens, expected)
    return accepted / drafted


def test_a_trained_head(folder: Path) -> None:
    assert accepted_share(folder, "eagle3", "head", batch=4, most=4, count=48) > FLOOR


@pytest.mark.parametrize("case", tiers(CASES, slow=[case for case in CASES if case[2] == 4]))
def test_every_drafter(folder: Path, case: tuple[str, str, int]) -> None:
    """Ten prompts, up to full caches."""
    head, drafter, batch = case
    assert accepted_share(folder, head, drafter, batch, most=10, count=CAPACITY) > (FLOOR if drafter == "head" else 0)
