"""compare-engine: how far one model, bundle or engine is from another."""

# Without `from __future__ import annotations`: the types of options are read.

import json
import shlex
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import click
from attrs import field

from trt_nvfp4.builder.cli.command import Command
from trt_nvfp4.builder.cli.console import print_json
from trt_nvfp4.builder.inputs.shape_text import Shape, read_shapes
from trt_nvfp4.builder.model.model_files import check_exists
from trt_nvfp4.builder.options import RUNS_CODE, Options, described, path
from trt_nvfp4.builder.terminal.output import output, status
from trt_nvfp4.builder.terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from trt_nvfp4.builder.accuracy.compare import Comparison


#: Default for language models that are given as Hugging Face directories.
STEPS = 16

INPUTS = "What to run"
LIMITS = "What has to be met"
SHOWN = "What to show"

# A comparison that leaves options without effect.
TOKENS = "token by token"


@attrs.frozen(kw_only=True)
class CompareOptions(Options):
    """The options of `compare-engine`."""

    GROUPS: ClassVar[tuple[str, ...]] = (INPUTS, LIMITS, SHOWN)

    reference: Path = field(
        converter=Path,
        metadata=described(
            "The reference: an ONNX file, an engine, a bundle folder, a folder with the ranks of a model that is "
            "split over GPUs, or a Hugging Face directory."
        ),
    )
    result: Path = field(converter=Path, metadata=described("The model to compare with it, any of the same."))
    data: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Input samples, as for --calib-data (default: random ones).",
            INPUTS,
            metavar="FILE|DIR",
            ignored_with=(TOKENS,),
        ),
    )
    shapes: dict[str, Shape] = field(
        factory=dict,
        converter=read_shapes,
        metadata=described(
            "Shapes of the random samples (default: the opt shapes in the report beside RESULT, else derived from the "
            "model).",
            INPUTS,
            metavar="x:1x16,...",
            ignored_with=(TOKENS,),
        ),
    )
    samples: int | None = field(
        default=None, metadata=described("How many random samples (default: 4).", INPUTS, metavar="N", at_least=1)
    )
    seed: int | None = field(
        default=None, metadata=described("Seed of the random samples (default: 0).", INPUTS, metavar="N", at_least=0)
    )
    steps: int | None = field(
        default=None,
        metadata=described(
            "Decoders: feed prompts, then N of REFERENCE's greedy tokens over the caches, and show KL and equal "
            "tokens per step (default for a Hugging Face directory of a language model: 16).",
            INPUTS,
            metavar="N",
            at_least=1,
        ),
    )
    prompt: tuple[str, ...] = field(
        default=(),
        converter=tuple,
        metadata=described(
            "A prompt for --steps; may be given several times (default: random tokens).",
            INPUTS,
            metavar="TEXT",
            repeats=True,
        ),
    )
    trust_remote_code: bool = field(default=False, metadata=described(RUNS_CODE, INPUTS))
    min_cosine: float | None = field(
        default=None,
        metadata=described(
            "Fail (exit code 5) when a sample's cosine is below.", LIMITS, metavar="X", ignored_with=(TOKENS,)
        ),
    )
    min_sqnr: float | None = field(
        default=None,
        metadata=described("Fail when a sample's SQNR is below.", LIMITS, metavar="DB", ignored_with=(TOKENS,)),
    )
    max_abs: float | None = field(
        default=None,
        metadata=described(
            "Fail when a value's absolute error is greater.", LIMITS, metavar="X", ignored_with=(TOKENS,)
        ),
    )
    max_rel: float | None = field(
        default=None,
        metadata=described(
            "Fail when a value's relative error is greater.", LIMITS, metavar="X", ignored_with=(TOKENS,)
        ),
    )
    max_kl: float | None = field(
        default=None, metadata=described("Fail when a sample's KL divergence is greater (nats).", LIMITS, metavar="X")
    )
    check: Literal["outputs", "all"] = field(
        default="outputs",
        metadata=described(
            "What has to meet the thresholds: outputs, or replaced subgraphs too.", LIMITS, ignored_with=(TOKENS,)
        ),
    )
    plan: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "The plan whose subgraphs are compared (default: the one beside RESULT).",
            SHOWN,
            metavar="FILE",
            ignored_with=(TOKENS,),
        ),
    )
    kl: bool = field(
        default=False, metadata=described("Show the KL divergence of the softmaxes of the last axis.", SHOWN)
    )
    save_worst: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Write the worst sample of each output here, to replay with --data.",
            SHOWN,
            metavar="DIR",
            ignored_with=(TOKENS,),
        ),
    )


def compare_engine(given: dict[str, Any], as_json: bool) -> None:
    """Run any two of original ONNX, rewritten ONNX, bundle and engine on the same inputs and report how they agree.

    Per output and per replaced subgraph: cosine of the worst sample, SQNR, greatest differences, share of equal argmax.
    An engine needs its GPU and TensorRT, and shows only its outputs; everything else runs in ONNX Runtime, plugins by
    their ONNX function bodies. Where there is a GPU and no engine is compared, each plugin of a rewritten RESULT runs
    on it against its function body.

    Example: compare-engine model.onnx model.rewritten.onnx --data samples.npz --min-cosine 0.99
    """
    options = CompareOptions(**given)
    for model in (options.reference, options.result):
        _check_one_model(model)  # before imports that take seconds
    with ExitStack() as made:
        from trt_nvfp4 import api
        from trt_nvfp4.builder.accuracy.compare_files import check_thresholds
        from trt_nvfp4.builder.accuracy.metrics import Thresholds
        from trt_nvfp4.builder.errors import VERIFICATION_FAILED, UsageError
        from trt_nvfp4.builder.parallel.manifest import FILE as RANKS

        if options.steps is not None:
            _check_steps(options.given(TOKENS), "--steps compares logits")
            _compare_steps(options, (options.reference, options.result), options.steps, as_json)
            return
        if options.prompt:
            raise UsageError("--prompt: is for decoders over their caches; add --steps N")
        # Before an export.
        limits = {limit.name: getattr(options, limit.name) for limit in fields(Thresholds)}
        check_thresholds(Thresholds(**limits), options.check == "all")
        paths = _exported(options.reference, made), _exported(options.result, made)
        ranks = any((path / RANKS).is_file() for path in paths)
        if ranks or (
            paths != (options.reference, options.result) and options.data is None and any(map(_is_decoder, paths))
        ):
            if ranks and options.data is not None:
                raise UsageError(
                    "--data: ranks are compared token by token: leave it out, or give --steps N with --prompt"
                )
            ignored = options.given(TOKENS) + ["--kl"] * options.kl
            _check_steps(ignored, f"{options.reference} and {options.result} are compared")
            _compare_steps(options, paths, STEPS, as_json, (str(options.reference), str(options.result)))
            return
        if options.save_worst is not None:
            _check_place(options.save_worst)
        with ProgressBar() as progress:
            found = api.compare(
                *paths,
                options.data,
                shapes=options.shapes,
                count=options.samples,
                seed=options.seed,
                plan=options.plan,
                **limits,
                check=options.check,
                kl=options.kl,
                trust_remote_code=options.trust_remote_code,
                progress=progress,
            )
        saved = found.save_worst(options.save_worst) if options.save_worst is not None else []
        replay = shlex.join(
            ["compare-engine", str(options.reference), str(options.result), "--data", str(options.save_worst)]
        )
        if as_json:
            shown: dict[str, Any] = found.as_dict()
            if saved:
                shown |= {"worst_samples": [str(file) for file in saved], "replay": replay}
            print_json(json.dumps(shown, indent=2))
        else:
            _print_tables(found)
            if saved:
                output.print(f"worst samples: {', '.join(map(str, saved))}\nreplay: {replay}", soft_wrap=True)
        for warning in found.warnings:
            status.print(f"warning: {warning}", style="yellow", soft_wrap=True)
        if found.failures:
            listed = "; ".join(found.failures[:5]) + ("; ..." if len(found.failures) > 5 else "")
            status.print(
                f"error: {len(found.failures)} of the thresholds missed: {listed}", style="red", soft_wrap=True
            )
            raise click.exceptions.Exit(VERIFICATION_FAILED)


def _exported(path: Path, made: ExitStack) -> Path:
    """`path`, or what a Hugging Face directory is exported to until `made` closes."""
    from trt_nvfp4.builder.generate.open import prepared
    from trt_nvfp4.builder.model.model_files import is_model_directory

    if not is_model_directory(path):
        return path
    with ProgressBar() as progress:
        progress.stage(f"exporting {path.name} to ONNX")
        return prepared(path, made, "auto")


def _is_decoder(path: Path) -> bool:
    from trt_nvfp4.builder.model.decoder_contract import decoder_of
    from trt_nvfp4.builder.model.onnx_file import read_if_any

    model = read_if_any(path) if path.suffix == ".onnx" else None
    return model is not None and decoder_of(model) is not None


def _check_one_model(model: Path) -> None:
    from trt_nvfp4.builder.components.manifest import FILE
    from trt_nvfp4.builder.errors import UsageError

    check_exists(model)
    if (model / FILE).is_file():
        raise UsageError(
            f"{model}: the parts of a model; build-engine compared them with the original (components.report.json)"
        )


def _check_steps(ignored: list[str], what: str) -> None:
    """Raise UsageError for options that do not apply to a decoder's steps; `what` begins the message."""
    from trt_nvfp4.builder.errors import UsageError

    if ignored:
        raise UsageError(f"{what} token by token: {', '.join(ignored)} cannot apply")


def _compare_steps(
    options: CompareOptions,
    paths: tuple[Path, Path],
    steps: int,
    as_json: bool,
    names: tuple[str, str] | None = None,
) -> None:
    """Compare the decoders `paths`, called `names`, token by token."""
    from trt_nvfp4 import api
    from trt_nvfp4.builder.accuracy.decoding import table
    from trt_nvfp4.builder.errors import VERIFICATION_FAILED

    with ProgressBar() as progress:
        shown = names or (paths[0].name, paths[1].name)
        progress.stage(f"decoding with {shown[0]} and {shown[1]}")
        found = api.compare_steps(*paths, steps, options.prompt, count=options.samples, seed=options.seed)
        found.names = names or found.names
    if as_json:
        print_json(json.dumps(found.as_dict(), indent=2))
    else:
        output.print(table(found))
    if options.max_kl is not None and not found.kl <= options.max_kl:
        status.print(
            f"error: --max-kl {options.max_kl} is not met: {found.kl:.4g} over all steps", style="red", soft_wrap=True
        )
        raise click.exceptions.Exit(VERIFICATION_FAILED)


def _check_place(folder: Path) -> None:
    """Before the work: raise BuilderError or OSError where --save-worst cannot save."""
    from trt_nvfp4.builder.errors import UsageError
    from trt_nvfp4.common.replacing import made_folder

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--save-worst {folder}: a file is there; choose a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"--save-worst {folder}: not empty; choose a new folder")
    with made_folder(folder):
        pass


def _print_tables(found: "Comparison") -> None:
    from trt_nvfp4.builder.accuracy.metrics import table

    samples = f"{found.samples} samples: the worst cosine, SQNR of all" if found.samples > 1 else "1 sample"
    output.print(table(f"{found.result.path} against {found.reference.path} ({samples})", found.agreements))
    if found.plugins:
        output.print(table("plugins on this GPU against their function bodies", found.plugins))
    if "engine" in (found.reference.kind, found.result.kind):
        output.print("An engine shows only its outputs; compare its rewritten ONNX for the subgraphs.")


app = Command("compare-engine", CompareOptions, compare_engine)

if __name__ == "__main__":
    app()
