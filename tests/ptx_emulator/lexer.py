"""PTX text to tokens."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import PtxSyntaxError

_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r]+|//[^\n]*|/\*.*?\*/|\.loc[ \t][^\n]*)
  | (?P<newline>\n)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
  | (?P<word>[%$A-Za-z_][\w$]*(?:(?:::|\.)[\w$]+)*)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<punct>[{}()\[\],;:|!@<>=+\-*/&^~])
""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    text: str
    line: int
    start: int
    end: int


def tokenize(text: str) -> list[Token]:
    """All tokens but blanks, comments and source locations; raises PtxSyntaxError with the line."""
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
