"""Generation with drafts gives the tokens of generation without: any drafts, runner, sampling and end."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from onnx_models.tiny_decoder import VOCAB, TinyDecoder
from trt_nvfp4.builder.errors import BuilderError, UsageError
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.caches import last_logits
from trt_nvfp4.builder.generate.drafts.drafter import Drafter
from trt_nvfp4.builder.generate.drafts.drafting import Drafting
from trt_nvfp4.builder.generate.drafts.model import ModelDrafter
from trt_nvfp4.builder.generate.drafts.ngram import NgramDrafter
from trt_nvfp4.builder.generate.logits import HostLogits
from trt_nvfp4.builder.generate.loop import Finish, generate_ids
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.generate.sampling import Sampling
from trt_nvfp4.builder.generate.torch_runner import TorchRunner

Found = list[tuple[list[int], Finish | None]]


def free() -> float:
    """A clock by which drafts cost nothing."""
    return 0.0


class Oracle(Drafter):
    """Drafts `answers`, the whole texts, with a share of wrong tokens and of drafts that are cut short."""

    name = "oracle"

    def __init__(self, answers: Sequence[Sequence[int]], rng: np.random.Generator, wrong: float) -> None:
        self._answers, self._rng, self._wrong = answers, rng, wrong

    def start(self, batch: int) -> None:
        assert batch == len(self._answers)

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        drafts = []
        for text, answer, most in zip(texts, self._answers, wanted, strict=True):
            length = int(self._rng.integers(0, most + 1)) if self._rng.random() < 0.3 else most
            draft = [*answer[len(text) :], *self._rng.integers(0, VOCAB, 16).tolist()][:length]
            lost = self._rng.random(len(draft)) < self._wrong
            drafts.append([(token + 1) % VOCAB if bad else token for token, bad in zip(draft, lost, strict=True)])
        return drafts


def run(
    runner: Any,
    prompts: list[list[int]],
    count: int,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    drafting: Drafting | None = None,
) -> Found:
    found: Found = [([], None) for _ in prompts]
    for tokens in generate_ids(runner, prompts, count, sampling or Sampling(), stop, drafting):
        for token in tokens:
            assert found[token.sequence][1] is None, "a token behind a sequence's end"
            found[token.sequence] = ([*found[token.sequence][0], token.id], token.finish)
    return found


def runners(model: Path, device: str = "cpu") -> list[Any]:
    return [OnnxRunner(model), TorchRunner(model, device)]


@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 20, 0.9, 3)], ids=["greedy", "sampled"])
def test_any_drafts_change_no_token(
    tiny_of: Callable[..., Any], rng: np.random.Generator, tmp_path: Path, sampling: Sampling, wrong: float
) -> None:
    tiny = tiny_of(capacity=64)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (9, 1, 4, 30)]
    for runner in runners(tiny.save(tmp_path / "model.onnx")):
        plain = run(runner, prompts, 40, sampling)
        answers = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
        drafting = Drafting(Oracle(answers, rng, wrong), clock=free)
        assert run(runner, prompts, 40, sampling, drafting=drafting) == plain
        statistics = drafting.statistics
        assert statistics.drafted == sum(drafted for drafted, _ in statistics.by_position)
        assert statistics.accepted == sum(accepted for _, accepted in statistics.by_position)
        if wrong == 0:
            assert statistics.steps < 40  # as many as without drafts
        if wrong == 1:
            assert statistics.accepted < 0.2 * statistics.drafted


def test_ends_within_a_draft(tiny_of: Callable[..., Any], rng: np.random.Generator, tmp_path: Path) -> None:
    """A stop token, the last token asked for, a full cache, and the length at which a text runs again."""
    tiny = tiny_of(capacity=24)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (9, 1, 4)]
    for changed in ({}, {"recompute_length": 11}):
        runner = OnnxRunner(tiny.save(tmp_path / "model.onnx", **changed))
        whole = run(runner, prompts, 24)
        assert whole[0][1] == "capacity"
        answers = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, whole, strict=True)]
        for count, stop in ((24, ()), (7, ()), (24, (whole[1][0][5],))):
            drafting = Drafting(Oracle(answers, rng, 0.1), clock=free)
            assert run(runner, prompts, count, stop=stop, drafting=drafting) == run(runner, prompts, count, stop=stop)
            assert drafting.statistics.accepted > 0


def test_what_stood_before_is_drafted() -> None:
    drafter = NgramDrafter()
    drafter.start(2)
    text = [1, 2, 3, 4, 5, 6, 7, 2, 3]
    assert drafter.propose([text, [8, 9]], [3, 3]) == [[4, 5, 6], []]
    text += [9, 9, 1, 2, 3, 4]  # a longer ending than [3, 4], which continued the same way
    assert drafter.propose([text, [8, 9, 8, 9]], [2, 5]) == [[5, 6], [8, 9, 8, 9, 8]]
    assert drafter.propose([[*text, 5], [8, 9, 8, 9, 0]], [0, 4]) == [[], []]


def test_repeating_text_takes_fewer_steps(tiny_of: Callable[..., Any], tmp_path: Path) -> None:
    """A model that goes in circles, as greedy ones do."""
    tiny = tiny_of(capacity=256)
    tiny.weights["positions"] *= 0
    for name in ("wq", "wk", "wv", "wo"):
        tiny.weights[name] *= 0.01
    with Generator(tiny.save(tmp_path / "model.onnx")) as generator:
        found = generator.generate([[3, 1, 4]], max_new_tokens=200)
    with Generator(tmp_path / "model.onnx", draft="none") as generator:
        plain = generator.generate([[3, 1, 4]], max_new_tokens=200)
    assert found.generations == plain.generations
    assert (plain.timings.drafts.drafted, plain.timings.drafts.steps) == (0, 200)
    assert found.timings.drafts.steps < 100


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_small_model_drafts(
    tiny_of: Callable[..., Any], rng: np.random.Generator, tmp_path: Path, device: str
) -> None:
    """The model itself, all of whose drafts are right, and another one, none of whose are; shorter caches too."""
    tiny, other = tiny_of(capacity=40), tiny_of(capacity=24)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (20, 1, 4)]
    model = tiny.save(tmp_path / "model.onnx")
    for draft, right in ((model, True), (other.save(tmp_path / "other.onnx"), False)):
        for runner, own in zip(runners(model, device), runners(draft, device), strict=True):
            plain = run(runner, prompts, 18)
            drafting = Drafting(ModelDrafter(own, runner), clock=free)
            for _ in range(2):
                assert run(runner, prompts, 18, drafting=drafting) == plain
            statistics = drafting.statistics
            assert (statistics.accepted == statistics.drafted) == right
            assert statistics.drafted > 0


def test_drafts_that_do_not_fit_are_refused(tiny_of: Callable[..., Any], tmp_path: Path) -> None:
    model, other = tiny_of().save(tmp_path / "model.onnx"), tiny_of(vocab=80, max_batch=1).save(tmp_path / "o.onnx")
    for draft, words in ((other, "knows 80 tokens and the model 64"), (tmp_path / "none.onnx", "no such file")):
        with pytest.raises(UsageError, match=words):
            Generator(model, draft=draft)
    single = tiny_of().save(tmp_path / "single.onnx", logit_tokens=1)
    with Generator(single) as generator:  # no drafts where nobody asked for them
        generator.generate([[1]], max_new_tokens=2)
    with pytest.raises(BuilderError, match="no draft can be verified"), Generator(single, draft="ngram") as generator:
        generator.generate([[1]], max_new_tokens=2)
    small = tiny_of(max_batch=1).save(tmp_path / "small.onnx")
    with pytest.raises(BuilderError, match="takes at most 1 at once"), Generator(model, draft=small) as generator:
        generator.generate([[1], [2]], max_new_tokens=2)


class Table:
    """A model whose logits depend on the last token alone."""

    name, longest_step = "table", 24

    def __init__(self, tiny: TinyDecoder, batch: int, logits: np.ndarray) -> None:
        self.decoder = replace(tiny.decoder, max_batch=batch, vocab_size=len(logits), all_logits=True)
        self._logits = logits

    def start(self, batch: int) -> None:
        pass

    def step(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> HostLogits:
        return HostLogits(last_logits(self.decoder, self._logits[ids], new, count))


class Following(Drafter):
    """Drafts token + 1 behind each token."""

    name = "following"

    def start(self, batch: int) -> None:
        pass

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        return [[(text[-1] + 1 + n) % 4 for n in range(most)] for text, most in zip(texts, wanted, strict=True)]


@pytest.mark.parametrize("drafter", [None, Following()], ids=["plain", "drafts"])
def test_the_distribution_stays(tiny_of: Callable[..., Any], rng: np.random.Generator, drafter: Drafter | None) -> None:
    """50,000 draws of three tokens, of which drafts hold the last two: chi-square against their exact probabilities."""
    draws, sampling = 50_000, Sampling(0.8, seed=5)
    logits = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    drafting = Drafting(drafter, clock=free)
    found = run(Table(tiny_of(), draws, logits), [[0]] * draws, 3, sampling, drafting=drafting)
    if drafter is not None:
        assert 0.2 * draws < drafting.statistics.accepted < 0.8 * draws * 2
    steps = np.exp(logits.astype(np.float64) / sampling.temperature)
    steps /= steps.sum(-1, keepdims=True)
    expected = draws * (steps[0][:, None, None] * steps[:, :, None] * steps[None]).ravel()
    codes = np.array([tokens for tokens, _ in found]) @ [16, 4, 1]
    counts = np.bincount(codes, minlength=64)
    assert (counts.sum(), expected.min() > 5) == (draws, True)
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3
