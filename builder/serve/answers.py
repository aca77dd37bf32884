"""Answers as OpenAI's API writes them: whole, or as the chunks of a stream."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from trt_nvfp4.builder.serve.protocol import ChatRequest, Common, CompletionRequest
from trt_nvfp4.builder.serve.request import Generated, PromptScored, Score
from trt_nvfp4.builder.serve.tool_calls import calls_in

TokenText = Callable[[int], str]
_FINISH = {"stop": "stop", "length": "length", "capacity": "length"}


class _Choice:
    """One text, as far as it has come."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.scores: list[Score] = []
        self.prompt_scores: list[Score] = []
        self.finish: str | None = None

    def add(self, text: str, event: Generated) -> None:
        self.text += text
        self.tokens.append(event.id)
        if event.score is not None:
            self.scores.append(event.score)
        if event.finish is not None:
            self.finish = _FINISH[event.finish]


class Answer(ABC):
    """The answer to one request; pieces come in by `add`."""

    #: The object names of a whole answer and of a chunk, and the prefix of an answer's number.
    whole_object, chunk_object, prefix = "", "", ""

    def __init__(self, body: Common, model: str, choices: int, token_text: TokenText) -> None:
        self._model, self._token_text = model, token_text
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self.choices = [_Choice() for _ in range(choices)]
        self._has_usage = body.stream_options.get("include_usage", False)

    def add(self, number: int, text: str, event: Generated | PromptScored) -> dict[str, Any] | None:
        """Take in a piece; returns the chunk that a stream gets for it, None for no chunk."""
        choice = self.choices[number]
        if isinstance(event, PromptScored):
            choice.prompt_scores += event.scores
            return None
        choice.add(text, event)
        found = self._chunk(number, text, event)
        if found is None:
            return None
        entry = {"index": number, **found, "finish_reason": choice.finish}
        return self._written(self.chunk_object, [entry], **({"usage": None} if self._has_usage else {}))

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk that ends a stream with usage; None for a stream without."""
        return self._written(self.chunk_object, [], usage=usage) if self._has_usage else None

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer, once every choice has its end."""
        entries = [
            {"index": number, **self._entry(number, choice), "finish_reason": choice.finish}
            for number, choice in enumerate(self.choices)
        ]
        return self._written(self.whole_object, entries, usage=usage)

    def _written(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    @abstractmethod
    def _chunk(self, number: int, text: str, event: Generated) -> dict[str, Any] | None:
        """The choice in the chunk of a stream for a token; None for no chunk."""

    @abstractmethod
    def _entry(self, number: int, choice: _Choice) -> dict[str, Any]:
        """The choice in the whole answer."""


class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    whole_object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, body: CompletionRequest, model: str, prompts: Sequence[Sequence[int]], texts: Sequence[str],
        token_text: TokenText,
    ) -> None:  # fmt: skip
        """`prompts` and their `texts`: one for each choice."""
        super().__init__(body, model, len(prompts), token_text)
        self._echo, self._top = body.echo, body.logprobs
        self._prompts, self._texts = prompts, texts

    def _chunk(self, number: int, text: str, event: Generated) -> dict[str, Any] | None:
        choice = self.choices[number]
        begin = len(choice.text) - len(text)
        if self._echo and len(choice.tokens) == 1:
            text = self._texts[number] + text
        if not (text or event.finish or event.score):
            return None
        return {"text": text, "logprobs": self._scores([event.id], [event.score], begin)}

    def _entry(self, number: int, choice: _Choice) -> dict[str, Any]:
        if not self._echo:
            return {"text": choice.text, "logprobs": self._scores(choice.tokens, choice.scores, 0)}
        tokens = [*self._prompts[number], *choice.tokens]
        scores = [None, *choice.prompt_scores, *choice.scores]
        return {"text": self._texts[number] + choice.text, "logprobs": self._scores(tokens, scores, 0)}

    def _scores(self, tokens: Sequence[int], scores: Sequence[Score | None], begin: int) -> dict[str, Any] | None:
        if self._top is None:
            return None
        texts = [self._token_text(token) for token in tokens]
        offsets = [begin]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": [self._likely(*pair) for pair in zip(texts, scores, strict=True)],
            "text_offset": offsets,
        }

    def _likely(self, text: str, score: Score | None) -> dict[str, float] | None:
        """By text: of tokens that look alike, the likeliest; and the token that came, whatever its place."""
        if score is None:
            return None
        found = {self._token_text(token): value for token, value in reversed(score.top)}
        return found if text in found else {**found, text: score.logprob}


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    whole_object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, body: ChatRequest, model: str, token_text: TokenText) -> None:
        super().__init__(body, model, body.n, token_text)
        self._names = set() if body.tool_choice == "none" else {tool.function.name for tool in body.tools}
        self._has_scores = body.logprobs

    def _chunk(self, number: int, text: str, event: Generated) -> dict[str, Any] | None:
        choice = self.choices[number]
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if len(choice.tokens) == 1 else {}
        scores = self._scores([event.id], [event.score]) if event.score is not None else None
        if not self._names:
            delta |= {"content": text} if text else {}
        elif event.finish is not None:  # whether the text is a call shows at its end
            delta |= self._message(choice)
            for index, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = index
        return {"delta": delta, "logprobs": scores} if delta or scores or event.finish else None

    def _entry(self, number: int, choice: _Choice) -> dict[str, Any]:
        scores = self._scores(choice.tokens, choice.scores) if self._has_scores else None
        return {"message": {"role": "assistant", **self._message(choice)}, "logprobs": scores}

    def _message(self, choice: _Choice) -> dict[str, Any]:
        text, calls = calls_in(choice.text, self._names) if self._names else (choice.text, [])
        if not calls:
            return {"content": text}
        choice.finish = "tool_calls"
        return {
            "content": text or None,
            "tool_calls": [
                {
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ],
        }

    def _scores(self, tokens: Sequence[int], scores: Sequence[Score]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(token, score.logprob),
                    "top_logprobs": [self._token(*likely) for likely in score.top],
                }
                for token, score in zip(tokens, scores, strict=True)
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
