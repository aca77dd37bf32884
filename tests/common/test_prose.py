"""Comments, docstrings and messages have no turns that readers stumble over. Folders join as they become clean."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = ("builder", "calibration", "graph_passes", "plugins", "trt_nvfp4")
CPP = (".cu", ".cuh", ".h", ".cpp")
BANNED = {
    "is none: write invalid, missing or unknown": r"\b(?:is|are|was|were) none\b",
    "is no X: write is not an X": r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer|more|less|larger|smaller)[a-z]",
    "a sentence opens with its subject, not with Of": r"(?:^|[.:;!?] )Of (?=[a-z`'\"])",
    "alone: write only": r"\balone\b",
    "told: write reported or recognised": r"\btold\b",
    "mend: write fix": r"\bmend(?:s|ed)?\b",
    "what was asked for: name it": r"\b(?:what|asked) (?:\w+ ){0,3}asked\b|\basked for\b",
}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments and strings, keys and names excepted, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isidentifier():
            yield node.lineno, " ".join(node.value.split())


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        has_body = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_body and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments of C++, each with those on the lines right behind it, and their first lines."""
    for found in re.finditer(r"//[^\n]*(?:\n[ \t]*//[^\n]*)*", source):
        words = re.sub(r"\n\s*//+", " ", found[0]).lstrip("/ ")
        yield source.count("\n", 0, found.start()) + 1, " ".join(words.split())


def banned(source: str, suffix: str = ".py") -> Iterator[tuple[int, str]]:
    """Lines, and what to write there."""
    for line, text in texts(source) if suffix == ".py" else comments(source):
        yield from ((line, advice) for advice, pattern in BANNED.items() if re.search(pattern, text))
    for line, text in docstrings(source) if suffix == ".py" else ():
        if re.match(r"What\b", text):
            yield line, "a docstring opens with what it returns or does, not with What"


@pytest.mark.parametrize("folder", CLEAN)
def test_prose(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {advice}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", *CPP)
        for line, advice in banned(path.read_text(), path.suffix)
    ]
    assert not found, "\n".join(found)


def test_every_turn_is_found() -> None:
    source = '''"""What it is."""
# Of these, nothing.
x = "there is no file; the plan is no plan, which is none"  # alone
# The mend was told what was asked for.
'''
    assert {advice for _, advice in banned(source)} >= set(BANNED)
    assert not list(banned('"""Returns the file. There is no other."""\n'))
    assert [line for line, _ in banned("int x;  // A sum.\n// Of two\n// parts alone.\n", ".cu")] == [1, 1]
