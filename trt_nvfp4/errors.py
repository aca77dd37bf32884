"""The one family of exceptions that this package raises for faults that a user can fix."""

from __future__ import annotations


class TrtNvfp4Error(Exception):
    """One message that says what is wrong, where, and what to do.

    `exit_code` is what the commands end with: 2 usage, 3 model, 4 unavailable, 5 verification, 6 build.
    """

    exit_code: int = 1
