"""Tokenizers of Hugging Face directories that anybody may have made."""

from __future__ import annotations

from typing import Any


def try_out(tokenizer: Any) -> None:
    """Tokenize a letter. Raises whatever a broken tokenizer raises."""
    # Some broken tokenizers recurse for ever over an unknown token that they lack; this meets it here, not in the
    # middle of a run.
    tokenizer("a", add_special_tokens=tokenizer.unk_token_id is None)
