"""Hybrids verify drafts: their recurrent states go back where a draft is wrong."""

from pathlib import Path

import numpy as np
import pytest

from onnx_models.any_causal_lm import made
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.drafts.drafting import Drafting
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.generate.sampling import Sampling
from trt_nvfp4.builder.generate.torch_runner import TorchRunner
from trt_nvfp4.builder.model.decoder_contract import CacheOptions

from .test_drafts import Oracle, free, run

pytest.importorskip("transformers")

CAPACITY = 128


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    made("Qwen3_5ForCausalLM").save_pretrained(folder / "m")
    return export(folder / "m", folder / "m.onnx", "auto", CacheOptions(CAPACITY, max_batch=3))


@pytest.mark.parametrize("lengths", [(7,), (40, 1, 9)], ids=["alone", "batch"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 20, 0.9, 3)], ids=["greedy", "sampled"])
def test_states_go_back(hybrid: Path, rng: np.random.Generator, lengths: tuple[int, ...], sampling: Sampling) -> None:
    """Drafts with any share of wrong tokens, up to a full cache."""
    runner = OnnxRunner(hybrid)
    assert runner.decoder.states
    prompts = [rng.integers(3, 60, length).tolist() for length in lengths]
    plain = run(runner, prompts, CAPACITY, sampling)
    answers = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
    for wrong in (0.0, 0.2, 1.0):
        drafting = Drafting(Oracle(answers, rng, wrong), clock=free)
        assert run(runner, prompts, CAPACITY, sampling, drafting=drafting) == plain
        assert drafting.statistics.drafted > 0
        assert drafting.statistics.accepted > 20 or wrong == 1


def test_prompt_lookup_is_the_default(hybrid: Path) -> None:
    prompts, found = [[5, 6, 7, 5, 6], list(range(3, 60)), [9]], []
    for draft in (None, "none"):
        with Generator(hybrid, draft=draft) as generator:
            found.append(generator.generate(prompts, max_new_tokens=CAPACITY, stop=[-1]))
    assert found[0].generations == found[1].generations
    assert found[0].timings.drafts.drafted > 0


def test_states_go_back_in_torch(hybrid: Path, rng: np.random.Generator) -> None:
    runner, prompts = TorchRunner(hybrid, "cpu"), [[5, 6, 7], [9]]
    plain = run(runner, prompts, 10)
    drafting = Drafting(
        Oracle([[*p, *tokens] for p, (tokens, _) in zip(prompts, plain, strict=True)], rng, 0.4), clock=free
    )
    assert run(runner, prompts, 10, drafting=drafting) == plain
    assert 0 < drafting.statistics.accepted < drafting.statistics.drafted
