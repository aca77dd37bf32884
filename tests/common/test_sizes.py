"""No file and no folder grows beyond what a reader takes in: about 500 lines, about 20 files side by side."""

import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
#: A little above, so that one line more holds up no change.
LINES, FILES = 520, 22
WRITTEN = (".py", ".cpp", ".h", ".cu", ".cuh", ".jinja", ".css", ".md")
#: Kernels have their own measure.
LONG = ("plugins/kernels/",)
#: One op or test per file, whatever there is of them.
WIDE = ("tests/", "plugins/ops/")


@pytest.fixture(scope="module")
def files() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_is_too_long(files: list[str]) -> None:
    written = [name for name in files if name.endswith(WRITTEN) and not name.startswith(LONG)]
    lengths = {name: len((ROOT / name).read_bytes().splitlines()) for name in written}
    assert lengths["builder/pipeline/pipeline.py"] > 100
    assert {name: length for name, length in lengths.items() if length > LINES} == {}, "split them by what they do"


def test_no_folder_is_too_wide(files: list[str]) -> None:
    folders = Counter(f"{PurePosixPath(name).parent}/" for name in files)
    assert folders["builder/pipeline/"] > 5
    wide = {name: count for name, count in folders.items() if count > FILES and not name.startswith(WIDE)}
    assert wide == {}, "give files that belong together a folder of their own"
