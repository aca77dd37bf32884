"""PTX text to tokens, and the bodies of its entries, which are most of it."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from .errors import PtxSyntaxError

_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r]+|//[^\n]*|/\*.*?\*/|\.loc[ \t][^\n]*
      |\.section[ \t][^{]*\{[^}]*\})
  | (?P<newline>\n)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
  | (?P<word>[%$A-Za-z_][\w$]*(?:(?:::|\.)[\w$]+)*)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<punct>[{}()\[\],;:|!@<>=+\-*/&^~])
""",
    re.VERBOSE | re.DOTALL,
)
_ENTRY = re.compile(r"^[ \t]*(?:\.(?:visible|weak)[ \t]+)*\.entry[ \t]+([\w$]+)", re.MULTILINE)
_BRACE = re.compile(r"""[{}]|//[^\n]*|/\*.*?\*/|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


class Token(NamedTuple):
    kind: str
    text: str
    line: int
    start: int
    end: int


def tokenize(text: str) -> list[Token]:
    """All tokens but blanks, comments, source locations and debug sections; raises PtxSyntaxError with the line."""
    tokens = []
    line, position, size = 1, 0, len(text)
    match = _TOKEN.match
    while position < size:
        found = match(text, position)
        if found is None:
            raise PtxSyntaxError(f"line {line}: unexpected {text[position : position + 20]!r}")
        kind = found.lastgroup
        end = found.end()
        if kind == "newline":
            line += 1
        elif kind == "skip":
            line += text.count("\n", position, end)
        else:
            assert kind is not None
            tokens.append(Token(kind, found.group(), line, position, end))
        position = end
    tokens.append(Token("end", "", line, size, size))
    return tokens


def entry_bodies(text: str) -> dict[str, tuple[int, int]]:
    """Where the body of each entry lies in the text, braces excluded."""
    bodies = {}
    for entry in _ENTRY.finditer(text):
        depth = start = 0
        for found in _BRACE.finditer(text, entry.end()):
            depth += {"{": 1, "}": -1}.get(found[0], 0)
            start = start or found.end() * depth
            if start and depth == 0:
                bodies[entry[1]] = start, found.start()
                break
    return bodies


def without(text: str, bodies: Iterable[tuple[int, int]]) -> str:
    """The text with these bodies empty; lines keep their numbers."""
    kept, position = [], 0
    for start, end in sorted(bodies):
        kept += [text[position:start], "\n" * text.count("\n", start, end)]
        position = end
    return "".join([*kept, text[position:]])
