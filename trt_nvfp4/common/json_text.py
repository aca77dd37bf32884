"""Text and JSON from files that anybody may have made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Characters. Plans, reports and manifests of the largest models have a few millions; JSON takes up to twenty times as
# many bytes in memory.
_MOST = 64 << 20


def parse_json(text: str) -> Any:
    """The value that `text` describes. Raises ValueError for what is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError for what is not UTF-8, and for what does not end, as a device, or is larger
    than any such file; OSError where it cannot be read."""
    with path.open(encoding="utf-8") as file:
        text = file.read(_MOST + 1)
    if len(text) > _MOST:
        raise ValueError(f"larger than {_MOST >> 20} MB, which no such file is")
    return text


def read_json(path: Path) -> Any:
    """The value that a file describes; raises as `read_text` and `parse_json` do."""
    return parse_json(read_text(path))
