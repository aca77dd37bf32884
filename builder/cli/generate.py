"""generate: text from a language model: its engine, or its ONNX file without TensorRT."""

# Without `from __future__ import annotations`: the types of options are read.

import json
import unicodedata
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
from attrs import field

from trt_nvfp4.builder.cli.command import Command
from trt_nvfp4.builder.cli.console import print_json
from trt_nvfp4.builder.cli.text_models import check_gives_text
from trt_nvfp4.builder.model.hub import local_model
from trt_nvfp4.builder.options import Options, PathLike, described, path
from trt_nvfp4.builder.terminal.output import output, status
from trt_nvfp4.builder.terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from trt_nvfp4.builder.generate import Piece, Result
    from trt_nvfp4.builder.generate.tokenizer import Tokenizer


# Characters that would move the cursor or reorder text: models may generate any.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


WHAT = "What to continue"
HOW = "How to generate"

# Models that leave options without effect.
PARTS, ONE_MODEL = "model of parts", "one model"


def _paths(values: Iterable[PathLike]) -> tuple[Path, ...]:
    return tuple(map(Path, values))


@attrs.frozen(kw_only=True)
class GenerateOptions(Options):
    """The options of `generate`."""

    GROUPS: ClassVar[tuple[str, ...]] = (WHAT, HOW)

    model: Path = field(
        converter=Path,
        metadata=described(
            "OUT.engine of build-engine, a bundle folder, a folder with a model's parts or with the ranks of one that "
            "is split over GPUs, an exported or rewritten ONNX model, a Hugging Face directory, or the name of a model "
            "of the Hugging Face Hub, which is downloaded."
        ),
    )
    prompt: tuple[str, ...] = field(
        default=(),
        converter=tuple,
        metadata=described("Text to continue; may be given several times.", WHAT, metavar="TEXT", repeats=True),
    )
    prompt_file: tuple[Path, ...] = field(
        default=(),
        converter=_paths,
        metadata=described(
            "UTF-8 file whose text is a prompt, behind those of --prompt.", WHAT, metavar="FILE", repeats=True
        ),
    )
    image: tuple[Path, ...] = field(
        default=(),
        converter=_paths,
        metadata=described(
            "Image for a model of parts: one for each prompt, or one for each image token in the prompts.",
            WHAT,
            metavar="FILE",
            repeats=True,
            ignored_with=(ONE_MODEL,),
        ),
    )
    video: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Video for a model of parts: a folder of frames, or an animation (GIF, WebP, PNG).",
            WHAT,
            metavar="FILE|DIR",
            ignored_with=(ONE_MODEL,),
        ),
    )
    fps: float = field(
        default=2.0,
        metadata=described(
            "Frames of --video in a second: of a folder all are taken, of a file so many.",
            WHAT,
            metavar="X",
            ignored_with=(ONE_MODEL,),
        ),
    )
    chat: bool = field(
        default=False,
        metadata=described(
            "Put each prompt into the tokenizer's chat template, as a user's message. Without a prompt, messages are "
            "read line by line and answered with all before them in view, until the input ends.",
            WHAT,
            ignored_with=(PARTS,),
        ),
    )
    system: str | None = field(
        default=None,
        metadata=described(
            "System message in front of each chat (with --chat).", WHAT, metavar="TEXT", ignored_with=(PARTS,)
        ),
    )
    tokenizer: Path | None = field(
        default=None,
        converter=path,
        metadata=described(
            "Folder with the tokenizer's files (default: the one beside the model).", WHAT, metavar="DIR"
        ),
    )
    max_new_tokens: int = field(
        default=128, metadata=described("Most tokens to generate per prompt.", HOW, metavar="N")
    )
    temperature: float = field(
        default=0.0,
        metadata=described("0: greedy, the likeliest token; above: sample from softmax(logits / X).", HOW, metavar="X"),
    )
    top_k: int | None = field(
        default=None, metadata=described("Sample among the K likeliest tokens (default: all).", HOW, metavar="K")
    )
    top_p: float | None = field(
        default=None,
        metadata=described("Sample among the fewest likeliest tokens whose probabilities sum to P.", HOW, metavar="P"),
    )
    seed: int | None = field(
        default=None, metadata=described("Seed of sampling (default: 0).", HOW, metavar="N", at_least=0)
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata=described(
            "Divide positive logits of tokens that the text has by this, and multiply negative ones.",
            HOW,
            metavar="X",
            ignored_with=(PARTS,),
        ),
    )
    presence_penalty: float = field(
        default=0.0,
        metadata=described(
            "Subtract this from logits of tokens that were generated.", HOW, metavar="X", ignored_with=(PARTS,)
        ),
    )
    stop: tuple[str, ...] = field(
        default=(),
        converter=tuple,
        metadata=described(
            "End a text before this string; may be given several times.",
            HOW,
            metavar="TEXT",
            repeats=True,
            ignored_with=(PARTS,),
        ),
    )
    runner: Literal["auto", "tensorrt", "onnxruntime", "torch"] = field(
        default="auto",
        metadata=described(
            "tensorrt: an engine on its GPU. onnxruntime: the ONNX model on the CPU. torch: the ONNX model on any "
            "NVIDIA GPU, with the plugins (compiled at the first use) and torch for the rest. auto: tensorrt for an "
            "engine, onnxruntime for a model; for ranks torch, a process and a GPU for each, or without a GPU "
            "onnxruntime, all in one process.",
            HOW,
        ),
    )
    draft: str | None = field(
        default=None,
        metadata=described(
            "Proposes tokens that one step verifies together; the text stays the same. ngram: what followed the same "
            "tokens before. none: one token a step. Or a head that was built for the model, or a small model with the "
            "same tokenizer, as MODEL is given. Default: the drafter beside the model (MODEL.draft.engine, draft/ of a "
            "bundle), else ngram.",
            HOW,
            metavar="ngram|none|MODEL",
            ignored_with=(PARTS,),
        ),
    )
    stream: bool = field(
        default=False, metadata=described("Show text as it is generated (one prompt).", HOW, ignored_with=(PARTS,))
    )


def generate(given: dict[str, Any], as_json: bool) -> None:
    """Continue prompts with a language model, or describe images; greedy or sampled.

    Prompts of different lengths run as one batch. Text goes to stdout; the time to the first token and the tokens per
    second go to stderr. A sequence that fills its cache ends there, and a warning says so.

    Examples: generate model.engine --prompt "Once upon a time" --max-new-tokens 64

    generate paligemma/ --image kitchen.jpg --prompt "describe"
    """
    options = GenerateOptions(**given)
    options = attrs.evolve(options, model=local_model(options.model, status.print))
    check_gives_text(options.model)  # before imports that take seconds
    from trt_nvfp4.builder.components.manifest import FILE
    from trt_nvfp4.builder.errors import UsageError
    from trt_nvfp4.builder.generate.sampling import Sampling

    prompts = [*options.prompt, *map(_text_of, options.prompt_file)]
    if options.stream and (as_json or len(prompts) > 1):
        what = "--json shows all at the end" if as_json else "texts of several prompts would mix"
        raise UsageError(f"--stream: {what}; leave out one or the other")
    sampling: dict[str, Any] = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}
    more: dict[str, Any] = {name: getattr(options, name) for name in ("repetition_penalty", "presence_penalty")}
    Sampling(**sampling, **more)  # before a model is loaded
    more |= {"stop": list(options.stop) or None, "system": options.system}
    of_parts = (options.model / FILE).is_file()
    if ignored := options.given(PARTS if of_parts else ONE_MODEL):
        what = "is" if of_parts else "is not"
        raise UsageError(f"{ignored[0]}: {options.model} {what} a folder with a model's parts; leave the option out")
    if options.system is not None and not options.chat:
        raise UsageError("--system: a message of a chat; add --chat, or leave it out")
    converses = options.chat and not prompts
    if not of_parts and not prompts and not converses:
        raise UsageError("there is nothing to continue; add --prompt TEXT")
    if converses and as_json:
        raise UsageError("--json: a conversation is shown as it goes on; add --prompt TEXT, or leave it out")
    with ExitStack() as stack:
        with ProgressBar() as progress:
            progress.stage(f"loading {options.model.name}")
            if of_parts:
                from trt_nvfp4.builder.components.pipeline import Pipeline

                pipeline = stack.enter_context(Pipeline(options.model, options.tokenizer, runner=options.runner))
            else:
                from trt_nvfp4.builder.generate import Generator
                from trt_nvfp4.builder.generate.conversation import NO_END, converse

                loaded = _early_tokenizer(options.model, options.tokenizer, options.chat)
                generator = stack.enter_context(
                    Generator(options.model, loaded, runner=options.runner, draft=options.draft)
                )
        if of_parts:
            seen: dict[str, Any] = {"images": options.image or None, "video": options.video, "fps": options.fps}
            result = pipeline.generate(prompts, **seen, max_new_tokens=options.max_new_tokens, **sampling)
            capacity = pipeline.capacity
        else:
            if not generator.decoder.eos_token_ids and not options.stop:
                status.print(NO_END, style="yellow", soft_wrap=True)
            how = {"max_new_tokens": options.max_new_tokens, **sampling, **more}
            if converses:
                converse(generator, how, _show, partial(_print_summary, capacity=generator.decoder.capacity))
                return
            show = _show if options.stream else None
            result = generator.generate(prompts, chat=options.chat, on_piece=show, **how)
            capacity = generator.decoder.capacity
    if as_json:
        print_json(json.dumps(asdict(result), indent=2))
    elif options.stream:
        output.print()
    else:
        for generation in result.generations:
            output.print(printable(generation.text), soft_wrap=True, highlight=False)
    _print_summary(result, capacity)


def _text_of(file: Path) -> str:
    from trt_nvfp4.builder.errors import UsageError
    from trt_nvfp4.common.json_text import read_text

    if file.exists() and not file.is_file():
        raise UsageError(f"--prompt-file {file}: a folder, a pipe or a device; give an ordinary file")
    try:
        return read_text(file).removesuffix("\n")
    except ValueError as error:
        raise UsageError(f"--prompt-file {file}: not a UTF-8 text ({error})") from error


def _early_tokenizer(model: Path, folder: Path | None, chat: bool) -> "Tokenizer | None":
    """The tokenizer, with what is wrong with it said before the model is exported or loaded; None where none lies
    beside a model, with which something else may be wrong."""
    from trt_nvfp4.builder.generate.open import tokenizer_folder
    from trt_nvfp4.builder.generate.tokenizer import Tokenizer
    from trt_nvfp4.builder.model.model_files import is_model_directory

    beside = tokenizer_folder(model)
    if folder is None and not is_model_directory(model) and not beside.is_dir():
        return None
    tokenizer = Tokenizer(folder or beside)
    if chat:
        tokenizer.check_chat("leave out --chat")
    return tokenizer


def _show(piece: "Piece") -> None:
    output.print(printable(piece.text), end="", soft_wrap=True, highlight=False)


def printable(text: str) -> str:
    """Text without control characters, which would act on the terminal: they are shown as escapes."""
    return "".join(
        character
        if character in "\n\t" or (unicodedata.category(character) != "Cc" and character not in _REORDERING)
        else f"\\u{ord(character):04x}"
        for character in text
    )


def _print_summary(result: "Result", capacity: int) -> None:
    timings = result.timings
    rate = "" if timings.tokens_per_s is None else f", then {timings.tokens_per_s:.1f} tokens/s"
    found = timings.drafts
    drafts = f"; {found.accepted} of {found.drafted} drafted tokens accepted" if found.drafted else ""
    status.print(
        f"{timings.tokens} tokens on {result.runs_on}: first after {timings.first_token_s * 1e3:.0f} ms{rate}{drafts}",
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


app = Command("generate", GenerateOptions, generate, "; give a prompt with --prompt TEXT")

if __name__ == "__main__":
    app()
