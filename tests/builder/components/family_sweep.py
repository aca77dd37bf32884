"""Every vision-language and encoder-decoder class of transformers, small and with random weights: its chain of parts
computes what it does, or it is refused.

    python tests/builder/components/family_sweep.py [--jobs 2] [--seconds 200] [--out FILE.jsonl] [CLASS ...]

prints a line for each: `equal` (chain within 1e-4, tokens those of the model's own `generate`), `refused` with the
message, or what must not be: `differs`, `failed` (a traceback), `late`. `not made`: no small configuration of it here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

MARK = "RESULT "
#: Parameters of the largest model that is tried.
LARGEST = 60_000_000
NEW_TOKENS = 6


def classes() -> list[str]:
    """Names of all classes of these kinds that the installed transformers has."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kinds = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "VISION_2_SEQ")
    names: set[str] = set()
    for kind in kinds:
        for value in getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values():
            names |= {value} if isinstance(value, str) else set(value)
    return sorted(name for name in names if hasattr(transformers, name))


def made(name: str, folder: Path) -> Any:
    """A small model of the class with random weights, saved in `folder`."""
    import torch
    import transformers
    from families import amplified
    from small_configs import config_of
    from small_options import OPTIONS

    # NAME:CASE is a further configuration of the class.
    cls = getattr(transformers, name.partition(":")[0])
    config = config_of(name.partition(":")[0], OPTIONS.get(name, {}))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(7)
    return amplified(cls(config).eval(), folder)


def examined(name: str, folder: Path) -> dict[str, Any]:
    from trt_nvfp4.builder.components.source import is_of_parts
    from trt_nvfp4.builder.errors import exit_code

    try:
        model = made(name, folder / "model")
    except Exception as error:
        return {"outcome": "not made", "why": f"{type(error).__name__}: {error}"[:400]}
    try:
        found = (_of_parts if is_of_parts(folder / "model") else _of_one_graph)(model, folder)
    except Exception as error:
        if exit_code(error) is None:
            return {"outcome": "failed", "why": traceback.format_exc()[-3000:]}
        lines = len(str(error).splitlines())
        return {"outcome": "refused", "why": str(error).replace(str(folder), ""), "lines": lines}
    return found


def _of_one_graph(model: Any, folder: Path) -> dict[str, Any]:
    from trt_nvfp4.builder.export.decoder_contract import CacheOptions
    from trt_nvfp4.builder.export.huggingface import export

    export(folder / "model", folder / "model.onnx", "auto", CacheOptions(128, 2))
    return {"outcome": "one graph", "why": ""}


def _of_parts(model: Any, folder: Path) -> dict[str, Any]:
    import torch
    from small_configs import START

    from trt_nvfp4.builder.components.check import computed_by, expected_of, relative_error
    from trt_nvfp4.builder.components.directory import of_directory
    from trt_nvfp4.builder.components.manifest import Manifest
    from trt_nvfp4.builder.components.pipeline import Pipeline
    from trt_nvfp4.builder.export.decoder_contract import CacheOptions

    sized = getattr(model.config, "vision_config", None) is not None and hasattr(
        model.config.vision_config, "spatial_merge_size"
    )
    source = of_directory(folder / "model", CacheOptions(128, 2), "64x96" if sized else None)
    if source.task == "run":
        return {"outcome": "pair", "why": ""}
    parts = folder / "parts"
    parts.mkdir()
    manifest = Manifest(
        source.task,
        [part.export(source.name, parts) for part in source.parts],
        source.flows,
        source.settings,
        source.name,
    ).check()
    manifest.save(parts)
    expected = expected_of(source.example)
    error = relative_error(expected, computed_by(parts, manifest, source.example, expected))
    inputs, prompts = source.example.inputs, [list(prompt) for prompt in source.example.prompts]
    image = source.settings.get("image")
    stop = None if image is None else image["token_id"]
    start = [START, 4, 5]
    if image is not None:
        pixels = inputs["pixel_values"]
        given: dict[str, Any] = {"prompts": prompts, "images": pixels[None] if image["alone"] else pixels}
    elif source.settings["source"] == "text":
        lengths = inputs["attention_mask"].sum(1)
        rows = [row[:length].tolist() for row, length in zip(inputs["input_ids"], lengths, strict=True)]
        given = {"prompts": rows, "start_tokens": start}
    else:
        (values,) = inputs.values()
        given = {source.settings["source"]: values, "start_tokens": start}
    with Pipeline(parts) as pipeline:
        result = pipeline.generate(**given, max_new_tokens=NEW_TOKENS, stop=[] if stop is None else [stop])
    same = []
    for number, generation in enumerate(result.generations):
        prompt = prompts[number] if image is not None else start
        with torch.no_grad():
            theirs = _their_tokens(model, source, number, prompt, stop)
        same.append(list(generation.token_ids) == theirs)
    outcome = "equal" if error < 1e-4 and all(same) else "differs"
    return {"outcome": outcome, "error": float(error), "tokens": same, "why": ""}


def _their_tokens(model: Any, source: Any, number: int, prompt: list[int], stop: int | None) -> list[int]:
    """Greedy, by the model's own `generate`."""
    import inspect

    import torch
    from transformers import GenerationMixin

    model.generation_config.eos_token_id = stop
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    inputs = {name: torch.from_numpy(array) for name, array in source.example.inputs.items()}
    if "image" not in source.settings:
        one = {name: tensor[number : number + 1] for name, tensor in inputs.items()}
        if "attention_mask" in one:
            one = {name: tensor[:, : int(one["attention_mask"].sum())] for name, tensor in one.items()}
        # Whisper's own is for long recordings.
        found = GenerationMixin.generate(model, **one, decoder_input_ids=torch.tensor([prompt]), **options)
        return list(found[0, len(prompt) :].tolist())
    vision, image = source.parts[0].module, source.settings["image"]
    pixels = inputs["pixel_values"]
    ids = torch.tensor([prompt])
    takes = inspect.signature(model.forward).parameters
    images = ids == image["token_id"]
    extra = {"mm_token_type_ids": images.int()} if "mm_token_type_ids" in takes else {}
    if "token_type_ids" in takes:
        extra["token_type_ids"] = torch.zeros_like(ids) if model.config.model_type == "paligemma" else images.long()
    seen = vision.original(pixels if image["alone"] else pixels[number : number + 1])
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **seen, **extra, **options)
    return list(found[0, len(prompt) :].tolist())


def in_a_process(name: str, seconds: int) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    begun = time.monotonic()
    try:
        ran = subprocess.run(
            [sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "outcome": "late", "why": f"more than {seconds} s"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith(MARK)]
    found = json.loads(lines[-1][len(MARK) :]) if lines else {"outcome": "failed", "why": ran.stderr[-2000:]}
    return {"name": name, **found, "seconds": round(time.monotonic() - begun)}


def line(found: Mapping[str, Any]) -> str:
    numbers = f" {found['error']:.1e} {found['tokens']}" if "error" in found else ""
    return f"{found['name']:45} {found['outcome']}{numbers} {str(found['why'])[-300:]}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CLASS")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(MARK + json.dumps(examined(options.one, Path(folder))))
        return
    from small_options import OPTIONS

    names = options.names or sorted({*classes(), *OPTIONS})
    with ThreadPoolExecutor(options.jobs) as pool:
        for ended in as_completed(pool.submit(in_a_process, name, options.seconds) for name in names):
            found = ended.result()
            print(line(found), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
