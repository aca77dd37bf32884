"""Prompts as token ids, made in a process of its own: texts and templates that take long do not stop the decoder."""

import asyncio
import base64
import binascii
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trt_nvfp4.builder.components.images import Preprocessing
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.serve.failures import ApiError
from trt_nvfp4.builder.serve.protocol import ImagePart, Message, Tool

_T = TypeVar("_T")
_PROCESSES = 2
# Each process has its own.
_tokenizer: Tokenizer | None = None
_preprocessing: Preprocessing | None = None


class Prompts:
    """Token ids of texts and chats, by the tokenizer of a folder."""

    def __init__(self, folder: Path, preprocessing: Mapping[str, Any] | None = None) -> None:
        """`preprocessing` of images (see `components.images`); None: the model takes none."""
        self._folder, self._preprocessing = folder, preprocessing
        self._processes = self._started()
        self._first = [self._processes.submit(_encoded, "encode", ("",)) for _ in range(_PROCESSES)]

    def _started(self) -> ProcessPoolExecutor:
        given = (self._folder, self._preprocessing)
        return ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn"), initializer=_load, initargs=given)

    def wait(self) -> None:
        """Return when the processes have started, which takes seconds."""
        for each in self._first:
            each.result()

    async def of_text(self, text: str) -> list[int]:
        """Raises ApiError for what `Tokenizer.encode` does not take."""
        return await self._run(_encoded, "encode", (text,))

    async def of_chat(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[int], list[np.ndarray]]:
        """The tokens, and pixel values of the images in their order. Raises ApiError for what `Tokenizer.encode_chat`
        does not take, and for images that cannot be read."""
        described = [tool.model_dump(exclude_none=True) for tool in tools] or None
        parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
        urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
        if urls and self._preprocessing is None:
            raise ApiError(400, "this model takes no images", param="messages")
        pixels = [await self._run(_seen, url) for url in urls]
        taken = [_as_templates_take_it(message) for message in messages]
        return await self._run(_encoded, "encode_chat", (taken, described)), pixels

    def close(self) -> None:
        self._processes.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[..., _T | str], *given: Any) -> _T:
        processes = self._processes
        try:
            found = await asyncio.get_running_loop().run_in_executor(processes, work, *given)
        except BrokenProcessPool as error:
            # The system ends processes where memory is short. All that were at work fail; the first starts new ones.
            if self._processes is processes:
                self._processes = self._started()
            raise ApiError(
                503, "the process that reads prompts has ended; it is started again: repeat the request"
            ) from error
        if isinstance(found, str):
            raise ApiError(400, found)  # templates refuse chats, too
        return found


def _load(folder: Path, preprocessing: Mapping[str, Any] | None) -> None:
    global _tokenizer, _preprocessing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all processes of a terminal
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = Tokenizer(folder)
    _preprocessing = None if preprocessing is None else Preprocessing.of(preprocessing)


def _end_with_parent() -> None:
    """The pool does not end its processes where the server is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encoded(method: str, given: Sequence[Any]) -> list[int] | str:
    """The tokens, or what is wrong."""
    assert _tokenizer is not None
    try:
        found: list[int] = getattr(_tokenizer, method)(*given)
    except BuilderError as error:
        return str(error)
    return found


def _seen(url: str) -> np.ndarray | str:
    """The pixel values of an image, or what is wrong."""
    assert _preprocessing is not None
    try:
        return _preprocessing(base64.b64decode(url.partition(",")[2], validate=True))
    except (BuilderError, binascii.Error) as error:
        return f"an image cannot be read: {error}"


def _as_templates_take_it(message: Message) -> Mapping[str, Any]:
    """Templates expect the arguments of a call as an object, where the API has a string of JSON, no message without
    content, and only the place of an image."""
    found = message.model_dump(exclude_none=True, exclude={"refusal"})
    found.setdefault("content", "")
    if isinstance(found["content"], list):
        found["content"] = [{"type": "image"} if "image_url" in part else part for part in found["content"]]
    for call in found.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue  # the template has the text
    return found
