"""build-engine: a model becomes a verified TensorRT engine with NVFP4 plugins."""

from pathlib import Path
from typing import Any

from trt_nvfp4.builder.cli.command import Command
from trt_nvfp4.builder.cli.console import print_json
from trt_nvfp4.builder.model.hub import local_model
from trt_nvfp4.builder.model.model_files import check_model_file, is_policy
from trt_nvfp4.builder.pipeline.build_options import BuildOptions
from trt_nvfp4.builder.terminal.output import output, status
from trt_nvfp4.builder.terminal.progress_bar import ProgressBar


def build_engine(given: dict[str, Any], as_json: bool) -> None:
    """Build a TensorRT engine in which MoE, MLP and linear subgraphs run as NVFP4 plugins.

    Finds the subgraphs, plans their precision, calibrates, rewrites the ONNX, builds the engine and checks that it
    holds what was planned. Beside OUT.engine: OUT.plan.yaml, OUT.statistics.json, OUT.rewritten.onnx, OUT.report.json
    and the same as a page, OUT.report.html.

    Example: build-engine model.onnx -o model.engine --target rtx-blackwell --calib-data samples.npz
    """
    given = {**given, "model": local_model(Path(given["model"]), status.print)}
    options = BuildOptions(**given)
    check_model_file(options.model)  # before imports that take seconds
    if is_policy(options.model):
        from trt_nvfp4.builder.components.policies.checkpoint import processing_of

        processing_of(options.model)
    from trt_nvfp4 import api
    from trt_nvfp4.builder.components.source import is_of_parts
    from trt_nvfp4.builder.components.user_modules import is_python_file
    from trt_nvfp4.builder.report.parts_tables import report_tables

    with ProgressBar() as progress:
        if options.parallel is not None or is_of_parts(options.model, options.task) or is_python_file(options.model):
            parts = api.build_parts(**given, progress=progress)
            shown, tables = parts.json(), report_tables(parts)
        else:
            report = api.build(**given, progress=progress).report
            shown, tables = report.json(), report.tables()
    if as_json:
        print_json(shown)
        return
    for table in tables:
        output.print(table)


app = Command(
    "build-engine",
    BuildOptions,
    build_engine,
    "; name the engine to write with -o OUT.engine, or a bundle with --bundle DIR",
)

if __name__ == "__main__":
    app()
