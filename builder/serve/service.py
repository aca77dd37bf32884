"""From a checked body to the pieces of its answer."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from trt_nvfp4.builder.components.picture_slots import Picture, PictureSlots
from trt_nvfp4.builder.generate.sampling import Sampling
from trt_nvfp4.builder.generate.tokenizer import TextStream, Tokenizer
from trt_nvfp4.builder.serve.engine import Engine
from trt_nvfp4.builder.serve.failures import ApiError
from trt_nvfp4.builder.serve.grammar import Grammars
from trt_nvfp4.builder.serve.metrics import Metrics
from trt_nvfp4.builder.serve.prompts import Prompts
from trt_nvfp4.builder.serve.protocol import ChatRequest, Common
from trt_nvfp4.builder.serve.request import Event, Failed, Generated, PromptScored, Request, Started

_STATUS = {"deadline": 504, "model": 500, "request": 400}


#: The number of a text, what has become certain of it, and what happened.
Piece = tuple[int, str, Generated | PromptScored]


@dataclass(frozen=True)
class Wanted:
    """Requested extras beside the text: `top_scores` of likely tokens (None: no scores), scores of the prompt's tokens,
    a JSON `schema` that the text must follow. `seconds`: until the deadline."""

    client: str
    most_tokens: int
    seconds: float
    top_scores: int | None = None
    scores_prompt: bool = False
    schema: dict[str, Any] | None = None
    pictures: Sequence[Picture] = ()


class Service:
    """The engine, tokenizer and prompts that all requests share."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, prompts: Prompts, model: str, slots: PictureSlots | None = None
    ) -> None:
        """`model`: the name that clients know. `slots`: of a model that takes images."""
        self.engine, self.tokenizer, self.prompts, self.model = engine, tokenizer, prompts, model
        self._slots = slots
        self.metrics = Metrics(engine)
        self._ends = frozenset(engine.scheduler.decoder.eos_token_ids)
        self.token_text = lru_cache(maxsize=1 << 18)(self._token_text)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.engine.scheduler.decoder)

    def _token_text(self, token: int) -> str:
        return str(self.tokenizer.wrapped.decode([token]))

    @property
    def takes_images(self) -> bool:
        return self._slots is not None

    async def of_chat(self, body: ChatRequest) -> tuple[list[int], list[Picture]]:
        """The tokens of a chat, and its images as the decoder sees them. Raises ApiError or UsageError for what the
        template, the images or their places are not."""
        ids, pixels = await self.prompts.of_chat(body.messages, body.tools if body.tool_choice != "none" else [])
        if not pixels:
            return ids, []
        assert self._slots is not None
        pictures = [await asyncio.wrap_future(self.engine.call(partial(self._slots.see, each))) for each in pixels]
        return self._slots.placed(ids, pictures), pictures

    async def start(self, body: Common, prompts: Sequence[Sequence[int]], wanted: Wanted) -> "Running":
        """Let `body.n` texts for each prompt wait for their slots. Raises UsageError for prompts that do not fit,
        QueueFullError."""
        sampling, stop = _sampling(body), frozenset() if body.ignore_eos else self._ends
        deadline = time.monotonic() + wanted.seconds
        requests = [
            Request(
                prompt,
                wanted.most_tokens,
                sampling,
                stop,
                number=number,
                top_scores=wanted.top_scores,
                scores_prompt=wanted.scores_prompt,
                client=wanted.client,
                deadline=deadline,
                pictures=wanted.pictures,
            )
            for prompt in prompts
            for number in range(body.n)
        ]
        if wanted.schema is not None:
            for request in requests:
                request.constraint = await asyncio.to_thread(self._grammars.json, wanted.schema)
        running = Running(self, requests, body)
        self.engine.submit(requests, [partial(running.take, number) for number in range(len(requests))])
        return running


class Running:
    """The texts of one answer while they are generated."""

    def __init__(self, service: Service, requests: Sequence[Request], body: Common) -> None:
        self.requests, self._body = requests, body
        self.generated_tokens = 0
        self.first_token_s: float | None = None
        self._metrics, self._engine = service.metrics, service.engine
        self._streams = [TextStream(service.tokenizer, body.stops) for _ in requests]
        self._started: dict[int, Started] = {}
        self._times = [time.perf_counter()] * len(requests)
        self._waiting, self._unfinished = set(range(len(requests))), set(range(len(requests)))
        self._events: list[tuple[int, Event]] = []
        self._has_come = asyncio.Event()

    def take(self, number: int, event: Event) -> None:
        """The next event of a text."""
        self._events.append((number, event))
        self._has_come.set()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """All pieces, those that have come together, until every text has its end. Raises ApiError where one fails."""
        while self._unfinished:
            await self._has_come.wait()
            self._has_come.clear()
            events, self._events = self._events, []
            found: list[Piece] = []
            for number, event in events:
                if isinstance(event, Generated) and number in self._unfinished:  # none behind a stop string
                    found.append(self._piece(number, event))
                elif isinstance(event, PromptScored):
                    found.append((number, "", event))
                elif isinstance(event, Started):
                    self._started[number] = event
            if found:
                yield found
            for _, event in events:
                if isinstance(event, Failed):
                    raise ApiError(_STATUS[event.reason], event.message)

    def _piece(self, number: int, event: Generated) -> Piece:
        """A token with its text, which ends at a stop string."""
        now = time.perf_counter()
        took, self._times[number] = now - self._times[number], now
        if number in self._waiting:
            self._waiting.remove(number)
            self._metrics.first_token.observe(took)
            self.first_token_s = self.first_token_s or round(took, 4)
        else:
            self._metrics.next_token.observe(took)
        self.generated_tokens += 1
        stream, request = self._streams[number], self.requests[number]
        if event.id not in request.stop:
            stream.add(event.id)
        if stream.is_stopped:
            event = event._replace(finish="stop")
            self._engine.cancel([request])
        if event.finish is not None:
            self._unfinished.remove(number)
        return number, stream.take(event.finish is not None), event

    def close(self) -> None:
        """End what nobody waits for."""
        self._engine.cancel(self.requests)

    def usage(self) -> dict[str, Any]:
        """Tokens, as OpenAI counts them."""
        started = [event for number, event in self._started.items() if number % self._body.n == 0]
        prompt = sum(event.prompt_tokens for event in started)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated_tokens,
            "total_tokens": prompt + self.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(event.reused for event in started)},
        }


def _sampling(body: Common) -> Sampling:
    penalties = (body.repetition_penalty, body.presence_penalty, body.frequency_penalty)
    if body.temperature == 0:
        return Sampling(0.0, None, None, None, *penalties)
    seed = secrets.randbits(63) if body.seed is None else body.seed % (1 << 64)
    top_k = body.top_k if body.top_k is not None and body.top_k > 0 else None
    return Sampling(body.temperature, top_k, body.top_p if body.top_p < 1 else None, seed, *penalties)
