"""A file of the user's under the name of a module that the commands need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trt_nvfp4.builder.errors import UNAVAILABLE

CALL = "from trt_nvfp4.builder.cli.build_engine import app; app()"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("click.py", "x = 1"),
        ("attrs.py", "import nothing_of_this_name"),
        ("rich/__init__.py", "raise SystemExit(3)"),
        ("yaml.py", "1 / 0"),
        ("onnx.py", "x = 1"),
    ],
)
@pytest.mark.parametrize("by", ["PYTHONPATH", "folder"])
def test_the_file_is_named(tmp_path: Path, name: str, content: str, by: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if by == "PYTHONPATH":
        environment["PYTHONPATH"] = str(tmp_path)
    command = [sys.executable, "-c", CALL, tmp_path / "m.onnx", "-o", tmp_path / "o.engine", "--target", "thor"]
    folder = tmp_path if by == "folder" else None
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == UNAVAILABLE, done.stderr
    assert done.stderr.startswith(f"error: {tmp_path / name}: is imported in place of the installed module")
    assert done.stderr.count("\n") == 1
