"""The program behind a bundle's generate.py: text or token ids in and out, on the device's GPU.

Needs TensorRT's (or TensorRT-RTX's) package, NumPy and cuda-bindings; for text, transformers too.

Exit codes: 0 done, 2 usage, 3 the bundle or its engine is at fault, 4 a package or the GPU is missing, 6 the engine
failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from trt_nvfp4.common.json_text import read_json, read_text

from ..errors import ModelFaultError, UsageError, exit_code, message, printable
from ..records.bundle import MANIFEST, named_file
from .conversation import NO_END, converse
from .generator import Generator, Piece, Prompt, Result

# Options that `Generator.generate` takes by their names.
_HOW = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "repetition_penalty", "presence_penalty", "system")


def main(folder: Path) -> int:
    """Generate with the engine that was built from the bundle `folder`; returns the exit code."""
    arguments = _parser().parse_args()
    try:
        prompts = _prompts(arguments.prompt, arguments.prompt_file, arguments.ids)
        if not prompts and (arguments.json or not arguments.chat):
            raise UsageError("there is no prompt: give --prompt TEXT, --prompt-file FILE or --ids 1,2,3")
        engine = arguments.engine or engine_of(folder)
        if not engine.is_file():
            raise ModelFaultError(f"{engine}: no such engine; run build_engine.py first, or name it with --engine")
        tokenizer = arguments.tokenizer or folder / "tokenizer"
        with Generator(engine, tokenizer, folder / MANIFEST, draft=arguments.draft) as generator:
            if not generator.decoder.eos_token_ids and not arguments.stop:
                print(NO_END, file=sys.stderr)
            how = {name: getattr(arguments, name) for name in _HOW} | {"stop": arguments.stop or None}
            if prompts:
                _show(generator.generate(prompts, chat=arguments.chat, **how), arguments.json)
            else:
                converse(generator, how, _show_piece, _show_timings)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"error: {printable(message(error))}", file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Generate text with the engine of this bundle; greedy by default.")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; repeatable")
    parser.add_argument("--ids", action="append", default=[], metavar="1,2,3", help="the same as token ids; repeatable")
    parser.add_argument("--prompt-file", action="append", default=[], type=Path, metavar="FILE", help="a text in UTF-8")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put each text into the tokenizer's chat template; without one, answer stdin line by line",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: the likeliest token (default)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among tokens with this probability together")
    parser.add_argument("--seed", type=int, help="of sampling")
    parser.add_argument(
        "--draft",
        metavar="NAME",
        help="ngram, none, or the engine of a head or small model (default: that in draft/, else ngram)",
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="of tokens in the text")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="of generated tokens")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end a text before this; repeatable")
    parser.add_argument("--system", metavar="TEXT", help="system message in front of each chat")
    parser.add_argument("--engine", type=Path, help="the engine (default: the one in this folder)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: tokenizer/ in this folder")
    parser.add_argument("--json", action="store_true", help="texts, token ids and timings as JSON")
    return parser


def _prompts(texts: list[str], files: list[Path], ids: list[str]) -> list[Prompt]:
    prompts: list[Prompt] = list(texts)
    for file in files:
        try:
            prompts.append(read_text(file).removesuffix("\n"))
        except (OSError, ValueError) as error:
            raise UsageError(f"--prompt-file {file}: not a UTF-8 text ({error})") from error
    for text in ids:
        try:
            prompts.append([int(token) for token in text.split(",")])
        except ValueError:
            raise UsageError(f"--ids {text}: expected token ids such as 1,2,3") from None
    return prompts


def engine_of(folder: Path) -> Path:
    """The engine that the bundle's manifest names."""
    manifest = folder / MANIFEST
    try:
        return named_file(folder, read_json(manifest)["engine"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFaultError(f"{manifest}: not a manifest of trt-nvfp4 ({error!r})") from error


def _show(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    else:
        for generation in result.generations:
            print(printable(generation.text) or ",".join(map(str, generation.token_ids)))
    _show_timings(result)


def _show_piece(piece: Piece) -> None:
    print(printable(piece.text), end="", flush=True)


def _show_timings(result: Result) -> None:
    timings = result.timings
    rate = "" if timings.tokens_per_s is None else f", then {timings.tokens_per_s:.1f} tokens/s"
    first = f"first after {timings.first_token_s * 1e3:.0f} ms{rate}"
    print(f"{timings.tokens} tokens on {result.runs_on}: {first}", file=sys.stderr)
    for number, generation in enumerate(result.generations, 1):
        if generation.finish == "capacity":
            print(f"warning: prompt {number}: its cache is full, so that it ends there", file=sys.stderr)
