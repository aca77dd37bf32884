"""The outcome of one check of this machine."""

from dataclasses import dataclass
from typing import Literal

#: missing: something cannot work without it. note: what only some uses need.
State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Check:
    """The subject of a check, the finding, and for anything but "ok" the command or change that fixes it."""

    name: str
    state: State
    found: str
    fix: str = ""
