"""A folder of several engines or bundles that appears when it is whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trt_nvfp4.builder.report.parts_report import PartsReport
from trt_nvfp4.common.replacing import scratch


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `destination`, which is empty or not there, unless the work inside fails."""
    with scratch(destination.parent) as temporary:
        folder = temporary / "bundle"
        folder.mkdir()
        yield folder
        folder.rename(destination)


def rename_in_reports(report: PartsReport, folder: Path, destination: Path) -> None:
    """Let the reports of what was built in `folder` name files where they will lie."""
    old, new = str(folder), str(destination)
    for built in report.parts.values():
        built.engine = built.engine and built.engine.replace(old, new)
        built.bundle = built.bundle and built.bundle.replace(old, new)
        built.files = {name: file.replace(old, new) for name, file in built.files.items()}
    for file in (*folder.glob("*.report.json"), *folder.glob("*.report.html")):
        file.write_text(file.read_text().replace(old, new))
