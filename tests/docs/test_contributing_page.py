"""The lists of files that a new op and a new kind of subgraph touch are those of one that is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
OP = "FP8MoE"


def listed(title: str = "A new op") -> list[str]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [row.split("|")[3] for row in section.splitlines() if row.startswith("| ")][1:]
    return [file for row in rows for file in re.findall(r"`([^`]+)`", row)]


def naming(pattern: str) -> set[str]:
    """The source files that match."""
    folders = ("plugins", "graph_passes", "calibration", "builder", "trt_nvfp4")
    sources = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)) for path in sources if re.search(pattern, path.read_text())}


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


def test_no_other_source_file_knows_the_kind() -> None:
    """By its classes, its decision or its files."""
    files = listed("A new kind of subgraph")
    assert 5 < len(files) == len(set(files)) <= 15
    assert naming(r"\bDecoderLayer(Subgraph)?\b|\bDecision\.DECODER\b|\bdecoder_layers?\b") <= set(files)


@pytest.mark.parametrize(
    ("title", "example", "in_code"),
    [
        ("A new target", r"\bspark\b|\bsm_121a\b", r"\bspark\b|\bsm_121a\b"),
        ("A model family", "paligemma", '"paligemma": '),
        ("A checkpoint format", "pack.quantized", r"\bpack.quantized\b"),
    ],
)
def test_the_other_lists_name_the_files_of_their_example(title: str, example: str, in_code: str) -> None:
    files = listed(title)
    assert naming(in_code) <= set(files)
    assert all(re.search(example, (ROOT / file).read_text(), re.IGNORECASE) for file in files)


def test_no_code_asks_for_a_kind_by_its_name() -> None:
    """Outside of the kinds: of subgraphs, plan entries and predictions; other things have kinds too."""
    asking = re.compile(r"(?:entry|subgraph|part|each)(?:\.kind|\[\"kind\"\]) (?:==|!=|in \(\"|not in \(\")")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("graph_passes", "builder", "calibration", "trt_nvfp4")
        for path in (ROOT / folder).rglob("*.py")
        if path.parent.name != "kinds"
        for line in path.read_text().splitlines()
        if asking.search(line)
    ]
    assert not found
