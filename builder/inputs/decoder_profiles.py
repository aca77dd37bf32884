"""Optimization profiles of a decoder: prefill, and the step that generates one token per sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.builder.export.decoder_contract import Decoder
from trt_nvfp4.builder.inputs.shapes import RANGES, Profile, Profiles, Shape, derive_profiles
from trt_nvfp4.common.cache_names import layer_names, stacked_names


def decoder_profiles(
    inputs: Mapping[str, Sequence[int | str]],
    decoder: Decoder,
    least: Mapping[str, Shape],
    typical: Mapping[str, Shape],
    most: Mapping[str, Shape],
) -> list[Profiles]:
    """[prefill, decode]. Prompts have 1 to as many tokens as the caches hold, unless overrides of them say
    otherwise; a decode step has one token per sequence, in the same batches.

    Raises BuilderError (usage) as `derive_profiles`, (model) where the tokens' input is not [batch, tokens, ...].
    """
    tokens = min(RANGES["sequence"][1][1], decoder.capacity)
    if len(found := inputs.get(decoder.tokens, ())) < 2:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"input {decoder.tokens!r}, the decoder's tokens by its metadata, has the shape {list(found)}, expected "
            "[batch, tokens]; export the model again",
        )
    _, new, *rest = inputs[decoder.tokens]
    width = tuple(size for size in rest if isinstance(size, int))
    prefill = derive_profiles(
        inputs,
        {decoder.tokens: (1, 1, *width), **least},
        {decoder.tokens: (1, tokens, *width), **typical},
        {decoder.tokens: (decoder.max_batch, decoder.capacity, *width), **most},
    )
    if (longest := prefill[decoder.tokens].most[1]) > decoder.capacity:
        raise BuilderError(
            USAGE,
            f"--max-shapes {decoder.tokens}: {longest} tokens, but the caches hold {decoder.capacity}; give fewer, or "
            "export the model with a larger --cache-capacity",
        )
    decode = {
        name: _of_one_token(profile, inputs[name].index(new)) if new in inputs[name] else profile
        for name, profile in prefill.items()
    }
    return [prefill, decode]


def with_stacked_caches(profiles: Sequence[Profiles], decoder: Decoder | None) -> list[dict[str, Profile]]:
    """`profiles` of a decoder's original, with the caches that the rewritten one, `decoder`, has in one tensor."""
    changed = [dict(profile) for profile in profiles]
    for first, last in () if decoder is None else decoder.stacked:
        names = [name for layer in range(first, last + 1) for name in layer_names(layer)[0]]
        for profile in changed:
            found = [profile.pop(name) for name in names if name in profile]
            if not found:
                continue  # they are the rewritten model's own
            front = (last - first + 1, 2)
            least, typical, most = ((*front, *shape) for shape in (found[0].least, found[0].typical, found[0].most))
            profile[stacked_names(first, last)[0]] = Profile(least, typical, most)
    return changed


def _of_one_token(profile: Profile, axis: int) -> Profile:
    least, typical, most = ((*s[:axis], 1, *s[axis + 1 :]) for s in (profile.least, profile.typical, profile.most))
    return Profile(least, typical, most)
