"""Enumerations of text, as `enum.StrEnum` of Python 3.11."""

from enum import Enum


class TextEnum(str, Enum):
    """Members are their values wherever text is expected: equal to them, hashed and shown as they are."""

    def __str__(self) -> str:
        return str(self.value)
