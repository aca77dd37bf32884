"""Continuous batching: requests join and leave the batch between a decoder's steps.

A step feeds every text that waits for its next token: the last one that was generated, and a draft behind it. Prompts
are taken in pieces between the steps, each by itself, so that a piece costs no more than its own tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from trt_nvfp4.builder.errors import BuilderError, UsageError
from trt_nvfp4.builder.generate.drafts.drafter import Drafter
from trt_nvfp4.builder.generate.drafts.drafting import Drafting
from trt_nvfp4.builder.generate.logits import Logits
from trt_nvfp4.builder.generate.loop import Finish
from trt_nvfp4.builder.generate.runner import SlotRunner
from trt_nvfp4.builder.model.decoder_contract import LOGIT_TOKENS
from trt_nvfp4.builder.serve.choice import Choice
from trt_nvfp4.builder.serve.fair_queue import FairQueue
from trt_nvfp4.builder.serve.pace import Pace
from trt_nvfp4.builder.serve.request import Event, Failed, PromptScored, Request, Started
from trt_nvfp4.builder.serve.slots import Place, Slot, place

Told = tuple[Request, Event]
# Tokens of a piece that no text waits for.
_WIDEST = 512


@dataclass
class Statistics:
    """Sums since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0


class _Running:
    """A request in a slot."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = list(request.prompt)
        self.choice = Choice(request)

    @property
    def left(self) -> int:
        """Most tokens that are still to come."""
        return len(self.request.prompt) + self.request.max_new_tokens - len(self.text)

    @property
    def scores_prompt(self) -> bool:
        """Whether the tokens that a step takes are of a prompt whose scores are wanted."""
        return self.request.scores_prompt and len(self.text) == len(self.request.prompt)


@dataclass
class _Fed:
    """The tokens that one running row is fed: of its text, and a draft behind them. `wanted`: the number of last tokens
    whose logits are read."""

    slot: Slot[_Running]
    running: _Running
    tokens: list[int]
    draft: Sequence[int] = ()
    wanted: int = 0

    def __post_init__(self) -> None:
        scored = len(self.tokens) if self.running.scores_prompt else 0
        self.wanted = max(scored, 1 + len(self.draft) if self.reaches_the_end else 0)

    @property
    def reaches_the_end(self) -> bool:
        return len(self.slot.cached) + len(self.tokens) == len(self.running.text)


class Scheduler:
    """Runs the requests of a queue on a runner, in one thread; see the module.

    Greedy text of a request is that of the same request run without others, up to rounding: a step of other sizes may
    add up floating-point numbers in another order.
    """

    def __init__(
        self, runner: SlotRunner, slots: int, queue: FairQueue, deliver: Callable[[list[Told]], None],
        drafter: Drafter | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`slots`: sequences at once. `deliver` takes a step's events, in order. `drafter`: for a decoder without
        recurrent states. Raises UsageError for more slots than the decoder or the drafter takes."""
        decoder = runner.decoder
        if slots > decoder.max_batch:
            raise UsageError(
                f"--slots {slots}: {runner.name} takes at most {decoder.max_batch} sequences at once; give fewer, or "
                "build it with a larger --max-batch",
            )
        self.decoder, self._runner, self._queue, self._clock = decoder, runner, queue, clock
        self._has_states = bool(decoder.states)
        self._logit_tokens = decoder.capacity if decoder.all_logits else decoder.logit_tokens
        #: Tokens of a prompt and what follows it. Where frequencies change, a text would have to run again.
        self.capacity = min(decoder.capacity, decoder.recompute_length or decoder.capacity)
        self.slots = [Slot[_Running](row) for row in range(slots)]
        self.statistics = Statistics()
        self._send, self._events = deliver, list[Told]()
        self._pace = Pace(min(runner.longest_step, decoder.capacity, _WIDEST))
        self.drafting = Drafting(drafter, clock=clock)
        runner.start(slots)
        self.drafting.start(runner, slots)

    def warm_up(self) -> None:
        """Run steps and pieces of every width, whose times the pace of prompts follows. The first of a width chooses
        kernels and is not counted."""
        rows = len(self.slots)
        self._pace.learn_step(_quickest(self._runner.step, rows, 1), 1, 1)
        for width in self._pace.widths:
            self._pace.learn_piece(width, _quickest(partial(self._runner.step_row, 0), 1, width))
        self._runner.start(rows)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return sum(slot.running is not None for slot in self.slots)

    def check(self, request: Request) -> None:
        """Raise UsageError for a prompt that the decoder cannot take."""
        prompt, vocabulary = request.prompt, self.decoder.vocab_size
        if not 1 <= len(prompt) <= self.capacity:
            raise UsageError(f"the prompt has {len(prompt)} tokens, expected 1 to {self.capacity}")
        if not request.pictures and (unknown := [token for token in prompt if not 0 <= token < vocabulary]):
            raise UsageError(f"the prompt holds token {unknown[0]}, and the model knows {vocabulary}")

    def step(self) -> bool:
        """Run one step of the decoder, or take a piece of a prompt; returns False if nothing is to be done."""
        self._drop()
        self._admit()
        active = [(slot, slot.running) for slot in self.slots if slot.running is not None]
        waiting = [(slot, running) for slot, running in active if len(running.text) - len(slot.cached) == 1]
        prompts = [(slot, running) for slot, running in active if len(running.text) - len(slot.cached) > 1]
        width = self._pace.width() if waiting else self._pace.widths[-1]
        begun = time.perf_counter()
        if prompts and width:
            slot, running = min(prompts, key=lambda each: each[0].used)
            taken = self._take_piece(slot, running, width)
            self._pace.learn_piece(taken, time.perf_counter() - begun)
        elif waiting:
            self._take_tokens(waiting, self.decoder.capacity - max(len(slot.cached) for slot, _ in active))
            self._pace.learn_step(time.perf_counter() - begun, len(waiting), len(prompts))
        else:
            self._deliver()
        return bool(active)

    def _take_piece(self, slot: Slot[_Running], running: _Running, width: int) -> int:
        """Cache at most `width` further tokens of a prompt; returns how many."""
        width = min(width, self._logit_tokens) if running.scores_prompt else width
        fed = _Fed(slot, running, running.text[len(slot.cached) : len(slot.cached) + width])
        past, new = np.array([len(slot.cached)]), np.array([len(fed.tokens)])
        logits = self._runner.step_row(slot.row, np.array([fed.tokens]), past, new, max(1, fed.wanted))
        self._read([fed], logits, [slot.row], past, new)
        return len(fed.tokens)

    def _take_tokens(self, waiting: Sequence[tuple[Slot[_Running], _Running]], room: int) -> None:
        """A step of the texts that wait for their next token. `room`: free tokens of every running row."""
        fed = self._feed(waiting, room)
        ids, past, new = self._arrays(fed)
        logits = self._runner.step(ids, past, new, max(each.wanted for each in fed))
        self._read(fed, logits, range(len(self.slots)), past, new)

    def _read(
        self, fed: Sequence[_Fed], logits: Logits, rows: Sequence[int], past: np.ndarray, new: np.ndarray
    ) -> None:
        """Take in the logits of what was fed. `rows`: those of the caches that wrote `new` tokens at `past`, and whose
        logits these are."""
        self._deliver()  # what came before, while the device computes this
        self.drafting.observe(past, new, rows)
        self.statistics.steps += 1
        count = max(1, *(each.wanted for each in fed))
        ends = [(rows.index(each.slot.row) + 1) * count for each in fed]
        read = [range(end - each.wanted, end) for each, end in zip(fed, ends, strict=True)]
        greedy = [
            row
            for each, own in zip(fed, read, strict=True)
            if each.reaches_the_end and each.running.choice.is_greedy
            for row in own[-1 - len(each.draft) :]
        ]
        # A device waits for the numbers of rows, and copies these.
        is_all = len(greedy) == len(rows) * count
        likeliest = (logits if is_all else logits.rows(greedy or [0])).likeliest(1)
        known = {
            row: int(token) if finite else None
            for row, token, finite in zip(greedy, likeliest.ids[:, 0], likeliest.finite, strict=False)
        }
        for each, own in zip(fed, read, strict=True):
            self._advance(each, logits, own, known)
        if not logits.is_pending:
            self._deliver()

    def _emit(self, request: Request, event: Event) -> None:
        self._events.append((request, event))

    def _deliver(self) -> None:
        """Give the events out that have come since the last time."""
        if self._events:
            events, self._events = self._events, []
            self._send(events)

    def _drop(self) -> None:
        """End the requests that nobody waits for, or for too long."""
        now = self._clock()
        late = self._queue.drop(now)
        for slot in self.slots:
            if slot.running is None:
                continue
            request = slot.running.request
            if request.deadline <= now and not request.is_cancelled:
                late.append(request)
            if request.deadline <= now or request.is_cancelled:
                slot.running = None
        for request in late:
            self._emit(request, Failed("deadline", "the request took longer than its deadline allows"))

    def _admit(self) -> None:
        while any(slot.running is None for slot in self.slots) and (request := self._queue.take()) is not None:
            if request.is_cancelled:
                continue
            found = place(self.slots, [] if request.scores_prompt else request.prompt, self._has_states)
            assert found is not None
            self._occupy(found, request)

    def _occupy(self, found: Place[_Running], request: Request) -> None:
        slot = found.slot
        if found.source is not None:
            self._runner.copy_row(found.source.row, slot.row)
        elif self._has_states and not found.reused:
            self._runner.clear_row(slot.row)
        slot.cached = list(request.prompt[: found.reused])
        slot.used = 1 + max(each.used for each in self.slots)
        slot.running = _Running(request)
        self.drafting.begin(slot.row, slot.row if found.source is None else found.source.row, found.reused)
        self._emit(request, Started(len(request.prompt), found.reused))
        self.statistics.prompt_tokens += len(request.prompt)
        self.statistics.reused_tokens += found.reused

    def _feed(self, waiting: Sequence[tuple[Slot[_Running], _Running]], room: int) -> list[_Fed]:
        """The last token of each text, and a draft behind it."""
        # A draft makes all rows wider, whose padding, too, must lie within the caches. Where few run, the step is still
        # one pass over the weights.
        most = min(LOGIT_TOKENS // len(waiting), room, self._logit_tokens) - 1
        texts: list[Sequence[int]] = [slot.cached for slot in self.slots]
        limits = [0] * len(self.slots)
        for slot, running in waiting:
            texts[slot.row] = running.text
            limits[slot.row] = min(most, running.left - 1, self.capacity - len(running.text))
        drafts = self.drafting.propose(texts, limits)
        return [_Fed(slot, running, running.text[-1:], drafts[slot.row]) for slot, running in waiting]

    def _arrays(self, fed: Sequence[_Fed]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The step's tokens, how many each row has cached and how many it takes. A row that is not fed writes its last
        token once more; one with states takes none."""
        width = max(len(each.tokens) + len(each.draft) for each in fed)
        ids = np.zeros((len(self.slots), width), np.int64)
        past, new = np.zeros(len(self.slots), np.int64), np.zeros(len(self.slots), np.int64)
        for each in fed:
            tokens = [*each.tokens, *each.draft]
            ids[each.slot.row, : len(tokens)] = tokens
            past[each.slot.row], new[each.slot.row] = len(each.slot.cached), len(tokens)
        fed_rows = {each.slot.row for each in fed}
        for slot in self.slots:
            if slot.row not in fed_rows:
                past[slot.row], new[slot.row] = self._idle(slot, width)
                ids[slot.row, 0] = (slot.cached or [0])[-1]
        return ids, past, new

    def _idle(self, slot: Slot[_Running], width: int) -> tuple[int, int]:
        """(cached, new) of a row that runs along; what the padding behind it overwrites is forgotten."""
        new = 0 if self._has_states else 1
        room = self.decoder.capacity - width + new
        if len(slot.cached) > room:
            slot.cached = [] if self._has_states else slot.cached[:room]
        return max(len(slot.cached) - new, 0), new

    def _advance(self, fed: _Fed, logits: Logits, rows: Sequence[int], known: dict[int, int | None]) -> None:
        slot, running = fed.slot, fed.running
        scored = running.scores_prompt
        begin = len(slot.cached) + 1
        slot.cached += fed.tokens
        try:
            if scored:
                following = running.text[begin : begin + len(rows)]
                scores = running.choice.scores(logits, rows[: len(following)], following)
                self._emit(running.request, PromptScored(scores))
            if len(slot.cached) == len(running.text):
                self._generate(fed, logits, rows[-1 - len(fed.draft) :], known)
        except BuilderError as error:
            self._emit(running.request, Failed("request" if isinstance(error, UsageError) else "model", str(error)))
            slot.running, slot.cached = None, []
            self._runner.clear_row(slot.row)  # masked NaN would be NaN in the next text, too

    def _generate(self, fed: _Fed, logits: Logits, rows: Sequence[int], known: dict[int, int | None]) -> None:
        """Choose the token behind the text, and behind every token of the draft that was chosen."""
        slot, running, draft = fed.slot, fed.running, fed.draft
        accepted = 0
        for at, row in enumerate(rows):
            token = running.choice.choose(logits, row, running.text, known)
            running.text.append(token)
            self.statistics.generated_tokens += 1
            was_drafted = draft[at : at + 1] == [token]
            accepted += was_drafted
            finish = self._finish(running, token)
            self._emit(running.request, running.choice.event(token, finish))
            if finish is not None:
                slot.running = None
            if finish is not None or not was_drafted:
                break
        slot.cached += draft[:accepted][: len(running.text) - 1 - len(slot.cached)]
        self.drafting.learn(slot.row, len(draft), accepted)

    def _finish(self, running: _Running, token: int) -> Finish | None:
        request = running.request
        if token in request.stop or running.choice.is_complete:
            return "stop"
        if running.left == 0:
            return "length"
        return "capacity" if len(running.text) > self.capacity else None


def _quickest(step: Callable[[np.ndarray, np.ndarray, np.ndarray, int], Logits], rows: int, width: int) -> float:
    """The seconds that the quickest of three steps takes, behind one that is not counted."""
    ids, past, new = np.zeros((rows, width), np.int64), np.zeros(rows, np.int64), np.full(rows, width, np.int64)
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        step(ids, past, new, 1).rows([0]).likeliest(1)
        times.append(time.perf_counter() - begun)
    return min(times[1:])
