"""compare-engine: how far the rewritten model (and its engine) is from the original."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from .console import DEBUG, EXIT_CODES, JSON, ProgressBar, failures, output, print_json

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command(epilog=EXIT_CODES)
def compare_engine(
    original: Annotated[Path, typer.Argument(help="The original ONNX file.")],
    result: Annotated[
        Path, typer.Argument(help="OUT.engine or OUT.rewritten.onnx of build-engine; the files beside it are used.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="Input samples, as for --calib-data (default: random ones).", metavar="FILE|DIR")
    ] = None,
    shapes: Annotated[str, typer.Option(help="Shapes of the random samples.", metavar="x:1x16,...")] = "",
    samples: Annotated[int, typer.Option(min=1, help="How many random samples.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random samples.")] = 0,
    min_cosine: Annotated[
        float | None, typer.Option(help="Fail (exit code 5) when an output's cosine is below.", metavar="X")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Run original and rewritten model on the same inputs and report how they agree.

    Per output and per replaced subgraph: cosine of the worst sample, SQNR, greatest difference, share of equal argmax.
    ONNX Runtime computes the plugins by their ONNX function bodies; the engine runs too where its GPU and runtime are,
    and where there is only a GPU, each plugin runs on it against its function body.
    """
    with failures(debug, as_json):
        import numpy as np

        from trt_nvfp4.builder import compare
        from trt_nvfp4.builder.backend import local_compute_capability
        from trt_nvfp4.builder.errors import USAGE, VERIFICATION_FAILED, BuilderError
        from trt_nvfp4.builder.plugin_comparison import compare_plugins
        from trt_nvfp4.builder.shapes import parse_shapes
        from trt_nvfp4.builder.targets import arch_of
        from trt_nvfp4.calibration.samples import input_specs, load_samples
        from trt_nvfp4.graph_passes.plan import Plan
        from trt_nvfp4.plugins.host import PluginHost
        from trt_nvfp4.plugins.library import build_library

        base = result.name.removesuffix(".engine").removesuffix(".onnx").removesuffix(".rewritten")
        rewritten = result if result.suffix == ".onnx" else result.with_name(base + ".rewritten.onnx")
        plan = result.with_name(base + ".plan.yaml")
        for path in (original, rewritten):
            if not path.is_file():
                raise BuilderError(
                    USAGE, f"{path}: no such file; compare-engine needs the original and the rewritten ONNX"
                )
        inputs: Iterable[compare.Sample]
        if data is None:
            inputs = compare.random_samples(
                original, samples, np.random.default_rng(seed), parse_shapes(shapes, "--shapes")
            )
        else:
            inputs = load_samples(data, input_specs(original))
        with ProgressBar() as progress:
            progress.stage("running original and rewritten model")
            inputs = list(inputs)
            engine = compare.engine_runner(result)
            found = compare.compare(original, rewritten, inputs, Plan.load(plan) if plan.is_file() else None, engine)
            capability = local_compute_capability()
            if engine is None and capability is not None:
                progress.stage("running the plugins on this GPU")
                found["plugins"] = compare_plugins(rewritten, inputs, PluginHost(build_library(arch_of(capability))))
        if as_json:
            rows = {runner: [agreement.as_dict() for agreement in agreements] for runner, agreements in found.items()}
            print_json(json.dumps(rows, indent=2))
        else:
            for runner, agreements in found.items():
                output.print(compare.table(runner, agreements))
        outputs = [row for rows in found.values() for row in rows if row.kind == "output"]
        worst = min(outputs, key=lambda row: row.cosine)
        if min_cosine is not None and not worst.cosine >= min_cosine:
            raise BuilderError(
                VERIFICATION_FAILED, f"output {worst.name}: cosine {worst.cosine:.6f} is below {min_cosine}"
            )


main = app
