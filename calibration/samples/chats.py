"""Texts of a .jsonl file: chats, as language models are tuned on, or plain ones."""

from pathlib import Path
from typing import Any

from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.json_text import parse_json
from trt_nvfp4.common.limited import LimitError
from trt_nvfp4.common.tokenizers import TemplateError, render_chats

_EXPECTED = (
    'expected an object with "messages", a list of {"role": ..., "content": ...} of text or parts {"type": "text", '
    '"text": ...}, or with "text" on each line'
)
# Roles as ShareGPT names them.
_ROLES = {"human": "user", "gpt": "assistant"}


def texts(file: Path, lines: str, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text of each line's object, and whether it is a chat, as the tokenizer's chat template writes it.

    Raises CalibrationError, naming the line: not JSON, no such object, a template that is missing or fails.
    """
    found: list[tuple[str, bool]] = []
    # Chats are written together: their numbers among the texts, where they come from, and their messages.
    chats: list[tuple[int, str, list[dict[str, Any]]]] = []
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise CalibrationError(f"{where}: not JSON ({error}); {_EXPECTED}") from error
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            chats.append((len(found), where, _messages(where, entry)))
        found.append((text, False) if isinstance(text, str) else ("", True))
    for (place, _, _), text in zip(chats, _rendered(file, chats, tokenizer), strict=True):
        found[place] = (text, True)
    return found


def _rendered(file: Path, chats: list[tuple[int, str, list[dict[str, Any]]]], tokenizer: Any) -> list[str]:
    if not chats:
        return []
    places = [where for _, where, _ in chats]
    if not tokenizer.chat_template:
        raise CalibrationError(
            f'{places[0]}: the tokenizer has no chat template to write it by; give objects of "text"'
        )
    try:
        return render_chats(tokenizer, [messages for _, _, messages in chats])
    except TemplateError as error:
        raise CalibrationError(f"{places[error.number]}: the tokenizer's chat template refuses it: {error}") from error
    except LimitError as error:
        raise CalibrationError(f"{file}: the tokenizer's chat template cannot write its chats: {error}") from error


def _messages(where: str, entry: Any) -> list[dict[str, Any]]:
    turns = entry.get("messages", entry.get("conversations")) if isinstance(entry, dict) else None
    messages = [_message(turn) for turn in turns] if isinstance(turns, list) else []
    known = [message for message in messages if message is not None]
    if not known or len(known) < len(messages):
        raise CalibrationError(f"{where}: {_EXPECTED}")
    return known


def _message(turn: Any) -> dict[str, Any] | None:
    if not isinstance(turn, dict):
        return None
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    is_parts = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
    if not isinstance(role, str) or not (isinstance(content, str) or is_parts):
        return None
    return {"role": _ROLES.get(role, role), "content": content}
