"""Continuous batching: requests join and leave the batch between a decoder's steps.

A step feeds each running row its next tokens: the last one that was generated and a draft behind it, or a piece of its
prompt. All rows take as many tokens as the widest (padding costs time, and is overwritten by the tokens that follow).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
# Tokens of a row in a step that no sequence waits for.
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
    """The input of a step for one running row: tokens of its text, and a draft behind them. `wanted`: the number of
    last tokens whose logits are read."""

    slot: Slot[_Running]
    running: _Running
    tokens: list[int]
    draft: list[int]
    wanted: int

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
        self.drafting = Drafting(drafter)
        runner.start(slots)
        self.drafting.start(runner, slots)

    def warm_up(self) -> None:
        """Run steps of every width, whose times the pace of prompts follows. The first of a width chooses kernels and
        is not counted."""
        rows = len(self.slots)
        for width in self._pace.widths:
            self._pace.learn(width, min([self._timed(width, rows) for _ in range(4)][1:]))
        self._runner.start(rows)

    def _timed(self, width: int, rows: int) -> float:
        begun = time.perf_counter()
        ids, past = np.zeros((rows, width), np.int64), np.zeros(rows, np.int64)
        self._runner.step(ids, past, np.full(rows, width, np.int64)).rows([0]).likeliest(1)
        return time.perf_counter() - begun

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
        """Run one step of the decoder; returns False if nothing is to be done."""
        self._drop()
        self._admit()
        fed = self._feed()
        if not fed:
            self._deliver()
            return False
        begun = time.perf_counter()
        ids, past, new = self._arrays(fed)
        count = max(1, *(each.wanted for each in fed))
        logits = self._runner.step(ids, past, new, count)
        self._deliver()  # those of the step before, while the device computes this one
        self.drafting.observe(past, new)
        greedy = [
            row
            for each in fed
            if each.reaches_the_end and each.running.choice.is_greedy
            for row in self._rows(each, count)[-1 - len(each.draft) :]
        ]
        likeliest = None
        if greedy:  # a device waits for the numbers of rows, and copies these
            is_all = len(greedy) == len(self.slots) * count
            likeliest = (logits if is_all else logits.rows(greedy)).likeliest(1)
        known = {} if likeliest is None else {
            row: int(token) if finite else None
            for row, token, finite in zip(greedy, likeliest.ids[:, 0], likeliest.finite, strict=True)
        }  # fmt: skip
        self._pace.learn(ids.shape[1], time.perf_counter() - begun)
        self.statistics.steps += 1
        for each in fed:
            self._advance(each, logits, self._rows(each, count), known)
        if not logits.is_pending:
            self._deliver()
        return True

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

    def _feed(self) -> list[_Fed]:
        active = [(slot, slot.running) for slot in self.slots if slot.running is not None]
        if not active:
            return []
        waits = [len(running.text) - len(slot.cached) == 1 for slot, running in active]
        # Padding, too, must lie within the caches.
        room = self.decoder.capacity - max(len(slot.cached) for slot, _ in active)
        width = min(self._pace.width(sum(waits), len(waits) - sum(waits)), room)
        # A draft makes all rows wider: where few run, the step is still one pass over the weights.
        most = min(LOGIT_TOKENS // len(active), room, self._logit_tokens) - 1 if all(waits) else 0
        texts: list[Sequence[int]] = [slot.cached for slot in self.slots]
        limits = [0] * len(self.slots)
        for slot, running in active:
            texts[slot.row] = running.text
            limits[slot.row] = min(most, running.left - 1, self.capacity - len(running.text))
        drafts = self.drafting.propose(texts, limits)
        fed = []
        for slot, running in active:
            tokens = running.text[len(slot.cached) : len(slot.cached) + width]
            if running.scores_prompt:
                tokens = tokens[: self._logit_tokens]
            draft = drafts[slot.row]
            each = _Fed(slot, running, tokens, draft, len(tokens) if running.scores_prompt else 0)
            each.wanted = max(each.wanted, 1 + len(draft) if each.reaches_the_end else 0)
            fed.append(each)
        return fed

    def _arrays(self, fed: Sequence[_Fed]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The step's tokens, how many each row has cached and how many it takes. A row without a request writes its
        last token once more; one with states takes none."""
        width = max(len(each.tokens) + len(each.draft) for each in fed)
        ids = np.zeros((len(self.slots), width), np.int64)
        past, new = np.zeros(len(self.slots), np.int64), np.zeros(len(self.slots), np.int64)
        for each in fed:
            tokens = [*each.tokens, *each.draft]
            ids[each.slot.row, : len(tokens)] = tokens
            past[each.slot.row], new[each.slot.row] = len(each.slot.cached), len(tokens)
        for slot in self.slots:
            if slot.running is None:
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

    @staticmethod
    def _rows(fed: _Fed, count: int) -> range:
        """The rows of a step's logits that are read for one sequence, at its end."""
        end = (fed.slot.row + 1) * count
        return range(end - fed.wanted, end)

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
