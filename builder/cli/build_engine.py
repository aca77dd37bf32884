"""build-engine: a model becomes a verified TensorRT engine with NVFP4 plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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

if TYPE_CHECKING:
    from trt_nvfp4.builder.pipeline.request import Request

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command(cls=Command, epilog=EXIT_CODES)
def build_engine(
    model: Annotated[
        Path,
        typer.Argument(
            help="ONNX file, Hugging Face model directory (exported for you), OUT.rewritten.onnx with --plan, or a "
            "Python file with the parts of a model (model.py:components), which is run."
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            help="GPU to build for: thor, b200, b300, rtx-blackwell, spark, h200, h100 or ada.", metavar="NAME"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Engine file to write; the other files are named after it. Left out only with --bundle.",
            metavar="OUT.engine",
        ),
    ] = None,
    precision: Annotated[
        Literal["auto", "nvfp4", "native-nvfp4", "fp8", "bf16"],
        typer.Option(
            help="nvfp4: NVFP4 plugins where they can serve, else FP8, else 16 bits; auto: the same, but FP8 first "
            "where a target before Blackwell is faster with it, by the tokens of the typical shapes; fp8: FP8, else 16 "
            "bits; bf16: 16 bits; native-nvfp4: TensorRT's own NVFP4 layers, no plugins (Blackwell, with --calib-data)."
        ),
    ] = "auto",
    activations: Annotated[
        Literal["auto", "bf16", "fp16", "keep"],
        typer.Option(
            help="What a float32 model computes in outside of the replaced subgraphs: auto: BF16; fp16: values that "
            "--calib-data takes out of its range stay float32; keep: float32, on slow generic kernels. Norms and "
            "positions stay float32. Models in 16 bits stay as they are."
        ),
    ] = "auto",
    keep_fp32: Annotated[
        str | None, typer.Option(help="Nodes of a float32 model that stay float32, by their names.", metavar="REGEX")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Follow this plan (from --stop-after plan, perhaps edited).", metavar="FILE")
    ] = None,
    stop_after: Annotated[
        Literal["plan", "calibrate", "rewrite"] | None,
        typer.Option(help="Stop after this stage and keep its files, to continue from later (docs/how_to/plans.md)."),
    ] = None,
    calib_data: Annotated[
        Path | None,
        typer.Option(
            help="Input samples: .npz, a folder of .npz, a folder of .npy named by input, Polygraphy JSON, a Python "
            "loader (loader.py:function), or .txt or .jsonl for a Hugging Face model; or the .statistics.json of an "
            "earlier run. "
            "An interrupted calibration continues where it stopped.",
            metavar="FILE|DIR",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="How weights become NVFP4, parts joined by +. Block scales: mse (the default), max, four-over-six; "
            "with --calib-data also diagonal, local-hessian. Rounding: gptq, with activation-order, quantized-inputs. "
            "Channels scaled: awq. W4A4 activations: activation-four-over-six, activation-sweep. "
            "docs/how_to/calibration.md explains them. Example: local-hessian+gptq",
            metavar="NAME[+NAME...]",
        ),
    ] = None,
    min_shapes: Annotated[
        str, typer.Option(help="Smallest shapes of dynamic inputs. Default: batch 1, sequence 1.", metavar="x:1x16,...")
    ] = "",
    opt_shapes: Annotated[
        str,
        typer.Option(
            help="Typical shapes, for which TensorRT optimizes. Default: batch 1, sequence 128.", metavar="x:1x16,..."
        ),
    ] = "",
    max_shapes: Annotated[
        str,
        typer.Option(
            help="Largest shapes. Default: batch 8, sequence 512, at most what a Hugging Face directory states.",
            metavar="x:1x16,...",
        ),
    ] = "",
    include: Annotated[
        str | None, typer.Option(help="Only subgraphs whose name, or a node's name, matches.", metavar="REGEX")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(help="Not the subgraphs whose name, or a node's name, matches.", metavar="REGEX")
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Kinds of subgraph to replace: moe, gated_mlp, mlp, linear, or all of these. Default: all in a model "
            "with key-value caches, else all but linear. decoder, as in all,decoder: equal decoder layers as one "
            "plugin, one launch for up to 16 tokens.",
            metavar="KIND,...",
        ),
    ] = None,
    moe: Annotated[
        Literal["plugin", "native"],
        typer.Option(help="MoE blocks as NVFP4 plugins, or as TensorRT's own 16-bit layer where it has one."),
    ] = "plugin",
    attention: Annotated[
        Literal["auto", "plugin", "native"],
        typer.Option(
            help="Attention over key-value caches as a plugin, whose time follows the cached length, or as TensorRT's "
            "own layers. auto: the plugin, but for float32 and odd head sizes."
        ),
    ] = "auto",
    kv_cache: Annotated[
        Literal["auto", "fp16", "bf16", "fp8"],
        typer.Option(
            help="Type of the key-value caches. fp8: with the checkpoint's scales, or one per head from --calib-data. "
            "auto: fp8 where the checkpoint has scales or --accuracy-budget is met, else the network's."
        ),
    ] = "auto",
    surgery: Annotated[
        Path | None,
        typer.Option(
            help="Python function that changes the graph (an onnx_graphsurgeon.Graph) before anything is looked for, "
            "for example to put plugins in by hand. It is run (docs/how_to/graph_surgery.md).",
            metavar="SCRIPT.py:FUNCTION",
        ),
    ] = None,
    dump_passes: Annotated[
        Path | None,
        typer.Option(help="New folder for the graph after each pass, as ONNX without large weights.", metavar="DIR"),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="LoRA adapter as PEFT saves it, merged into the model of the Hugging Face directory before anything "
            "else; with a factor for what it changes, 1 by default.",
            metavar="DIR[:SCALE]",
        ),
    ] = None,
    packed_weights: Annotated[
        Path | None,
        typer.Option(
            help="NVFP4 checkpoint of the same model (ModelOpt or compressed-tensors), whose 4-bit weights and "
            "activation scales are taken over.",
            metavar="DIR",
        ),
    ] = None,
    require: Annotated[
        Literal["nvfp4", "fp8"] | None,
        typer.Option(
            help="Fail (exit code 5) unless every selected subgraph is built in this precision or a smaller one. With "
            "nvfp4, --precision auto takes NVFP4 at every number of tokens."
        ),
    ] = None,
    require_fast: Annotated[
        bool, typer.Option("--require-fast", help="With --require: fail, too, where slow generic kernels would serve.")
    ] = False,
    accuracy_budget: Annotated[
        str | None,
        typer.Option(
            help="Choose the fastest precisions with which the outputs, compared with the original's on held-out "
            "samples, meet this: cosine>=X, sqnr>=dB, kl<=X or perplexity<=X. Fails (exit code 5) if none does.",
            metavar="METRIC>=X",
        ),
    ] = None,
    accuracy_data: Annotated[
        Path | None,
        typer.Option(
            help="Held-out samples for the budget; default: every fourth of --calib-data.", metavar="FILE|DIR"
        ),
    ] = None,
    accuracy_samples: Annotated[
        int,
        typer.Option(min=0, help="Samples on which the rewritten model is compared with the original, for the report."),
    ] = 2,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Instead of an engine, write a folder to build and check it from on the device, by "
            "python3 DIR/build_engine.py.",
            metavar="DIR",
        ),
    ] = None,
    embed_plugins: Annotated[
        Literal["yes", "no"],
        typer.Option(
            help="yes: the engine carries the plugin library; no: the library lies beside the engine, once for all "
            "engines in the folder, which one runtime can then load together."
        ),
    ] = "yes",
    strip: Annotated[
        bool,
        typer.Option(
            "--strip",
            help="Leave the plugins' weights out of the engine, in a file beside it that is named by its content: "
            "engines of the same model share it, on disk and in GPU memory.",
        ),
    ] = False,
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="Timing cache to use and update (tensorrt; TensorRT-RTX has none).", metavar="FILE"),
    ] = None,
    task: Annotated[
        Literal["auto", "generate", "features"],
        typer.Option(
            help="What a Hugging Face directory is exported for. generate: a language model with key-value caches, two "
            "profiles (prefill and decode); features: any model without caches; auto: generate for causal language "
            "models."
        ),
    ] = "auto",
    cache: Annotated[
        Literal["keep", "inplace"],
        typer.Option(
            help="Caches of a decoder that comes as ONNX with past_key_values and present. inplace: they become caches "
            "of fixed capacity that are updated in place, as an exported directory has; keep: built as it is."
        ),
    ] = "keep",
    cache_capacity: Annotated[
        int | None,
        typer.Option(
            help="Tokens that each sequence's cache holds, prompt included. Default: the model's limit, at most 4096.",
            metavar="TOKENS",
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Most sequences at once, with caches. Default: 1.", metavar="N")
    ] = None,
    all_logits: Annotated[
        bool, typer.Option("--all-logits", help="With caches: logits of every token, not of each sequence's last.")
    ] = False,
    image_size: Annotated[
        str | None,
        typer.Option(
            help="Height and width in pixels that a vision encoder is built for, where the model leaves a choice.",
            metavar="HxW",
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Split a Hugging Face model over N GPUs, an engine for each (tensor parallel); -o names a folder.",
            metavar="tp=N",
        ),
    ] = None,
    trust_remote_code: Annotated[bool, TRUST] = False,
    as_json: Annotated[bool, JSON] = False,
    debug: Annotated[bool, DEBUG] = False,
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Build a TensorRT engine in which MoE, MLP and linear subgraphs run as NVFP4 plugins.

    Finds the subgraphs, plans their precision, calibrates, rewrites the ONNX, builds the engine and checks that it
    holds what was planned. Beside OUT.engine: OUT.plan.yaml, OUT.statistics.json, OUT.rewritten.onnx, OUT.report.json
    and the same as a page, OUT.report.html.

    Example: build-engine model.onnx -o model.engine --target rtx-blackwell --calib-data samples.npz
    """
    with failures(debug, as_json):
        # First what needs no import that takes seconds.
        from trt_nvfp4.builder.model_files import check_model_file
        from trt_nvfp4.builder.targets import find_target

        find_target(target)
        check_model_file(model)
        from trt_nvfp4.builder.accuracy.budget import Budget
        from trt_nvfp4.builder.components.source import is_of_parts
        from trt_nvfp4.builder.components.user_modules import is_python_file
        from trt_nvfp4.builder.export.adapter import Adapter
        from trt_nvfp4.builder.inputs.shapes import parse_shapes
        from trt_nvfp4.builder.pipeline import pipeline
        from trt_nvfp4.builder.report import report
        from trt_nvfp4.graph_passes.planning.plan import KINDS

        request = pipeline.Request(
            model=model,
            target=find_target(target),
            output=out,
            precision=precision,
            activations=activations,
            keep_fp32=keep_fp32,
            plan=plan,
            stop_after=stop_after,
            calib_data=calib_data,
            recipe=recipe,
            least=parse_shapes(min_shapes, "--min-shapes"),
            typical=parse_shapes(opt_shapes, "--opt-shapes"),
            most=parse_shapes(max_shapes, "--max-shapes"),
            include=include,
            exclude=exclude,
            kinds=_kinds(kinds, KINDS),
            task=task,
            cache=cache,
            cache_capacity=cache_capacity,
            max_batch=max_batch,
            all_logits=all_logits,
            moe=moe,
            attention=attention,
            kv_cache=kv_cache,
            surgery=surgery,
            dump_passes=dump_passes,
            adapter=None if adapter is None else Adapter.parse(adapter),
            packed_weights=packed_weights,
            require=require,
            require_fast=require_fast,
            bundle=bundle,
            embed_plugins=embed_plugins == "yes",
            strip=strip,
            timing_cache=timing_cache,
            accuracy_samples=accuracy_samples,
            accuracy_budget=Budget.parse(accuracy_budget) if accuracy_budget is not None else None,
            accuracy_data=accuracy_data,
            trust_remote_code=trust_remote_code,
            image_size=image_size,
        )
        if parallel is not None or is_of_parts(model, task) or is_python_file(model):
            _build_parts(request, parallel, as_json)
            return
        with ProgressBar() as progress:
            result = pipeline.run(request, progress)
        if as_json:
            print_json(result.json())
            return
        shown: dict[str, Any] = json.loads(result.json())
        for table in report.subgraph_tables(shown["subgraphs"]):
            output.print(table)
        output.print(report.summary_table(shown))


def _kinds(text: str | None, known: tuple[str, ...]) -> tuple[str, ...] | None:
    if text is None:
        return None
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    return (*known, *(kind for kind in kinds if kind not in (*known, "all"))) if "all" in kinds else kinds


def _build_parts(request: Request, parallel: str | None, as_json: bool) -> None:
    """A model of several graphs, or one that is split: each becomes an engine, or a bundle."""
    from trt_nvfp4.builder.components import build
    from trt_nvfp4.builder.components.tables import report_tables
    from trt_nvfp4.builder.errors import USAGE, BuilderError

    if request.surgery is not None:
        what = f"{request.model} has several" if parallel is None else f"--parallel {parallel} splits it before"
        raise BuilderError(USAGE, f"--surgery is for one graph, and {what}; leave it out")
    with ProgressBar() as progress:
        if parallel is None:
            result = build.run(request, progress)
        else:
            from trt_nvfp4.builder.parallel import build as ranks

            result = ranks.run(request, parallel, progress)
    if as_json:
        print_json(result.json())
        return
    for table in report_tables(json.loads(result.json())):
        output.print(table)


if __name__ == "__main__":
    app()
