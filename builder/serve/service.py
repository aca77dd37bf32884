"""From a checked body to the pieces of its answer."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from trt_nvfp4.builder.components.picture_slots import Picture, PictureSlots
from trt_nvfp4.builder.generate.sampling import Sampling
from trt_nvfp4.builder.generate.tokenizer import TextStream, Tokenizer
from trt_nvfp4.builder.serve.engine import Engine
from trt_nvfp4.builder.serve.failures import ApiError
from trt_nvfp4.builder.serve.grammar import Grammars, JsonConstraint
from trt_nvfp4.builder.serve.metrics import Metrics
from trt_nvfp4.builder.serve.prompts import Prompts
from trt_nvfp4.builder.serve.protocol import ChatRequest, Common
from trt_nvfp4.builder.serve.request import Event, Failed, Generated, Request

_STATUS = {"deadline": 504, "model": 500, "request": 400, "stopped": 503}


#: The number of a text, what has become certain of it, and what happened.
Piece = tuple[int, str, Event]


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


class Outbox:
    """Events on their way from the decoder's thread to the event loop, which is woken once for all that have come: each
    waking costs the decoder time."""

    def __init__(self) -> None:
        self._events: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._is_woken = False

    def put(self, loop: asyncio.AbstractEventLoop, take: Callable[[Event], None], event: Event) -> None:
        """Let `take` have the event, in the loop."""
        self._events.append((take, event))
        if not self._is_woken and not loop.is_closed():
            self._is_woken = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # before the last look: what comes behind it wakes again
        while self._events:
            take, event = self._events.popleft()
            take(event)


class Service:
    """The engine, tokenizer and prompts that all requests share."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, prompts: Prompts, model: str, slots: PictureSlots | None = None
    ) -> None:
        """`model`: the name that clients know. `slots`: of a model that takes images."""
        self.engine, self.tokenizer, self.prompts, self.model = engine, tokenizer, prompts, model
        self._slots = slots
        self.metrics = Metrics(engine)
        self.outbox = Outbox()
        self._ends = frozenset(engine.scheduler.decoder.eos_token_ids)
        self.token_text = lru_cache(maxsize=1 << 18)(self._token_text)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.engine.scheduler.decoder)

    def _constraint(self, schema: dict[str, Any] | None) -> JsonConstraint | None:
        return None if schema is None else self._grammars.json(schema)

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
        running = Running(self, [list(prompt) for prompt in prompts for _ in range(body.n)])
        sampling = _sampling(body)
        deadline = time.monotonic() + wanted.seconds
        try:
            for number, prompt in enumerate(running.prompts):
                stream = TextStream(self.tokenizer, body.stops)
                constraint = await asyncio.to_thread(self._constraint, wanted.schema)
                request = Request(
                    prompt,
                    wanted.most_tokens,
                    running.emitter(number, stream, bool(body.stops)),
                    sampling,
                    frozenset() if body.ignore_eos else self._ends,
                    _ends(stream) if body.stops else None,
                    constraint,
                    number % body.n,
                    wanted.top_scores,
                    wanted.scores_prompt,
                    wanted.client,
                    deadline,
                    wanted.pictures,
                )
                running.requests.append(request)
                self.engine.submit(request)
        except BaseException:
            running.close()
            raise
        return running


class Running:
    """The texts of one answer while they are generated: their pieces, from the decoder's thread to the event loop."""

    def __init__(self, service: Service, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.requests: list[Request] = []
        self.generated_tokens = 0
        self.first_token_s: float | None = None
        self._metrics, self._outbox = service.metrics, service.outbox
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._times = [time.perf_counter()] * len(prompts)

    def emitter(self, choice: int, stream: TextStream, has_stops: bool) -> Callable[[Event], None]:
        """A function that takes the events of one choice, in the decoder's thread. Text is made in the event loop while
        the decoder goes on, but where stop strings have been looked for in it."""

        def take(event: Event, text: str | None = None) -> None:
            if text is None and isinstance(event, Generated):
                if event.id not in self.requests[choice].stop:
                    stream.add(event.id)
                text = stream.take(event.finish is not None)
            self._pieces.put_nowait((choice, text or "", event))

        def emit(event: Event) -> None:
            done = take
            if has_stops and isinstance(event, Generated):
                done = partial(take, text=stream.take(event.finish is not None))
            self._outbox.put(self._loop, done, event)

        return emit

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces, until every text has its end. Raises ApiError where one fails."""
        left = len(self.prompts)
        waiting = set(range(left))
        while left:
            number, text, event = await self._pieces.get()
            if isinstance(event, Failed):
                raise ApiError(_STATUS[event.reason], event.message)
            if isinstance(event, Generated):
                now = time.perf_counter()
                took = now - self._times[number]
                if number in waiting:
                    waiting.remove(number)
                    self._metrics.first_token.observe(took)
                    self.first_token_s = self.first_token_s or round(took, 4)
                else:
                    self._metrics.next_token.observe(took)
                self._times[number] = now
                self.generated_tokens += 1
                left -= event.finish is not None
            yield number, text, event

    @property
    def has_pieces(self) -> bool:
        """Whether the next piece is there already."""
        return not self._pieces.empty()

    def close(self) -> None:
        """End what nobody waits for."""
        for request in self.requests:
            request.is_cancelled = True

    def usage(self, choices_of_a_prompt: int) -> dict[str, Any]:
        """Tokens, as OpenAI counts them."""
        prompt = sum(map(len, self.prompts[::choices_of_a_prompt]))
        reused = sum(request.reused for request in self.requests[::choices_of_a_prompt])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated_tokens,
            "total_tokens": prompt + self.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": reused},
        }


def _ends(stream: TextStream) -> Any:
    def ends(token: int) -> bool:
        stream.add(token)
        return stream.is_stopped

    return ends


def _sampling(body: Common) -> Sampling:
    penalties = (body.repetition_penalty, body.presence_penalty, body.frequency_penalty)
    if body.temperature == 0:
        return Sampling(0.0, None, None, None, *penalties)
    seed = secrets.randbits(63) if body.seed is None else body.seed % (1 << 64)
    top_k = body.top_k if body.top_k is not None and body.top_k > 0 else None
    return Sampling(body.temperature, top_k, body.top_p if body.top_p < 1 else None, seed, *penalties)
