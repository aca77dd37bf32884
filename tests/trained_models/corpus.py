"""The text that the fixtures are trained on: the prose of Python's own documentation, from a CPython installation.

Every docstring of the standard library and every topic of the language reference (`pydoc_data.topics`), without
repetitions, split by module and topic into text to train on and text held out. Run with CPython 3.13.0 it writes the
committed files again: python3.13 corpus.py
"""

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
HELD_OUT_BYTES = 100_000
# Tests, and packages that are data or copies of others.
SKIPPED = ("test", "tests", "idle_test", "site-packages", "_vendor", "pydoc_data", "encodings")


def documents() -> Iterator[str]:
    """One string per module (its docstrings in source order) and per topic."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        if not set(file.relative_to(library).parts).isdisjoint(SKIPPED):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        owners = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        owners.sort(key=lambda node: getattr(node, "lineno", 0))
        yield "\n\n".join(filter(None, map(ast.get_docstring, owners)))
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def paragraphs(text: str, seen: set[str]) -> Iterator[str]:
    """Those of the paragraphs that are sentences in ASCII and were not seen before."""
    for paragraph in text.split("\n\n"):
        paragraph = "\n".join(line.rstrip() for line in paragraph.strip("\n").splitlines())
        if len(paragraph) >= 40 and paragraph.isascii() and paragraph not in seen:
            seen.add(paragraph)
            yield paragraph


def main() -> None:
    seen: set[str] = set()
    texts = ["\n\n".join(paragraphs(document, seen)) for document in documents()]
    texts = [text for text in texts if text]
    random.Random(0).shuffle(texts)
    texts.sort(key=lambda text: len(text) > HELD_OUT_BYTES // 10)  # no long one is held out
    held_out: list[str] = []
    while sum(map(len, held_out)) < HELD_OUT_BYTES:
        held_out.append(texts.pop(0))
    (HERE / "text").mkdir(exist_ok=True)
    (HERE / "text" / "train.txt").write_text("\n\n".join(texts) + "\n")
    (HERE / "text" / "held_out.txt").write_text("\n\n".join(held_out) + "\n")


if __name__ == "__main__":
    main()
