"""Whether two models have the same tokenizer, by its files. Bundles carry this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_nvfp4.common.json_text import read_json

from ...errors import ModelFaultError, UsageError

_FILE = "tokenizer.json"


def check_same_tokenizer(what: str, model: Path, drafter: Path) -> None:
    """Raise UsageError where the tokenizers in two folders differ in a token or in which are special, and
    ModelFaultError for a broken file. A folder without `tokenizer.json` says nothing."""
    files = [folder / _FILE for folder in (model, drafter)]
    if not all(file.is_file() for file in files):
        return
    expected, found = map(_tokens, files)
    for token in sorted(expected.keys() | found.keys()):
        if expected.get(token) != found.get(token):
            told = f"token {token} is {_shown(found.get(token))} in {files[1]} and {_shown(expected.get(token))} in"
            raise UsageError(f"{what}: {told} {files[0]}; give a model with the same tokenizer")


def _tokens(file: Path) -> dict[int, tuple[str, bool]]:
    """Every token by its id, and whether it is special."""
    try:
        content = read_json(file)
        listed: Any = content["model"]["vocab"]
        pairs = listed.items() if isinstance(listed, dict) else ((entry[0], at) for at, entry in enumerate(listed))
        found = {int(token): (str(text), False) for text, token in pairs}
        for entry in content.get("added_tokens") or ():
            found[int(entry["id"])] = (str(entry["content"]), bool(entry.get("special")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelFaultError(f"{file}: not a tokenizer's file ({error!r})") from error
    return found


def _shown(token: tuple[str, bool] | None) -> str:
    if token is None:
        return "missing"
    return f"{token[0]!r}{' (special)' if token[1] else ''}"
