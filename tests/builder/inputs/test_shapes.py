"""Profiles derived from a model's inputs, and their override in trtexec's syntax."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UsageError
from trt_nvfp4.builder.inputs.decoder_profiles import decoder_profiles
from trt_nvfp4.builder.inputs.shape_text import parse_shapes
from trt_nvfp4.builder.inputs.shapes import Profile, derive_opt_shapes, derive_profiles

names = st.text(st.characters(codec="ascii", exclude_characters=","), min_size=1).filter(lambda name: name.strip())
shapes = st.lists(st.integers(0, 10**6), min_size=1, max_size=6).map(tuple)


@given(st.dictionaries(names, shapes, max_size=4))
def test_parse_shapes_reads_what_is_written(wanted: dict[str, tuple[int, ...]]) -> None:
    text = ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in wanted.items())
    assert parse_shapes(text, "--min-shapes") == wanted


@pytest.mark.parametrize("text", ["x", "x:", "x:1x", "x:axb", "x:1 x 2", "x:-1x2"])
def test_parse_shapes_names_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--opt-shapes"):
        parse_shapes(text, "--opt-shapes")


@pytest.mark.parametrize(
    ("dim", "shown"),
    [("2147483648", "2147483648"), ("9" * 5000, r"9{10}\.\.\. \(5000 digits\)")],
    ids=["2 ** 31", "digits"],
)
def test_parse_shapes_refuses_what_no_dimension_is(dim: str, shown: str) -> None:
    with pytest.raises(UsageError, match=f"--opt-shapes x: no dimension is {shown}; the largest is 2147483647"):
        parse_shapes(f"x:{dim}x64", "--opt-shapes")
    assert parse_shapes("x:2147483647", "--opt-shapes") == {"x": (2147483647,)}


def test_parse_shapes_refuses_a_second_shape() -> None:
    with pytest.raises(BuilderError, match="--opt-shapes: gives x twice"):
        parse_shapes("x:1x64,x:2x64", "--opt-shapes")


def test_dimension_of_minus_one_is_dynamic() -> None:
    profile = derive_profiles({"x": [-1, 64]}, max_shapes={"x": (4, 64)})["x"]
    assert (profile.min, profile.max) == ((1, 64), (4, 64))


def test_input_that_takes_no_values() -> None:
    with pytest.raises(ModelFaultError, match="'x': dimension 1 is 0"):
        derive_profiles({"x": ["batch", 0]})


def test_text_model_gets_batch_and_sequence_ranges() -> None:
    profiles = derive_profiles({"input_ids": ["batch", "sequence"], "pixel_values": ["batch", 3, 224, 224]})
    assert profiles["input_ids"].min == (1, 1)
    assert profiles["input_ids"].max == (8, 512)
    assert profiles["pixel_values"].max == (8, 3, 224, 224)


def test_dimensions_that_torch_numbered_mean_what_their_place_says() -> None:
    # torch.export's Dim.DYNAMIC and Dim.AUTO: a symbol for each, no name.
    profiles = derive_profiles({"input_ids": ["s10", "s21"], "pixel_values": ["s10", 3, 224, 224], "t": ["s10"]})
    assert profiles["input_ids"].opt == (1, 128)
    assert profiles["input_ids"].max == (8, 512)
    assert profiles["pixel_values"].max == (8, 3, 224, 224)
    assert profiles["t"].max == (8,)
    assert derive_profiles({"ids": ["s10", "s21"], "mask": ["s21", "s10"]})["mask"].max == (8, 8)


def test_height_that_torch_numbered_asks_for_a_range() -> None:
    with pytest.raises(BuilderError, match=r"dimension 2 \(s53\)"):
        derive_profiles({"image": ["s77", 3, "s53", "s27"]})


def test_sequence_ends_where_the_model_does() -> None:
    profile = derive_profiles({"input_ids": ["batch", "seq_len"]}, longest=64)["input_ids"]
    assert (profile.opt, profile.max) == ((1, 64), (8, 64))


def test_static_inputs_need_no_profile() -> None:
    assert derive_profiles({"x": [1, 16]}) == {}


def test_one_override_widens_the_others() -> None:
    profile = derive_profiles({"x": ["batch", "sequence"]}, max_shapes={"x": (2, 2048)}, min_shapes={"x": (1, 1024)})[
        "x"
    ]
    assert profile.min == (1, 1024)
    assert profile.opt == (1, 1024)
    assert profile.max == (2, 2048)


def test_a_most_below_the_default_brings_the_typical_down() -> None:
    profile = derive_profiles({"x": ["batch", "sequence"]}, max_shapes={"x": (2, 32)})["x"]
    assert profile == Profile((1, 1), (1, 32), (2, 32))


def test_meaningless_dimension_asks_for_a_range() -> None:
    with pytest.raises(UsageError, match=r"image.*dimension 2 \(height\).*--max-shapes image:"):
        derive_profiles({"image": ["batch", 3, "height", 224]})


def test_override_gives_the_range_of_a_meaningless_dimension() -> None:
    profile = derive_profiles({"image": [1, "height"]}, max_shapes={"image": (1, 640)})["image"]
    assert (profile.min, profile.opt, profile.max) == ((1, 640), (1, 640), (1, 640))
    both = derive_profiles({"image": [1, "height"]}, min_shapes={"image": (1, 64)}, max_shapes={"image": (1, 640)})[
        "image"
    ]
    assert both == Profile((1, 64), (1, 640), (1, 640))


@pytest.mark.parametrize(
    ("override", "text"),
    [({"y": (1,)}, "no input 'y'"), ({"x": (1, 2, 3)}, "does not fit"), ({"x": (1, 32)}, "does not fit")],
)
def test_override_that_does_not_fit(override: dict[str, tuple[int, ...]], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        derive_profiles({"x": ["batch", 16]}, opt_shapes=override)


def test_bounds_out_of_order() -> None:
    with pytest.raises(BuilderError, match="out of order"):
        derive_profiles({"x": ["batch"]}, min_shapes={"x": (4,)}, max_shapes={"x": (2,)})


CACHE = "past_key_values.0.key"


def decoder(mask: str, new: str | int, past: str) -> dict[str, list[int | str]]:
    cache: list[int | str] = ["batch", 2, past, 16]
    inputs: dict[str, list[int | str]] = {"input_ids": ["batch", new], "attention_mask": ["batch", mask]}
    return inputs | {CACHE: cache, "past_key_values.0.value": cache}


@pytest.mark.parametrize(
    ("mask", "new", "past"),
    [
        ("total_sequence", "sequence", "past_sequence"),
        ("total_sequence_length", "sequence_length", "past_sequence_length"),
        ("past_sequence_length + sequence_length", "sequence_length", "past_sequence_length"),
        ("past_sequence_length + 1", "sequence_length", "past_sequence_length"),
        ("past_sequence_length + 1", 1, "past_sequence_length"),
        ("s17 + s26", "s17", "s26"),
        ("kv_length", "sequence_length", "past_length"),
        ("kv_len", "len", "past_len"),
        ("total_len", "seq_len", "past_len"),
    ],
)
def test_mask_of_a_decoder_spans_cached_and_new_tokens(mask: str, new: str | int, past: str) -> None:
    profiles = derive_profiles(
        decoder(mask, new, past), min_shapes={CACHE: (1, 2, 0, 16)}, max_shapes={CACHE: (4, 2, 4096, 16)}
    )
    cache = profiles["past_key_values.0.value"]  # whose dimensions have the names of the key's
    assert (cache.min, cache.max) == ((1, 2, 0, 16), (4, 2, 4096, 16))
    for bound in ("min", "opt", "max"):
        ids, total, cached = (getattr(profiles[name], bound) for name in ("input_ids", "attention_mask", CACHE))
        assert total == (ids[0], ids[1] + cached[2])
        assert ids[0] == cached[0]


@pytest.mark.parametrize(
    ("mask", "formula"),
    [
        ("past_sequence_length + sequence_length", r"past_sequence_length \+ sequence_length"),
        ("total_sequence_length", r"past_sequence_length \+ sequence_length"),
    ],
)
def test_a_mask_of_another_length_than_past_and_new_tokens_is_refused(mask: str, formula: str) -> None:
    inputs = decoder(mask, "sequence_length", "past_sequence_length")
    shapes = {"input_ids": (1, 3), CACHE: (1, 2, 5, 16)}
    assert derive_profiles(inputs, opt_shapes={**shapes, "attention_mask": (1, 8)})["attention_mask"].opt == (1, 8)
    with pytest.raises(UsageError, match=f"attention_mask: dimension 1 is {formula}, which is 8 here and not 9"):
        derive_profiles(inputs, opt_shapes={**shapes, "attention_mask": (1, 9)})


def test_total_without_its_parts_asks_for_a_range() -> None:
    inputs = decoder("total_len", "seq_len", "past_len") | {"encoder_ids": ["batch", "encoder_len"]}
    with pytest.raises(BuilderError, match=r"total_len.* not all of past_len and len are in .* attention_mask:1x1"):
        derive_profiles(inputs)
    assert derive_profiles(inputs, max_shapes={"attention_mask": (8, 1024)})["attention_mask"].max == (8, 1024)
    assert derive_profiles({"input_ids": ["batch", "total_len"]})["input_ids"].max == (8, 512)  # no cache, no sum


def test_length_of_the_cache_itself_is_no_sum() -> None:
    profiles = derive_profiles(decoder("seq_len", "seq_len", "kv_len"))
    assert profiles[CACHE] == Profile((1, 2, 1, 16), (1, 2, 128, 16), (8, 2, 512, 16))


def test_override_holds_for_dimensions_of_the_same_name() -> None:
    inputs = {"ids": ["batch", "seq"], "mask": ["batch", "seq"], "image": ["", 3]}
    profiles = derive_profiles(inputs, opt_shapes={"ids": (2, 64)}, max_shapes={"mask": (4, 1024)})
    assert profiles["ids"] == Profile((1, 1), (2, 64), (4, 1024))
    assert profiles["mask"] == Profile((1, 1), (2, 64), (4, 1024))
    assert profiles["image"] == Profile((1, 3), (1, 3), (8, 3))
    with pytest.raises(BuilderError, match="dimension seq is 1024 in ids and 100 in mask"):
        derive_profiles(inputs, max_shapes={"ids": (4, 1024), "mask": (4, 100)})


@pytest.mark.parametrize(
    ("min_shapes", "opt_shapes", "max_shapes"),
    [
        ({"ids": (1, 0)}, {}, {}),
        ({}, {"past": (1, 0)}, {}),
        ({"past": (1, 0)}, {"past": (1, 0)}, {}),
        ({}, {}, {"past": (1, 0)}),
        ({"past": (0, 1)}, {}, {}),
    ],
)
def test_only_the_least_cache_may_be_empty(
    min_shapes: dict[str, tuple[int, ...]],
    opt_shapes: dict[str, tuple[int, ...]],
    max_shapes: dict[str, tuple[int, ...]],
) -> None:
    inputs = {"ids": ["batch", "seq"], "past": ["batch", "past_seq"]}
    with pytest.raises(UsageError, match="out of order"):
        derive_profiles(inputs, min_shapes, opt_shapes, max_shapes)
    assert derive_profiles(inputs, {"past": (1, 0)})["past"] == Profile((1, 0), (1, 128), (8, 512))


def test_cache_of_a_single_run_may_be_empty() -> None:
    inputs = decoder("total_seq", "seq", "past_seq")
    shapes = derive_opt_shapes(inputs, {"input_ids": (1, 5), CACHE: (1, 2, 0, 16)})
    assert shapes["attention_mask"] == (1, 5)
    assert shapes["past_key_values.0.value"] == (1, 2, 0, 16)
    with pytest.raises(BuilderError, match=r"'input_ids', dimension 1 \(seq\): min 0, opt 0.*\(--shapes\)"):
        derive_opt_shapes(inputs, {"input_ids": (1, 0)})


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        ("2*batch", (2, 2, 16)),
        ("batch * 3", (3, 3, 24)),
        ("2*batch + 1", (3, 3, 17)),
        ("batch*seq", (1, 128, 4096)),
        ("(batch + 1)*2", (4, 4, 18)),
        ("seq//2 + 1", (1, 65, 257)),
        ("2*tokens", (2, 256, 1024)),  # which no input has: its name says a range
    ],
)
def test_dimension_that_is_computed_from_others(dim: str, expected: tuple[int, int, int]) -> None:
    profiles = derive_profiles({"x": ["batch", "seq"], "y": [dim, 32]})
    assert profiles["y"] == Profile(*((size, 32) for size in expected))
    doubled = derive_profiles({"y": ["2*batch", 32], "x": ["batch"]}, opt_shapes={"x": (3,)}, max_shapes={"x": (4,)})
    assert doubled["y"] == Profile((2, 32), (6, 32), (8, 32))


def test_sizes_that_contradict_what_they_are_computed_from() -> None:
    inputs = {"latents": ["batch", 64], "prompts": ["2*batch", 32]}
    with pytest.raises(
        BuilderError, match=r"--max-shapes prompts: .* is 2\*batch, which is 16 here and not 4; .*latents"
    ):
        derive_profiles(inputs, max_shapes={"prompts": (4, 32)})
    given = derive_profiles(inputs, max_shapes={"prompts": (4, 32), "latents": (2, 64)})
    assert (given["prompts"].max, given["latents"].max) == ((4, 32), (2, 64))


@pytest.mark.parametrize("dim", ["2*h", "h//0", "f(h)", "h**9", "(" * 190, "a*" * 500 + "a"])
def test_arithmetic_that_says_no_range(dim: str) -> None:
    with pytest.raises(UsageError, match="nothing says its range"):
        derive_profiles({"x": ["batch", dim]})


@pytest.mark.parametrize("shape", [(), ("batch",)])
def test_tokens_of_a_decoder_with_too_few_dimensions(shape: tuple[str, ...]) -> None:
    decoder = TinyDecoder(np.random.default_rng(0)).decoder
    with pytest.raises(ModelFaultError, match=r"'input_ids', the decoder's tokens .* expected \[batch, tokens\]"):
        decoder_profiles({"input_ids": shape}, decoder, {}, {}, {})
