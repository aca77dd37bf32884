"""JSON from files that anybody may have made."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """The value that `text` describes. Raises ValueError for what is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
