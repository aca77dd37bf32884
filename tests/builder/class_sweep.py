"""Every class in transformers' automatic mappings, tiny and with random weights: an engine, or one message.

    nice python tests/builder/class_sweep.py --out RECORD.json [--seconds 150] [--gigabytes 8] [--until 09:00] [CLASS]

Each class is built for rtx-blackwell by TensorRT-RTX, verified, in a process of its own with limits of time and memory:
*built*, *refused* with the message (where the message names an option, the build is done again with it), *failed* (a
traceback), *too long*, *died*, or *not made*: no small configuration of it is known here. First one class of each model
type, then the others, and CLASS:CASE of `small_options`. RECORD.json keeps what earlier runs with the same versions
found. Not a test: it takes hours.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[level]) for level in (1, 0)]

#: Parameters of the largest model that is tried.
LARGEST = 60_000_000
#: What a message asks for, and how it is given.
OPTIONS: dict[str, dict[str, Any]] = {"--set image-size": {"image_size": "64x96"}, "--set batch=N": {"batch": 1}}
PACKAGES = ("transformers", "torch", "onnx", "tensorrt-rtx")
#: Mappings whose classes come first.
_FIRST = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "OBJECT_DETECTION", "SEQ_TO_SEQ_CAUSAL_LM")
_FIRST += ("IMAGE_CLASSIFICATION", "CAUSAL_LM", "TEXT_ENCODING", "MASKED_LM", "SEMANTIC_SEGMENTATION")


def classes() -> list[str]:
    """One class of each model type, and then the others."""
    import transformers
    from components.small_options import OPTIONS as OF_CLASS
    from transformers.models.auto import modeling_auto as auto

    mappings = [name for name in vars(auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")]
    ordered = [f"MODEL_FOR_{name}_MAPPING_NAMES" for name in _FIRST]
    ordered += [*sorted(set(mappings) - {*ordered, "MODEL_MAPPING_NAMES"}), "MODEL_MAPPING_NAMES"]
    heads: dict[str, str] = {}
    others: dict[str, None] = {}
    for mapping in ordered:
        for kind, value in getattr(auto, mapping, {}).items():
            for name in [value] if isinstance(value, str) else value:
                if hasattr(transformers, name):
                    others[name] = None
                    heads.setdefault(kind, name)
    return list(dict.fromkeys([*heads.values(), *others, *OF_CLASS]))


def made(name: str, folder: Path) -> None:
    """A small model of the class with random weights, saved in `folder`."""
    import torch
    import transformers
    from components.families import FAMILIES, amplified, saved
    from components.small_configs import config_of
    from components.small_options import OPTIONS as OF_CLASS

    from onnx_models import any_causal_lm

    if name.endswith(("ForCausalLM", "LMHeadModel")):
        any_causal_lm.made(name).save_pretrained(folder)
        return
    if (family := next((key for key, (cls, _) in FAMILIES.items() if cls == name), None)) is not None:
        saved(family, folder, 7)
        return
    case, name = name, name.partition(":")[0]
    cls = getattr(transformers, name)
    config = config_of(name, OF_CLASS.get(case, {}))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(7)
    amplified(cls(config).eval(), folder)


def outcome(name: str, folder: Path) -> tuple[str, str]:
    """How the class ends, and what was said."""
    from trt_nvfp4.builder.components.source import is_of_parts
    from trt_nvfp4.builder.errors import exit_code
    from trt_nvfp4.builder.pipeline import parts_build, pipeline
    from trt_nvfp4.builder.pipeline.request import Request
    from trt_nvfp4.builder.targets import find_target

    model = folder / name.replace(":", "-")
    try:
        made(name, model)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"[:300]
    given: dict[str, Any] = {}
    of_parts = is_of_parts(model)
    while True:
        request = Request(
            model,
            find_target("rtx-blackwell"),
            folder / ("out" if of_parts else "m.engine"),
            accuracy_samples=0,
            **{"cache_capacity": 64, "max_batch": 2} if of_parts or "LM" in name else {},
            **given,
        )
        try:
            (parts_build if of_parts else pipeline).run(request)
        except Exception as error:
            if exit_code(error) is None:
                return "failed", traceback.format_exc()[-2000:]
            said = str(error).replace(f"{folder}/", "")
            asked = [value for text, value in OPTIONS.items() if text in said and not value.keys() <= given.keys()]
            if not asked:
                return "refused", said
            for value in asked:
                given |= value
            continue
        return "built", ", ".join(f"{key}={value}" for key, value in given.items())


def _child(name: str, gigabytes: float, end: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)
    os.setsid()
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            end.send(outcome(name, Path(folder)))
        except Exception:
            end.send(("failed", traceback.format_exc()[-2000:]))


def run(name: str, seconds: float, gigabytes: float) -> dict[str, Any]:
    """The outcome of the class, from a process of its own."""
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=_child, args=(name, gigabytes, theirs))
    begun = time.monotonic()
    process.start()
    theirs.close()
    how, said = "too long", f"over {seconds:.0f} s"
    if ours.poll(seconds):
        try:
            how, said = ours.recv()
        except EOFError:
            process.join()
            how, said = "died", f"exit code {process.exitcode}"
    else:
        os.killpg(process.pid, 9)
    process.join()
    return {"how": how, "said": said, "seconds": round(time.monotonic() - begun, 1)}


def _until(text: str | None) -> Iterator[None]:
    """An item as long as the clock shows an earlier time."""
    while text is None or time.strftime("%H:%M") < text:
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="written as each class ends")
    parser.add_argument("--seconds", type=float, default=150, help="for each class")
    parser.add_argument("--gigabytes", type=float, default=8, help="for each class")
    parser.add_argument("--until", help="HH:MM: no class is begun later")
    parser.add_argument("names", nargs="*", metavar="CLASS", help="these again; default: all that the record lacks")
    options = parser.parse_args()
    # Imported once, for all processes that are forked.
    import torch  # noqa: F401
    import transformers  # noqa: F401
    from sweep_record import recorded

    import trt_nvfp4.builder.pipeline.parts_build
    import trt_nvfp4.builder.pipeline.pipeline  # noqa: F401

    record = recorded(options.out, "python tests/builder/class_sweep.py --out RECORD.json", PACKAGES)
    outcomes = record["outcomes"]
    names = options.names or [name for name in classes() if name not in outcomes]
    for name, _ in zip(names, _until(options.until), strict=False):
        outcomes[name] = run(name, options.seconds, options.gigabytes)
        options.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        print(f"{name:40} {outcomes[name]['seconds']:6} s {outcomes[name]['how']}: {outcomes[name]['said'][-200:]}")
    print(dict(Counter(entry["how"] for entry in outcomes.values())))


if __name__ == "__main__":
    main()
