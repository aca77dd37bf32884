"""Optimization profiles of a decoder: prefill, and the step that generates one token per sequence."""

from collections.abc import Mapping, Sequence

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.builder.inputs.shapes import RANGES, Profile, Profiles, derive_profiles
from trt_nvfp4.builder.model.decoder_contract import LOGIT_TOKENS, Decoder
from trt_nvfp4.common.cache_names import layer_names, stacked_names


def decoder_profiles(
    inputs: Mapping[str, Sequence[int | str]],
    decoder: Decoder,
    min_shapes: Mapping[str, Shape],
    opt_shapes: Mapping[str, Shape],
    max_shapes: Mapping[str, Shape],
) -> list[Profiles]:
    """[prefill, decode]. Prompts have 1 to as many tokens as the caches hold, unless overrides of them say
    otherwise; a decode step has one token per sequence and is tuned for it, with room for a draft to verify, in the
    same batches.

    Raises UsageError as `derive_profiles`, (model) where the tokens' input is not [batch, tokens, ...].
    """
    tokens = min(RANGES["sequence"][1][1], decoder.capacity)
    if len(found := inputs.get(decoder.tokens, ())) < 2:
        raise ModelFaultError(
            f"input {decoder.tokens!r}, the decoder's tokens by its metadata, has the shape {list(found)}, expected "
            "[batch, tokens]; export the model again"
        )
    _, new, *rest = inputs[decoder.tokens]
    width = tuple(size for size in rest if isinstance(size, int))
    prefill = derive_profiles(
        inputs,
        {decoder.tokens: (1, 1, *width), **min_shapes},
        {decoder.tokens: (1, tokens, *width), **opt_shapes},
        {decoder.tokens: (decoder.max_batch, decoder.capacity, *width), **max_shapes},
    )
    if (longest := prefill[decoder.tokens].max[1]) > decoder.capacity:
        raise UsageError(
            f"--max-shapes {decoder.tokens}: {longest} tokens, but the caches hold {decoder.capacity}; give fewer, or "
            "export the model with a larger --cache-capacity"
        )
    decode = {
        name: _decode_step(profile, inputs[name].index(new), decoder) if new in inputs[name] else profile
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
            low, middle, high = ((*front, *shape) for shape in (found[0].min, found[0].opt, found[0].max))
            profile[stacked_names(first, last)[0]] = Profile(low, middle, high)
    return changed


def _decode_step(profile: Profile, axis: int, decoder: Decoder) -> Profile:
    most = min(LOGIT_TOKENS, decoder.verified_tokens, profile.max[axis])
    sizes = zip((profile.min, profile.opt, profile.max), (1, 1, most), strict=True)
    low, middle, high = ((*shape[:axis], size, *shape[axis + 1 :]) for shape, size in sizes)
    return Profile(low, middle, high)
