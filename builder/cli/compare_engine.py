"""compare-engine: how far one model, bundle or engine is from another."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
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
    status,
)

if TYPE_CHECKING:
    from trt_nvfp4.builder.accuracy.compare import Comparison


#: Of language models that are given as Hugging Face directories.
STEPS = 16

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command(cls=Command, epilog=EXIT_CODES)
def compare_engine(
    reference: Annotated[
        Path,
        typer.Argument(
            help="The reference: an ONNX file, an engine, a bundle folder, a folder with the ranks of a model that is "
            "split over GPUs, or a Hugging Face directory."
        ),
    ],
    result: Annotated[Path, typer.Argument(help="The model to compare with it, any of the same.")],
    data: Annotated[
        Path | None, typer.Option(help="Input samples, as for --calib-data (default: random ones).", metavar="FILE|DIR")
    ] = None,
    shapes: Annotated[
        str,
        typer.Option(
            help="Shapes of the random samples (default: the opt shapes in the report beside RESULT, else derived "
            "from the model).",
            metavar="x:1x16,...",
        ),
    ] = "",
    samples: Annotated[int | None, typer.Option(min=1, help="How many random samples (default: 4).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the random samples (default: 0).")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="The plan whose subgraphs are compared (default: the one beside RESULT).", metavar="FILE"),
    ] = None,
    min_cosine: Annotated[
        float | None, typer.Option(help="Fail (exit code 5) when a sample's cosine is below.", metavar="X")
    ] = None,
    min_sqnr: Annotated[float | None, typer.Option(help="Fail when a sample's SQNR is below.", metavar="DB")] = None,
    max_abs: Annotated[
        float | None, typer.Option(help="Fail when a value's absolute error is greater.", metavar="X")
    ] = None,
    max_rel: Annotated[
        float | None, typer.Option(help="Fail when a value's relative error is greater.", metavar="X")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Fail when a sample's KL divergence is greater (nats).", metavar="X")
    ] = None,
    check: Annotated[
        Literal["outputs", "all"],
        typer.Option(help="What has to meet the thresholds: outputs, or replaced subgraphs too."),
    ] = "outputs",
    kl: Annotated[bool, typer.Option("--kl", help="Show the KL divergence of the softmaxes of the last axis.")] = False,
    save_worst: Annotated[
        Path | None,
        typer.Option(help="Write the worst sample of each output here, to replay with --data.", metavar="DIR"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Decoders: feed prompts, then N of REFERENCE's greedy tokens over the caches, and show KL and equal "
            "tokens per step (default for a Hugging Face directory of a language model: 16).",
            metavar="N",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt for --steps; may be given several times (default: random tokens).", metavar="TEXT"),
    ] = None,
    trust_remote_code: Annotated[bool, TRUST] = False,
    as_json: Annotated[bool, JSON] = False,
    debug: Annotated[bool, DEBUG] = False,
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Run any two of original ONNX, rewritten ONNX, bundle and engine on the same inputs and report how they agree.

    Per output and per replaced subgraph: cosine of the worst sample, SQNR, greatest differences, share of equal argmax.
    An engine needs its GPU and TensorRT, and shows its outputs alone; everything else runs in ONNX Runtime, plugins by
    their ONNX function bodies. Where there is a GPU and no engine is compared, each plugin of a rewritten RESULT runs
    on it against its function body.

    Example: compare-engine model.onnx model.rewritten.onnx --data samples.npz --min-cosine 0.99
    """
    with failures(debug, as_json, reference, result), ExitStack() as made:
        from trt_nvfp4 import api
        from trt_nvfp4.builder.accuracy.compare_files import check_thresholds
        from trt_nvfp4.builder.accuracy.metrics import Thresholds
        from trt_nvfp4.builder.errors import USAGE, VERIFICATION_FAILED, BuilderError
        from trt_nvfp4.builder.inputs.shapes import parse_shapes
        from trt_nvfp4.builder.parallel.manifest import FILE as RANKS

        given: dict[str, object] = {
            "--data": data,
            "--shapes": shapes or None,
            "--plan": plan,
            "--save-worst": save_worst,
        }
        given |= {"--min-cosine": min_cosine, "--min-sqnr": min_sqnr, "--max-abs": max_abs, "--max-rel": max_rel}
        given["--check all"] = True if check == "all" else None
        if steps is not None:
            _check_steps(given, "--steps compares logits")
            _compare_steps(reference, result, steps, prompt or [], samples, seed, max_kl, as_json)
            return
        if prompt:
            raise BuilderError(USAGE, "--prompt: is for decoders over their caches; add --steps N")
        # Before an export.
        check_thresholds(Thresholds(min_cosine, min_sqnr, max_abs, max_rel, max_kl), check == "all")
        paths = _exported(reference, made), _exported(result, made)
        ranks = any((path / RANKS).is_file() for path in paths)
        if ranks or (paths != (reference, result) and data is None and any(map(_is_decoder, paths))):
            if ranks and data is not None:
                raise BuilderError(
                    USAGE, "--data: ranks are compared token by token: leave it out, or give --steps N with --prompt"
                )
            _check_steps({**given, "--kl": kl or None}, f"{reference} and {result} are compared")
            _compare_steps(*paths, STEPS, [], samples, seed, max_kl, as_json, (str(reference), str(result)))
            return
        given_shapes = parse_shapes(shapes, "--shapes")
        if save_worst is not None:
            _check_place(save_worst)
        with ProgressBar() as progress:
            found = api.compare(
                *paths,
                data,
                shapes=given_shapes,
                count=samples,
                seed=seed,
                plan=plan,
                min_cosine=min_cosine,
                min_sqnr=min_sqnr,
                max_abs=max_abs,
                max_rel=max_rel,
                max_kl=max_kl,
                check=check,
                kl=kl,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        saved = found.save_worst(save_worst) if save_worst is not None else []
        replay = shlex.join(["compare-engine", str(reference), str(result), "--data", str(save_worst)])
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
            raise typer.Exit(VERIFICATION_FAILED)


def _exported(path: Path, made: ExitStack) -> Path:
    """`path`, or what a Hugging Face directory is exported to until `made` closes."""
    from trt_nvfp4.builder.export.huggingface import is_model_directory
    from trt_nvfp4.builder.generate.open import prepared

    if not is_model_directory(path):
        return path
    with ProgressBar() as progress:
        progress.stage(f"exporting {path.name} to ONNX")
        return prepared(path, made, "auto")


def _is_decoder(path: Path) -> bool:
    from trt_nvfp4.builder.export.decoder_contract import decoder_of
    from trt_nvfp4.builder.onnx_file import read_if_any

    model = read_if_any(path) if path.suffix == ".onnx" else None
    return model is not None and decoder_of(model) is not None


def _check_steps(given: Mapping[str, object], what: str) -> None:
    """Raise BuilderError (usage) for options that say nothing of a decoder's steps; `what` begins the message."""
    from trt_nvfp4.builder.errors import USAGE, BuilderError

    if unused := [option for option, value in given.items() if value is not None]:
        raise BuilderError(USAGE, f"{what} token by token: {', '.join(unused)} cannot apply")


def _compare_steps(
    reference: Path,
    result: Path,
    steps: int,
    prompts: list[str],
    count: int | None,
    seed: int | None,
    max_kl: float | None,
    as_json: bool,
    names: tuple[str, str] | None = None,
) -> None:
    from trt_nvfp4 import api
    from trt_nvfp4.builder.accuracy.decoding import table
    from trt_nvfp4.builder.errors import VERIFICATION_FAILED

    with ProgressBar() as progress:
        shown = names or (reference.name, result.name)
        progress.stage(f"decoding with {shown[0]} and {shown[1]}")
        found = api.compare_steps(reference, result, steps, prompts, count=count, seed=seed)
        found.names = names or found.names
    if as_json:
        print_json(json.dumps(found.as_dict(), indent=2))
    else:
        output.print(table(found))
    if max_kl is not None and not found.kl <= max_kl:
        status.print(f"error: --max-kl {max_kl} is not met: {found.kl:.4g} over all steps", style="red", soft_wrap=True)
        raise typer.Exit(VERIFICATION_FAILED)


def _check_place(folder: Path) -> None:
    """Before the work: raise BuilderError or OSError where --save-worst cannot save."""
    from trt_nvfp4.builder.errors import USAGE, BuilderError
    from trt_nvfp4.common.replacing import made_folder

    if folder.exists() and not folder.is_dir():
        raise BuilderError(USAGE, f"--save-worst {folder}: a file is there; choose a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise BuilderError(USAGE, f"--save-worst {folder}: not empty; choose a new folder")
    with made_folder(folder):
        pass


def _print_tables(found: Comparison) -> None:
    from trt_nvfp4.builder.accuracy.metrics import table

    samples = f"{found.samples} sample{'s' if found.samples > 1 else ''}"
    output.print(table(f"{found.result.path} against {found.reference.path} ({samples})", found.agreements))
    if found.plugins:
        output.print(table("plugins on this GPU against their function bodies", found.plugins))
    if "engine" in (found.reference.kind, found.result.kind):
        output.print("An engine shows its outputs alone; compare its rewritten ONNX for the subgraphs.")


if __name__ == "__main__":
    app()
