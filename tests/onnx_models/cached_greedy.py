"""Greedy generation over a decoder's caches in ONNX Runtime, with nothing of the project's own runners."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from trt_nvfp4.builder.model import onnx_session
from trt_nvfp4.builder.model.decoder_contract import Decoder, decoder_of

NEW_TOKENS = 32


def session(path: Path) -> onnxruntime.InferenceSession:
    # Its slopes are bfloat16 in every model, which ONNX Runtime cannot multiply.
    if (path.parent / "falcon_alibi").is_dir():
        return onnx_session.session(path, rounding=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # a note for every cache that is not updated in place
    return onnxruntime.InferenceSession(path, options)


def empty_caches(decoder: Decoder, batch: int) -> dict[str, np.ndarray]:
    dims = [dim for pair in zip(decoder.head_dim, decoder.value_head_dim, strict=True) for dim in pair]
    heads = [count for count in decoder.kv_heads for _ in range(2)]
    shapes = [(count, decoder.capacity, dim) for count, dim in zip(heads, dims, strict=True)]
    shapes += [tuple(state.shape) for state in decoder.states]
    return {name: np.zeros((batch, *shape), np.float32) for name, shape in zip(decoder.caches, shapes, strict=True)}


def greedy(path: Path, prompts: list[list[int]], padding: int) -> list[list[int]]:
    decoder = decoder_of(onnx.load(path))
    assert decoder is not None
    run, caches = session(path).run, empty_caches(decoder, len(prompts))
    new = np.array([len(prompt) for prompt in prompts])
    ids = np.full((len(prompts), max(new)), padding)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    past, texts = np.zeros_like(new), []
    for _ in range(NEW_TOKENS):
        logits, *present = run(None, {"input_ids": ids, "past_length": past, "new_length": new, **caches})
        assert logits.shape == (len(prompts), min(ids.shape[1], decoder.logit_tokens), decoder.vocab_size)
        ids, past, new = logits[:, -1:].argmax(-1), past + new, np.ones_like(new)
        caches = dict(zip(decoder.caches, present, strict=True))
        texts.append(ids[:, 0])
    return np.stack(texts, 1).tolist()
