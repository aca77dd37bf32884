"""The list of files that a new op touches is that of an op that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
OP = "FP8MoE"


def listed() -> list[str]:
    section = PAGE.split("## A new op")[1].split("\n## ")[0]
    return [row.split("|")[3].strip(" `") for row in section.splitlines() if row.startswith("| ")][1:]


def names_the_op(path: Path) -> bool:
    """In code: Python by a string that is the op's name, C++ by that or by its definition's struct."""
    text = path.read_text()
    if path.suffix == ".py":
        return any(isinstance(node, ast.Constant) and node.value == OP for node in ast.walk(ast.parse(text)))
    return re.search(rf"\b{OP}\b", text) is not None


def test_an_op_touches_at_most_twelve_files_that_are_there() -> None:
    files = listed()
    assert 5 < len(files) == len(set(files)) <= 12
    mentioned = re.compile(r"fp8_?moe", re.IGNORECASE)
    assert all(mentioned.search((ROOT / file).read_text()) for file in files)


def test_no_other_source_file_names_the_op() -> None:
    """Its kernels aside, and what measures or documents it."""
    sources = [
        path
        for folder in ("plugins", "graph_passes", "calibration", "builder", "trt_nvfp4")
        for pattern in ("*.py", "*.cpp", "*.h")
        for path in (ROOT / folder).rglob(pattern)
        if "kernels" not in path.relative_to(ROOT).parts
    ]
    naming = {str(path.relative_to(ROOT)) for path in sources if names_the_op(path)}
    assert naming <= set(listed())
    assert {"plugins/ops/fp8_moe.py", "plugins/adapters/fp8_moe.cpp"} <= naming


def test_every_file_that_a_page_names_is_there() -> None:
    for name in re.findall(r"`((?:builder|calibration|docs|graph_passes|plugins|tests)/[\w./]*)`", PAGE):
        assert (ROOT / name).exists(), name
