"""build-engine: a model becomes a verified TensorRT engine with NVFP4 plugins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    from trt_nvfp4.options import BuildOptions

# Headings of --help.
_REPLACE = "What to replace, and how"
_WEIGHTS = "Weights and calibration"
_ACCURACY = "Accuracy"
_SHAPES = "Shapes"
_LANGUAGE = "Language models and models of several parts"
_ENGINE = "The engine"

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


class _BuildEngine(Command):
    extra = "; name the engine to write with -o OUT.engine, or a bundle with --bundle DIR"


@app.command(cls=_BuildEngine, epilog=EXIT_CODES)
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
            help="nvfp4: NVFP4 plugins where possible, else FP8, else 16 bits; auto: the same, but FP8 first on "
            "targets before Blackwell where it is faster at the tokens of the opt shapes; fp8: FP8, else 16 bits; "
            "bf16: 16 bits; native-nvfp4: TensorRT's own NVFP4 layers, no plugins (Blackwell, with --calib-data).",
            rich_help_panel=_REPLACE,
        ),
    ] = "auto",
    activations: Annotated[
        Literal["auto", "bf16", "fp16", "keep"],
        typer.Option(
            help="Type of a float32 model outside of the replaced subgraphs. auto: BF16. fp16: FP16, but float32 for "
            "values that leave its range on --calib-data. keep: float32, on slow generic kernels. Norms and positions "
            "stay float32. Models in 16 bits stay as they are.",
            rich_help_panel=_REPLACE,
        ),
    ] = "auto",
    keep_fp32: Annotated[
        str | None,
        typer.Option(
            help="Nodes of a float32 model that stay float32, by their names.",
            metavar="REGEX",
            rich_help_panel=_REPLACE,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Follow this plan (from --stop-after plan, perhaps edited).", metavar="FILE", rich_help_panel=_REPLACE
        ),
    ] = None,
    stop_after: Annotated[
        Literal["plan", "calibrate", "rewrite"] | None,
        typer.Option(
            help="Stop after this stage and keep its files, to continue from later (docs/how_to/plans.md).",
            rich_help_panel=_REPLACE,
        ),
    ] = None,
    calib_data: Annotated[
        Path | None,
        typer.Option(
            help="Input samples: .npz, a folder of .npz, a folder of .npy named by input, Polygraphy JSON, a Python "
            "loader (loader.py:function), or .txt or .jsonl for a Hugging Face model; or the .statistics.json of an "
            "earlier run. "
            "An interrupted calibration continues where it stopped.",
            metavar="FILE|DIR",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="How weights are quantized to NVFP4: names joined by +. Block scales: mse (the default), max, "
            "four-over-six; with --calib-data also diagonal, local-hessian. Rounding: gptq, with activation-order, "
            "learned, quantized-inputs. Channels scaled: awq. W4A4 activations: activation-four-over-six, "
            "activation-sweep, residual:32 or residual:64 (error of the heaviest channels). "
            "docs/how_to/calibration.md explains them. Example: local-hessian+gptq",
            metavar="NAME[+NAME...]",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    min_shapes: Annotated[
        str,
        typer.Option(
            help="Smallest shapes of dynamic inputs. Default: batch 1, sequence 1.",
            metavar="x:1x16,...",
            rich_help_panel=_SHAPES,
        ),
    ] = "",
    opt_shapes: Annotated[
        str,
        typer.Option(
            help="Shapes that TensorRT optimizes for. Default: batch 1, sequence 128.",
            metavar="x:1x16,...",
            rich_help_panel=_SHAPES,
        ),
    ] = "",
    max_shapes: Annotated[
        str,
        typer.Option(
            help="Largest shapes. Default: batch 8, sequence 512, at most what a Hugging Face directory states.",
            metavar="x:1x16,...",
            rich_help_panel=_SHAPES,
        ),
    ] = "",
    include: Annotated[
        str | None,
        typer.Option(
            help="Only subgraphs whose name, or a node's name, matches.", metavar="REGEX", rich_help_panel=_REPLACE
        ),
    ] = None,
    exclude: Annotated[
        str | None,
        typer.Option(
            help="No subgraphs whose name, or a node's name, matches.", metavar="REGEX", rich_help_panel=_REPLACE
        ),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Kinds of subgraph to replace: moe, gated_mlp, mlp, linear, or all of these. Default: all in a model "
            "with key-value caches, else all but linear. decoder, as in all,decoder: equal decoder layers as one "
            "plugin, one launch for up to 16 tokens.",
            metavar="KIND,...",
            rich_help_panel=_REPLACE,
        ),
    ] = None,
    moe: Annotated[
        Literal["plugin", "native"],
        typer.Option(
            help="MoE blocks as NVFP4 plugins, or as TensorRT's own 16-bit layer where it has one.",
            rich_help_panel=_REPLACE,
        ),
    ] = "plugin",
    attention: Annotated[
        Literal["auto", "plugin", "native"],
        typer.Option(
            help="Attention over key-value caches as a plugin, whose time follows the cached length, or as TensorRT's "
            "own layers. auto: the plugin, except for float32 and head sizes that are no multiple of 16.",
            rich_help_panel=_LANGUAGE,
        ),
    ] = "auto",
    kv_cache: Annotated[
        Literal["auto", "fp16", "bf16", "fp8"],
        typer.Option(
            help="Type of the key-value caches. fp8: with the checkpoint's scales, or one per head from --calib-data. "
            "auto: fp8 where the checkpoint has scales or --accuracy-budget is met, else the network's.",
            rich_help_panel=_LANGUAGE,
        ),
    ] = "auto",
    surgery: Annotated[
        Path | None,
        typer.Option(
            help="Python function that changes the graph (an onnx_graphsurgeon.Graph) before anything is looked for, "
            "for example to put plugins in by hand (docs/how_to/graph_surgery.md). The file is executed.",
            metavar="SCRIPT.py:FUNCTION",
            rich_help_panel=_REPLACE,
        ),
    ] = None,
    dump_passes: Annotated[
        Path | None,
        typer.Option(
            help="New folder for the graph after each pass, as ONNX without large weights.",
            metavar="DIR",
            rich_help_panel=_REPLACE,
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="LoRA adapter as PEFT saves it, merged into the model of the Hugging Face directory before anything "
            "else; SCALE multiplies its change (default: 1).",
            metavar="DIR[:SCALE]",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    packed_weights: Annotated[
        Path | None,
        typer.Option(
            help="NVFP4 checkpoint of the same model (ModelOpt or compressed-tensors), whose 4-bit weights and "
            "activation scales are taken over.",
            metavar="DIR",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    require: Annotated[
        Literal["nvfp4", "fp8"] | None,
        typer.Option(
            help="Fail (exit code 5) unless every selected subgraph is built in this precision or a smaller one. With "
            "nvfp4, --precision auto takes NVFP4 at every number of tokens.",
            rich_help_panel=_REPLACE,
        ),
    ] = None,
    require_fast: Annotated[
        bool,
        typer.Option(
            "--require-fast",
            help="With --require: fail, too, where slow generic kernels would serve.",
            rich_help_panel=_REPLACE,
        ),
    ] = False,
    accuracy_budget: Annotated[
        str | None,
        typer.Option(
            help="Choose the fastest precisions that meet this: cosine>=X, sqnr>=dB, kl<=X or perplexity<=X of the "
            "outputs against the original's, on held-out samples. Fails (exit code 5) if none does.",
            metavar="METRIC>=X",
            rich_help_panel=_ACCURACY,
        ),
    ] = None,
    accuracy_data: Annotated[
        Path | None,
        typer.Option(
            help="Held-out samples for the budget; default: every fourth of --calib-data.",
            metavar="FILE|DIR",
            rich_help_panel=_ACCURACY,
        ),
    ] = None,
    accuracy_samples: Annotated[
        int,
        typer.Option(
            min=0,
            help="Samples on which the rewritten model is compared with the original, for the report.",
            rich_help_panel=_ACCURACY,
        ),
    ] = 2,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Instead of an engine, write a folder from which python3 DIR/build_engine.py builds and checks the "
            "engine on the device.",
            metavar="DIR",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    embed_plugins: Annotated[
        Literal["yes", "no"],
        typer.Option(
            help="yes: the engine carries the plugin library; no: the library lies beside the engine. All engines in "
            "the folder share it, and one runtime can load them together.",
            rich_help_panel=_ENGINE,
        ),
    ] = "yes",
    strip: Annotated[
        bool,
        typer.Option(
            "--strip",
            help="Write the plugins' weights to a file beside the engine, not into the engine. The file is named by "
            "its content: engines of the same model share it, on disk and in GPU memory.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    weight_streaming: Annotated[
        bool,
        typer.Option(
            "--weight-streaming",
            help="For models larger than the GPU's memory: TensorRT keeps weights of its own layers in host memory and "
            "copies them when it needs them (not with TensorRT-RTX). Plugins' weights stay on the GPU.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    timing_cache: Annotated[
        Path | None,
        typer.Option(
            help="Timing cache to use and update (not with TensorRT-RTX).",
            metavar="FILE",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    task: Annotated[
        Literal["auto", "generate", "features"],
        typer.Option(
            help="What a Hugging Face directory is exported for. generate: a language model with key-value caches, two "
            "profiles (prefill and decode); features: any model without caches; auto: generate for causal language "
            "models.",
            rich_help_panel=_LANGUAGE,
        ),
    ] = "auto",
    cache: Annotated[
        Literal["keep", "inplace"],
        typer.Option(
            help="Caches of an ONNX decoder with inputs past_key_values and outputs present. inplace: convert them to "
            "caches of fixed capacity that are updated in place, as exported directories have; keep: leave them.",
            rich_help_panel=_LANGUAGE,
        ),
    ] = "keep",
    cache_capacity: Annotated[
        int | None,
        typer.Option(
            help="Tokens that each sequence's cache holds, prompt included. Default: the model's limit, at most 4096.",
            metavar="TOKENS",
            rich_help_panel=_LANGUAGE,
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(help="Most sequences at once, with caches. Default: 1.", metavar="N", rich_help_panel=_LANGUAGE),
    ] = None,
    all_logits: Annotated[
        bool,
        typer.Option(
            "--all-logits",
            help="With caches: logits of every token, not of each sequence's last.",
            rich_help_panel=_LANGUAGE,
        ),
    ] = False,
    image_size: Annotated[
        str | None,
        typer.Option(
            help="Height and width in pixels that a vision encoder is built for, where the model leaves a choice.",
            metavar="HxW",
            rich_help_panel=_LANGUAGE,
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Split a Hugging Face model over N GPUs (tensor parallel) and build an engine for each; -o names a "
            "folder. ep=M spreads whole experts over M groups of GPUs (M divides N); without it every GPU has a part "
            "of each expert.",
            metavar="tp=N[,ep=M]",
            rich_help_panel=_LANGUAGE,
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
        from trt_nvfp4 import api
        from trt_nvfp4.builder.components.source import is_of_parts
        from trt_nvfp4.builder.components.tables import report_tables
        from trt_nvfp4.builder.components.user_modules import is_python_file
        from trt_nvfp4.builder.inputs.shapes import parse_shapes

        options: BuildOptions = {
            "precision": precision,
            "activations": activations,
            "keep_fp32": keep_fp32,
            "plan": plan,
            "stop_after": stop_after,
            "calib_data": calib_data,
            "recipe": recipe,
            "min_shapes": parse_shapes(min_shapes, "--min-shapes"),
            "opt_shapes": parse_shapes(opt_shapes, "--opt-shapes"),
            "max_shapes": parse_shapes(max_shapes, "--max-shapes"),
            "include": include,
            "exclude": exclude,
            "kinds": None if kinds is None else [kind.strip() for kind in kinds.split(",") if kind.strip()],
            "moe": moe,
            "attention": attention,
            "kv_cache": kv_cache,
            "surgery": surgery,
            "dump_passes": dump_passes,
            "adapter": adapter,
            "packed_weights": packed_weights,
            "require": require,
            "require_fast": require_fast,
            "accuracy_budget": accuracy_budget,
            "accuracy_data": accuracy_data,
            "accuracy_samples": accuracy_samples,
            "embed_plugins": embed_plugins == "yes",
            "strip": strip,
            "weight_streaming": weight_streaming,
            "timing_cache": timing_cache,
            "task": task,
            "cache": cache,
            "cache_capacity": cache_capacity,
            "max_batch": max_batch,
            "all_logits": all_logits,
            "image_size": image_size,
            "trust_remote_code": trust_remote_code,
        }
        if parallel is not None or is_of_parts(model, task) or is_python_file(model):
            with ProgressBar() as progress:
                parts = api.build_parts(
                    model, target=target, output=out, bundle=bundle, parallel=parallel, progress=progress, **options
                )
            shown, tables = parts.json(), report_tables(parts)
        else:
            with ProgressBar() as progress:
                built = api.build(model, target=target, output=out, bundle=bundle, progress=progress, **options)
            shown, tables = built.report.json(), built.report.tables()
        if as_json:
            print_json(shown)
            return
        for table in tables:
            output.print(table)


if __name__ == "__main__":
    app()
