"""docs/architecture.md and its picture show the rooms of the import contracts."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "hooks" / "architecture_picture.py"
_spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
assert _spec is not None
assert _spec.loader is not None
drawing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(drawing)


def test_picture_is_up_to_date() -> None:
    """Otherwise: python docs/hooks/architecture_picture.py."""
    assert drawing.picture() == drawing.PICTURE.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["builder", "graph_passes"])
def test_rooms_of_the_page_are_those_of_the_contract(package: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    described = re.findall(rf"^\| `{package}/(\w+)(?:\.py)?` \|", page, re.MULTILINE)
    rooms = [room for layer in drawing.rooms_by_package()[package] for room in layer.split(" | ")]
    assert described == rooms
