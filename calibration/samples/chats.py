"""Texts of a .jsonl file: chats, as language models are tuned on, or plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.json_text import parse_json

_EXPECTED = 'expected an object with "messages", a list of {"role": ..., "content": ...}, or with "text" on each line'
# Roles as ShareGPT names them.
_ROLES = {"human": "user", "gpt": "assistant"}


def texts(file: Path, lines: str, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text of each line's object, and whether it is a chat, as the tokenizer's chat template writes it.

    Raises CalibrationError, naming the line: not JSON, no such object, a template that is missing or fails.
    """
    found = []
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise CalibrationError(f"{where}: not JSON ({error}); {_EXPECTED}") from error
        text = entry.get("text") if isinstance(entry, dict) else None
        found.append((text, False) if isinstance(text, str) else (_chat(where, entry, tokenizer), True))
    return found


def _chat(where: str, entry: Any, tokenizer: Any) -> str:
    turns = entry.get("messages", entry.get("conversations")) if isinstance(entry, dict) else None
    messages = [_message(turn) for turn in turns] if isinstance(turns, list) and turns else [None]
    if None in messages:
        raise CalibrationError(f"{where}: {_EXPECTED}")
    if not tokenizer.chat_template:
        raise CalibrationError(f'{where}: the tokenizer has no chat template to write it by; give objects of "text"')
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates raise what they like
        raise CalibrationError(f"{where}: the tokenizer's chat template refuses it: {error}") from error


def _message(turn: Any) -> dict[str, str] | None:
    if not isinstance(turn, dict):
        return None
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": _ROLES.get(role, role), "content": content}
