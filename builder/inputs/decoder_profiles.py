"""Optimization profiles of a decoder: prefill, and the step that generates one token per sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_nvfp4.builder.export.decoder_contract import IDS, Decoder
from trt_nvfp4.builder.inputs.shapes import RANGES, Profile, Profiles, Shape, derive_profiles


def decoder_profiles(
    inputs: Mapping[str, Sequence[int | str]],
    decoder: Decoder,
    least: Mapping[str, Shape],
    typical: Mapping[str, Shape],
    most: Mapping[str, Shape],
) -> list[Profiles]:
    """[prefill, decode]. Prompts have 1 to as many tokens as the caches hold, unless overrides of `input_ids` say
    otherwise; a decode step has one token per sequence, in the same batches.

    Raises BuilderError (usage) as `derive_profiles`.
    """
    tokens = min(RANGES["sequence"][1][1], decoder.capacity)
    prefill = derive_profiles(
        inputs,
        {IDS: (1, 1), **least},
        {IDS: (1, tokens), **typical},
        {IDS: (decoder.max_batch, decoder.capacity), **most},
    )
    return [prefill, {**prefill, IDS: _of_one_token(prefill[IDS])}]


def _of_one_token(profile: Profile) -> Profile:
    return Profile(*((batch, 1) for batch, _ in (profile.least, profile.typical, profile.most)))
