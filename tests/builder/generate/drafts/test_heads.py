"""Heads draft from the model's hidden states: what they draft, and that no token changes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recorded_drafts import Recorded, reference

from onnx_models.tiny_decoder import VOCAB, TinyDecoder
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.drafts.drafting import Drafting
from trt_nvfp4.builder.generate.sampling import Sampling

from .test_drafts import free, run, runners


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("pieces", [None, 4])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 20, 0.9, 3)], ids=["greedy", "sampled"])
def test_a_head_drafts_from_hidden_states(
    tiny_of: Callable[..., TinyDecoder],
    rng: np.random.Generator,
    tmp_path: Path,
    sampling: Sampling,
    pieces: int | None,
    device: str,
) -> None:
    """Prompts of unequal length, one of a single token, up to full caches; steps that take a prompt in pieces."""
    target = tiny_of(capacity=48, hidden=True)
    for name in ("wo", "positions"):
        target.weights[name] *= 0.1
    head = tiny_of(capacity=48, head=True)
    # A head that often agrees: the target, and a little of what it must read.
    head.weights |= {name: target.weights[name] for name in ("embedding", "head", "wq", "wk", "wv", "wo", "positions")}
    head.weights["previous"] *= 0.3
    model, drafter = target.save(tmp_path / "model.onnx"), head.save(tmp_path / "head.onnx")
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (20, 1, 7)]
    for runner, own in zip(runners(model, device), runners(drafter, device), strict=True):
        plain = run(runner, prompts, 60, sampling)
        if pieces is not None:
            runner.longest_step = own.longest_step = pieces
        recorded = Recorded(own, runner)
        drafting = Drafting(recorded, clock=free)
        assert run(runner, prompts, 60, sampling, drafting=drafting) == plain
        assert len(recorded.drafts) >= 20
        assert 0 < drafting.statistics.accepted < drafting.statistics.drafted
        for text, draft in recorded.drafts:
            assert draft == reference(target, head, text, len(draft))


def test_a_head_that_does_not_fit(tiny_of: Callable[..., TinyDecoder], tmp_path: Path) -> None:
    head = tiny_of(head=True).save(tmp_path / "head.onnx")
    blind, seeing = tiny_of().save(tmp_path / "m.onnx"), tiny_of(hidden=True).save(tmp_path / "h.onnx")
    with pytest.raises(UsageError, match="the model gives out none"):
        Generator(blind, draft=head)
    wide = tiny_of(head=True).save(tmp_path / "wide.onnx", hidden_size=40)
    with pytest.raises(UsageError, match="of width 40, and the model's have 32"):
        Generator(seeing, draft=wide)
    with pytest.raises(UsageError, match="a head, which drafts for another model"), Generator(head) as generator:
        generator.generate([[1]], max_new_tokens=2)


def test_the_head_beside_a_model_drafts(tiny_of: Callable[..., TinyDecoder], tmp_path: Path) -> None:
    model = tiny_of(hidden=True).save(tmp_path / "m.onnx")
    head = tiny_of(head=True).save(tmp_path / "m.draft.onnx")
    for runner in ("auto", "torch"):
        with Generator(model, runner=runner) as generator:
            found = generator.generate([[1, 2, 3]], max_new_tokens=12)
        with Generator(model, runner=runner, draft=head) as generator:
            named = generator.generate([[1, 2, 3]], max_new_tokens=12)
        assert found.generations == named.generations
        assert found.timings.drafts.drafted > 0
        assert named.timings.drafts.drafted > 0
