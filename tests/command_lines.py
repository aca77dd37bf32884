"""Commands that run in the tests' own process."""

from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner, Result


def invoked(app: Any, arguments: Sequence[object], code: int = 0, *texts: str, **options: Any) -> Result:
    """The result of a command, which ends with this exit code and has these texts on stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    assert result.exit_code == code, result.output
    said = " ".join(result.stderr.split())
    for text in texts:
        assert " ".join(text.split()) in said
    return result
