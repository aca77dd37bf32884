"""One plugin library for all engines of a folder that do not carry theirs, with the kernels that any of them needs."""

from collections.abc import Iterator
from pathlib import Path

from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.tensorrt.build_script import report_file
from trt_nvfp4.builder.tensorrt.load import built_by
from trt_nvfp4.common.replacing import replacing


def kernels_beside(engine: Path, report: Report) -> set[str]:
    """Groups of kernels that the other engines in the folder of `engine` need."""
    return {group for _, kernels in _others(engine, report) for group in kernels}


def share_library(engine: Path, report: Report) -> None:
    """Let the other engines in the folder use the library of `engine`, which has their kernels, and remove theirs."""
    for library, _ in list(_others(engine, report)):
        if library == report.plugin_library:
            continue
        for file in (*engine.parent.glob("*.report.json"), *engine.parent.glob("*.report.html")):
            if library in (text := file.read_text()):
                with replacing(file) as temporary:
                    temporary.write_text(text.replace(library, str(report.plugin_library)))
        (engine.parent / library).unlink(missing_ok=True)


def _others(engine: Path, report: Report) -> Iterator[tuple[str, list[str]]]:
    """Name and kernels of the libraries of engines beside, as their reports say: of this version and target."""
    for file in engine.parent.glob("*.report.json"):
        found = built_by(file.with_name(file.name.removesuffix(".report.json") + ".engine"))
        library, kernels = found.get("plugin_library"), found.get("kernels")
        if file == report_file(engine) or not isinstance(library, str) or not isinstance(kernels, list):
            continue
        same = found.get("versions", {}).get("trt-nvfp4") == report.versions.get("trt-nvfp4")
        if same and found.get("target") == report.target and Path(library).name == library:
            yield library, [str(group) for group in kernels]
