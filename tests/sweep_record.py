"""The records of sweeps over many classes, which several runs fill."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def recorded(path: Path | None, command: str, packages: Sequence[str]) -> dict[str, Any]:
    """What earlier runs of `command` recorded with the installed versions of `packages`; no outcomes without any."""
    versions = {name: version(name) for name in packages}
    empty: dict[str, Any] = {"command": command, "versions": versions, "outcomes": {}}
    found: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.is_file() else empty
    return found if found["versions"] == versions else empty
