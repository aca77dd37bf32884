"""The library is compiled where the package is installed, so every source that a build reads travels in the wheel."""

import re
import subprocess
from pathlib import Path

from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.compile.toolchain import PYPI_PACKAGES

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_sources_travel_in_the_wheel() -> None:
    declared = re.search(r'^"trt_nvfp4\.plugins" = \[(.*?)\]', PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    assert declared is not None
    patterns = re.findall(r'"([^"]+)"', declared[1])
    travelling = {path for pattern in patterns for path in ROOT.glob(pattern)}
    folders = ("adapters", "plugin_host", "interface", "kernels")
    needed = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert len(needed) > 20
    assert {str(path.relative_to(ROOT)) for path in needed - travelling} == set()


def test_every_package_is_installed() -> None:
    """Those that the list names and no others: an editable install does not notice."""
    top = PYPROJECT.parent
    declared = re.search(r"^packages = \[(.*?)\]", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    assert declared is not None
    files = subprocess.run(["git", "-C", top, "ls-files", "*__init__.py"], capture_output=True, text=True).stdout
    folders = [
        Path(file).parent.parts for file in files.split() if not file.startswith(("tests", "benchmarks", "examples"))
    ]
    own = {".".join(parts if parts[0] == "trt_nvfp4" else ("trt_nvfp4", *parts)) for parts in folders}
    assert set(re.findall(r'"([^"]+)"', declared[1])) == own


def test_compiler_to_install_is_the_extra() -> None:
    assert f'compiler = ["{PYPI_PACKAGES.strip(chr(39))}", ' in PYPROJECT.read_text()
