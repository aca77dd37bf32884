"""Conversations over stdin, and the warning of models that name no end, for both commands that generate. Bundles carry
this module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from .generator import Generator, Piece, Result

#: What is said of a model without end tokens where no stop string is given.
NO_END = (
    "warning: the model names no token that ends a text, so that each goes on for --max-new-tokens; --stop TEXT ends "
    "it before"
)


def converse(
    generator: Generator, how: Mapping[str, Any], show: Callable[[Piece], None], answered: Callable[[Result], None]
) -> None:
    """Answer each line of stdin, with all messages before it in view. `how`: arguments of `generate`; `show` gets the
    pieces of an answer, `answered` the whole."""
    messages: list[dict[str, str]] = []
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        result = generator.generate([messages], on_piece=show, **how)
        print(flush=True)
        messages.append({"role": "assistant", "content": result.generations[0].text})
        answered(result)
