"""Requests that join and leave a running batch, against each one alone."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from generated_ids import generated
from prometheus_client import generate_latest
from recorded_drafts import Recorded, reference

from onnx_models.any_causal_lm import made
from onnx_models.fake_gpu import TRT, FakeEngine, FakeRuntime
from onnx_models.near_ties import assert_same
from onnx_models.tiny_decoder import VOCAB, TinyDecoder
from trt_nvfp4.builder.cuda.runtime import Cuda
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.generate.drafts.drafter import Drafter
from trt_nvfp4.builder.generate.drafts.model import ModelDrafter
from trt_nvfp4.builder.generate.drafts.ngram import NgramDrafter
from trt_nvfp4.builder.generate.loop import generate_ids
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.generate.sampling import Sampling
from trt_nvfp4.builder.generate.tensorrt_runner import TensorRTRunner
from trt_nvfp4.builder.generate.torch_runner import TorchRunner
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.builder.serve.fair_queue import FairQueue, QueueFullError
from trt_nvfp4.builder.serve.metrics import Metrics
from trt_nvfp4.builder.serve.request import Event, Failed, Generated, PromptScored, Request, Started
from trt_nvfp4.builder.serve.scheduler import Scheduler, Told

SLOTS = 4


@pytest.fixture
def tiny(rng: np.random.Generator) -> TinyDecoder:
    return TinyDecoder(rng, capacity=48)


@dataclass
class Served:
    """A scheduler, what it gives out, the times of its clock, and the sizes of its decoder's steps."""

    scheduler: Scheduler
    queue: FairQueue
    events: dict[Request, list[Event]]
    told: list[Told]
    now: float = 0.0
    steps: list[tuple[list[int], list[int], int]] = field(default_factory=list)

    def ask(self, prompt: list[int], count: int = 8, **more: Any) -> tuple[Request, list[Event]]:
        request = Request(prompt, count, **more)
        events = self.events[request] = []
        self.scheduler.check(request)
        self.queue.put(request)
        return request, events

    def reused(self, request: Request) -> int:
        (started,) = (event for event in self.events[request] if isinstance(event, Started))
        return started.reused

    def run(self) -> None:
        while self.scheduler.step():
            pass


def served(
    runner: Any, slots: int = SLOTS, longest: int = 100, drafts: bool = True, drafter: Drafter | None = None
) -> Served:
    """`drafts`: by n-grams, unless a `drafter` is given."""
    queue = FairQueue(longest)
    chosen = drafter or (NgramDrafter() if drafts and not runner.decoder.states else None)
    events: dict[Request, list[Event]] = {}
    all_told: list[Told] = []

    def deliver(told: list[Told]) -> None:
        all_told.extend(told)
        for request, event in told:
            events[request].append(event)

    found = Served(Scheduler(runner, slots, queue, deliver, chosen, lambda: found.now), queue, events, all_told)
    step, step_row = runner.step, runner.step_row

    def noted(ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> Any:
        found.steps.append((past.tolist(), new.tolist(), ids.shape[1]))
        assert (past + ids.shape[1] <= runner.decoder.capacity).all()
        return step(ids, past, new, count)

    def piece(row: int, *given: Any) -> Any:
        runner.step = step
        ids, past, new, _ = given
        found.steps.append((past.tolist(), new.tolist(), ids.shape[1]))
        assert (past + ids.shape[1] <= runner.decoder.capacity).all()
        try:
            return step_row(row, *given)
        finally:
            runner.step = noted

    runner.step, runner.step_row = noted, piece
    return found


def ids(events: list[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, Generated)]


def onnx_runner(tiny: TinyDecoder, folder: Path) -> Any:
    return OnnxRunner(tiny.save(folder / "model.onnx"))


def torch_runner(tiny: TinyDecoder, folder: Path) -> Any:
    return TorchRunner(tiny.save(folder / "model.onnx"), "cpu")


def tensorrt_runner(tiny: TinyDecoder, folder: Path) -> Any:
    runtime = FakeRuntime()
    engine = FakeEngine(tiny.save(folder / "model.onnx"), runtime, [(1, 48), (1, 16)], batch=SLOTS)
    return TensorRTRunner(engine, TRT, tiny.decoder, "model.engine", Cuda(runtime))


def knowing_drafter(tiny: TinyDecoder, rng: np.random.Generator, folder: Path) -> Drafter:
    """The model itself: all that it drafts for greedy texts is right."""
    return ModelDrafter(OnnxRunner(tiny.save(folder / "drafter.onnx")), onnx_runner(tiny, folder))


def other_drafter(tiny: TinyDecoder, rng: np.random.Generator, folder: Path) -> Drafter:
    """Another model with a smaller cache, which hardly drafts a right token."""
    other = TinyDecoder(rng, capacity=32)
    return ModelDrafter(OnnxRunner(other.save(folder / "drafter.onnx")), onnx_runner(tiny, folder))


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        (onnx_runner, None),
        (torch_runner, None),
        (tensorrt_runner, None),
        (onnx_runner, knowing_drafter),
        (onnx_runner, other_drafter),
    ],
)
def test_each_text_is_that_of_a_lone_run(
    kind: Any, drafter: Any, tiny: TinyDecoder, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Random arrivals, lengths, shared beginnings, cancellations and sampling; the slots are never idle for long."""
    server = served(kind(tiny, tmp_path), drafter=drafter and drafter(tiny, rng, tmp_path))
    stems = [rng.integers(0, VOCAB, 20).tolist() for _ in range(2)]
    asked = []
    for number in range(40):
        stem = stems[number % 2][: int(rng.integers(0, 21))]
        prompt = [*stem, *rng.integers(0, VOCAB, int(rng.integers(1, 21))).tolist()]
        sampling = Sampling(1.0, top_k=5, seed=number) if number % 5 == 0 else Sampling()
        request, events = server.ask(prompt, int(rng.integers(1, 30)), sampling=sampling, client=str(number % 3))
        asked.append((request, events))
        for _ in range(int(rng.integers(0, 6))):
            server.scheduler.step()
        if number % 7 == 0:
            asked[int(rng.integers(0, len(asked)))][0].is_cancelled = True
    server.run()
    assert (server.scheduler.running, len(server.queue)) == (0, 0)
    lone = OnnxRunner(tiny.save(tmp_path / "lone.onnx"))
    for request, events in asked:
        found = ids(events)
        if request.is_cancelled:
            assert all(isinstance(event, (Started, Generated)) for event in events)
            continue
        steps = generate_ids(lone, [list(request.prompt)], request.max_new_tokens, request.sampling)
        expected = [token for step in steps for token in step]
        assert found == [token.id for token in expected]
        assert isinstance(events[-1], Generated)
        assert events[-1].finish == expected[-1].finish
    sums = server.scheduler.statistics
    assert sums.reused_tokens > 0
    drafts = server.scheduler.drafting.statistics
    assert drafts.drafted > 0
    if drafter is knowing_drafter:  # texts are drawn, too, and drafts go beyond an end
        assert drafts.accepted > 0.6 * drafts.drafted


@pytest.mark.parametrize(
    ("kind", "own"), [(onnx_runner, onnx_runner), (torch_runner, torch_runner), (onnx_runner, torch_runner)]
)
def test_a_heads_drafts_are_those_of_each_text_alone(
    kind: Any, own: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Whatever ran in its slot before, and whichever slot its beginning was copied from."""
    target, head = TinyDecoder(rng, capacity=48, hidden=True), TinyDecoder(rng, capacity=48, head=True)
    head.weights |= {name: target.weights[name] for name in ("embedding", "head", "wq", "wk", "wv", "wo", "positions")}
    head.weights["previous"] *= 0.3
    (tmp_path / "head").mkdir()
    runner = kind(target, tmp_path)
    recorded = Recorded(own(head, tmp_path / "head"), runner)
    server = served(runner, drafter=recorded)
    stem = rng.integers(0, VOCAB, 20).tolist()
    asked = []
    for number in range(20):
        prompt = [*stem[: int(rng.integers(0, 21))], int(rng.integers(0, VOCAB))]
        asked.append(
            server.ask(
                prompt, int(rng.integers(2, 8)), sampling=Sampling(1.0, seed=number) if number % 2 else Sampling()
            )
        )
        for _ in range(int(rng.integers(0, 5))):
            server.scheduler.step()
    server.run()
    lone = OnnxRunner(target.save(tmp_path / "lone.onnx"))
    for request, events in asked:
        steps = generate_ids(lone, [list(request.prompt)], request.max_new_tokens, request.sampling)
        assert ids(events) == [token.id for step in steps for token in step]
    assert server.scheduler.statistics.reused_tokens > 0
    assert len(recorded.drafts) >= 10
    for text, draft in recorded.drafts:
        assert draft == reference(target, head, text, len(draft))


def test_a_drafter_goes_on_behind_a_reused_prompt(tiny: TinyDecoder, rng: np.random.Generator, tmp_path: Path) -> None:
    """Its own caches follow the slots': copied ones, continued ones, and those of a prompt of one token."""
    server = served(onnx_runner(tiny, tmp_path), drafter=knowing_drafter(tiny, rng, tmp_path))
    statistics = server.scheduler.drafting.statistics
    stem = rng.integers(0, VOCAB, 20).tolist()
    for prompt in ([3], stem, [*stem, 1], [*stem[:18], 2], stem):
        first = server.ask(prompt, 10)
        second = server.ask([*prompt, 4], 10)
        before = statistics.drafted, statistics.accepted
        server.run()
        for request, events in (first, second):
            assert ids(events) == tiny.greedy(list(request.prompt), 10)
        drafted, accepted = (
            now - then for now, then in zip((statistics.drafted, statistics.accepted), before, strict=True)
        )
        assert drafted == accepted > 0
    engine: Any = SimpleNamespace(scheduler=server.scheduler, queue=server.queue)
    shown = generate_latest(Metrics(engine).registry).decode()
    for place, (drafted, accepted) in enumerate(statistics.by_position, 1):
        assert f'trt_nvfp4_drafted_tokens_by_place_total{{place="{place}"}} {drafted}.0' in shown
        assert f'trt_nvfp4_accepted_tokens_by_place_total{{place="{place}"}} {accepted}.0' in shown
    assert server.scheduler.statistics.reused_tokens > 20


def test_a_long_prompt_goes_in_pieces_between_the_tokens_of_others(tiny: TinyDecoder, tmp_path: Path) -> None:
    runner = onnx_runner(tiny, tmp_path)
    server = served(runner, drafts=False)
    seconds = dict.fromkeys((1, 2, 4), 1.5) | dict.fromkeys((8, 16, 32), 4.0)  # a longer piece takes too long
    pace = server.scheduler._pace
    pace._seconds, learn_step, learn_piece = seconds, pace.learn_step, pace.learn_piece
    pace.learn_step = lambda _, *texts: learn_step(1.0, *texts)  # type: ignore[method-assign]
    pace.learn_piece = lambda width, _: learn_piece(width, seconds.get(width, 1.0))  # type: ignore[method-assign]
    _, short = server.ask([1, 2], 30)
    server.scheduler.step()
    _, long = server.ask([3] * 45, 2)
    before, begun = len(short), len(server.steps)
    while not ids(long):
        server.scheduler.step()
    taken = server.steps[begun:]
    assert [width for *_, width in taken] == [1, 4] * 11 + [1]  # a token of the other with every piece
    assert len(short) - before == 12
    server.run()
    assert ids(long) == tiny.greedy([3] * 45, 2)
    _, alone = server.ask([4] * 40, 1)
    begun = len(server.steps)
    server.run()
    assert len(server.steps) - begun == 2  # nobody waits: 32 tokens, and 8 behind them
    assert ids(alone) == tiny.greedy([4] * 40, 1)


def test_a_second_turn_takes_its_new_tokens_only(tiny: TinyDecoder, tmp_path: Path) -> None:
    server = served(onnx_runner(tiny, tmp_path), drafts=False)
    first = [5, 9, 2] * 6
    _, events = server.ask(first, 6)
    server.run()
    turn = [*first, *ids(events), 7, 8]
    request, second = server.ask(turn, 4)
    begun = len(server.steps)
    server.run()
    assert server.reused(request) == len(turn) - 3  # the last token of an answer is not cached
    assert server.steps[begun][1] == [3]
    assert ids(second) == tiny.greedy(turn, 4)
    _, running = server.ask([*first[:16], 1], 25)
    server.scheduler.step()
    request, copied = server.ask([*first, 3], 4)  # the other slots' beginning, of one that runs
    server.run()
    assert server.reused(request) >= 16
    assert ids(copied) == tiny.greedy([*first, 3], 4)
    assert ids(running) == tiny.greedy([*first[:16], 1], 25)


def test_a_second_turn_of_2000_tokens(rng: np.random.Generator, tmp_path: Path) -> None:
    """Beside other texts: all that its first turn computed is used, not only a slot's beginning."""
    tiny = TinyDecoder(rng, capacity=2048)
    server = served(onnx_runner(tiny, tmp_path), drafts=False)
    first = rng.integers(0, VOCAB, 2000).tolist()
    _, events = server.ask(first, 6)
    for _ in range(SLOTS - 1):
        server.ask(rng.integers(0, VOCAB, 20).tolist(), 4)
    server.run()
    turn = [*first, *ids(events), *rng.integers(0, VOCAB, 9).tolist()]
    request, second = server.ask(turn, 2)
    begun = len(server.steps)
    server.run()
    assert server.reused(request) == 2005
    assert sum(max(new) for _, new, _ in server.steps[begun:]) == 10 + 1  # the prompt's new tokens, one generated
    assert ids(second) == tiny.greedy(turn, 2)


def test_scores_are_those_of_all_tokens_at_once(tiny: TinyDecoder, rng: np.random.Generator, tmp_path: Path) -> None:
    server = served(onnx_runner(tiny, tmp_path))
    prompt = rng.integers(0, VOCAB, 30).tolist()
    server.ask(prompt, 3)
    server.run()
    _, events = server.ask(prompt, 2, scores_prompt=True, top_scores=3)
    server.run()
    scores = [score for event in events if isinstance(event, PromptScored) for score in event.scores]
    scores += [event.score for event in events if isinstance(event, Generated) and event.score is not None]
    text = [*prompt, *ids(events)]
    logits = tiny.logits(text).astype(float)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose([score.logprob for score in scores], expected[range(31), text[1:]], atol=1e-4)
    assert [[token for token, _ in score.top] for score in scores] == np.argsort(-expected)[:31, :3].tolist()


def test_clients_take_turns_and_late_or_unwanted_requests_end(tiny: TinyDecoder, tmp_path: Path) -> None:
    server = served(onnx_runner(tiny, tmp_path), slots=1, longest=5)
    for client in ("a", "a", "a", "b"):
        server.ask([1], 1, client=client)
    _, late = server.ask([1], 1, deadline=5.0)
    with pytest.raises(QueueFullError):
        server.ask([1], 1)
    server.now = 6.0
    server.run()
    order = [request.client for request, event in server.told if isinstance(event, Generated)]
    assert order == ["a", "b", "a", "a"]
    assert [type(event) for event in late] == [Failed]
    _, running = server.ask([1], 20, deadline=7.0)
    server.scheduler.step()
    server.now = 8.0
    server.run()
    assert isinstance(running[-1], Failed)
    assert running[-1].reason == "deadline"
    assert 2 < len(running) < 21


def test_a_text_whose_logits_are_no_numbers_leaves_the_others_be(tiny: TinyDecoder, tmp_path: Path) -> None:
    tiny.weights["embedding"][7] = math.nan
    server = served(onnx_runner(tiny, tmp_path))
    _, wrong = server.ask([1, 7, 2], 5)
    _, scored = server.ask([7, 2], 5, top_scores=1)
    _, right = server.ask([1, 2], 5)
    server.run()
    assert [event.reason for event in (*wrong, *scored) if isinstance(event, Failed)] == ["model"] * 2
    assert len(wrong) == len(scored) == 2
    assert len(ids(right)) == 5 or 7 in ids(right)
    after = [server.ask([1, token], 5)[1] for token in (3, 4, 5, 6)]
    server.run()
    assert all(len(ids(events)) == 5 or 7 in ids(events) for events in after)


def test_what_the_decoder_cannot_take(tiny: TinyDecoder, tmp_path: Path) -> None:
    runner = onnx_runner(tiny, tmp_path)
    with pytest.raises(UsageError, match=r"--slots 5: .* at most 4 sequences"):
        served(runner, slots=5)
    server = served(OnnxRunner(tiny.save(tmp_path / "long.onnx", recompute_length=20)))
    for prompt, message in ([], "0 tokens"), ([1] * 21, "expected 1 to 20"), ([VOCAB], f"token {VOCAB}"):
        with pytest.raises(UsageError, match=message):
            server.ask(prompt)
    _, events = server.ask([1] * 18, 9)
    server.run()
    assert (len(ids(events)), events[-1].finish) == (3, "capacity")  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_hybrids_states_are_those_of_its_own_text(tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("transformers")
    model = made("Lfm2ForCausalLM")
    model.save_pretrained(tmp_path / "m")
    runner = OnnxRunner(export(tmp_path / "m", tmp_path / "m.onnx", "auto", CacheOptions(64, max_batch=2)))
    prompts = [rng.integers(3, 100, count).tolist() for count in rng.integers(1, 30, 7)]
    lone = [generated(runner, [prompt], 10)[0] for prompt in prompts]
    server = served(runner, slots=2)
    asked = [server.ask(prompt, 10) for prompt in prompts]
    server.run()
    for prompt, (_, events), expected in zip(prompts, asked, lone, strict=True):
        assert_same(model, prompt, ids(events), expected)
    turn = [*prompts[-1], *ids(asked[-1][1]), 5]
    request, events = server.ask(turn, 5)
    server.run()
    assert server.reused(request) == len(turn) - 2
    assert_same(model, turn, ids(events), generated(runner, [turn], 5)[0])
