"""generate: text from a language model: its engine, or its ONNX file without TensorRT."""

from __future__ import annotations

import json
import unicodedata
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .console import DEBUG, EXIT_CODES, JSON, VERSION, Command, ProgressBar, failures, output, print_json, status

if TYPE_CHECKING:
    from trt_nvfp4.builder.generate import Piece, Result
    from trt_nvfp4.builder.generate.tokenizer import Tokenizer

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

# Characters that would move the cursor or reorder text: models may generate any.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class _Generate(Command):
    extra = "; give a prompt with --prompt TEXT"


@app.command(cls=_Generate, epilog=EXIT_CODES)
def generate(
    model: Annotated[
        Path,
        typer.Argument(
            help="OUT.engine of build-engine, a bundle folder, a folder with a model's parts or with the ranks of one "
            "that is split over GPUs, an exported or rewritten ONNX model, or a Hugging Face directory."
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be given several times.", metavar="TEXT")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image for a model of parts: one for each prompt, or one for each image token in the prompts.",
            metavar="FILE",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the tokenizer's chat template, as a user's message.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate per prompt.", metavar="N")] = 128,
    temperature: Annotated[
        float,
        typer.Option(help="0: greedy, the likeliest token; above: sample from softmax(logits / X).", metavar="X"),
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Sample among the K likeliest tokens (default: all).", metavar="K")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample among the fewest likeliest tokens whose probabilities sum to P.", metavar="P"),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of sampling (default: 0).")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show text as it is generated (one prompt).")] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer's files (default: tokenizer/ beside the model).", metavar="DIR"),
    ] = None,
    runner: Annotated[
        Literal["auto", "tensorrt", "onnxruntime", "torch"],
        typer.Option(
            help="tensorrt: an engine on its GPU. onnxruntime: the ONNX model on the CPU. torch: the ONNX model on any "
            "NVIDIA GPU, with the plugins (compiled at the first use) and torch for the rest. auto: tensorrt for an "
            "engine, onnxruntime for a model; for ranks torch, a process and a GPU for each, or without a GPU "
            "onnxruntime, all in one process.",
        ),
    ] = "auto",
    as_json: Annotated[bool, JSON] = False,
    debug: Annotated[bool, DEBUG] = False,
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Continue prompts with a language model, or describe images; greedy or sampled.

    Prompts of different lengths run as one batch. Text goes to stdout; the time to the first token and the tokens per
    second go to stderr. A sequence that fills its cache ends there, and a warning says so.

    Examples: generate model.engine --prompt "Once upon a time" --max-new-tokens 64

    generate paligemma/ --image kitchen.jpg --prompt "describe"
    """
    with failures(debug, as_json, model):
        from trt_nvfp4.builder.components.manifest import FILE
        from trt_nvfp4.builder.errors import USAGE, BuilderError
        from trt_nvfp4.builder.generate.sampling import Sampling

        prompts = prompt or []
        if stream and (as_json or len(prompts) > 1):
            what = "--json shows all at the end" if as_json else "texts of several prompts would mix"
            raise BuilderError(USAGE, f"--stream: {what}; leave out one or the other")
        Sampling(temperature, top_k, top_p, seed)  # before a model is loaded
        of_parts = (model / FILE).is_file()
        for flag, given, wanted in (
            ("--chat", chat, False),
            ("--stream", stream, False),
            ("--image", image, True),
        ):
            if given and of_parts != wanted:
                what = "is" if of_parts else "is not"
                raise BuilderError(USAGE, f"{flag}: {model} {what} a folder with a model's parts; leave the option out")
        if not of_parts and not prompts:
            raise BuilderError(USAGE, "there is nothing to continue; add --prompt TEXT")
        sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        with ExitStack() as stack:
            with ProgressBar() as progress:
                progress.stage(f"loading {model.name}")
                if of_parts:
                    from trt_nvfp4.builder.components.pipeline import Pipeline

                    pipeline = stack.enter_context(Pipeline(model, tokenizer, runner=runner))
                else:
                    from trt_nvfp4.builder.generate import Generator

                    loaded = _early_tokenizer(model, tokenizer, chat)
                    generator = stack.enter_context(Generator(model, loaded, runner=runner))
            if of_parts:
                result = pipeline.generate(prompts, images=image, max_new_tokens=max_new_tokens, **sampling)
                capacity = pipeline.capacity
            else:
                show = _show if stream else None
                result = generator.generate(
                    prompts, chat=chat, max_new_tokens=max_new_tokens, on_piece=show, **sampling
                )
                capacity = generator.decoder.capacity
        if as_json:
            print_json(json.dumps(asdict(result), indent=2))
        elif stream:
            output.print()
        else:
            for generation in result.generations:
                output.print(printable(generation.text), soft_wrap=True, highlight=False)
        _print_summary(result, capacity)


def _early_tokenizer(model: Path, folder: Path | None, chat: bool) -> Tokenizer | None:
    """The tokenizer, with what is wrong with it said before the model is exported or loaded; None where none lies
    beside a model, with which something else may be wrong."""
    from trt_nvfp4.builder.generate.open import is_model_directory, tokenizer_folder
    from trt_nvfp4.builder.generate.tokenizer import Tokenizer

    beside = tokenizer_folder(model)
    if folder is None and not is_model_directory(model) and not beside.is_dir():
        return None
    tokenizer = Tokenizer(folder or beside)
    if chat:
        tokenizer.check_chat()
    return tokenizer


def _show(piece: Piece) -> None:
    output.print(printable(piece.text), end="", soft_wrap=True, highlight=False)


def printable(text: str) -> str:
    """Text without control characters, which would act on the terminal: they are shown as escapes."""
    return "".join(
        character
        if character in "\n\t" or (unicodedata.category(character) != "Cc" and character not in _REORDERING)
        else f"\\u{ord(character):04x}"
        for character in text
    )


def _print_summary(result: Result, capacity: int) -> None:
    timings = result.timings
    rate = "" if timings.tokens_per_s is None else f", then {timings.tokens_per_s:.1f} tokens/s"
    status.print(
        f"{timings.tokens} tokens on {result.runs_on}: first after {timings.first_token_s * 1e3:.0f} ms{rate}",
        soft_wrap=True,
        highlight=False,
    )
    for number, generation in enumerate(result.generations, 1):
        if generation.finish == "capacity":
            status.print(
                f"warning: prompt {number}: the cache of {capacity} tokens is full, so generation ended after "
                f"{len(generation.token_ids)} tokens; build the model with a larger --cache-capacity for more",
                style="yellow",
                soft_wrap=True,
            )


if __name__ == "__main__":
    app()
