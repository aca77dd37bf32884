"""A drafter that keeps its drafts, and what a tiny head should have drafted."""

from collections.abc import Sequence

import numpy as np

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.generate.drafts.model import ModelDrafter


class Recorded(ModelDrafter):
    """Keeps what it drafted."""

    def start(self, batch: int) -> None:
        super().start(batch)
        self.drafts: list[tuple[list[int], list[int]]] = []

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        drafts = super().propose(texts, wanted)
        assert all(len(draft) <= most for draft, most in zip(drafts, wanted, strict=True))
        self.drafts += [(list(text), draft) for text, draft in zip(texts, drafts, strict=True) if draft]
        return drafts


def reference(target: TinyDecoder, head: TinyDecoder, text: list[int], count: int) -> list[int]:
    """A draft behind `text`, without caches: the target's hidden states of the text, then the head's own."""
    previous, tokens = target.hidden(text)[:-1], text[1:]
    for _ in range(count):
        own = head.hidden(tokens, previous)
        previous = np.concatenate([previous, own[-1:]])
        tokens = [*tokens, int((own[-1] @ head.weights["head"]).argmax())]
    return tokens[len(text) - 1 :]
