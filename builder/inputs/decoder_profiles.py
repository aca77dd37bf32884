"""Optimization profiles of a decoder: prefill, and the step that generates one token per sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_nvfp4.builder.export.decoder_contract import Decoder
from trt_nvfp4.builder.inputs.shapes import RANGES, Profile, Profiles, Shape, derive_profiles


def decoder_profiles(
    inputs: Mapping[str, Sequence[int | str]],
    decoder: Decoder,
    least: Mapping[str, Shape],
    typical: Mapping[str, Shape],
    most: Mapping[str, Shape],
) -> list[Profiles]:
    """[prefill, decode]. Prompts have 1 to as many tokens as the caches hold, unless overrides of them say
    otherwise; a decode step has one token per sequence, in the same batches.

    Raises BuilderError (usage) as `derive_profiles`.
    """
    tokens = min(RANGES["sequence"][1][1], decoder.capacity)
    _, new, *rest = inputs[decoder.tokens]
    width = tuple(size for size in rest if isinstance(size, int))
    prefill = derive_profiles(
        inputs,
        {decoder.tokens: (1, 1, *width), **least},
        {decoder.tokens: (1, tokens, *width), **typical},
        {decoder.tokens: (decoder.max_batch, decoder.capacity, *width), **most},
    )
    decode = {
        name: _of_one_token(profile, inputs[name].index(new)) if new in inputs[name] else profile
        for name, profile in prefill.items()
    }
    return [prefill, decode]


def _of_one_token(profile: Profile, axis: int) -> Profile:
    least, typical, most = ((*s[:axis], 1, *s[axis + 1 :]) for s in (profile.least, profile.typical, profile.most))
    return Profile(least, typical, most)
