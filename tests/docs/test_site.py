"""The documentation builds as a site: every page is in the navigation, every link and anchor leads somewhere."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "how_to" / "language_models" / "index.html").exists()
    assert (
        "repository/benchmarks/results/kernels/decode.json"
        in (tmp_path / "figures" / "performance" / "index.html").read_text()
    )
