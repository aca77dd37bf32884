"""No module imports another that imports it, however far around; imports for type checking count."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import graphlib, sys
sys.path.insert(0, sys.argv[1])
import grimp
graph = grimp.build_graph("trt_nvfp4", cache_dir=None)
assert len(graph.modules) > 300, sorted(graph.modules)
try:
    graphlib.TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()
except graphlib.CycleError as error:
    sys.exit(" -> ".join(error.args[1]))
"""


def test_imports_go_one_way(tmp_path: Path) -> None:
    """In a process of its own, over links: the packages lie in folders of other names."""
    pytest.importorskip("grimp")
    package = tmp_path / "trt_nvfp4"
    package.mkdir()
    for entry in (ROOT / "trt_nvfp4").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in ("builder", "calibration", "graph_passes", "plugins"):
        (package / name).symlink_to(ROOT / name)
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
