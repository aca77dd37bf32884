"""What a bundle's generate.py runs: text or token ids in, text or token ids out, on the device's GPU.

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

from trt_nvfp4.common.json_text import read_json

from ..errors import MODEL_AT_FAULT, USAGE, BuilderError, exit_code, message, printable
from ..tensorrt.build_script import MANIFEST
from .generator import Generator, Prompt, Result


def main(folder: Path) -> int:
    """Generate with the engine that was built from the bundle `folder`; returns the exit code."""
    arguments = _parser().parse_args()
    try:
        prompts = _prompts(arguments.prompt, arguments.ids)
        engine = arguments.engine or folder / _engine(folder / MANIFEST)
        if not engine.is_file():
            raise BuilderError(
                MODEL_AT_FAULT, f"{engine}: no such engine; run build_engine.py first, or name it with --engine"
            )
        with Generator(engine, arguments.tokenizer or folder / "tokenizer", folder / MANIFEST) as generator:
            result = generator.generate(
                prompts,
                chat=arguments.chat,
                max_new_tokens=arguments.max_new_tokens,
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
                seed=arguments.seed,
            )
        _show(result, arguments.json)
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
    parser.add_argument("--chat", action="store_true", help="put each text into the tokenizer's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: the likeliest token (default)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among tokens with this probability together")
    parser.add_argument("--seed", type=int, help="of sampling")
    parser.add_argument("--engine", type=Path, help="the engine (default: the one in this folder)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: tokenizer/ in this folder")
    parser.add_argument("--json", action="store_true", help="texts, token ids and timings as JSON")
    return parser


def _prompts(texts: list[str], ids: list[str]) -> list[Prompt]:
    prompts: list[Prompt] = list(texts)
    for text in ids:
        try:
            prompts.append([int(token) for token in text.split(",")])
        except ValueError:
            raise BuilderError(USAGE, f"--ids {text}: expected token ids such as 1,2,3") from None
    if not prompts:
        raise BuilderError(USAGE, "there is no prompt: give --prompt TEXT or --ids 1,2,3")
    return prompts


def _engine(manifest: Path) -> str:
    try:
        return str(read_json(manifest)["engine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuilderError(MODEL_AT_FAULT, f"{manifest}: no manifest of trt-nvfp4 ({error!r})") from error


def _show(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    else:
        for generation in result.generations:
            print(printable(generation.text) or ",".join(map(str, generation.token_ids)))
    timings = result.timings
    rate = "" if timings.tokens_per_s is None else f", then {timings.tokens_per_s:.1f} tokens/s"
    first = f"first after {timings.first_token_s * 1e3:.0f} ms{rate}"
    print(f"{timings.tokens} tokens on {result.runs_on}: {first}", file=sys.stderr)
    for number, generation in enumerate(result.generations, 1):
        if generation.finish == "capacity":
            print(f"warning: prompt {number}: its cache is full, so that it ends there", file=sys.stderr)
