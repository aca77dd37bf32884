"""The recorded runs, by name, for the pages that show them."""

import json
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
DOCS = BENCHMARKS.parent / "docs"


def path_of(name: str) -> Path:
    (path,) = BENCHMARKS.glob(f"results/*/{name}.json")
    return path


def load(name: str) -> dict[str, Any]:
    return dict(json.loads(path_of(name).read_text()))


def link(name: str) -> str:
    """Markdown, from a page in a folder of docs/."""
    return f"[`{name}.json`](../../{path_of(name).relative_to(BENCHMARKS.parent)})"


def script(name: str) -> str:
    """How the script that recorded a run is started. Records may name a place that it has left since."""
    words = load(name)["environment"]["command"].split()
    file = words[2] if words[1] == "-m" else words[1].rpartition("/")[2]
    (path,) = BENCHMARKS.glob(f"*/{file}") if file.endswith(".py") else BENCHMARKS.glob(f"*/{file.split('.')[-1]}.py")
    return f"python -m benchmarks.{path.parent.name}.{path.stem}"
