"""Constrained text: JSON of a schema, by llguidance, which bounds the work that a schema or its patterns make."""

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.hf
import numpy as np

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.model.decoder_contract import Decoder

# Endless white space would be JSON, too.
_WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes constraints for the texts of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, decoder: Decoder) -> None:
        """Raises UsageError for a tokenizer without a tokenizer.json, or one that names no end of a text."""
        ends = list(decoder.eos_token_ids) or None
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(
                tokenizer.wrapped, n_vocab=decoder.vocab_size, eos_token=ends
            )
        except Exception as error:  # it names no types
            raise UsageError(f"this tokenizer allows for no constrained text: {error}") from error

    def json(self, schema: dict[str, Any]) -> "JsonConstraint":
        """JSON of a schema. Raises UsageError for a schema that is invalid, or too large."""
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_WRITTEN)
        except ValueError as error:
            raise UsageError(f"the JSON schema is invalid: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UsageError(f"the JSON schema cannot be followed: {matcher.get_error().strip()}")
        return JsonConstraint(matcher)


class JsonConstraint:
    """The state of one text."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> np.ndarray:
        """Raises UsageError where the schema allows for no token, or takes too long."""
        found: np.ndarray = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        if self._matcher.is_error() or not found.any():
            raise UsageError(f"the JSON schema cannot be followed: {self._matcher.get_error().strip()}")
        return found

    def accept(self, token: int) -> bool:
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


def schema_of_calls(functions: Sequence[tuple[str, dict[str, Any]]], several: bool) -> dict[str, Any]:
    """JSON of a call of one of the functions, given as (name, schema of its arguments); with `several`, a list of
    them."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, arguments in functions
    ]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": call, "minItems": 1} if several else call
