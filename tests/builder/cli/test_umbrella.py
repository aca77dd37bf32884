"""One name for all commands."""

import pytest
from command_lines import invoked

from trt_nvfp4.builder.cli.umbrella import COMMANDS, app


def test_each_command_explains_itself_by_its_full_name() -> None:
    listed = invoked(app, ["--help"]).output
    assert "--version" in listed
    for name in COMMANDS:
        assert f"\n  {name} " in listed
        assert f"Usage: trt-nvfp4 {name} " in invoked(app, [name, "--help"]).output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing"], 2, "No such command 'nothing'"),
        (["serve"], 2, "Missing argument 'MODEL'"),
        (["serve", "missing.onnx"], 3, "missing.onnx"),
        (["serve", "x", "--port", "70000"], 2, "expected 0 to 65535"),
    ],
)
def test_failures_end_as_the_command_ends(arguments: list[str], code: int, message: str) -> None:
    invoked(app, arguments, code, message)
