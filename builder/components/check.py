"""Compares a chain of parts with the original, on the source's example."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.components.chain import Values, put_all, run_chain, run_part
from trt_nvfp4.builder.components.decoding import PartsRunner
from trt_nvfp4.builder.components.devices.device import Device
from trt_nvfp4.builder.components.devices.onnx_device import OnnxDevice, decoder_of_parts
from trt_nvfp4.builder.components.manifest import Manifest, Part
from trt_nvfp4.builder.components.source import Example
from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.common import metrics

#: Tokens that are generated behind each prompt.
STEPS = 3
#: Largest relative error of an exported chain in float32, and of one in 16 bits.
TOLERANCE, TOLERANCE_16_BITS = 1e-3, 5e-2
#: A chain in 16 bits may also differ by so many times what 16 bits change in the original itself.
_ROUNDINGS = 3


def expected_of(example: Example) -> list[np.ndarray]:
    """The original's results: logits [batch, vocab] of each step over its own likeliest tokens, or all outputs."""
    if example.logits is None:
        return [example.outputs[name] for name in sorted(example.outputs)]
    texts, found = [list(prompt) for prompt in example.prompts], []
    with torch.no_grad():
        for _ in range(STEPS):
            logits = np.stack([example.logits(number, text) for number, text in enumerate(texts)])
            found.append(logits)
            for text, token in zip(texts, likeliest(logits, example.placeholder), strict=True):
                text.append(int(token))
    return found


def likeliest(logits: np.ndarray, placeholder: int | None) -> np.ndarray:
    """The token with the largest logit of each row [batch, vocab], the placeholder excepted."""
    allowed = logits.copy()
    if placeholder is not None and placeholder < allowed.shape[1]:
        allowed[:, placeholder] = -np.inf
    chosen: np.ndarray = allowed.argmax(-1).astype(np.int64)
    return chosen


def computed_by(folder: Path, manifest: Manifest, example: Example, expected: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of the parts in the folder, in ONNX Runtime, given the original's own tokens."""
    device = OnnxDevice(folder, manifest)
    try:
        if example.run is not None:
            return example.run(device, manifest)
        given = put_all(device, manifest, example.inputs)
        if manifest.task == "run":
            values = run_chain(device, manifest, given)
            return [device.get(values[name]) for name in sorted(example.outputs)]
        runner = PartsRunner(device, manifest, decoder_of_parts(folder))
        runner.values, runner.given = before_decoding(device, manifest, given), given
        rows = [list(prompt) for prompt in example.prompts]
        runner.start(len(rows))
        new = np.array([len(row) for row in rows], np.int64)
        past, ids = np.zeros_like(new), np.zeros((len(rows), new.max()), np.int64)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = row
        found = []
        for logits in expected:
            found.append(runner.step(ids, past, new).host())
            past, new, ids = past + new, np.ones_like(new), likeliest(logits, example.placeholder)[:, None]
        return found
    finally:
        device.close()


def before_decoding(device: Device, manifest: Manifest, given: dict[str, Any]) -> Values:
    """Outputs of the parts that run once, in front of the embedding and the decoder."""
    values: Values = {}
    for part in encoding_parts(manifest):
        values |= run_part(device, manifest, part, given, values)
    return values


def encoding_parts(manifest: Manifest) -> list[Part]:
    return [part for part in manifest.parts if part.name not in ("embed", "decoder")]


def cosine(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """The smallest over all tensors."""
    return min((metrics.cosine(b, a) for a, b in zip(expected, found, strict=True)), default=1.0)


def check_export(
    name: str,
    expected: Sequence[np.ndarray],
    found: Sequence[np.ndarray],
    sixteen_bits: bool,
    rounding: Callable[[], float] | None = None,
) -> float:
    """The relative error; for `rounding` see `Example`. Raises ModelFaultError where it is more than rounding."""
    error = metrics.relative_error(found=found, expected=expected)
    is_right = error <= (TOLERANCE_16_BITS if sixteen_bits else TOLERANCE)
    if not is_right and sixteen_bits and rounding is not None:  # which is measured only then
        is_right = error <= _ROUNDINGS * rounding()
    if not is_right:
        raise ModelFaultError(
            f"{name}: the exported parts do not compute what the model does (relative error {error:.1%}): a model of "
            "this kind is not known here; give a Python file with its parts (model.py:components)"
        )
    return error
