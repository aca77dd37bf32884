"""The routes of the HTTP API."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from trt_nvfp4.builder.errors import UnavailableError, UsageError
from trt_nvfp4.builder.serve.answers import Answer, ChatAnswer, CompletionAnswer
from trt_nvfp4.builder.serve.failures import ApiError
from trt_nvfp4.builder.serve.fair_queue import QueueFullError
from trt_nvfp4.builder.serve.grammar import schema_of_calls
from trt_nvfp4.builder.serve.guard import Guard
from trt_nvfp4.builder.serve.logs import Logged
from trt_nvfp4.builder.serve.protocol import ChatRequest, Common, CompletionRequest
from trt_nvfp4.builder.serve.service import Running, Service, Wanted

_PAGE = Path(__file__).parent / "page.html"
# The page loads nothing from elsewhere, and talks to this server only.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_Begun = tuple[Common, Running, Answer]


class Api:
    """Answers requests by a service; `seconds`: the longest that a request may take."""

    def __init__(self, service: Service, guard: Guard, seconds: float) -> None:
        self._service, self._guard, self._seconds = service, guard, seconds
        self._created = int(time.time())

    def app(self) -> Any:
        """The ASGI application."""
        handlers: dict[Any, Any] = {
            ApiError: lambda _, error: error.response(),
            HTTPException: lambda _, error: ApiError(error.status_code, error.detail).response(),
            UsageError: lambda _, error: ApiError(400, str(error)).response(),
            UnavailableError: lambda _, error: ApiError(503, str(error)).response(),
            QueueFullError: lambda _, error: ApiError(429, str(error)).response(),
            Exception: lambda _, error: ApiError(500, "an internal error; the server's log has more").response(),
        }
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", partial(self._answered, self._completion), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._answered, self._chat), methods=["POST"]),
        ]
        return Logged(Starlette(routes=routes, exception_handlers=handlers), self._service.metrics.requests.labels)

    async def page(self, request: Request) -> Response:
        return FileResponse(_PAGE, headers=_PAGE_HEADERS)

    async def health(self, request: Request) -> Response:
        failure = self._service.engine.failure
        return JSONResponse({"status": failure or "ok"}, 503 if failure else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        self._guard.client(request)
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        self._guard.client(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    async def _answered(self, begin: Callable[[Request, str], Awaitable[_Begun]], request: Request) -> Response:
        client = request.scope["log"]["client"] = self._guard.client(request)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._guard.counted(client))
            body, running, answer = await begin(request, client)
            facts = request.scope["log"]
            stack.callback(lambda: facts.update(running.usage(), first_token_s=running.first_token_s))
            stack.callback(running.close)
            if body.stream:
                return _EventStream(_events(running, answer), stack.pop_all())
            await _while_connected(request, _collect(running, answer))
            return JSONResponse(answer.whole(running.usage()))

    async def _completion(self, request: Request, client: str) -> _Begun:
        body = await self._guard.body(request, CompletionRequest)
        self._check_model(body.model)
        scores_prompt = body.echo and body.logprobs is not None
        if scores_prompt and body.stream:
            raise ApiError(400, "scores of the prompt (echo and logprobs) are not streamed", param="stream")
        given = body.prompts
        ids = [await self._service.prompts.of_text(each) if isinstance(each, str) else each for each in given]
        wanted = self._wanted(request, client, body, body.max_tokens, body.logprobs)
        texts = [each if isinstance(each, str) else self._service.tokenizer.decode(each) for each in given if body.echo]
        texts = [text for text in texts for _ in range(body.n)]
        running = await self._service.start(body, ids, replace(wanted, scores_prompt=scores_prompt))
        prompts = [request.prompt for request in running.requests]
        answer = CompletionAnswer(body, self._service.model, prompts, texts, self._service.token_text)
        return body, running, answer

    async def _chat(self, request: Request, client: str) -> _Begun:
        body = await self._guard.body(request, ChatRequest)
        self._check_model(body.model)
        ids, pictures = await self._service.of_chat(body)
        most = body.max_completion_tokens or body.max_tokens or self._service.engine.scheduler.capacity
        scores = body.top_logprobs if body.logprobs else None
        wanted = replace(self._wanted(request, client, body, most, scores), pictures=pictures)
        if body.forced:
            functions = [(function.name, function.parameters) for function in body.forced]
            several = body.tool_choice == "required" and body.parallel_tool_calls
            wanted = replace(wanted, schema=schema_of_calls(functions, several))
        running = await self._service.start(body, [ids], wanted)
        return body, running, ChatAnswer(body, self._service.model, self._service.token_text)

    def _wanted(self, request: Request, client: str, body: Common, most: int, scores: int | None) -> Wanted:
        try:
            seconds = float(request.headers.get("x-request-timeout", "inf"))
        except ValueError:
            raise ApiError(400, "the header X-Request-Timeout is not a number of seconds") from None
        if not seconds > 0:
            raise ApiError(400, "the header X-Request-Timeout is not above 0")
        schema = None if body.response_format is None else body.response_format.wanted
        return Wanted(client, most, min(seconds, self._seconds), scores, False, schema)

    def _check_model(self, name: str) -> None:
        if name not in ("", self._service.model):
            raise ApiError(404, f"this server has the model {self._service.model} only", "model_not_found", "model")

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._service.model,
            "object": "model",
            "created": self._created,
            "owned_by": "local",
            "max_model_len": self._service.engine.scheduler.capacity,
            "has_chat_template": self._service.tokenizer.has_chat_template,
            "takes_images": self._service.takes_images,
        }


class _EventStream(StreamingResponse):
    """Server-sent events; `held` is closed when the client has all of them, or is gone."""

    def __init__(self, events: AsyncIterator[str], held: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _events(running: Running, answer: Answer) -> AsyncIterator[str]:
    try:
        async for pieces in running.pieces():
            chunks = [_event(chunk) for piece in pieces if (chunk := answer.add(*piece)) is not None]
            if chunks:
                yield "".join(chunks)
    except ApiError as error:  # the status has gone already
        yield _event(error.json())
        return
    if (last := answer.last_chunk(running.usage())) is not None:
        yield _event(last)
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _collect(running: Running, answer: Answer) -> None:
    async for pieces in running.pieces():
        for piece in pieces:
            answer.add(*piece)


async def _while_connected(request: Request, work: Any) -> None:
    """Run `work`; raises ApiError where the client goes before it ends, whom nothing reaches."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone")
        task.result()
    finally:
        task.cancel()
        gone.cancel()
