"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """Yield a temporary path beside `destination`; rename it over `destination` on success, remove it otherwise."""
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, destination)
    except OSError as error:
        # Writes name no file.
        if error.filename in (None, str(temporary)):
            error.filename = str(destination)
        raise
    finally:
        temporary.unlink(missing_ok=True)
