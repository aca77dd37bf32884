"""bench-engine: how fast a model is with NVFP4 plugins, against TensorRT's own NVFP4, FP8 and BF16."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from trt_nvfp4.builder.cli.console import (
    DEBUG,
    EXIT_CODES,
    JSON,
    TRUST,
    VERSION,
    Command,
    ProgressBar,
    failures,
    output,
    print_json,
)

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command(cls=Command, epilog=EXIT_CODES)
def bench_engine(
    subject: Annotated[
        Path,
        typer.Argument(
            help="OUT.engine of build-engine (the files beside it are used), an ONNX file, a Hugging Face directory, "
            "or a folder with the ranks of a model that is split over GPUs."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="GPU, as for build-engine (default: the plan's, else the one in this machine).", metavar="NAME"
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Follow this plan (default: the one beside an engine, else a new one).", metavar="FILE"),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="The ONNX file that an engine was built from, if it is not where it was.", metavar="FILE"),
    ] = None,
    mode: Annotated[
        Literal["engine", "plugins", "roofline"] | None,
        typer.Option(help="How to measure (default: the first of these that can run here)."),
    ] = None,
    shapes: Annotated[
        str, typer.Option(help="Input shapes (default: the first sample's, else the opt shapes).", metavar="x:1x16,...")
    ] = "",
    calib_data: Annotated[
        Path | None,
        typer.Option(
            help="As for build-engine; the first sample is the input that is timed, unless --shapes asks for others.",
            metavar="FILE|DIR",
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            help="Language models: cached tokens at which a step is timed (default: an eighth, half and all of the "
            "caches' capacity).",
            metavar="N,N,...",
        ),
    ] = "",
    rounds: Annotated[int, typer.Option(min=2, help="Timed runs of each engine or kernel.")] = 50,
    warm_up: Annotated[int, typer.Option(min=0, help="Untimed runs before them.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the result here as JSON (default: beside an engine).",
            metavar="OUT.bench.json",
        ),
    ] = None,
    trust_remote_code: Annotated[bool, TRUST] = False,
    as_json: Annotated[bool, JSON] = False,
    debug: Annotated[bool, DEBUG] = False,
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Time a model with NVFP4 plugins against TensorRT's own NVFP4, FP8 and BF16, all built from the same model.

    - engine: whole engines on their GPU, as CUDA graphs, interleaved, with percentiles, a profile by layer and clocks.
    - plugins: on any GPU, each subgraph's plugin alone, against cuBLAS products of the same shapes.
    - roofline: without a GPU, the least time that the target's published peaks allow; a prediction, marked as one.

    Of a language model with caches: the time to the first token of a prompt, and per token at several cached lengths.
    Ranks run as generate runs them, a process and a GPU for each.

    The result of an engine is written beside it, OUT.bench.json, and shown on the build's page, OUT.report.html.

    Example: bench-engine model.engine
    """
    with failures(debug, as_json, subject):
        from trt_nvfp4 import api
        from trt_nvfp4.builder.bench.result import tables
        from trt_nvfp4.builder.inputs.shapes import parse_shapes
        from trt_nvfp4.builder.tensorrt.load import ENGINES

        beside = subject.with_suffix(".bench.json") if subject.suffix in ENGINES else None
        with ProgressBar() as progress:
            result = api.bench(
                subject,
                output=None if output.quiet else out or beside,
                target=target,
                plan=plan,
                model=model,
                mode=mode,
                shapes=parse_shapes(shapes, "--shapes"),
                calib_data=calib_data,
                trust_remote_code=trust_remote_code,
                rounds=rounds,
                warm_up=warm_up,
                lengths=_lengths(lengths),
                progress=progress,
            )
        if as_json:
            print_json(json.dumps(asdict(result), indent=2))
            return
        for table in tables(result):
            output.print(table)
        for note in result.notes:
            output.print(note)


def _lengths(text: str) -> tuple[int, ...]:
    from trt_nvfp4.builder.errors import USAGE, BuilderError

    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise BuilderError(USAGE, f"--lengths {text}: expected numbers of tokens such as 1024,4096") from None


if __name__ == "__main__":
    app()
