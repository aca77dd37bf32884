"""bench-engine: how fast a model is with NVFP4 plugins, against TensorRT's own NVFP4, FP8 and BF16."""

import json
from dataclasses import asdict
from typing import Any

from trt_nvfp4.builder.bench.bench_options import BenchOptions
from trt_nvfp4.builder.cli.command import Command
from trt_nvfp4.builder.cli.console import print_json
from trt_nvfp4.builder.model.model_files import ENGINES, check_exists
from trt_nvfp4.builder.terminal.output import output
from trt_nvfp4.builder.terminal.progress_bar import ProgressBar


def bench_engine(given: dict[str, Any], as_json: bool) -> None:
    """Time a model with NVFP4 plugins against TensorRT's own NVFP4, FP8 and BF16, all built from the same model.

    engine: whole engines on their GPU, as CUDA graphs, interleaved, with percentiles, a profile by layer and clocks.

    plugins: on any GPU, each subgraph's plugin by itself, against cuBLAS products of the same shapes.

    roofline: without a GPU, the least time that the target's published peaks allow; a prediction, marked as one.

    A language model with caches: the time to the first token of a prompt, and per token at several cached lengths.
    Ranks run as generate runs them, a process and a GPU for each.

    The result of an engine is written beside it, OUT.bench.json, and shown on the build's page, OUT.report.html.

    Example: bench-engine model.engine
    """
    options = BenchOptions(**given)
    check_exists(options.subject)  # before imports that take seconds
    from trt_nvfp4 import api
    from trt_nvfp4.builder.bench.result import tables

    if options.output is None and options.subject.suffix in ENGINES:
        given["output"] = options.subject.with_suffix(".bench.json")
    if output.quiet:  # a later rank
        given.pop("output", None)
    with ProgressBar() as progress:
        result = api.bench(**given, progress=progress)
    if as_json:
        print_json(json.dumps(asdict(result), indent=2))
        return
    for table in tables(result):
        output.print(table)
    for note in result.notes:
        output.print(note)


app = Command("bench-engine", BenchOptions, bench_engine)

if __name__ == "__main__":
    app()
