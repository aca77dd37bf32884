"""The options of a build, each written once (see `builder.options`)."""

# Without `from __future__ import annotations`: the types of fields are read.

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import attrs
from attrs import field

from trt_nvfp4.builder.inputs.shape_text import LARGEST_DIMENSION, Shape
from trt_nvfp4.builder.options import RUNS_CODE, Options, described, path
from trt_nvfp4.builder.pipeline.option_readers import (
    read_adapter,
    read_budget,
    read_kinds,
    read_max_shapes,
    read_min_shapes,
    read_opt_shapes,
    read_switch,
    read_target,
)
from trt_nvfp4.builder.targets import Target

if TYPE_CHECKING:
    from trt_nvfp4.builder.accuracy.budget import Budget
    from trt_nvfp4.builder.export.adapter import Adapter

Precision: TypeAlias = Literal["auto", "nvfp4", "native-nvfp4", "fp8", "bf16"]

# Headings of --help.
WHAT = "What to build"
PRECISION = "Precision"
SHAPES = "Shapes and caches"
WHERE = "Where to put it"
CHECK = "How to check it"

# Options that leave others without effect.
PLAN = "plan"
PLAN_WITHOUT_REQUIRE = "plan without require"
REWRITTEN = "rewritten model"
PARTS = "parts"
ONNX = "ONNX model"
ONNX_CACHES = "ONNX model whose caches stay"
TASK_FEATURES = "task features"
_SELECTS = (PLAN_WITHOUT_REQUIRE,)


@attrs.frozen(kw_only=True)
class BuildOptions(Options):
    """A model, what to make of it, and how. The options are those of `build-engine`, which its `--help` and
    docs/reference/command_line.md explain; paths may be strings, and shapes `x:1x16`.

    Raises UsageError for a value that an option does not take.
    """

    GROUPS: ClassVar[tuple[str, ...]] = (WHAT, PRECISION, SHAPES, WHERE, CHECK)

    model: Path = field(
        kw_only=False,
        converter=Path,
        metadata=described(
            "ONNX file, Hugging Face model directory or diffusers pipeline (exported for you), the name of a model of "
            "the Hub (downloaded), OUT.rewritten.onnx with --plan, or a Python file with the parts of a model "
            "(model.py:components), which is run."
        ),
    )
    target: Target = field(
        kw_only=False,
        converter=read_target,
        metadata=described(
            "GPU to build for: thor, b200, b300, rtx-blackwell, spark, h200, h100 or ada.", WHAT, metavar="NAME"
        ),
    )
    output: Path | None = field(
        kw_only=False,
        default=None,
        converter=path,
        metadata=described(
            "Engine file to write; the other files are named after it. Left out only with --bundle.",
            WHERE,
            metavar="OUT.engine",
            short=("-o",),
        ),
    )
    bundle: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Instead of an engine, write a folder from which python3 DIR/build_engine.py builds and checks the engine "
            "on the device.",
            WHERE,
            metavar="DIR",
        ),
    )
    kinds: tuple[str, ...] | None = field(
        default=None,
        converter=read_kinds,
        metadata=described(
            "Kinds of subgraph to replace: moe, gated_mlp, mlp, linear, or all of these. Default: all in a model with "
            "key-value caches, else all but linear. decoder, as in all,decoder: equal decoder layers as one plugin, "
            "one launch for up to 16 tokens.",
            WHAT,
            metavar="KIND,...",
            ignored_with=_SELECTS,
        ),
    )
    include: str | None = field(
        default=None,
        metadata=described(
            "Only subgraphs whose name, or a node's name, matches.", WHAT, metavar="REGEX", ignored_with=_SELECTS
        ),
    )
    exclude: str | None = field(
        default=None,
        metadata=described(
            "No subgraphs whose name, or a node's name, matches.", WHAT, metavar="REGEX", ignored_with=_SELECTS
        ),
    )
    plan: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Follow this plan (from --stop-after plan, perhaps edited).", WHAT, metavar="FILE", ignored_with=(PARTS,)
        ),
    )
    task: Literal["auto", "generate", "text", "features"] = field(
        default="auto",
        metadata=described(
            "What a Hugging Face directory is exported for. generate: a language model with key-value caches, two "
            "profiles (prefill and decode); text: the same of what reads text in a model that takes images or sound, "
            "too, in place of all its parts; features: any model without caches; auto: generate for causal language "
            "models.",
            WHAT,
            ignored_with=(ONNX,),
        ),
    )
    adapter: "Adapter | None" = field(
        default=None,
        converter=read_adapter,
        metadata=described(
            "LoRA adapter as PEFT (for pipelines: diffusers) saves it, merged into the model before anything else; "
            "SCALE multiplies its change (default: 1).",
            WHAT,
            metavar="DIR[:SCALE]",
        ),
    )
    draft: str = field(
        default="none",
        converter=str,
        metadata=described(
            "A drafter, built beside the model as OUT.draft.engine. auto: the layers that predict further tokens, in "
            "the model's own files; DIR: an EAGLE-3 head of this model, or a smaller language model with the same "
            "tokenizer.",
            WHAT,
            metavar="auto|none|DIR",
            ignored_with=(ONNX, TASK_FEATURES, PARTS),
        ),
    )
    parallel: str | None = field(
        default=None,
        metadata=described(
            "Split a Hugging Face model over N GPUs (tensor parallel) and build an engine for each; -o names a folder. "
            "ep=M spreads whole experts over M groups of GPUs (M divides N); without it every GPU has a part of each "
            "expert.",
            WHAT,
            metavar="tp=N[,ep=M]",
        ),
    )
    trust_remote_code: bool = field(
        default=False,
        metadata=described(RUNS_CODE, WHAT),
    )
    precision: Precision = field(
        default="auto",
        metadata=described(
            "nvfp4: NVFP4 plugins where possible, else FP8, else 16 bits; auto: the same, but FP8 first on targets "
            "before Blackwell where it is faster at the tokens of the opt shapes; fp8: FP8, else 16 bits; bf16: 16 "
            "bits; native-nvfp4: TensorRT's own NVFP4 layers, no plugins (Blackwell, with --calib-data).",
            PRECISION,
            ignored_with=(PLAN,),
        ),
    )
    activations: Literal["auto", "bf16", "fp16", "keep"] = field(
        default="auto",
        metadata=described(
            "Type of a float32 model outside of the replaced subgraphs. auto: BF16. fp16: FP16, but float32 for values "
            "that leave its range on --calib-data. keep: float32, on slow generic kernels. Norms and positions stay "
            "float32. Models in 16 bits stay as they are.",
            PRECISION,
            ignored_with=(PLAN,),
        ),
    )
    calib_data: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Input samples: .npz, a folder of .npz, a folder of .npy named by input, Polygraphy JSON, a Python loader "
            "(loader.py:function), or .txt or .jsonl for a Hugging Face model (prompts, .txt, for a pipeline); or the "
            ".statistics.json of an earlier run. An interrupted calibration continues where it stopped.",
            PRECISION,
            metavar="FILE|DIR",
            ignored_with=(REWRITTEN,),
        ),
    )
    calib_samples: int = field(
        default=512,
        metadata=described(
            "Most samples of --calib-data to calibrate on, evenly drawn (of a Python loader the first ones).",
            PRECISION,
            metavar="N",
            at_least=1,
            ignored_with=(REWRITTEN,),
        ),
    )
    recipe: str | None = field(
        default=None,
        metadata=described(
            "How weights are quantized to NVFP4: names joined by +. Block scales: mse (the default), max, "
            "four-over-six; with --calib-data also diagonal, local-hessian. Rounding: gptq, with quantized-inputs. "
            "Channels scaled: awq. W4A4 activations: activation-four-over-six, activation-sweep, residual:32 or "
            "residual:64 (error of the heaviest channels). docs/how_to/calibration.md explains them. Example: "
            "local-hessian+gptq",
            PRECISION,
            metavar="NAME[+NAME...]",
            ignored_with=(REWRITTEN,),
        ),
    )
    attention: Literal["auto", "plugin", "tensorrt"] = field(
        default="auto",
        metadata=described(
            "Attention over key-value caches as a plugin, whose time follows the cached length, or as TensorRT's own "
            "layers. auto: the plugin, except for float32 and head sizes that are not a multiple of 16.",
            PRECISION,
            renamed={"native": "tensorrt"},
            ignored_with=(PLAN,),
        ),
    )
    kv_cache: Literal["auto", "fp16", "bf16", "fp8"] = field(
        default="auto",
        metadata=described(
            "Type of the key-value caches. fp8: with the checkpoint's scales, or one per head from --calib-data. auto: "
            "fp8 where the checkpoint has scales or --accuracy-budget is met, else the network's.",
            PRECISION,
            ignored_with=(PLAN,),
        ),
    )
    min_shapes: dict[str, Shape] = field(
        factory=dict,
        converter=read_min_shapes,
        metadata=described(
            "Smallest shapes of dynamic inputs. Default: batch 1, sequence 1.", SHAPES, metavar="x:1x16,..."
        ),
    )
    opt_shapes: dict[str, Shape] = field(
        factory=dict,
        converter=read_opt_shapes,
        metadata=described(
            "Shapes that TensorRT optimizes for. Default: batch 1, sequence 128.", SHAPES, metavar="x:1x16,..."
        ),
    )
    max_shapes: dict[str, Shape] = field(
        factory=dict,
        converter=read_max_shapes,
        metadata=described(
            "Largest shapes. Default: batch 8, sequence 512, at most what a Hugging Face directory states.",
            SHAPES,
            metavar="x:1x16,...",
        ),
    )
    cache: Literal["keep", "inplace"] = field(
        default="keep",
        metadata=described(
            "Caches of an ONNX decoder with inputs past_key_values and outputs present. inplace: convert them to "
            "caches of fixed capacity that are updated in place, as exported directories have; keep: leave them.",
            SHAPES,
        ),
    )
    cache_capacity: int | None = field(
        default=None,
        metadata=described(
            "Tokens that each sequence's cache holds, prompt included. Default: the model's limit, at most 4096.",
            SHAPES,
            metavar="TOKENS",
            at_least=1,
            at_most=LARGEST_DIMENSION,
            ignored_with=(TASK_FEATURES, ONNX_CACHES),
        ),
    )
    max_batch: int | None = field(
        default=None,
        metadata=described(
            "Most sequences at once, with caches; of a diffusers pipeline most prompts. Default: 1.",
            SHAPES,
            metavar="N",
            at_least=1,
            at_most=LARGEST_DIMENSION,
            ignored_with=(TASK_FEATURES, ONNX_CACHES),
        ),
    )
    stop_after: Literal["plan", "calibrate", "rewrite"] | None = field(
        default=None,
        metadata=described(
            "Stop after this stage and keep its files, to continue from later (docs/how_to/plans.md).",
            WHERE,
            ignored_with=(REWRITTEN, PARTS),
        ),
    )
    embed_plugins: bool = field(
        default=True,
        converter=read_switch,
        metadata=described(
            "yes: the engine carries the plugin library; no: the library lies beside the engine. All engines in the "
            "folder share it, and one runtime can load them together.",
            WHERE,
        ),
    )
    strip: bool = field(
        default=False,
        metadata=described(
            "Write the plugins' weights to a file beside the engine, not into the engine. The file is named by its "
            "content: engines of the same model share it, on disk and in GPU memory.",
            WHERE,
        ),
    )
    require: Literal["nvfp4", "fp8"] | None = field(
        default=None,
        metadata=described(
            "Fail (exit code 5) unless every selected subgraph is built in this precision or a smaller one. With "
            "nvfp4, --precision auto takes NVFP4 at every number of tokens.",
            CHECK,
        ),
    )
    accuracy_budget: "Budget | None" = field(
        default=None,
        converter=read_budget,
        metadata=described(
            "Choose the fastest precisions that meet this: cosine>=X, sqnr>=dB, kl<=X or perplexity<=X of the outputs "
            "against the original's, on held-out samples. Fails (exit code 5) if none does.",
            CHECK,
            metavar="METRIC>=X",
            ignored_with=(PARTS,),
        ),
    )
    accuracy_data: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Held-out samples for the budget. Default: every fourth of --calib-data.",
            CHECK,
            metavar="FILE|DIR",
            ignored_with=(PARTS,),
        ),
    )
    accuracy_samples: int = field(
        default=2,
        metadata=described(
            "Samples on which the rewritten model is compared with the original, for the report.",
            metavar="N",
            is_setting=True,
            at_least=0,
            ignored_with=(REWRITTEN,),
        ),
    )
    all_kernels: bool = field(
        default=False,
        converter=read_switch,
        metadata=described(
            "Link every kernel into the plugin library, so that it serves all models; otherwise those that this model "
            "needs.",
            is_setting=True,
        ),
    )
    all_logits: bool = field(
        default=False,
        converter=read_switch,
        metadata=described(
            "With caches: logits of every token, not of each sequence's last.",
            is_setting=True,
            ignored_with=(TASK_FEATURES, ONNX),
        ),
    )
    batch: int | None = field(
        default=None,
        kw_only=True,
        metadata=described(
            "Inputs of one run, fixed, of a Hugging Face model without caches; for models whose batch cannot change.",
            metavar="N",
            is_setting=True,
            at_least=1,
            at_most=LARGEST_DIMENSION,
            ignored_with=(ONNX, PARTS),
        ),
    )
    dump_passes: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "New folder for the graph after each pass, as ONNX without large weights.",
            metavar="DIR",
            is_setting=True,
            ignored_with=(REWRITTEN,),
        ),
    )
    image_size: str | None = field(
        default=None,
        metadata=described(
            "Height and width in pixels of images that a Hugging Face model is built for, where it leaves a choice; of "
            "a diffusers pipeline those of pictures, which may be a range.",
            metavar="HxW[..HxW]",
            is_setting=True,
            ignored_with=(ONNX,),
        ),
    )
    pipeline_arguments: str | None = field(
        default=None,
        metadata=described(
            "What a diffusers pipeline is called with while it is built, beside its prompt, size and steps, such as "
            "num_frames=49,guidance_scale=1: its engines are built for that.",
            metavar="NAME=VALUE,...",
            is_setting=True,
            ignored_with=(ONNX,),
        ),
    )
    keep_fp32: str | None = field(
        default=None,
        metadata=described(
            "Nodes of a float32 model that stay float32, by their names.",
            metavar="REGEX",
            is_setting=True,
            ignored_with=(PLAN,),
        ),
    )
    moe: Literal["plugin", "trt_moe"] = field(
        default="plugin",
        metadata=described(
            "MoE blocks as NVFP4 plugins, or (trt_moe) as TensorRT's own 16-bit layer where it has one.",
            is_setting=True,
            renamed={"native": "trt_moe"},
            ignored_with=(PLAN,),
        ),
    )
    packed_weights: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "NVFP4 checkpoint of the same model (ModelOpt or compressed-tensors), whose 4-bit weights and activation "
            "scales are taken over.",
            metavar="DIR",
            is_setting=True,
            ignored_with=(REWRITTEN, PARTS),
        ),
    )
    require_fast: bool = field(
        default=False,
        converter=read_switch,
        metadata=described("With --require: fail, too, where slow generic kernels would serve.", is_setting=True),
    )
    surgery: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Python function that changes the graph (an onnx_graphsurgeon.Graph) before anything is looked for, for "
            "example to put plugins in by hand (docs/how_to/graph_surgery.md). The file is executed.",
            metavar="SCRIPT.py:FUNCTION",
            is_setting=True,
            ignored_with=(REWRITTEN, PARTS),
        ),
    )
    acceptance: bool = field(
        default=False,
        converter=read_switch,
        metadata=described(
            "With --bundle of a language model: record text and logits by ONNX Runtime, which takes as long as a few "
            "steps there, and add accept.py, which builds the engine on the device and compares it with them.",
            is_setting=True,
            ignored_with=(PARTS,),
        ),
    )
    triton: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Write a model repository for NVIDIA's Triton Inference Server into this folder, too: the engine of the "
            "package tensorrt and its config.pbtxt; with --bundle the latter, and where the device puts the engine.",
            metavar="DIR",
            is_setting=True,
            ignored_with=(PARTS,),
        ),
    )
    timing_cache: Path | None = field(
        default=None,
        converter=path,
        metadata=described("Timing cache to use and update (not with TensorRT-RTX).", metavar="FILE", is_setting=True),
    )
    weight_streaming: bool = field(
        default=False,
        converter=read_switch,
        metadata=described(
            "For models larger than the GPU's memory: TensorRT keeps weights of its own layers in host memory and "
            "copies them when it needs them (not with TensorRT-RTX). Plugins' weights stay on the GPU.",
            is_setting=True,
        ),
    )
